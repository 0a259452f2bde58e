"""Paged attention in plain torch, as two custom operators: `gplan::paged_decode_attention` and `..._prefill_attention`.

Like a GPU kernel, each reads lengths and page tables from memory when it runs, writes nothing but `out`, and is one
call to whatever records it. What lies in a page past a request's last token, or anywhere in the rows of other
requests, never reaches a result, NaN included: only tokens of the request itself are gathered.

Single queries are computed in groups of requests of similar length, small enough for their keys and values to stay in
the processor's cache between gathering and use, so the cost follows the tokens that are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gplan.kernels.custom_ops import define_operator

GROUP_TOKENS = 1024
"""Tokens of one group at most, unless a single request has more."""
QUERY_BLOCK = 256
"""Queries that share one mask: bounds the mask's memory, and the keys that are computed only to be masked."""

IntArray = npt.NDArray[np.int64]

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
    cache = _Cache(k_cache, v_cache, _PageLists.read(kv_indptr, kv_indices, kv_last_page_len, k_cache.shape[1]))
    rows = np.arange(len(cache.pages.lengths))
    _attend_single_queries(q, cache, rows, rows, out)


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
    cache = _Cache(k_cache, v_cache, _PageLists.read(kv_indptr, kv_indices, kv_last_page_len, k_cache.shape[1]))
    starts = qo_indptr.cpu().numpy().astype(np.int64)
    counts = np.diff(starts)
    single = np.flatnonzero(counts == 1)
    if len(single):
        _attend_single_queries(q, cache, single, starts[single], out)
    for request in np.flatnonzero(counts > 1):
        _attend_chunk(q, cache, int(request), int(starts[request]), int(counts[request]), out)


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


@dataclass(frozen=True, slots=True, eq=False)
class _PageLists:
    """Metadata of one step on the host.

    Attributes:
        first: [num_requests] where each request's pages begin in `indices`.
        indices: page ids.
        lengths: [num_requests] tokens.
    """

    first: IntArray
    indices: IntArray
    lengths: IntArray
    page_size: int

    @staticmethod
    def read(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> _PageLists:
        starts = indptr.cpu().numpy().astype(np.int64)
        used = indices[: int(starts[-1])].cpu().numpy().astype(np.int64)
        lengths = (np.diff(starts) - 1) * page_size + last_page_len.cpu().numpy()
        return _PageLists(starts[:-1], used, lengths, page_size)

    def slots(self, requests: IntArray, length: int) -> IntArray:
        """[len(requests), length] slots of each request's tokens; past its end, that of its last token again."""
        positions = np.minimum(np.arange(length), self.lengths[requests, None] - 1)
        pages = self.indices[self.first[requests, None] + positions // self.page_size]
        slots: IntArray = pages * self.page_size + positions % self.page_size
        return slots

    def contiguous_slot(self, request: int) -> int | None:
        """The first slot of a request whose pages follow each other, else None."""
        first = self.first[request]
        pages = self.indices[first : first + -(-self.lengths[request] // self.page_size)]
        if (np.diff(pages) != 1).any():
            return None
        return int(pages[0]) * self.page_size


class _Cache:
    """Keys and values of one layer by slot, and who holds which."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor, pages: _PageLists) -> None:
        self._keys, self._values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        self.pages = pages

    def of_one(self, request: int) -> tuple[Tensor, Tensor]:
        """[1, kv_heads, length, head_dim] keys and values of a request; a view where its pages allow it."""
        start, length = self.pages.contiguous_slot(request), int(self.pages.lengths[request])
        if start is None:
            return self.of_group(np.array([request]), length)
        window = slice(start, start + length)
        return self._keys[window].transpose(0, 1)[None], self._values[window].transpose(0, 1)[None]

    def of_group(self, requests: IntArray, length: int) -> tuple[Tensor, Tensor]:
        """[n, kv_heads, length, head_dim] keys and values; what is past a request's end must be masked."""
        slots = torch.from_numpy(self.pages.slots(requests, length).reshape(-1)).to(self._keys.device)
        keys, values = self._keys.index_select(0, slots), self._values.index_select(0, slots)
        shape = (len(requests), length, *self._keys.shape[1:])
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)


def _attend_single_queries(q: Tensor, cache: _Cache, requests: IntArray, rows: IntArray, out: Tensor) -> None:
    """Attention of requests whose only query is in the given row of q."""
    for members in _groups(cache.pages.lengths[requests]):
        group, lengths = requests[members], cache.pages.lengths[requests[members]]
        keys, values = cache.of_one(int(group[0])) if len(group) == 1 else cache.of_group(group, int(lengths[0]))
        index = torch.from_numpy(rows[members]).to(q.device)
        queries = q.index_select(0, index).unsqueeze(2)  # [n, qo_heads, 1, head_dim]
        mask = _length_mask(lengths, queries) if lengths[-1] < lengths[0] else None
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        out.index_copy_(0, index, attended.squeeze(2))


def _groups(lengths: IntArray) -> Iterator[IntArray]:
    """Partitions requests, longest first, so that padding to the longest of a group at most doubles its tokens."""
    order = np.argsort(-lengths, kind="stable")
    begin = 0
    while begin < len(order):
        longest = lengths[order[begin]]
        most = max(1, GROUP_TOKENS // int(longest))
        candidates = order[begin : begin + most]
        count = int(np.count_nonzero(lengths[candidates] * 2 >= longest))
        yield candidates[:count]
        begin += count


def _length_mask(lengths: IntArray, like: Tensor) -> Tensor:
    """[n, 1, 1, longest] of `like`'s dtype: 0 within a request, minus infinity past its end. Longest first."""
    past = np.arange(int(lengths[0])) >= lengths[:, None]
    mask = torch.zeros(past.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(torch.from_numpy(past).to(like.device), float("-inf"))[:, None, None]


def _attend_chunk(q: Tensor, cache: _Cache, request: int, start: int, count: int, out: Tensor) -> None:
    """Attention of a request's last `count` tokens, whose queries begin in row `start`."""
    keys, values = cache.of_one(request)
    cached = keys.shape[2] - count
    for begin in range(0, count, QUERY_BLOCK if cached else count):
        block = slice(start + begin, start + min(begin + QUERY_BLOCK, count) if cached else start + count)
        size = block.stop - block.start
        visible = cached + begin + size
        mask = None
        if cached:
            mask = torch.ones((size, visible), dtype=torch.bool, device=q.device).tril_(visible - size)
        attended = scaled_dot_product_attention(
            q[block].transpose(0, 1)[None],
            keys[:, :, :visible],
            values[:, :, :visible],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        out[block].copy_(attended[0].transpose(0, 1))
