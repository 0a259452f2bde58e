# mypy: ignore-errors
"""Decode attention over paged keys and values, in Triton: one query token per request, long contexts in parts.

What is computed where is a list of work items made on the host, a fixed number of them: an item is a range of one
request's tokens, or none at all, which gives zeros. A program takes one item for one head of keys and values, with all
query heads that share it. Where a request has several items, each leaves its part in memory, and the last to arrive
merges them in order, so the result does not depend on which that was.
"""

import triton
import triton.language as tl

from gplan.kernels.flashinfer.pdl_triton import await_previous


@triton.jit
def decode_attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    items,
    page_indptr,
    item_indptr,
    page_ids,
    partial,
    counters,
    scale_log2,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (kv_heads, items).

    Args:
        q, out: [n, kv_heads * GROUP, D].
        k_cache, v_cache: [pages, PAGE, kv_heads, D].
        items: [items, 4] int32: request, first token, end, number of the part; request -1 for no work.
        page_indptr, page_ids: pages of each request, as in `AttentionBatch`.
        item_indptr: [n + 1] int32: part numbers of each request.
        partial: float32, for each part and kv head [GROUP_PADDED, D] sums, then as many maxima and sums of weights.
        counters: [n * kv_heads] int32, 0.
        scale_log2: softmax scale times log2(e).
        ROWS: rows of the query tile, at least GROUP and 16. MERGE: parts merged at a time.
    """
    head, item = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    # The lists were copied before the step began: they need not wait for the kernel before this one.
    request = tl.load(items + item * 4)
    first, end = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2)
    part = tl.load(items + item * 4 + 3)
    if request < 0:
        await_previous(PDL)
        return
    pages = page_ids + tl.load(page_indptr + request)
    first_item = tl.load(item_indptr + request)
    num_items = tl.load(item_indptr + request + 1) - first_item

    group, dims, tokens = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TOKENS)
    await_previous(PDL)
    in_group = group < GROUP
    q_row = (request * num_heads + head) * GROUP + group
    q_tile = tl.load(q + q_row[:, None] * D + dims[None, :], mask=in_group[:, None], other=0.0)

    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, D], dtype=tl.float32)
    for start in tl.range(first, end, TOKENS, num_stages=STAGES):
        token = start + tokens
        inside = token < end
        page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
        place = ((page * PAGE + token % PAGE) * num_heads + head) * D
        k_tile = tl.load(k_cache + place[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_tile, k_tile.T) * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        v_tile = tl.load(v_cache + place[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        peak = new_peak

    if num_items == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + q_row[:, None] * D + dims[None, :], result.to(out.dtype.element_ty), mask=in_group[:, None])
        return
    size: tl.constexpr = GROUP_PADDED * (D + 2)
    mine = partial + (part * num_heads + head).to(tl.int64) * size
    _leave_part(acc, peak, total, mine, GROUP, GROUP_PADDED, ROWS, D)
    counter = counters + request * num_heads + head
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == num_items - 1:
        tl.store(counter, 0)
        parts = partial + (first_item * num_heads + head).to(tl.int64) * size
        row = (request * num_heads + head) * GROUP
        _merge(parts, num_heads * size, num_items, out, row, GROUP, GROUP_PADDED, D, MERGE)


@triton.jit
def _leave_part(
    acc,
    peak,
    total,
    mine,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Stores a program's part; once every thread has, what is released after it is visible to who acquires that."""
    group, dims = tl.arange(0, ROWS), tl.arange(0, D)
    in_group = group < GROUP
    tl.store(mine + group[:, None] * D + dims[None, :], acc, mask=in_group[:, None])
    tl.store(mine + GROUP_PADDED * D + group, peak, mask=in_group)
    tl.store(mine + GROUP_PADDED * (D + 1) + group, total, mask=in_group)
    tl.debug_barrier()


@triton.jit
def _merge(
    parts,
    stride,
    num_parts,
    out,
    first_row,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    D: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Adds up the parts of one request and kv head, MERGE at a time."""
    group, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, D)
    in_group = group < GROUP
    peak = tl.full([GROUP_PADDED], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_PADDED], dtype=tl.float32)
    acc = tl.zeros([GROUP_PADDED, D], dtype=tl.float32)
    for first in range(0, num_parts, MERGE):
        part = first + tl.arange(0, MERGE)
        valid = part < num_parts
        base = parts + part.to(tl.int64) * stride
        both = valid[:, None] & in_group[None, :]
        row = base[:, None] + GROUP_PADDED * D + group[None, :]
        peaks = tl.load(row, mask=both, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(row + GROUP_PADDED, mask=both, other=0.0, cache_modifier=".cg")
        at = base[:, None, None] + group[None, :, None] * D + dims[None, None, :]
        sums = tl.load(at, mask=both[:, :, None], other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        shrink = tl.where(in_group, tl.exp2(peak - new_peak), 0.0)
        weights = tl.where(both, tl.exp2(peaks - new_peak[None, :]), 0.0)
        total = total * shrink + tl.sum(totals * weights, axis=0)
        acc = acc * shrink[:, None] + tl.sum(sums * weights[:, :, None], axis=0)
        peak = new_peak
    result = acc / total[:, None]
    target = out + (first_row + group)[:, None] * D + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=in_group[:, None])


@triton.jit
def advance_kernel(rows, positions, kv_slots, items, item_indptr, NUM_ROWS, NUM_ITEMS, BLOCK: tl.constexpr):
    """Grid (blocks of rows and items): every request's position, KV location and last item by one token further; those
    of the dummy row, 0, stand still."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = at < NUM_ROWS
    live = (tl.load(rows + at, mask=is_row, other=0) != 0).to(tl.int64)
    tl.store(positions + at, tl.load(positions + at, mask=is_row, other=0) + live, mask=is_row)
    tl.store(kv_slots + at, tl.load(kv_slots + at, mask=is_row, other=0) + live, mask=is_row)

    is_item = at < NUM_ITEMS
    request = tl.load(items + at * 4, mask=is_item, other=-1)
    is_work = request >= 0
    last = tl.load(item_indptr + request + 1, mask=is_work, other=0) - 1
    part = tl.load(items + at * 4 + 3, mask=is_work, other=-2)
    grows = is_work & (part == last) & (tl.load(rows + request, mask=is_work, other=0) != 0)
    end = tl.load(items + at * 4 + 2, mask=grows, other=0)
    tl.store(items + at * 4 + 2, end + 1, mask=grows)
