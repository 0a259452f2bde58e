"""What a static buffer is: its shape at the maximum, the rows that a step fills, and what the others hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from gplan.graphs.padding import FillOnce, Padding, Sentinel, Stale, Zero


@dataclass(frozen=True, slots=True)
class Slot:
    """One static buffer.

    Attributes:
        shape: at the maximum.
        axis: the dimension that a step fills in part; its rows past the real ones are padding.
        padding: what those rows hold.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int
    padding: Padding

    def __post_init__(self) -> None:
        assert 0 <= self.axis < len(self.shape), f"slot {self.name}: axis {self.axis} of shape {self.shape}"

    @property
    def length(self) -> int:
        """Rows at the maximum."""
        return self.shape[self.axis]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def shape_at(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])


def is_packed(slot: Slot) -> bool:
    """Whether a slot is a list that every fill writes, tail included, in a dtype that numpy knows."""
    return len(slot.shape) == 1 and slot.dtype is not torch.bfloat16 and tail_value(slot.padding) is not None


def tail_value(padding: Padding) -> float | None:
    """What every fill writes into the tail; None where it writes nothing."""
    match padding:
        case Zero():
            return 0
        case Sentinel(value):
            return value
        case FillOnce() | Stale():
            return None


def poison_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
