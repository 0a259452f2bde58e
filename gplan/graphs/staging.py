"""The way of host values into static buffers on a GPU: pinned memory, and few copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from gplan.graphs.slots import Slot, is_packed, poison_of, tail_value


class Pack:
    """Slots of one dtype that lie one after another, so that one copy fills them all."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        self.starts: dict[str, int] = {}
        end = 0
        for slot in slots:
            self.starts[slot.name] = end
            end += slot.length
        self.memory = torch.zeros(end, dtype=slots[0].dtype, device=device)
        self.tensors = {slot.name: self.memory.narrow(0, self.starts[slot.name], slot.length) for slot in slots}


class Staging:
    """Pinned host memory that values wait in until they are copied. Two areas take turns, so that filling one does not
    wait for the copies out of the other; an area is written again only once its copies are done.

    What lies between two packed slots' values is copied with them: rows that no step reads before they are written.
    """

    def __init__(self, slots: Iterable[Slot], packs: Mapping[torch.dtype, Pack]) -> None:
        loose = [slot for slot in slots if not is_packed(slot)]
        self._packs = packs
        self._areas = [{slot.name: _pinned(prod(slot.shape), slot.dtype) for slot in loose} for _ in range(2)]
        self._packed = [{dtype: _pinned(len(pack.memory), dtype) for dtype, pack in packs.items()} for _ in range(2)]
        self._arrays = [{dtype: tensor.numpy() for dtype, tensor in area.items()} for area in self._packed]
        self._events = [torch.Event("cuda"), torch.Event("cuda")]
        self._turn = 0
        self._spans: dict[torch.dtype, tuple[int, int]] = {}

    def advance(self) -> None:
        """Takes the other area, once its copies are done."""
        self._turn ^= 1
        self._events[self._turn].synchronize()
        self._spans.clear()

    def pack(self, slot: Slot, source: Tensor, real: int, padded: int) -> None:
        """Holds the value of a packed slot and its tail."""
        start, value = self._packs[slot.dtype].starts[slot.name], tail_value(slot.padding)
        array = self._arrays[self._turn][slot.dtype]
        array[start : start + real] = source.numpy()
        array[start + real : start + padded] = value
        first, end = self._spans.get(slot.dtype, (start, start))
        self._spans[slot.dtype] = (min(first, start), max(end, start + padded))

    def copy_packs(self) -> None:
        for dtype, (first, end) in self._spans.items():
            source = self._packed[self._turn][dtype].narrow(0, first, end - first)
            self._packs[dtype].memory.narrow(0, first, end - first).copy_(source, non_blocking=True)

    def put(self, slot: Slot, source: Tensor, real: int, padded: int) -> Tensor:
        """Holds another value: [.., real, ..], or [.., padded, ..] with its tail where the policy writes one."""
        value = tail_value(slot.padding)
        size = real if value is None else padded
        shape = slot.shape_at(size)
        staged = self._areas[self._turn][slot.name][: prod(shape)].view(shape)
        staged.narrow(slot.axis, 0, real).copy_(source)
        if value is not None and real < size:
            staged.narrow(slot.axis, real, size - real).fill_(value)
        return staged

    def sent(self) -> None:
        """Notes that the copies out of this area are launched."""
        self._events[self._turn].record()

    def poison(self) -> None:
        """So that what is copied between values is poison too."""
        for event, area in zip(self._events, self._packed, strict=True):
            event.synchronize()
            for dtype, tensor in area.items():
                tensor.fill_(poison_of(dtype))


def packed_by_dtype(slots: Iterable[Slot]) -> dict[torch.dtype, list[Slot]]:
    groups = defaultdict(list)
    for slot in slots:
        if is_packed(slot):
            groups[slot.dtype].append(slot)
    return groups


def _pinned(length: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length, dtype=dtype, pin_memory=True)
