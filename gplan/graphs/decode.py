"""Decode: one token of each request, the vocabulary head in the graph; in some variants the choice of the token too.

A graph that draws leaves everything as the next step of the same requests needs it: tokens, positions, KV locations,
attention metadata, and with the positions what each row's next number is drawn from. So a step that goes on where the
last one ended takes nothing from the host, until a request enters another page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gplan.core import DUMMY_ROW, Batch, Phase, Request, ShapeKey
from gplan.graphs import variants
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.capture.base import CaptureBackend
from gplan.graphs.forward import DRAW_SLOTS, LAST_TOKENS, ForwardParts
from gplan.graphs.runner import BY_TOKEN, ByRequest, PhaseRunner
from gplan.graphs.variants import SAMPLED, draw_of
from gplan.kernels.base import Attention, AttentionBatch, SamplingInputs


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What a graph leaves in the buffers: inputs of the same key, as long as nobody else writes there.

    Attributes:
        starts: position of each request's token.
        num_writes: of the buffers, when they were filled last.
    """

    key: ShapeKey
    requests: list[Request]
    starts: list[int]
    num_writes: int


class DecodeRunner(PhaseRunner):
    """Sizes are requests. Input tokens are gathered on the device from each row's last token."""

    phase = Phase.DECODE

    def __init__(self, parts: ForwardParts, setup: PhaseSetup, backends: Mapping[str, CaptureBackend]) -> None:
        super().__init__(parts, setup, backends)
        self._next: _Inputs | None = None
        self.num_steps_without_input = 0

    def _make_attention(self, size: int, num_requests: int, *, in_graph: bool) -> Attention:
        return self.parts.kernels.decode_attention(size, in_graph=in_graph)

    def _load(self, batch: Batch, size: int, attention: Attention, *, by: ByRequest) -> None:
        rows = np.fromiter((c.request.row for c in batch.chunks), np.int32, batch.num_requests)
        positions = np.fromiter((c.start for c in batch.chunks), np.int64, batch.num_requests)
        counts = self.parts.page_table.update(batch)
        self._load_rows(size, attention, rows, positions, counts)

    def _load_dummy(self, size: int, attention: Attention, *, by: ByRequest) -> None:
        nothing = np.zeros(0, np.int32)
        self._load_rows(size, attention, nothing, nothing.astype(np.int64), nothing)

    def _load_rows(
        self, size: int, attention: Attention, rows: np.ndarray, positions: np.ndarray, counts: np.ndarray
    ) -> None:
        """Arrays of real requests: [n] each; rows n to size are padded with requests of one token on the dummy page."""
        table, real = self.parts.page_table, len(rows)
        values = {"rows": rows.astype(np.int64), "positions": positions, "kv_slots": table.slots(rows, positions)}
        self.parts.buffers.fill(values, real=real, padded=size, unread=("host_ids",))
        padding = size - real
        rows = np.concatenate([rows, np.full(padding, DUMMY_ROW, np.int32)])
        counts = np.concatenate([counts, np.ones(padding, np.int32)])
        last = np.concatenate([positions % table.page_size + 1, np.ones(padding, np.int64)]).astype(np.int32)
        indptr = np.zeros(size + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        attention.prepare(
            AttentionBatch(
                qo_indptr=np.arange(size + 1, dtype=np.int32),
                kv_indptr=indptr,
                kv_indices=table.indices(rows, counts),
                kv_last_page_len=last,
            )
        )

    def draw(self, batch: Batch, key: ShapeKey) -> tuple[Tensor, Tensor]:
        """Replays a graph that draws: logits [n, vocab] and tokens [n] int64, valid until the next step of either
        runner. The rows' last tokens are these afterwards."""
        logits, tokens = self._replay(batch, key)
        return logits[: batch.num_requests], tokens[: batch.num_requests]

    def _load_key(self, batch: Batch, key: ShapeKey) -> None:
        if not draw_of(key):
            super()._load_key(batch, key)
            return
        requests, starts = [c.request for c in batch.chunks], [c.start for c in batch.chunks]
        if self._goes_on(key, requests, starts):
            self.num_steps_without_input += 1
        else:
            super()._load_key(batch, key)
            self._load_draws(requests, key)
        # The graph is about to make the inputs of the step after this one.
        self._next = _Inputs(key, requests, [start + 1 for start in starts], self._num_writes)

    def _goes_on(self, key: ShapeKey, requests: list[Request], starts: list[int]) -> bool:
        """Whether a graph that drew has left the inputs of just these tokens of these requests."""
        ready = self._next
        if ready is None or (ready.key, ready.num_writes) != (key, self._num_writes):
            return False
        tokens = self._attention_of(key).advance_tokens
        return ready.requests == requests and ready.starts == starts and all(start % tokens for start in starts)

    @property
    def _num_writes(self) -> int:
        return self.parts.buffers.num_writes + self.parts.by_request.num_writes

    def _load_draws(self, requests: list[Request], key: ShapeKey) -> None:
        if draw_of(key) != SAMPLED:
            return
        vocab_size, all_params = self.parts.kernels.shape.vocab_size, [request.params for request in requests]
        rows = [(p.temperature, p.top_k or vocab_size, p.top_p, p.min_p, p.seed) for p in all_params]
        dtypes = (np.float32, np.int32, np.float32, np.float32, np.int64)
        columns = zip(DRAW_SLOTS, dtypes, zip(*rows, strict=True), strict=True)
        values = {name: np.array(column, dtype) for name, dtype, column in columns}
        self.parts.by_request.fill(values, real=len(requests), padded=key.size, unread=(LAST_TOKENS,))

    def _forward(
        self,
        size: int,
        attention: Attention,
        *,
        draw: str = "",
        by: ByRequest = BY_TOKEN,
        is_compiled: bool = False,
    ) -> Callable[[], tuple[Tensor, ...]]:
        parts, inputs = self.parts, self._inputs(size, attention)
        rows, logits = parts.buffers.view("rows", size), parts.buffers.view("logits", size)
        choose = self._chooser(draw, size, inputs.positions)
        run_model = self._model_forward(inputs, attention, is_compiled=is_compiled)

        def forward() -> tuple[Tensor, ...]:
            torch.index_select(parts.last_tokens, 0, rows, out=inputs.input_ids)
            run_model()
            parts.model.head(parts.kernels, inputs.residual, logits)
            if choose is None:
                return (logits,)
            tokens = choose(logits)
            parts.last_tokens.index_copy_(0, rows, tokens)
            attention.advance(rows, inputs.positions, inputs.kv_slots)
            return (logits, tokens)

        return forward

    def _chooser(self, draw: str, size: int, positions: Tensor) -> Callable[[Tensor], Tensor] | None:
        """How a graph chooses tokens; None where it does not."""
        kernels, draws = self.parts.kernels, self.parts.by_request
        match draw:
            case variants.GREEDY:
                return kernels.argmax
            case variants.SAMPLED:
                heat, k, p, least, seed = (draws.view(name, size) for name in DRAW_SLOTS)
                # A token is drawn by its own position, one after that of the token read.
                return lambda logits: kernels.sample(logits, SamplingInputs(heat, k, p, least, seed, positions + 1))
            case _:
                return None

    def _logits(self, batch: Batch, outputs: tuple[Tensor, ...], *, by: ByRequest) -> Tensor:
        return outputs[0][: batch.num_requests]
