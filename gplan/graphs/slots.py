"""What a static buffer is: its shape at the maximum, the rows that a step uses, and what the others hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from gplan.graphs.padding import Padding, Sentinel, Stale, Zero


@dataclass(frozen=True, slots=True)
class Slot:
    """One static buffer. Its rows past those that a step uses are padding.

    Attributes:
        shape: at the maximum; rows first.
        padding: what padding rows hold.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    padding: Padding

    def __post_init__(self) -> None:
        assert self.tail is None or len(self.shape) == 1, f"slot {self.name}: only lists are filled by the host"

    @property
    def length(self) -> int:
        """Rows at the maximum."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tail(self) -> float | None:
        """What every fill writes behind the real rows; None for a buffer that the host does not fill."""
        match self.padding:
            case Zero():
                return 0
            case Sentinel(value):
                return value
            case Stale():
                return None


def poison_of(dtype: torch.dtype) -> float:
    """What must not be read: NaN, or the largest integer."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
