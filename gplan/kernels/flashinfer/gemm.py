"""Launches of the products in Triton, with everything around them that is folded in, and of the norm before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gplan.kernels.flashinfer.gemm_rules import Config, FewRows, OneRow, OneRowLoop, Product, split_columns
from gplan.kernels.flashinfer.gemm_triton import (
    few_rows_kernel,
    one_row_kernel,
    one_row_loop_kernel,
    rms_norm_kernel,
    silu_mul_kernel,
)
from gplan.kernels.flashinfer.workspace import Workspace

MAX_NORM_WIDTH = 16384
_SILU_BLOCK = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """A product and what surrounds it.

    Attributes:
        x: [m, k], contiguous.
        weight: [n, k], or [2 * n, k] where gated: rows of the gate, then of what it multiplies.
        out: [m, n], contiguous; added to where `add`.
        norm_weight, eps: of the RMS norm of x, where m is 1; None for none.
        bias: [rows of weight].
    """

    x: Tensor
    weight: Tensor
    out: Tensor
    norm_weight: Tensor | None = None
    eps: float = 0.0
    bias: Tensor | None = None
    gated: bool = False
    add: bool = False

    @property
    def product(self) -> Product:
        m, n = self.out.shape
        return Product(m, n, self.x.shape[1], self.gated)


def multiply(operands: Operands, config: Config, workspace: Workspace, *, pdl: bool) -> None:
    """Computes into `operands.out` with the given launch shape."""
    assert all(tensor.is_contiguous() for tensor in (operands.x, operands.weight, operands.out))
    if isinstance(config, FewRows):
        _multiply_rows(operands, config, workspace, pdl=pdl)
    elif isinstance(config, OneRow):
        _multiply_row(operands, config, pdl=pdl)
    else:
        _multiply_row_in_loop(operands, config, pdl=pdl)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool) -> Tensor:
    """RMS norm of x [rows, width], width at most `MAX_NORM_WIDTH`."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = _power_of_two(width)
    rms_norm_kernel[(x.shape[0],)](
        x, weight, out, width, eps, BLOCK=block, PDL=pdl, num_warps=max(1, min(16, block // 512)), launch_pdl=pdl
    )
    return out


def silu_mul(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """See `Kernels.silu_mul`; gate_up contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(rows, -(-width // _SILU_BLOCK))](
        gate_up, out, width, BLOCK=_SILU_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def _multiply_row(operands: Operands, config: OneRow, *, pdl: bool) -> None:
    product = operands.product
    one_row_kernel[(-(-product.n // config.bn),)](
        operands.x,
        operands.weight,
        operands.norm_weight,
        operands.bias,
        operands.out,
        product.n,
        product.k,
        operands.eps,
        BN=config.bn,
        BK=config.bk,
        num_warps=config.warps,
        **_folded(operands, pdl),
    )


def _multiply_row_in_loop(operands: Operands, config: OneRowLoop, *, pdl: bool) -> None:
    product = operands.product
    tiles = -(-product.n // config.bn)
    blocks = -(-tiles // config.programs)
    one_row_loop_kernel[(-(-tiles // blocks),)](
        operands.x,
        operands.weight,
        operands.norm_weight,
        operands.bias,
        operands.out,
        product.n,
        product.k,
        blocks,
        operands.eps,
        BN=config.bn,
        BK=_power_of_two(product.k),
        num_warps=config.warps,
        **_folded(operands, pdl),
    )


def _multiply_rows(operands: Operands, config: FewRows, workspace: Workspace, *, pdl: bool) -> None:
    product = operands.product
    assert operands.norm_weight is None, "norms are not folded into products of several rows"
    columns = split_columns(product.k, config.bk, config.splits)
    splits = -(-product.k // columns)
    flags = _folded(operands, pdl)
    del flags["NORM"]
    few_rows_kernel[(-(-product.n // config.bn), splits, -(-product.m // config.bm))](
        operands.x,
        operands.weight,
        operands.bias,
        operands.out,
        workspace.gemm_partial,
        workspace.gemm_counters,
        product.m,
        product.n,
        product.k,
        columns,
        BM=config.bm,
        BN=config.bn,
        BK=config.bk,
        SPLITS=splits,
        STAGES=config.stages,
        EVEN=product.n % config.bn == 0 and product.k % columns == 0,
        num_warps=config.warps,
        **flags,
    )


def _folded(operands: Operands, pdl: bool) -> dict[str, Any]:
    return {
        "NORM": operands.norm_weight is not None,
        "GATED": operands.gated,
        "BIAS": operands.bias is not None,
        "ADD": operands.add,
        "PDL": pdl,
        "launch_pdl": pdl,
    }


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
