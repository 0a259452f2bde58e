"""The CUDA kernel set: FlashInfer's kernels, cuBLAS, and kernels in Triton where fusing pays."""

from __future__ import annotations

from typing import ClassVar

import flashinfer
import torch
from torch import Tensor
from torch.nn import functional

from gplan.errors import UnsupportedError
from gplan.kernels.base import Attention, Kernels, KernelShape, QKNorm, SamplingInputs
from gplan.kernels.flashinfer import cublaslt
from gplan.kernels.flashinfer.cublaslt import CublasLt
from gplan.kernels.flashinfer.decode_attention import DecodeAttention, DecodeLists
from gplan.kernels.flashinfer.drawing import sample
from gplan.kernels.flashinfer.gemm import MAX_NORM_WIDTH, Operands, multiply, rms_norm, silu_mul
from gplan.kernels.flashinfer.gemm_rules import Product, choose
from gplan.kernels.flashinfer.prefill_attention import PrefillAttention, PrefillLists
from gplan.kernels.flashinfer.prefill_kernel import PrefillKernel
from gplan.kernels.flashinfer.prefill_module import load_prefill_module
from gplan.kernels.flashinfer.rope import append, rope_append, rotate
from gplan.kernels.flashinfer.sampling import argmax, mask_tokens, penalise
from gplan.kernels.flashinfer.workspace import Workspace
from gplan.kernels.products import Algorithms, LibraryProduct, ProductLibrary, ProductShape
from gplan.kernels.reference import TraceableKernels

HEAD_DIMS = (64, 128, 256)


