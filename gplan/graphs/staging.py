"""The way of host values into static buffers on a GPU: pinned memory, and one copy for all slots of a dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gplan.graphs.slots import Slot, poison_of
from gplan.kernels.pinned import PinnedAreas

Lists = Mapping[str, npt.NDArray[np.generic]]
"""Host memory of slots by name, each at its maximum."""


class Pack:
    """Slots of one dtype that lie one after another, so that one copy fills them all."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        self.ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for slot in slots:
            self.ranges[slot.name] = (end, end + slot.length)
            end += slot.length
        self.memory = torch.zeros(end, dtype=slots[0].dtype, device=device)
        self.tensors = {name: self.memory[first:end] for name, (first, end) in self.ranges.items()}


def pack(slots: Iterable[Slot], device: torch.device) -> tuple[Pack, ...]:
    """Slots that the host fills, by dtype."""
    groups = defaultdict(list)
    for slot in slots:
        groups[slot.dtype].append(slot)
    return tuple(Pack(group, device) for group in groups.values())


class Staging:
    """Pinned host memory that values wait in until they are copied.

    What lies between two slots' values is copied with them: rows that no step reads before they are written.
    """

    def __init__(self, packs: Sequence[Pack]) -> None:
        self._packs = packs
        self._pinned = PinnedAreas(*((tuple(pack.memory.shape), pack.memory.dtype) for pack in packs))
        self._lists: list[Lists] = [
            {
                name: tensor[first:end].numpy()
                for pack, tensor in zip(packs, area, strict=True)
                for name, (first, end) in pack.ranges.items()
            }
            for area in self._pinned.areas
        ]

    def take(self) -> Lists:
        """Memory to write values into, which no copy reads any more."""
        self._pinned.take()
        return self._lists[self._pinned.turn]

    def send(self, names: Collection[str], padded: int) -> None:
        """Starts the copies of the first `padded` rows of what was written."""
        for pack, source in zip(self._packs, self._pinned.areas[self._pinned.turn], strict=True):
            starts = [first for name, (first, _) in pack.ranges.items() if name in names]
            if starts:
                span = slice(min(starts), max(starts) + padded)
                pack.memory[span].copy_(source[span], non_blocking=True)
        self._pinned.sent()

    def poison(self) -> None:
        """So that what is copied between values is poison too."""
        self._pinned.wait()
        for area in self._pinned.areas:
            for tensor in area:
                tensor.fill_(poison_of(tensor.dtype))
