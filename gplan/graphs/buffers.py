"""Static input buffers of captured graphs: allocated once at their maximum, filled in place before every step.

Owns the buffers, how values get into them, and their padding. Knows nothing of phases, keys or attention. A graph holds
the buffers' addresses, so a buffer is never rebound, resized or freed while graphs live; `guard` checks that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gplan.graphs.slots import Slot, poison_of
from gplan.graphs.staging import Lists, Staging, pack

Values = Mapping[str, npt.NDArray[np.generic]]
"""By slot name, what the real rows are filled with."""


class StaticBuffers:
    """The buffers of a set of slots, on one device.

    Example:
        >>> slot = Slot("seq_lens", (8,), torch.int32, Sentinel(1))
        >>> buffers = StaticBuffers([slot], torch.device("cpu"))
        >>> buffers.fill({"seq_lens": np.array([5, 7], np.int32)}, real=2, padded=4)
        >>> buffers.view("seq_lens", 4)
        tensor([5, 7, 1, 1], dtype=torch.int32)
    """

    def __init__(self, slots: Iterable[Slot], device: torch.device) -> None:
        slots = tuple(slots)
        self.slots = {slot.name: slot for slot in slots}
        assert len(self.slots) == len(slots), "two slots of one name"
        filled = [slot for slot in slots if slot.tail is not None]
        packs = pack(filled, device)
        lists = {name: tensor for each in packs for name, tensor in each.tensors.items()}
        self._tensors = {s.name: lists[s.name] if s.name in lists else _allocate(s, device) for s in slots}
        self._dtypes = {slot.name: _numpy_dtype(slot.dtype) for slot in filled}
        self._staging = Staging(packs) if device.type == "cuda" else None
        self.num_writes = 0
        """How often the host has written here: whoever wrote last knows that the contents are still its own."""

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
        """The first `size` rows of a buffer."""
        slot = self.slots[name]
        assert 0 <= size <= slot.length, f"{size} rows of {name}, which has {slot.length}"
        return self._tensors[name][:size]

    def fill(self, values: Values, real: int, padded: int, *, unread: Collection[str] = ()) -> None:
        """Writes the first `real` rows of each slot and pads its rows `[real, padded)`.

        Nothing is written before every value was checked. Values are free to change as soon as the call returns.

        Args:
            values: each with `real` rows, of the slot's dtype; for every slot whose padding the host writes.
            real: rows that a step uses.
            padded: rows that the graph reads.
            unread: slots without a value because this step's forward does not read them.

        Raises:
            ValueError: an unknown slot, a value of another shape or dtype, or no value for a slot that needs one.
        """
        self._check(values, real, padded, unread)
        self.num_writes += 1
        lists = self._staging.take() if self._staging is not None else self._own_lists()
        for name, value in values.items():
            lists[name][:real] = value
            tail = self.slots[name].tail
            if tail is not None:
                lists[name][real:padded] = tail
        if self._staging is not None:
            self._staging.send(values.keys(), padded)

    def poison(self) -> None:
        """Fills every buffer with what must not be read. For tests and receipts: after the next `fill`, only a tail
        that is never to be read still holds it."""
        self.num_writes += 1
        for tensor in self._tensors.values():
            tensor.fill_(poison_of(tensor.dtype))
        if self._staging is not None:
            self._staging.poison()

    def _own_lists(self) -> Lists:
        """On a CPU, what is filled are the buffers themselves."""
        return {name: self._tensors[name].numpy() for name in self._dtypes}

    def _check(self, values: Values, real: int, padded: int, unread: Collection[str]) -> None:
        unknown = [name for name in (*values, *unread) if name not in self._dtypes]
        if unknown:
            raise ValueError(f"no slot to fill is named {', '.join(unknown)}; there are {', '.join(self._dtypes)}")
        missing = [name for name in self._dtypes if name not in values and name not in unread]
        if missing:
            raise ValueError(f"no value for static buffer {', '.join(missing)}")
        for name, value in values.items():
            length = self.slots[name].length
            if not 0 <= real <= padded <= length:
                raise ValueError(f"static buffer {name} has {length} rows: cannot pad {real} to {padded}")
            if value.shape != (real,) or value.dtype != self._dtypes[name]:
                expected, found = f"[{real}] {self._dtypes[name]}", f"{list(value.shape)} {value.dtype}"
                raise ValueError(f"static buffer {name}: expected {expected}, got {found}")


def _allocate(slot: Slot, device: torch.device) -> Tensor:
    return torch.zeros(slot.shape, dtype=slot.dtype, device=device)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    return torch.empty(0, dtype=dtype).numpy().dtype