class FlashInferKernels(Kernels):
    """Operators on an NVIDIA GPU in bfloat16 or float16.

    Products of few rows are in Triton where that is faster (`gemm_rules`), with what surrounds them folded in; the
    others are cuBLAS's, by the algorithm that the plan names for their shape, else by cuBLAS' own choice. Prefill
    attention and norms of very wide rows are FlashInfer's; decode attention, other norms, activations, what stands
    between projection and attention, and sampling are in Triton.

    Raises:
        UnsupportedError: another dtype, or heads of another size than FlashInfer has kernels for.
        GplanError: an algorithm that cuBLASLt refuses.
    """

    name: ClassVar[str] = "flashinfer"

    def __init__(self, shape: KernelShape, algorithms: Algorithms | None = None) -> None:
        super().__init__(shape, algorithms)
        _check(shape)
        self._pdl = torch.cuda.get_device_capability(shape.device) >= (9, 0)
        self.workspace = Workspace(shape)
        self._decode_lists = DecodeLists(shape, self.workspace)
        self._prefill_lists = PrefillLists(shape, self.workspace)
        self._prefill_kernel = PrefillKernel(shape)
        self.products = _products(algorithms or {}, shape)

    @staticmethod
    def workspace_nbytes(shape: KernelShape) -> int:
        return Workspace.nbytes(shape)

    @staticmethod
    def prefill_kernel(dtype: torch.dtype, head_dim: int, device: torch.device) -> str:
        return load_prefill_module(dtype, head_dim, device)[0]

    @staticmethod
    def blas_version() -> str:
        return cublaslt.version()

    @staticmethod
    def product_library(dtype: torch.dtype, device: torch.device) -> ProductLibrary | None:
        return CublasLt(dtype, device) if cublaslt.version() else None

    @staticmethod
    def leaves_to_library(shape: ProductShape, *, gated: bool) -> bool:
        results = shape.n // 2 if gated else shape.n
        return choose(Product(shape.m, results, shape.k, gated)) is None

    def traceable(self) -> Kernels:
        return TraceableKernels(self.shape)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        product = None if bias is not None else self._product(x, weight, adds=False)
        if product is not None:
            out = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
            product.run(x, weight, out, self.workspace.blas)
            return out
        if out is None:
            return functional.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[1] <= MAX_NORM_WIDTH:
            return rms_norm(rows, weight, eps, pdl=self._pdl).view(x.shape)
        out: Tensor = flashinfer.norm.rmsnorm(rows, weight, eps)
        return out.view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = x.clone()
        flashinfer.norm.fused_add_rmsnorm(out, residual, weight, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up.contiguous(), pdl=self._pdl)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        rotate(q, positions, cos_sin)
        rotate(k, positions, cos_sin)

    def append_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        append(k, v, k_cache, v_cache, slots)

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        if x.shape[0] == 1 and self._multiply(Operands(x, weight, out, norm_weight, eps, bias)):
            return out
        rows = self.rms_norm(x, norm_weight, eps)
        if self._multiply(Operands(rows, weight, out, bias=bias)):
            return out
        return self.linear(rows, weight, bias, out)

    def norm_gate_up(
        self, x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        out = torch.empty((x.shape[0], gate_up_weight.shape[0] // 2), dtype=x.dtype, device=x.device)
        if x.shape[0] == 1 and self._multiply(Operands(x, gate_up_weight, out, norm_weight, eps, bias, gated=True)):
            return out
        rows = self.rms_norm(x, norm_weight, eps)
        if self._multiply(Operands(rows, gate_up_weight, out, bias=bias, gated=True)):
            return out
        return self.silu_mul(self.linear(rows, gate_up_weight, bias))

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> None:
        if self._multiply(Operands(x, weight, residual, bias=bias, add=True)):
            return
        product = self._product(x, weight, adds=True)
        if product is not None:
            product.run(x, weight, residual, self.workspace.blas)
        else:
            residual.addmm_(x, weight.t())
        if bias is not None:
            residual.add_(bias)

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
        rope_append(self.shape, qkv, q_out, positions, cos_sin, (k_cache, v_cache), slots, qk_norm, pdl=self._pdl)

    def decode_attention(self, num_requests: int, *, in_graph: bool) -> DecodeAttention:
        return DecodeAttention(
            self.shape, self.workspace, self._decode_lists, num_requests, in_graph=in_graph, pdl=self._pdl
        )

    def prefill_attention(self, num_tokens: int, num_requests: int, *, in_graph: bool) -> Attention:
        decode = None
        if not in_graph:
            decode = self.decode_attention(self.shape.max_batch, in_graph=False)
        return PrefillAttention(
            self.shape, self.workspace, self._prefill_lists, self._prefill_kernel, decode, num_tokens, num_requests
        )

    def argmax(self, logits: Tensor) -> Tensor:
        return argmax(logits)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        return sample(logits, inputs)

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

    def apply_token_mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        mask_tokens(logits, rows, bits)

    def _product(self, x: Tensor, weight: Tensor, *, adds: bool) -> LibraryProduct | None:
        """What the plan has chosen for a product that is left to cuBLAS."""
        if not self.products:
            return None
        n, k = weight.shape
        return self.products.get(ProductShape(x.shape[0], n, k, adds))

    def _multiply(self, operands: Operands) -> bool:
        config = choose(operands.product)
        if config is None or not operands.x.is_contiguous():
            return False
        multiply(operands, config, self.workspace, pdl=self._pdl)
        return True


def _products(algorithms: Algorithms, shape: KernelShape) -> dict[ProductShape, LibraryProduct]:
    if not algorithms:
        return {}
    library = CublasLt(shape.dtype, shape.device)
    return {product: library.product(product, algorithm) for product, algorithm in algorithms.items()}


def _check(shape: KernelShape) -> None:
    if shape.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"flashinfer kernels in {shape.dtype}", "Use bfloat16 or float16, or the reference kernels."
        )
    if shape.head_dim not in HEAD_DIMS:
        raise UnsupportedError(
            f"flashinfer kernels with heads of {shape.head_dim}",
            f"They exist for {', '.join(map(str, HEAD_DIMS))}; use the reference kernels.",
        )
