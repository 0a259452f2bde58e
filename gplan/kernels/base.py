"""The contract of a kernel set: the operators a model is run with.

`reference` (plain ATen) defines what each operator means; `flashinfer` must agree with it. Operators marked
*composite* have a definition here in terms of the others; a kernel set overrides one where a fused kernel pays.

Everything an operator reads at replay is a device tensor at a fixed address; host values enter only through
`Attention.prepare`, which runs outside the graph before every replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gplan.errors import UnsupportedError
from gplan.kernels.masking import mask_tokens
from gplan.kernels.products import Algorithms, ProductLibrary, ProductShape

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """What a kernel set is sized for: the model's attention geometry and the plan's limits."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    page_size: int
    max_batch: int
    max_tokens: int
    """Tokens of one step at most: the chunk."""
    max_len: int
    """Tokens of one request at most."""
    num_pages: int
    """Pages of the KV pool, the dummy page included."""
    dtype: torch.dtype
    device: torch.device

    @property
    def max_pages_per_request(self) -> int:
        return -(-self.max_len // self.page_size)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Host description of one step's paged attention, in FlashInfer's words.

    Request `r` has query tokens `[qo_indptr[r], qo_indptr[r + 1])`; its keys and values, those of the new tokens
    included, are in pages `kv_indices[kv_indptr[r] : kv_indptr[r + 1]]`, the last of which holds
    `kv_last_page_len[r]` tokens (1 to page_size). The queries are the last tokens of the request; attention is causal.
    A padded decode row has one page, the dummy one, and length 1. A padded prefill slot has no queries.

    Attributes:
        qo_indptr: [num_requests + 1] int32.
        kv_indptr: [num_requests + 1] int32.
        kv_indices: [kv_indptr[-1]] int32.
        kv_last_page_len: [num_requests] int32.
    """

    qo_indptr: IntArray
    kv_indptr: IntArray
    kv_indices: IntArray
    kv_last_page_len: IntArray

    @property
    def num_requests(self) -> int:
        return len(self.kv_last_page_len)


class Attention(ABC):
    """Paged attention of one key (or of eager steps of one phase): metadata on the device, and the call that reads it.

    `prepare` may write only buffers that this object owns (or shares with others that never run concurrently); its
    result is valid until the next `prepare` on the same kernel set, in stream order. `run` makes no host decision.
    """

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> None:
        """Copies the step's metadata to the device. Never called inside a capture."""

    @abstractmethod
    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Attends over the cache.

        Args:
            q: [num_tokens, num_qo_heads, head_dim]; rows past `qo_indptr[-1]` are padding and may hold anything.
            k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim] of one layer.
            out: [num_tokens, num_qo_heads, head_dim], written; what padding rows then hold is unspecified.
        """

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Named device tensors a graph that ran this attention refers to, for the guard."""

    def planned(self) -> AttentionBatch | None:
        """What `run` would read now, back from the device, for verification: waits for the device. None where a kernel
        set cannot tell."""
        return None

    advance_tokens: int = 0
    """`advance` gives what `prepare` would, to the bit, until a request's length passes a multiple of this; it divides
    the page size. 0: the host decides the metadata at each step."""

    def advance(self, rows: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        """Makes metadata, positions and KV locations those of the next token of the same requests, by device operations
        alone: so a graph can hold it, and `prepare` is left out where only that has changed.

        For attention whose metadata grow by counting. What a host decides anew at each step (FlashInfer's plan) would
        stay as captured, and be silently wrong.

        Args:
            rows: [n] int64 request rows; padding (the dummy row) stands still.
            positions, kv_slots: [n] int64, changed in place.

        Raises:
            UnsupportedError: the host decides this attention's metadata.
        """
        raise UnsupportedError(
            f"{type(self).__name__}: its metadata are decided on the host at each step",
            "Prepare it outside the graph before every replay.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class QKNorm:
    """Per-head RMS norms of queries and keys (Qwen3): weights [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """Per-row sampling parameters on the device, one entry per row of logits.

    Attributes:
        temperature: [n] float32, 0 for greedy.
        top_k: [n] int32, vocab_size for no limit.
        top_p, min_p: [n] float32, 1 and 0 for no limit.
        seed: [n] int64.
        position: [n] int64, index of the token being drawn within its request; with `seed` it fixes the draw.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor


class Kernels(ABC):
    """One set of operators, sized for one model and one plan. The caller owns every tensor passed in.

    Args:
        algorithms: of products that are left to a library, where its own choice is not to be taken; only for a set that
            has a `product_library`.
    """

    name: ClassVar[str]

    def __init__(self, shape: KernelShape, algorithms: Algorithms | None = None) -> None:
        self.shape = shape

    @staticmethod
    @abstractmethod
    def workspace_nbytes(shape: KernelShape) -> int:
        """Device bytes the constructor will allocate, known before it does; nothing is allocated after."""

    @staticmethod
    def prefill_kernel(dtype: torch.dtype, head_dim: int, device: torch.device) -> str:
        """Which kernel of the set runs prefill attention here, where that depends on the machine; else empty."""
        return ""

    @staticmethod
    def blas_version() -> str:
        """Of the library that the set leaves products to, exactly; empty where there is no algorithm to choose."""
        return ""

    @staticmethod
    def product_library(dtype: torch.dtype, device: torch.device) -> ProductLibrary | None:
        """What multiplies the products that `leaves_to_library` names; None where there is no algorithm to choose."""
        return None

    @staticmethod
    def leaves_to_library(shape: ProductShape, *, gated: bool) -> bool:
        """Whether the set has no kernel of its own for products of this shape.

        Args:
            gated: the weight is that of `norm_gate_up`.
        """
        return False

    def traceable(self) -> Kernels:
        """Operators with the same meaning that a compiler can see into, and makes good code of; this set, unless there
        is a better one. Attention and sampling are not asked of it."""
        return self

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: x [n, k], weight [m, k], bias [m] -> [n, m], into `out` where given."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, computed in float32: a new tensor of x's shape and dtype."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then its RMS norm as a new tensor. Both [n, hidden]."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of [n, 2 * m] (gate first) -> [n, m]."""

    @abstractmethod
    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotates q [n, qo_heads, d] and k [n, kv_heads, d] in place (half-split rotation, not interleaved).

        Args:
            positions: [n] int64.
            cos_sin: [max_len, d] float32: cosines of d/2 frequencies, then their sines (scaled where the kind scales).
        """

    @abstractmethod
    def append_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Writes k, v [n, kv_heads, d] at `slots` [n] int64: page * page_size + offset. Padding writes slot 0."""

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Composite: `linear(rms_norm(x))`."""
        return self.linear(self.rms_norm(x, norm_weight, eps), weight, bias)

    def norm_gate_up(
        self, x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Composite: `silu_mul(norm_linear(x))`: gate_up_weight [2 * m, k], gate first, bias [2 * m] -> [n, m]."""
        return self.silu_mul(self.norm_linear(x, norm_weight, eps, gate_up_weight, bias))

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> None:
        """Composite: `residual += linear(x)` in place; residual [n, m]."""
        residual.add_(self.linear(x, weight, bias))

    def rope_append(
        self,
        qkv: Tensor,
        q_out: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        qk_norm: QKNorm | None = None,
    ) -> None:
        """Composite: splits qkv [n, (qo_heads + 2 * kv_heads) * d], norms and rotates q and k, stores k and v, and
        leaves q in `q_out` [n, qo_heads, d]."""
        n, d = qkv.shape[0], self.shape.head_dim
        heads = qkv.view(n, -1, d)
        num_q, num_kv = self.shape.num_qo_heads, self.shape.num_kv_heads
        q, k, v = heads[:, :num_q], heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]
        if qk_norm is not None:
            q = self.rms_norm(q, qk_norm.q_weight, qk_norm.eps)
            k = self.rms_norm(k, qk_norm.k_weight, qk_norm.eps)
        q_out.copy_(q)
        self.rope(q_out, k, positions, cos_sin)
        self.append_kv(k, v, k_cache, v_cache, slots)

    @abstractmethod
    def decode_attention(self, num_requests: int, *, in_graph: bool) -> Attention:
        """Attention of one query token per request, for exactly `num_requests` rows (padding included) in a graph,
        for up to `num_requests` outside."""

    @abstractmethod
    def prefill_attention(self, num_tokens: int, num_requests: int, *, in_graph: bool) -> Attention:
        """Ragged causal attention over cached prefixes. In a graph exactly `num_requests` slots and `num_tokens`
        query rows, unused slots having no queries; outside, up to as many."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Composite: the first of the largest logits of each row: [n, vocab] of any float dtype -> [n] int64. Of rows
        with a NaN, any token."""
        return logits.argmax(dim=-1)

    @abstractmethod
    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Draws one token per row: logits [n, vocab] of any float dtype -> [n] int64. Does not change logits."""

    @abstractmethod
    def apply_penalties(
        self,
        logits: Tensor,
        output_counts: Tensor,
        in_prompt: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """Penalises seen tokens in place: logits [n, vocab] float32, output_counts [n, vocab] int32, in_prompt
        [n, vocab] bool, the three penalties [n] float32."""

    def apply_token_mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Composite: sets logits [n, vocab] float32 to minus infinity in place, in the rows [k] int64, where bit t % 32
        of word t // 32 of bits [k, ceil(vocab / 32)] int32 is 0."""
        mask_tokens(logits, rows, bits)
