# mypy: ignore-errors
"""Products of a few rows with a weight matrix, in Triton: what is read is the weights, so everything else is folded in.

`x @ w.T` with x [m, k] and w [n, k], k contiguous in both; around it, each by a compile-time flag, a bias, SiLU of the
first n rows of w times the next n (`GATED`), and addition to what is in `out` (`ADD`). Arithmetic is float32. One row
is multiplied without tensor cores, and there the RMS norm of x is folded in too; for several rows that costs more than
a kernel of its own. There the first weights, which depend on no kernel, are asked for before the one before has ended.
"""

import triton
import triton.language as tl

from gplan.kernels.flashinfer.pdl_triton import await_previous


@triton.jit
def one_row_kernel(
    x,
    w,
    norm_weight,
    bias,
    out,
    N,
    K,
    eps,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [k] -> out [n], for any k. A program makes BN results; its first weights are on their way before it waits."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.arange(0, BK)
    row_ok = rows < N
    tile = w + rows.to(tl.int64)[:, None] * K + cols[None, :]
    up_tile = tile + N.to(tl.int64) * K
    mask = row_ok[:, None] & (cols < K)[None, :]
    w_next = tl.load(tile, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_next = tl.load(up_tile, mask=mask, other=0.0, eviction_policy="evict_first")
    await_previous(PDL)
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    up_acc = tl.zeros([BN, BK], dtype=tl.float32)
    squares = tl.zeros([BK], dtype=tl.float32)
    for k in range(0, K, BK):
        w_tile = w_next
        mask = row_ok[:, None] & (k + BK + cols < K)[None, :]
        w_next = tl.load(tile + k + BK, mask=mask, other=0.0, eviction_policy="evict_first")
        if GATED:
            up_now = up_next
            up_next = tl.load(up_tile + k + BK, mask=mask, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x + k + cols, mask=k + cols < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x_tile * x_tile
            x_tile *= tl.load(norm_weight + k + cols, mask=k + cols < K, other=0.0).to(tl.float32)
        acc += w_tile.to(tl.float32) * x_tile[None, :]
        if GATED:
            up_acc += up_now.to(tl.float32) * x_tile[None, :]
    y = tl.sum(acc, axis=1)
    up = tl.sum(up_acc, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
        up *= scale
    if BIAS:
        y += tl.load(bias + rows, mask=row_ok, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + N + rows, mask=row_ok, other=0.0).to(tl.float32)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    if ADD:
        y += tl.load(out + rows, mask=row_ok, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=row_ok)


@triton.jit(do_not_specialize=["blocks"])
def one_row_loop_kernel(
    x,
    w,
    norm_weight,
    bias,
    out,
    N,
    K,
    blocks,
    eps,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [k] -> out [n], for k <= BK. A program holds all of x, normed once, and makes `blocks` times BN results."""
    first = tl.program_id(0) * blocks
    last = tl.minimum(first + blocks, tl.cdiv(N, BN))
    cols, offsets = tl.arange(0, BK), tl.arange(0, BN)
    col_ok = cols < K
    rows = first * BN + offsets
    up_shift = N.to(tl.int64) * K
    mask = (rows < N)[:, None] & col_ok[None, :]
    tile = w + rows.to(tl.int64)[:, None] * K + cols[None, :]
    w_next = tl.load(tile, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_next = tl.load(tile + up_shift, mask=mask, other=0.0, eviction_policy="evict_first")
    if NORM:
        gain = tl.load(norm_weight + cols, mask=col_ok, other=0.0).to(tl.float32)
    await_previous(PDL)
    x_row = tl.load(x + cols, mask=col_ok, other=0.0).to(tl.float32)
    if NORM:
        x_row *= tl.rsqrt(tl.sum(x_row * x_row, axis=0) / K + eps) * gain
    for block in range(first, last):
        rows = block * BN + offsets
        row_ok = rows < N
        w_now = w_next
        mask = ((rows + BN < N) & (block + 1 < last))[:, None] & col_ok[None, :]
        tile = w + (rows + BN).to(tl.int64)[:, None] * K + cols[None, :]
        w_next = tl.load(tile, mask=mask, other=0.0, eviction_policy="evict_first")
        if GATED:
            up_now = up_next
            up_next = tl.load(tile + up_shift, mask=mask, other=0.0, eviction_policy="evict_first")
        if ADD:
            held = tl.load(out + rows, mask=row_ok, other=0.0).to(tl.float32)
        y = tl.sum(w_now.to(tl.float32) * x_row[None, :], axis=1)
        if BIAS:
            y += tl.load(bias + rows, mask=row_ok, other=0.0).to(tl.float32)
        if GATED:
            up = tl.sum(up_now.to(tl.float32) * x_row[None, :], axis=1)
            if BIAS:
                up += tl.load(bias + N + rows, mask=row_ok, other=0.0).to(tl.float32)
            y = y / (1.0 + tl.exp(-y)) * up
        if ADD:
            y += held
        tl.store(out + rows, y.to(out.dtype.element_ty), mask=row_ok)


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(
    x,
    w,
    bias,
    out,
    partial,
    counters,
    M,
    N,
    K,
    K_SPLIT,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [m, k] -> out [m, n]. Grid (tiles of n, splits of k, tiles of m).

    With splits, each program leaves its part in `partial`; the last of a tile to arrive adds them up in order, so the
    result does not depend on which that was, and sets the tile's counter back to 0.

    Args:
        partial: float32, for each tile and split [BM, BN], twice where gated.
        counters: int32, one per tile, 0.
        K_SPLIT: columns of one split, a multiple of BK.
        EVEN: BN divides n, and BK the columns of every split.
    """
    tile_n, split, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile_n * BN + tl.arange(0, BN)
    x_rows = tile_m * BM + tl.arange(0, BM)
    cols = tl.arange(0, BK)
    k_first = split * K_SPLIT
    k_end = tl.minimum(k_first + K_SPLIT, K)
    await_previous(PDL)

    x_tile = x + x_rows.to(tl.int64)[:, None] * K + cols[None, :]
    w_tile = w + rows.to(tl.int64)[:, None] * K + cols[None, :]
    up_tile = w_tile + N.to(tl.int64) * K
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    up_acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in tl.range(k_first, k_end, BK, num_stages=STAGES):
        if EVEN:
            x_now = tl.load(x_tile + k, mask=(x_rows < M)[:, None], other=0.0)
            w_now = tl.load(w_tile + k, eviction_policy="evict_first")
            if GATED:
                up_now = tl.load(up_tile + k, eviction_policy="evict_first")
        else:
            x_now = tl.load(x_tile + k, mask=(x_rows < M)[:, None] & (k + cols < k_end)[None, :], other=0.0)
            mask = (rows < N)[:, None] & (k + cols < k_end)[None, :]
            w_now = tl.load(w_tile + k, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_now = tl.load(up_tile + k, mask=mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x_now, w_now.T, acc)
        if GATED:
            up_acc = tl.dot(x_now, up_now.T, up_acc)

    if SPLITS == 1:
        _finish(acc, up_acc, bias, out, x_rows, rows, M, N, GATED, BIAS, ADD)
    else:
        tile = tile_m * tl.num_programs(0) + tile_n
        size: tl.constexpr = BM * BN * (2 if GATED else 1)
        parts = partial + tile.to(tl.int64) * SPLITS * size
        _leave_part(acc, up_acc, parts + split * size, BM, BN, GATED)
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(counters + tile, 0)
            acc, up_acc = _sum_of_parts(parts, BM, BN, SPLITS, GATED)
            _finish(acc, up_acc, bias, out, x_rows, rows, M, N, GATED, BIAS, ADD)


@triton.jit
def _leave_part(acc, up_acc, mine, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """Stores a program's part; once every thread has, what is released after it is visible to who acquires that."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(mine + at, acc)
    if GATED:
        tl.store(mine + BM * BN + at, up_acc)
    tl.debug_barrier()


@triton.jit
def _sum_of_parts(parts, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr):
    """The parts of a tile, added in order; read past the first cache, which may hold what was there before."""
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    size: tl.constexpr = BM * BN * (2 if GATED else 1)
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    up_acc = tl.zeros([BM, BN], dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        acc += tl.load(parts + part * size + at, cache_modifier=".cg")
        if GATED:
            up_acc += tl.load(parts + part * size + BM * BN + at, cache_modifier=".cg")
    return acc, up_acc


@triton.jit
def _finish(y, up, bias, out, x_rows, rows, M, N, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Bias, activation and addition on a tile of sums, and its store."""
    row_ok = rows < N
    if BIAS:
        y += tl.load(bias + rows, mask=row_ok, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + N + rows, mask=row_ok, other=0.0).to(tl.float32)[None, :]
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    target = out + x_rows.to(tl.int64)[:, None] * N + rows[None, :]
    mask = (x_rows < M)[:, None] & row_ok[None, :]
    if ADD:
        y += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Norms rows [rows, width] to `out`. Grid (rows), BLOCK >= width."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    values = tl.load(x + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    tl.store(out + row * width + cols, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """SiLU of the first half of rows [rows, 2 * width] times the second. Grid (rows, blocks of width)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    await_previous(PDL)
    gate = tl.load(gate_up + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + cols, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)
