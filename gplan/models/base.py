"""What a runner gives a model, and what a model gives a runner.

A model holds weights and makes calls on a kernel set. It allocates only temporaries: whatever crosses an attention
call or leaves the model lies in buffers of the caller, so that segmented graphs share them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from gplan.kernels.base import Kernels

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""`attend(q, k_cache, v_cache, out)`: see `kernels.base.Attention.run`. May be a break between two graph segments."""


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Rows of a step that alone are asked for: of prompts, the last token of each.

    Attributes:
        rows: [m] int64, m <= n.
        out: [m, hidden]: what leaves the model for these rows.
    """

    rows: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInputs:
    """Static buffers of one step, cut to its (padded) size n.

    Attributes:
        input_ids, positions, kv_slots: [n] int64.
        residual: [n, hidden] of the model's dtype: the residual stream, updated in place; afterwards the output.
        attn_q, attn_out: [n, qo_heads, head_dim]: what crosses the attention call; shared by all layers.
        kv_caches: per layer (k_cache, v_cache), each [num_pages, page_size, kv_heads, head_dim].
        attend: the attention call.
        ends: the rows that are asked for; None for all.
    """

    input_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    residual: Tensor
    attn_q: Tensor
    attn_out: Tensor
    kv_caches: tuple[tuple[Tensor, Tensor], ...]
    attend: Attend
    ends: Ends | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A matrix product that every layer has.

    Attributes:
        weights: [n, k] of each layer.
        adds: the results are added to the residual stream.
        gated: the weight is that of `Kernels.norm_gate_up`.
        has_bias: something is added to every row before the results are written.
    """

    weights: tuple[Tensor, ...]
    adds: bool = False
    gated: bool = False
    has_bias: bool = False


class Model(ABC):
    """Weights of a causal language model, run with a kernel set."""

    @abstractmethod
    def forward(self, kernels: Kernels, inputs: ForwardInputs) -> None:
        """Embeds and runs every layer: leaves the stream (before the final norm) in `inputs.residual`. Calls
        `inputs.attend` exactly once per layer, in order.

        With `inputs.ends` the last layer ends with its attention for all other rows, and the stream of those that are
        asked for is left in `ends.out`: what `finish` makes of `inputs.attn_out` and `inputs.residual`.
        """

    @abstractmethod
    def finish(self, kernels: Kernels, attended: Tensor, residual: Tensor) -> None:
        """The last layer after its attention: attended [n, qo_heads, head_dim], residual [n, hidden], in place."""

    @abstractmethod
    def head(self, kernels: Kernels, hidden: Tensor, out: Tensor) -> None:
        """Final norm and vocabulary projection: hidden [n, hidden] -> out [n, vocab]."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Named weights and tables, each once, for the ledger and the guard."""

    def projections(self) -> tuple[Projection, ...]:
        """The products of a layer, for measuring; none where they are not known."""
        return ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for _, tensor in self.tensors())
