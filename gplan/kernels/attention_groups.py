"""What one step's attention computes together: page lists read from memory, and requests of similar length grouped.

A group of single queries is small enough for its keys and values to stay in the processor's cache between gathering
and use, and padding to its longest at most doubles its tokens, so the cost follows the tokens that are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GROUP_TOKENS = 1024
"""Tokens of one group at most, unless a single request has more."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Requests of one query each, padded to the longest.

    Attributes:
        length: tokens of the longest.
        rows: [n] int64, where in q and out each is; None for all rows, in order.
        slots: [n * length] int64, where each token is in the cache, past a request's end that of its last token again;
            None where one request has the slots from `first_slot` on.
        mask: [n, 1, 1, length] float32: 0 within a request, minus infinity past its end; None where none is shorter.
    """

    length: int
    rows: Tensor | None
    slots: Tensor | None
    first_slot: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One request with several queries.

    Attributes:
        rows: where its queries are.
        tokens: where all its tokens are.
    """

    rows: slice
    tokens: Group


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    single_queries: tuple[Group, ...]
    chunks: tuple[Chunk, ...]


def schedule_of(
    qo_indptr: Tensor | None, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, cache: Tensor
) -> Schedule:
    """Reads a step's metadata. The layers of a step share one schedule: it is kept until other metadata are read.

    Args:
        qo_indptr: [num_requests + 1] int32; None where each request has the one query of its row.
        kv_indptr, kv_indices, kv_last_page_len: int32, as in `AttentionBatch`.
        cache: [num_pages, page_size, ...] on the device that the schedule is for.
    """
    indptr = kv_indptr.cpu().numpy()
    return _schedule(
        None if qo_indptr is None else qo_indptr.cpu().numpy().tobytes(),
        indptr.tobytes(),
        kv_indices[: indptr[-1]].cpu().numpy().tobytes(),
        kv_last_page_len.cpu().numpy().tobytes(),
        cache.shape[1],
        cache.device,
    )


@lru_cache(maxsize=1)
def _schedule(
    qo_indptr: bytes | None, kv_indptr: bytes, kv_indices: bytes, last: bytes, page_size: int, device: torch.device
) -> Schedule:
    lists = _PageLists.of(_integers(kv_indptr), _integers(kv_indices), _integers(last), page_size)
    if qo_indptr is None:
        rows = np.arange(len(lists.lengths))
        return Schedule(tuple(_single_queries(lists, rows, rows, len(rows), device)), ())
    starts = _integers(qo_indptr)
    counts = np.diff(starts)
    single = np.flatnonzero(counts == 1)
    return Schedule(
        tuple(_single_queries(lists, single, starts[single], None, device)),
        tuple(
            Chunk(slice(int(starts[r]), int(starts[r + 1])), _tokens_of_one(lists, int(r), None, device))
            for r in np.flatnonzero(counts > 1)
        ),
    )


def _integers(raw: bytes) -> IntArray:
    return np.frombuffer(raw, np.int32).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _PageLists:
    """Attributes:
    first: [num_requests] where each request's pages begin in `indices`.
    indices: page ids.
    lengths: [num_requests] tokens.
    """

    first: IntArray
    indices: IntArray
    lengths: IntArray
    page_size: int

    @staticmethod
    def of(indptr: IntArray, indices: IntArray, last: IntArray, page_size: int) -> _PageLists:
        return _PageLists(indptr[:-1], indices, (np.diff(indptr) - 1) * page_size + last, page_size)

    def slots(self, requests: IntArray, length: int) -> IntArray:
        """[len(requests), length] slots of each request's tokens; past its end, that of its last token again."""
        positions = np.minimum(np.arange(length), self.lengths[requests, None] - 1)
        pages = self.indices[self.first[requests, None] + positions // self.page_size]
        slots: IntArray = pages * self.page_size + positions % self.page_size
        return slots

    def first_slot(self, request: int) -> int | None:
        """That of a request whose pages follow each other, else None."""
        first = self.first[request]
        pages = self.indices[first : first + -(-self.lengths[request] // self.page_size)]
        return int(pages[0]) * self.page_size if (np.diff(pages) == 1).all() else None


def _single_queries(
    lists: _PageLists, requests: IntArray, rows: IntArray, num_rows: int | None, device: torch.device
) -> Iterator[Group]:
    """Groups of requests whose only query is in the given row; `num_rows` in all, where these are all rows."""
    for members in _similar(lists.lengths[requests]):
        in_order = len(members) == num_rows and bool((rows[members] == np.arange(num_rows)).all())
        index = None if in_order else torch.from_numpy(rows[members]).to(device)
        group = requests[members]
        if len(group) == 1:
            yield _tokens_of_one(lists, int(group[0]), index, device)
            continue
        lengths = lists.lengths[group]
        longest = int(lengths.max())
        slots = torch.from_numpy(lists.slots(group, longest).reshape(-1)).to(device)
        yield Group(longest, index, slots, 0, _length_mask(lengths, device))


def _tokens_of_one(lists: _PageLists, request: int, rows: Tensor | None, device: torch.device) -> Group:
    length, first = int(lists.lengths[request]), lists.first_slot(request)
    if first is not None:
        return Group(length, rows, None, first, None)
    slots = torch.from_numpy(lists.slots(np.array([request]), length)[0]).to(device)
    return Group(length, rows, slots, 0, None)


def _similar(lengths: IntArray) -> Iterator[IntArray]:
    """Partitions requests into groups, longest first; each group in rising order."""
    order = np.argsort(-lengths, kind="stable")
    begin = 0
    while begin < len(order):
        longest = lengths[order[begin]]
        candidates = order[begin : begin + max(1, GROUP_TOKENS // int(longest))]
        count = int(np.count_nonzero(lengths[candidates] * 2 >= longest))
        yield np.sort(candidates[:count])
        begin += count


def _length_mask(lengths: IntArray, device: torch.device) -> Tensor | None:
    longest = lengths.max()
    if (lengths == longest).all():
        return None
    within = np.arange(longest) < lengths[:, None]
    mask = np.where(within, np.float32(0), np.float32("-inf"))
    return torch.from_numpy(mask[:, None, None]).to(device)
