"""The reference kernels: every operator in plain torch. They define what the operators mean, and serve on the CPU.

No operator reads a tensor's value on the host or has a shape that depends on one, so a recording of their calls
replays; what must read values is a custom operator (`paged_attention`, `sampling`), one call to a recorder. Norms,
rotations and sampling are computed in float32 whatever the model's dtype.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gplan.kernels.base import Attention, Kernels, KernelShape, QKNorm, SamplingInputs
from gplan.kernels.reference_attention import PageListBuffers, ReferenceAttention
from gplan.kernels.sampling import penalise, sample_tokens


class ReferenceKernels(Kernels):
    """Operators on the CPU or a GPU, in float32, bfloat16 or float16."""

    name: ClassVar[str] = "reference"

    def __init__(self, shape: KernelShape) -> None:
        super().__init__(shape)
        self._page_lists = PageListBuffers(shape)

    @staticmethod
    def workspace_nbytes(shape: KernelShape) -> int:
        return PageListBuffers.nbytes(shape)

    def traceable(self) -> Kernels:
        return TraceableKernels(self.shape)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            return functional.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> None:
        residual.addmm_(x, weight.t())
        if bias is not None:
            residual.add_(bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        return functional.silu(gate_up[:, :width]).mul_(gate_up[:, width:])

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        rows = cos_sin.index_select(0, positions)
        q.copy_(_rotated(q, rows))
        k.copy_(_rotated(k, rows))

    def append_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)

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
        """As the composite, but queries and keys are rotated together where no norm parts them."""
        num_q, num_kv = self.shape.num_qo_heads, self.shape.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_q + 2 * num_kv, self.shape.head_dim)
        if qk_norm is not None:
            super().rope_append(qkv, q_out, positions, cos_sin, k_cache, v_cache, slots, qk_norm)
            return
        rotated = _rotated(heads[:, : num_q + num_kv], cos_sin.index_select(0, positions))
        q_out.copy_(rotated[:, :num_q])
        self.append_kv(rotated[:, num_q:].to(qkv.dtype), heads[:, num_q + num_kv :], k_cache, v_cache, slots)

    def decode_attention(self, num_requests: int, *, in_graph: bool) -> Attention:
        return ReferenceAttention(self._page_lists, num_requests, in_graph=in_graph, decode=True)

    def prefill_attention(self, num_tokens: int, num_requests: int, *, in_graph: bool) -> Attention:
        return ReferenceAttention(self._page_lists, num_requests, in_graph=in_graph, decode=False)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        return sample_tokens(logits, inputs)

    def apply_penalties(
        self,
        logits: Tensor,
        output_counts: Tensor,
        in_prompt: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        penalise(logits, output_counts, in_prompt, repetition, presence, frequency)


class TraceableKernels(ReferenceKernels):
    """The operators alone, beside another set that attends: takes no memory."""

    def __init__(self, shape: KernelShape) -> None:
        Kernels.__init__(self, shape)

    def append_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """As the reference's, but into the caches as they are: of one that is written through a view, Inductor makes a
        copy, and copies that back."""
        places = (slots // k_cache.shape[1], slots % k_cache.shape[1])
        k_cache.index_put_(places, k)
        v_cache.index_put_(places, v)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates the two halves of each head: x [n, heads, d], cos_sin [n, d] -> [n, heads, d] float32."""
    n, num_heads, d = x.shape
    halves = x.view(n, num_heads, 2, d // 2)
    cos_and_sin = cos_sin.view(n, 1, 2, d // 2)
    sin = cos_and_sin[:, :, 1]
    rotated = halves * cos_and_sin[:, :, :1]
    rotated[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
    rotated[:, :, 1].addcmul_(halves[:, :, 0], sin)
    return rotated.view(n, num_heads, d)
