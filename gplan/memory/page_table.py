"""Host copy of which pages each request row holds, as the attention metadata of a step is cut from it.

Rows are rewritten only where they changed since the last step: a decode step adds at most one page to a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gplan.core import Batch, Chunk, Request
from gplan.kernels.base import IntArray

LongArray = npt.NDArray[np.int64]

_FEW_ROWS = 8
"""Up to so many rows are faster cut one by one than selected by a mask."""


class PageTable:
    """Pages by request row: [max_batch + 1, max_pages_per_request] int32."""

    def __init__(self, max_batch: int, max_pages_per_request: int, page_size: int) -> None:
        self.page_size = page_size
        self._pages = np.zeros((max_batch + 1, max_pages_per_request), dtype=np.int32)
        self._owners: list[tuple[Request | None, int, int]] = [(None, 0, 0)] * (max_batch + 1)

    def update(self, batch: Batch) -> IntArray:
        """Brings the rows of a batch up to date; returns their number of pages, [num_requests] int32."""
        counts = np.empty(batch.num_requests, dtype=np.int32)
        for index, chunk in enumerate(batch.chunks):
            self._update_row(chunk)
            counts[index] = len(chunk.pages)
        return counts

    def _update_row(self, chunk: Chunk) -> None:
        request, count = chunk.request, len(chunk.pages)
        owner, known, preemptions = self._owners[request.row]
        if owner is not request or preemptions != request.num_preemptions or known > count:
            known = 0
        if known < count:
            self._pages[request.row, known:count] = chunk.pages[known:]
        self._owners[request.row] = (request, count, request.num_preemptions)

    def indices(self, rows: IntArray, counts: IntArray) -> IntArray:
        """Pages of `rows`, one after another: [sum(counts)] int32."""
        if len(rows) <= _FEW_ROWS:
            parts = [self._pages[row, :count] for row, count in zip(rows, counts, strict=True)]
            return np.concatenate(parts) if parts else np.zeros(0, np.int32)
        table: IntArray = self._pages[rows, : int(counts.max(initial=0))]
        inside = np.arange(table.shape[1], dtype=np.int32) < counts[:, None]
        selected: IntArray = table[inside]
        return selected

    def slots(self, rows: IntArray, positions: LongArray) -> LongArray:
        """KV locations (page * page_size + offset) of the tokens at `positions` of `rows`, both [n]; int64."""
        pages: LongArray = self._pages[rows, positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size
