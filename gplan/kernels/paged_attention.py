"""Paged attention in plain torch, as two custom operators: `gplan::paged_decode_attention` and `..._prefill_attention`.

Like a GPU kernel, each reads lengths and page tables from memory when it runs, writes nothing but `out`, and is one
call to whatever records it. What lies in a page past a request's last token, or anywhere in the rows of other
requests, never reaches a result, NaN included: only tokens of the request itself are gathered.

Single queries are computed in groups of requests of similar length (see `attention_groups`); longer chunks one request
at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gplan.kernels.attention_groups import Group, Schedule, schedule_of
from gplan.kernels.custom_ops import define_operator

QUERY_BLOCK = 256
"""Queries that share one mask: bounds the mask's memory, and the keys that are computed only to be masked."""

_METADATA = "Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len"


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    out: Tensor,
) -> None:
    """Attention of one query per request.

    Args:
        q, out: [num_requests, num_qo_heads, head_dim].
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim].
        kv_indptr, kv_indices, kv_last_page_len: int32, as in `AttentionBatch`; indices past the last are not read.
    """
    schedule = schedule_of(None, kv_indptr, kv_indices, kv_last_page_len, k_cache)
    _attend(q, k_cache, v_cache, schedule, out)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    out: Tensor,
) -> None:
    """Causal attention of each request's last tokens. Rows of `out` past `qo_indptr[-1]` stay as they are.

    Args:
        q, out: [num_tokens, num_qo_heads, head_dim].
        qo_indptr: [num_requests + 1] int32. The rest as in `paged_decode_attention`.
    """
    schedule = schedule_of(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, k_cache)
    _attend(q, k_cache, v_cache, schedule, out)


define_operator(
    "paged_decode_attention",
    f"Tensor q, Tensor k_cache, Tensor v_cache, {_METADATA}, Tensor(a!) out",
    paged_decode_attention,
)
define_operator(
    "paged_prefill_attention",
    f"Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, {_METADATA}, Tensor(a!) out",
    paged_prefill_attention,
)


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, schedule: Schedule, out: Tensor) -> None:
    by_slot = (-1, *k_cache.shape[2:])
    keys, values = k_cache.view(by_slot), v_cache.view(by_slot)
    for group in schedule.single_queries:
        _attend_single_queries(q, _tokens(keys, group), _tokens(values, group), group, out)
    for chunk in schedule.chunks:
        _attend_chunk(q, _tokens(keys, chunk.tokens), _tokens(values, chunk.tokens), chunk.rows, out)


def _tokens(cache: Tensor, group: Group) -> Tensor:
    """[n, kv_heads, length, head_dim] keys or values of a group; a view where its slots follow each other."""
    if group.slots is None:
        found = cache[group.first_slot : group.first_slot + group.length]
    else:
        found = cache.index_select(0, group.slots)
    return found.view(-1, group.length, *cache.shape[1:]).transpose(1, 2)


def _attend_single_queries(q: Tensor, keys: Tensor, values: Tensor, group: Group, out: Tensor) -> None:
    queries = q if group.rows is None else q.index_select(0, group.rows)
    mask = None if group.mask is None else group.mask.to(q.dtype)
    attended = scaled_dot_product_attention(queries.unsqueeze(2), keys, values, attn_mask=mask, enable_gqa=True)
    if group.rows is None:
        out.copy_(attended.squeeze(2))
    else:
        out.index_copy_(0, group.rows, attended.squeeze(2))


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, rows: slice, out: Tensor) -> None:
    """Attention of the last tokens of one request, whose queries are in the given rows."""
    count = rows.stop - rows.start
    cached = keys.shape[2] - count
    step = QUERY_BLOCK if cached else count
    for begin in range(0, count, step):
        block = slice(rows.start + begin, min(rows.start + begin + step, rows.stop))
        size = block.stop - block.start
        visible = cached + begin + size
        mask = torch.ones((size, visible), dtype=torch.bool, device=q.device).tril_(visible - size) if cached else None
        attended = scaled_dot_product_attention(
            q[block].transpose(0, 1)[None],
            keys[:, :, :visible],
            values[:, :, :visible],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        out[block].copy_(attended[0].transpose(0, 1))
