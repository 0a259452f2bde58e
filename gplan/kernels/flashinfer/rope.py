"""Launches of rotation and storing of keys and values."""

from __future__ import annotations

from torch import Tensor

from gplan.kernels.base import KernelShape, QKNorm
from gplan.kernels.flashinfer.rope_triton import append_kernel, rope_append_kernel, rotate_kernel
from gplan.kernels.flashinfer.workspace import group_padded


def rope_append(
    shape: KernelShape,
    qkv: Tensor,
    q_out: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    qk_norm: QKNorm | None,
    *,
    pdl: bool,
) -> None:
    """See `Kernels.rope_append`; caches are (k_cache, v_cache) of a layer. Nothing is launched for no tokens."""
    if qkv.shape[0] == 0:
        return
    k_cache, v_cache = caches
    assert all(tensor.is_contiguous() for tensor in (qkv, q_out, k_cache, v_cache))
    rope_append_kernel[(qkv.shape[0], shape.num_kv_heads)](
        qkv,
        q_out,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slots,
        None if qk_norm is None else qk_norm.q_weight,
        None if qk_norm is None else qk_norm.k_weight,
        0.0 if qk_norm is None else qk_norm.eps,
        GROUP=shape.num_qo_heads // shape.num_kv_heads,
        GROUP_PADDED=group_padded(shape),
        HALF=shape.head_dim // 2,
        NORM=qk_norm is not None,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates x [tokens, heads, d] in place; see `Kernels.rope`."""
    num_tokens, num_heads, d = x.shape
    if num_tokens:
        rotate_kernel[(num_tokens, num_heads)](
            x, positions, cos_sin, x.stride(0), x.stride(1), HALF=d // 2, num_warps=1
        )


def append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `Kernels.append_kv`."""
    num_tokens, num_heads, d = k.shape
    if num_tokens:
        append_kernel[(num_tokens, num_heads)](
            k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), k.stride(1), v.stride(1), D=d, num_warps=1
        )
