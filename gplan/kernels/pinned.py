"""Host memory that a GPU copies from while the host goes on: pinned, and never written before its copy is done."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class PinnedAreas:
    """Two areas that take turns, so that filling one does not wait for the copies out of the other. An area is handed
    out again only once its copies are done.

    Args:
        parts: shape and dtype of each tensor of an area.
    """

    def __init__(self, *parts: tuple[tuple[int, ...], torch.dtype]) -> None:
        self.areas = tuple(
            tuple(torch.zeros(prod(shape), dtype=dtype, pin_memory=True).view(shape) for shape, dtype in parts)
            for _ in range(2)
        )
        self._copied = (torch.cuda.Event(), torch.cuda.Event())
        self.turn = 0
        """Index of the area that was taken last."""

    def take(self) -> tuple[Tensor, ...]:
        """The other area, free to be written."""
        self.turn ^= 1
        self._copied[self.turn].synchronize()
        return self.areas[self.turn]

    def sent(self) -> None:
        """Notes that the copies out of the area are on the current stream."""
        self._copied[self.turn].record()

    def wait(self) -> None:
        """Until all copies are done."""
        for event in self._copied:
            event.synchronize()
