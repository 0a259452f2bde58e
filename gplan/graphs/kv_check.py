"""Looks at what each step is about to read and write of the KV pool, and afterwards at pages that nobody may write to.

For debugging: it reads the device's own copy of the inputs before every step and waits for the step's end, so steps do
not overlap. The pages looked at afterwards are canaries: the last `CANARY_PAGES` of the pool, which the scheduler must
not be given. A location below 0 is one of theirs, on a CPU of the pool's end and on a GPU of the layer before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gplan.core import DUMMY_PAGE, Batch
from gplan.errors import KVError
from gplan.kernels.base import Attention, AttentionBatch
from gplan.memory.kv_pool import KVPool
from gplan.memory.page_owners import PageOwners

CANARY_PAGES = 1

_HINT = "A step's inputs are not those of its batch: this is a fault of gplan; report it with the plan."
_INTEGER = {2: torch.int16, 4: torch.int32}


class KVCheck:
    """Checks steps of one executor.

    Args:
        kv_slots: the static buffer of write locations, int64.
    """

    def __init__(self, pool: KVPool, kv_slots: Tensor) -> None:
        self._pool, self._kv_slots = pool, kv_slots
        self._page_size = pool.layout.page_size
        self._owners = PageOwners(self._page_size)
        self.num_checks = 0
        # Not a number: what reads a canary shows it too.
        self._canaries().fill_(float("nan"))
        self._expected = self._bits().clone()

    def before(self, batch: Batch, size: int, attention: Attention) -> None:
        """
        Args:
            size: rows of the step, padding included.

        Raises:
            KVError: names what a request, or a padded row, would read or write that it may not.
        """
        self.num_checks += 1
        self._check_writes(batch, self._kv_slots[:size].tolist())
        planned = attention.planned()
        if planned is not None:
            self._check_reads(batch, planned)
        self._owners.follow(batch)

    def after(self, batch: Batch) -> None:
        """
        Raises:
            KVError: a canary changed.
        """
        if torch.equal(self._bits(), self._expected):
            return
        changed = (self._bits() != self._expected).flatten(2).any(dim=2).nonzero().tolist()
        layers = ", ".join(f"{'keys' if part == 0 else 'values'} of layer {layer}" for layer, part in changed[:4])
        raise KVError(
            f"canary page: a {batch.phase} step of {batch.num_requests} requests wrote to it ({layers})", _HINT
        )

    def _check_writes(self, batch: Batch, slots: Sequence[int]) -> None:
        size = self._page_size
        end = (self._pool.num_pages - CANARY_PAGES) * size
        for row, slot in enumerate(slots):
            if not 0 <= slot < end:
                kind = "negative location" if slot < 0 else "location beyond the pool"
                raise KVError(f"{kind}: row {row} of the step would write to {slot}, of 0 to {end - 1}", _HINT)
        expected = [
            (chunk.request.id, chunk.pages[position // size] * size + position % size)
            for chunk in batch.chunks
            for position in range(chunk.start, chunk.end)
        ]
        for row, (name, slot) in enumerate(expected):
            if slots[row] != slot:
                raise KVError(
                    f"stale page row: request {name} would write to page {slots[row] // size}, not {slot // size}",
                    _HINT,
                )
        for row in range(len(expected), len(slots)):
            if slots[row] // size != DUMMY_PAGE:
                page = slots[row] // size
                raise KVError(f"page shared with a padded row: row {row} would write to page {page}", _HINT)

    def _check_reads(self, batch: Batch, planned: AttentionBatch) -> None:
        starts, pages = planned.kv_indptr, planned.kv_indices
        for row, chunk in enumerate(batch.chunks):
            found = tuple(pages[starts[row] : starts[row + 1]].tolist())
            if found != chunk.pages:
                raise KVError(
                    f"stale page row: request {chunk.request.id} would read pages {_few(found)}, not "
                    f"{_few(chunk.pages)}",
                    _HINT,
                )
        padding = pages[starts[batch.num_requests] :]
        if np.any(padding != DUMMY_PAGE):
            page = int(padding[padding != DUMMY_PAGE][0])
            raise KVError(f"page shared with a padded row: padding would read page {page}", _HINT)

    def _canaries(self) -> Tensor:
        return self._pool.data[:, :, -CANARY_PAGES:]

    def _bits(self) -> Tensor:
        canaries = self._canaries()
        return canaries.contiguous().view(_INTEGER[canaries.dtype.itemsize])


def _few(pages: Sequence[int]) -> str:
    return ", ".join(map(str, pages[:6])) + (", ..." if len(pages) > 6 else "")
