"""Attention of the reference kernels: page lists in fixed buffers, and the custom operators that read them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import gplan.kernels.paged_attention  # noqa: F401  (defines the operators)
from gplan.core import DUMMY_ROW
from gplan.kernels.base import Attention, AttentionBatch, IntArray, KernelShape


class PageListBuffers:
    """Device copies of an `AttentionBatch`, at its maximum. One set serves every attention of a kernel set, since no
    two of them are ever between `prepare` and their last `run` at once."""

    def __init__(self, shape: KernelShape) -> None:
        self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_last_page_len = (
            torch.zeros(size, dtype=torch.int32, device=shape.device) for size in self._sizes(shape)
        )
        self.page_size = shape.page_size

    @staticmethod
    def nbytes(shape: KernelShape) -> int:
        return sum(PageListBuffers._sizes(shape)) * torch.int32.itemsize

    @staticmethod
    def _sizes(shape: KernelShape) -> tuple[int, int, int, int]:
        """A batch of padding alone may hold a whole step's tokens in one request."""
        requests = shape.max_batch
        pages = max(requests * shape.max_pages_per_request, -(-shape.max_tokens // shape.page_size)) + requests
        return requests + 1, requests + 1, pages, requests

    def load(self, batch: AttentionBatch) -> None:
        _fill(self.qo_indptr, batch.qo_indptr)
        _fill(self.kv_indptr, batch.kv_indptr)
        _fill(self.kv_indices, batch.kv_indices)
        _fill(self.kv_last_page_len, batch.kv_last_page_len)


class ReferenceAttention(Attention):
    """Paged attention over shared page lists.

    Args:
        buffers: where `prepare` puts the lists.
        num_requests: requests of every batch in a graph, of the largest elsewhere.
        in_graph: whether `num_requests` is exact, so that what a recording refers to never moves.
        decode: whether each request has exactly one query, in the row of its number.
    """

    def __init__(self, buffers: PageListBuffers, num_requests: int, *, in_graph: bool, decode: bool) -> None:
        assert 0 < num_requests <= len(buffers.kv_last_page_len), "more requests than the kernel set is sized for"
        self._buffers, self._most, self._in_graph, self._decode = buffers, num_requests, in_graph, decode
        self.advance_tokens = buffers.page_size if decode else 0
        self._select(num_requests)

    def prepare(self, batch: AttentionBatch) -> None:
        if self._in_graph:
            assert batch.num_requests == self._most, "a graph holds an exact number of requests"
        else:
            assert batch.num_requests <= self._most, "more requests than this attention is for"
            self._select(batch.num_requests)
        self._buffers.load(batch)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        if self._decode:
            torch.ops.gplan.paged_decode_attention.default(q, k_cache, v_cache, *self._kv_lists, out)
        else:
            torch.ops.gplan.paged_prefill_attention.default(q, k_cache, v_cache, self._qo_indptr, *self._kv_lists, out)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        buffers = self._buffers
        yield "qo_indptr", buffers.qo_indptr
        yield "kv_indptr", buffers.kv_indptr
        yield "kv_indices", buffers.kv_indices
        yield "kv_last_page_len", buffers.kv_last_page_len

    def planned(self) -> AttentionBatch | None:
        kv_indptr, kv_indices, last_page_len = (part.cpu().numpy() for part in self._kv_lists)
        return AttentionBatch(
            qo_indptr=self._qo_indptr.cpu().numpy(),
            kv_indptr=kv_indptr,
            kv_indices=kv_indices[: kv_indptr[-1]],
            kv_last_page_len=last_page_len,
        )

    def advance(self, rows: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        if not self._decode:
            super().advance(rows, positions, kv_slots)
        step = (rows != DUMMY_ROW).to(torch.int64)
        positions.add_(step)
        kv_slots.add_(step)
        self._kv_lists[2].add_(step.to(torch.int32))

    def _select(self, num_requests: int) -> None:
        buffers = self._buffers
        self._qo_indptr = buffers.qo_indptr[: num_requests + 1]
        self._kv_lists = (
            buffers.kv_indptr[: num_requests + 1],
            buffers.kv_indices,
            buffers.kv_last_page_len[:num_requests],
        )


def _fill(buffer: Tensor, values: IntArray) -> None:
    assert len(values) <= len(buffer), "a batch beyond what the kernel set is sized for"
    buffer[: len(values)].copy_(torch.from_numpy(values))
