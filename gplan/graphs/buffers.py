"""Static input buffers of captured graphs: allocated once at their maximum, filled in place before every step.

Owns the buffers, how values get into them, and their padding. Knows nothing of phases, keys or attention. A graph holds
the buffers' addresses, so a buffer is never rebound, resized or freed while graphs live; `guard` checks that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gplan.graphs.padding import FillOnce, Sentinel, Zero
from gplan.graphs.slots import Slot, is_packed, poison_of, tail_value
from gplan.graphs.staging import Pack, Staging, packed_by_dtype

Source = Tensor | npt.NDArray[np.generic]
"""What a slot is filled from: a host tensor, a numpy array, or a tensor on the buffers' device."""


class StaticBuffers:
    """The buffers of a set of slots, on one device.

    Example:
        >>> slot = Slot("seq_lens", (8,), torch.int32, axis=0, padding=Sentinel(1))
        >>> buffers = StaticBuffers([slot], torch.device("cpu"))
        >>> buffers.fill({"seq_lens": np.array([5, 7], np.int32)}, real=2, padded=4)
        >>> buffers.view("seq_lens", 4)
        tensor([5, 7, 1, 1], dtype=torch.int32)
    """

    def __init__(self, slots: Iterable[Slot], device: torch.device) -> None:
        slots = tuple(slots)
        self.slots = {slot.name: slot for slot in slots}
        assert len(self.slots) == len(slots), "two slots of one name"
        self._device = device
        self._tensors = {slot.name: _allocate(slot, device) for slot in slots if not is_packed(slot)}
        packs = {dtype: Pack(group, device) for dtype, group in packed_by_dtype(slots).items()}
        for pack in packs.values():
            self._tensors.update(pack.tensors)
        self._tensors = {name: self._tensors[name] for name in self.slots}
        self._staging = Staging(slots, packs) if device.type == "cuda" else None
        self.num_writes = 0
        """How often the host has written here: whoever wrote last knows that the contents are still its own."""
        # Of each slot that is filled once: rows that may hold something else than its value.
        self._used = {slot.name: 0 for slot in slots if isinstance(slot.padding, FillOnce)}

    @staticmethod
    def nbytes(slots: Iterable[Slot]) -> int:
        """Device bytes the constructor will allocate, known before it does."""
        return sum(slot.nbytes for slot in slots)

    def __getitem__(self, name: str) -> Tensor:
        """The whole buffer: always the same tensor."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def view(self, name: str, size: int) -> Tensor:
        """The first `size` rows of a buffer along its axis."""
        slot = self.slots[name]
        assert 0 <= size <= slot.length, f"{size} rows of {name}, which has {slot.length}"
        return self._tensors[name].narrow(slot.axis, 0, size)

    def fill(self, values: Mapping[str, Source], real: int, padded: int, *, unread: Collection[str] = ()) -> None:
        """Writes the first `real` rows of each slot and pads its rows `[real, padded)`.

        Nothing is copied before every value was checked. Values are free to change as soon as the call returns, but for
        those on a CUDA device, which are read in stream order.

        Args:
            values: by slot name, each with `real` rows along the slot's axis and of the slot's dtype.
            real: rows that a step uses.
            padded: rows that the graph reads.
            unread: slots without a value because this step's forward does not read them.

        Raises:
            ValueError: an unknown slot, a value of another shape or dtype, or no value for a slot that needs one. Slots
                that are stale or filled once need none.
        """
        self.num_writes += 1
        self._check_names(values, unread)
        sources = {name: self._checked(self.slots[name], value, real, padded) for name, value in values.items()}
        if self._staging is not None:
            self._fill_from_host(sources, real, padded)
        self._copy(sources)
        for name in sources:
            self._pad(self.slots[name], real, padded)
        self._restore_filled_once(values, real)

    def poison(self) -> None:
        """Fills every buffer with what must not be read: NaN, or the largest integer. For tests and receipts: after the
        next `fill`, only a tail that is never to be read still holds it."""
        self.num_writes += 1
        for name, tensor in self._tensors.items():
            tensor.fill_(poison_of(tensor.dtype))
            if name in self._used:
                self._used[name] = self.slots[name].length
        if self._staging is not None:
            self._staging.poison()

    def _check_names(self, values: Mapping[str, Source], unread: Collection[str]) -> None:
        unknown = sorted((set(values) | set(unread)) - set(self.slots))
        if unknown:
            raise ValueError(f"no static buffer named {', '.join(unknown)}; there are {', '.join(self.slots)}")
        needed = (n for n, slot in self.slots.items() if isinstance(slot.padding, Zero | Sentinel))
        missing = [name for name in needed if name not in values and name not in unread]
        if missing:
            raise ValueError(f"no value for static buffer {', '.join(missing)}")

    def _checked(self, slot: Slot, value: Source, real: int, padded: int) -> Tensor:
        if not 0 <= real <= padded <= slot.length:
            raise ValueError(f"static buffer {slot.name} has {slot.length} rows: cannot pad {real} to {padded}")
        source = value if isinstance(value, Tensor) else _from_numpy(value)
        expected = slot.shape_at(real)
        if source.shape != expected or source.dtype != slot.dtype:
            found = f"{list(source.shape)} {source.dtype}"
            raise ValueError(f"static buffer {slot.name}: expected {list(expected)} {slot.dtype}, got {found}")
        if source.device.type not in ("cpu", self._device.type):
            raise ValueError(f"static buffer {slot.name}: expected a value on {self._device}, got {source.device}")
        return source

    def _fill_from_host(self, sources: dict[str, Tensor], real: int, padded: int) -> None:
        """Copies the host values among `sources`, and takes them out, tails included where the policy writes one."""
        assert self._staging is not None
        on_host = [name for name, source in sources.items() if source.device.type == "cpu"]
        if not on_host:
            return
        self._staging.advance()
        loose = {}
        for name in on_host:
            slot, source = self.slots[name], sources.pop(name)
            if is_packed(slot):
                self._staging.pack(slot, source, real, padded)
            else:
                loose[name] = self._staging.put(slot, source, real, padded)
        self._staging.copy_packs()
        self._copy(loose)
        self._staging.sent()

    def _copy(self, sources: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for name, source in sources.items():
            target = self.view(name, source.shape[self.slots[name].axis])
            targets, values = groups[source.dtype, target.dtype]
            targets.append(target)
            values.append(source)
        for targets, values in groups.values():
            torch._foreach_copy_(targets, values, non_blocking=True)

    def _pad(self, slot: Slot, real: int, padded: int) -> None:
        value = tail_value(slot.padding)
        if value is not None and real < padded:
            self._tensors[slot.name].narrow(slot.axis, real, padded - real).fill_(value)

    def _restore_filled_once(self, filled: Collection[str], real: int) -> None:
        for name, used in self._used.items():
            slot, first = self.slots[name], real if name in filled else 0
            if first < used:
                assert isinstance(slot.padding, FillOnce)
                self._tensors[name].narrow(slot.axis, first, used - first).fill_(slot.padding.value)
            self._used[name] = first


def _allocate(slot: Slot, device: torch.device) -> Tensor:
    value = slot.padding.value if isinstance(slot.padding, FillOnce) else 0
    return torch.full(slot.shape, value, dtype=slot.dtype, device=device)


def _from_numpy(array: npt.NDArray[np.generic]) -> Tensor:
    """Shares memory where torch can: it takes neither negative strides nor read-only arrays."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)
