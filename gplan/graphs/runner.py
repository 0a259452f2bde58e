"""The owner of one phase: pads a batch to a key, fills static buffers, prepares attention, replays, slices.

Everything both phases share is here; `decode` and `prefill` add how their inputs are laid out. A runner knows no
backend's name and no kernel set's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor

from gplan.core import Batch, Phase, ShapeKey
from gplan.graphs.admission import Admission, PhaseSetup, Verdict
from gplan.graphs.capture.base import CaptureBackend
from gplan.graphs.capture.breakable import graph_break
from gplan.graphs.forward import ForwardParts
from gplan.graphs.kv_check import KVCheck
from gplan.graphs.variants import COMPILED, draw_of
from gplan.kernels.base import Attention
from gplan.models.base import Ends, ForwardInputs


class ByRequest(NamedTuple):
    """What of a forward is laid out by request, 0 for nothing.

    Attributes:
        slots: that attention's metadata is padded to.
        ends: rows of the output, the last token of each request; else it has one for every token.
    """

    slots: int = 0
    ends: int = 0


BY_TOKEN = ByRequest()


class PhaseRunner(ABC):
    """Runs the batches of one phase, replayed where a key admits them and eagerly elsewhere, with the same result.

    Args:
        backends: by variant; that of the empty name captures all variants that are not named.

    Attributes:
        kv_check: looks at the inputs of every step and at the pool after it; None unless asked for.
    """

    phase: ClassVar[Phase]

    def __init__(self, parts: ForwardParts, setup: PhaseSetup, backends: Mapping[str, CaptureBackend]) -> None:
        assert setup.phase is self.phase
        self.parts, self.setup, self._backends = parts, setup, dict(backends)
        self._admission = Admission(setup)
        self._attentions: dict[tuple[int, int], Attention] = {}
        self._compiled: dict[tuple[int, Attention], Callable[[], None]] = {}
        self._forwards: dict[ShapeKey, Callable[[], tuple[Tensor, ...]]] = {}
        self._eager_attention = self._make_attention(setup.max_size, self._max_requests, in_graph=False)
        self.kv_check: KVCheck | None = None

    # What a phase adds ------------------------------------------------------------------------------------------

    @abstractmethod
    def _make_attention(self, size: int, num_requests: int, *, in_graph: bool) -> Attention: ...

    @abstractmethod
    def _load(self, batch: Batch, size: int, attention: Attention, *, by: ByRequest) -> None:
        """Fills the slots, padded to `size`, and prepares attention."""

    @abstractmethod
    def _load_dummy(self, size: int, attention: Attention, *, by: ByRequest) -> None:
        """As `_load`, with padding alone."""

    @abstractmethod
    def _forward(
        self,
        size: int,
        attention: Attention,
        *,
        draw: str = "",
        by: ByRequest = BY_TOKEN,
        is_compiled: bool = False,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """The computation over the first `size` rows of the static buffers, and what is
        laid out by request."""

    @abstractmethod
    def _logits(self, batch: Batch, outputs: tuple[Tensor, ...], *, by: ByRequest) -> Tensor:
        """[number of chunks that sample, vocab]: logits of the token after each."""

    @property
    def _max_requests(self) -> int:
        return self.parts.limits.max_batch

    # What both share --------------------------------------------------------------------------------------------

    @property
    def backend(self) -> CaptureBackend:
        """Of the base keys."""
        return self._backends[""]

    def backend_of(self, key: ShapeKey) -> CaptureBackend:
        return self._backends.get(key.variant, self.backend)

    def can_run(self, batch: Batch) -> Verdict:
        """The key that would be replayed, or the reason for running eagerly. Depends on the batch's sizes alone."""
        return self._admission.verdict(batch)

    def verdict_at(self, size: int) -> Verdict:
        """As `can_run`, of a batch of that size that no variant is made for."""
        return self._admission.at(size)

    def execute(self, batch: Batch, verdict: Verdict | None = None) -> Tensor:
        """Runs a batch.

        Args:
            verdict: of `can_run`; another one forces a key that covers the batch, or eager execution.

        Returns:
            [n, vocab] logits of the chunks that sample, valid until the next step of either runner.
        """
        key = (verdict or self.can_run(batch)).key
        if key is None:
            return self._logits(batch, self._run_eagerly(batch), by=BY_TOKEN)
        return self._logits(batch, self._replay(batch, key), by=self.by_request(key))

    def execute_padded(self, batch: Batch, key: ShapeKey) -> Tensor:
        """As a replay of `key`, but running its forward eagerly: what the replay must equal to the bit."""
        self._load_key(batch, key)
        return self._logits(batch, self._forward_of(key)(), by=self.by_request(key))

    def load_padding(self, key: ShapeKey) -> Attention:
        """Gives a key the inputs of padding alone, and returns its attention."""
        attention = self._attention_of(key)
        self._load_dummy(key.size, attention, by=self.by_request(key))
        return attention

    def warm_up(self, key: ShapeKey) -> None:
        """Runs a key's forward on padding alone, so that what compiles or loads does so before capture."""
        self.load_padding(key)
        self._forward_of(key)()

    def capture(self, key: ShapeKey) -> None:
        """Captures one key of the setup, on padding alone."""
        assert key in self.setup.keys, key
        self.load_padding(key)
        self.backend_of(key).capture(key, self._forward_of(key), len(self.parts.kv_pool.layers))

    def tensors(self, key: ShapeKey) -> Iterator[tuple[str, Tensor]]:
        """Named tensors, beside the shared ones, that the graph of `key` refers to."""
        yield from self.backend_of(key).tensors(key)
        for name, tensor in self._attention_of(key).tensors():
            yield f"attention.{name}", tensor

    def is_compiled(self, key: ShapeKey) -> bool:
        """Whether the forward of a key goes through a compiler."""
        return COMPILED in key.variant.split("+") or self.backend_of(key).compiles

    def execute_plain(self, batch: Batch, key: ShapeKey) -> Tensor:
        """As `execute_padded`, but never compiled: what compiled code is compared with."""
        self._load_key(batch, key)
        forward = self._forward(key.size, self._attention_of(key), by=self.by_request(key))
        return self._logits(batch, forward(), by=self.by_request(key))

    def freeze(self) -> None:
        """Ends capturing for good."""
        for backend in self._backends.values():
            backend.freeze()

    def close(self) -> None:
        """Drops every graph."""
        for backend in self._backends.values():
            backend.close()

    def _replay(self, batch: Batch, key: ShapeKey) -> tuple[Tensor, ...]:
        self._load_key(batch, key)
        if self.kv_check is None:
            return self.backend_of(key).replay(key)
        self.kv_check.before(batch, key.size, self._attention_of(key))
        outputs = self.backend_of(key).replay(key)
        self.kv_check.after(batch)
        return outputs

    def _run_eagerly(self, batch: Batch) -> tuple[Tensor, ...]:
        self._load(batch, batch.size, self._eager_attention, by=BY_TOKEN)
        forward = self._forward(batch.size, self._eager_attention)
        if self.kv_check is None:
            return forward()
        self.kv_check.before(batch, batch.size, self._eager_attention)
        outputs = forward()
        self.kv_check.after(batch)
        return outputs

    def _load_key(self, batch: Batch, key: ShapeKey) -> None:
        """Gives the graph of `key` its inputs."""
        self._load(batch, key.size, self._attention_of(key), by=self.by_request(key))

    def _attention_of(self, key: ShapeKey) -> Attention:
        if self.backend_of(key).cuts_at_breaks:
            return self._eager_attention
        slots = self.slots_of(key) or self._max_requests
        if (key.size, slots) not in self._attentions:
            self._attentions[key.size, slots] = self._make_attention(key.size, slots, in_graph=True)
        return self._attentions[key.size, slots]

    def _forward_of(self, key: ShapeKey) -> Callable[[], tuple[Tensor, ...]]:
        if key not in self._forwards:
            self._forwards[key] = self._forward(
                key.size,
                self._attention_of(key),
                draw=draw_of(key),
                is_compiled=self.is_compiled(key),
                by=self.by_request(key),
            )
        return self._forwards[key]

    def slots_of(self, key: ShapeKey) -> int:
        """Request slots that the metadata of a key is padded to; 0 for none."""
        return 0 if self.backend_of(key).cuts_at_breaks else min(self.setup.request_slots, key.size)

    def by_request(self, key: ShapeKey) -> ByRequest:
        return ByRequest(self.slots_of(key))

    def _model_forward(self, inputs: ForwardInputs, attention: Attention, *, is_compiled: bool) -> Callable[[], None]:
        model, kernels = self.parts.model, self.parts.kernels
        if not is_compiled:
            return lambda: model.forward(kernels, inputs)
        from gplan.graphs.compiling import CompiledForward

        # Keys of one size that differ in what follows the forward share it.
        shape = len(inputs.input_ids), attention
        if shape not in self._compiled:
            self._compiled[shape] = CompiledForward(model, kernels, inputs, attention)
        return self._compiled[shape]

    def _inputs(self, size: int, attention: Attention, ends: Ends | None = None) -> ForwardInputs:
        buffers = self.parts.buffers
        return ForwardInputs(
            input_ids=buffers.view("input_ids", size),
            positions=buffers.view("positions", size),
            kv_slots=buffers.view("kv_slots", size),
            residual=buffers.view("residual", size),
            attn_q=buffers.view("attn_q", size),
            attn_out=buffers.view("attn_out", size),
            kv_caches=self.parts.kv_pool.layers,
            attend=graph_break(attention.run),
            ends=ends,
        )
