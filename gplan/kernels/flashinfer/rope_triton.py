# mypy: ignore-errors
"""What happens to queries, keys and values between projection and attention, in one kernel in Triton."""

import triton
import triton.language as tl

from gplan.kernels.flashinfer.pdl_triton import await_previous


@triton.jit
def rope_append_kernel(
    qkv,
    q_out,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    slots,
    q_weight,
    k_weight,
    eps,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens, kv_heads): one head of keys and values with the queries that share it. See `Kernels.rope_append`;
    positions, slots and the table must be written before the kernel that makes qkv."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    dims, group = tl.arange(0, HALF), tl.arange(0, GROUP_PADDED)
    # Positions and slots were written before the kernel that made qkv: only qkv is to be waited for.
    slot = tl.load(slots + token)
    table = cos_sin + tl.load(positions + token) * (2 * HALF) + dims
    cos, sin = tl.load(table)[None, :], tl.load(table + HALF)[None, :]
    await_previous(PDL)
    row = qkv + token * (num_heads * (GROUP + 2) * 2 * HALF)

    q_heads = (head * GROUP + group)[:, None] * (2 * HALF) + dims[None, :]
    in_group = (group < GROUP)[:, None]
    low = tl.load(row + q_heads, mask=in_group, other=0.0)
    high = tl.load(row + q_heads + HALF, mask=in_group, other=0.0)
    low, high = _rotated(low, high, q_weight, dims, cos, sin, eps, HALF, NORM)
    target = q_out + token * (num_heads * GROUP * 2 * HALF) + q_heads
    tl.store(target, low.to(q_out.dtype.element_ty), mask=in_group)
    tl.store(target + HALF, high.to(q_out.dtype.element_ty), mask=in_group)

    k_row = row + (num_heads * GROUP + head) * (2 * HALF) + dims[None, :]
    low, high = tl.load(k_row), tl.load(k_row + HALF)
    low, high = _rotated(low, high, k_weight, dims, cos, sin, eps, HALF, NORM)
    place = (slot * num_heads + head) * (2 * HALF) + dims[None, :]
    tl.store(k_cache + place, low.to(k_cache.dtype.element_ty))
    tl.store(k_cache + place + HALF, high.to(k_cache.dtype.element_ty))
    v_row = k_row + num_heads * (2 * HALF)
    tl.store(v_cache + place, tl.load(v_row))
    tl.store(v_cache + place + HALF, tl.load(v_row + HALF))


@triton.jit
def _rotated(low, high, weight, dims, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Norms and rotates the halves of some heads, [rows, HALF] each; the norm is rounded to the model's dtype."""
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        low = (low * scale * tl.load(weight + dims).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        high = (high * scale * tl.load(weight + HALF + dims).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def rotate_kernel(x, positions, cos_sin, token_stride, head_stride, HALF: tl.constexpr):
    """Rotates x [tokens, heads, 2 * HALF] in place. Grid (tokens, heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, HALF)
    table = cos_sin + tl.load(positions + token) * (2 * HALF) + dims
    cos, sin = tl.load(table), tl.load(table + HALF)
    at = x + token * token_stride + head * head_stride + dims
    low, high = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    tl.store(at, (low * cos - high * sin).to(x.dtype.element_ty))
    tl.store(at + HALF, (high * cos + low * sin).to(x.dtype.element_ty))


@triton.jit
def append_kernel(k, v, k_cache, v_cache, slots, k_stride, v_stride, k_head, v_head, D: tl.constexpr):
    """Writes keys and values [tokens, heads, D] at their slots. Grid (tokens, heads); strides of tokens, of heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, D)
    place = (tl.load(slots + token) * tl.num_programs(1) + head) * D + dims
    tl.store(k_cache + place, tl.load(k + token * k_stride + head * k_head + dims))
    tl.store(v_cache + place, tl.load(v + token * v_stride + head * v_head + dims))
