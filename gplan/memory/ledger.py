"""The memory ledger: every device byte by purpose, planned against actual.

The planner fills in what was measured; serve books what it really takes and refuses to go on where a row does not
hold. The hold on activation memory is here too, because it is what makes its row true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from formats.plan import LEDGER_ROWS
from gplan.errors import FitError
from gplan.units import MIB, format_size

RELATIVE_TOLERANCE = 0.02
ABSOLUTE_TOLERANCE = 128 * MIB


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One row. `actual_bytes` is None until something was booked."""

    name: str
    planned_bytes: int
    actual_bytes: int | None

    @property
    def overrun_bytes(self) -> int:
        return 0 if self.actual_bytes is None else self.actual_bytes - self.planned_bytes

    @property
    def is_overrun(self) -> bool:
        """Whether it took more than planned by 2% or 128 MiB, whichever is more."""
        return self.overrun_bytes > max(ABSOLUTE_TOLERANCE, int(self.planned_bytes * RELATIVE_TOLERANCE))


class MemoryLedger:
    """Planned bytes per row, and what was really taken."""

    def __init__(self, planned: Mapping[str, int]) -> None:
        assert set(planned) == set(LEDGER_ROWS), "a ledger has every row"
        self._planned = dict(planned)
        self._actual: dict[str, int] = {}

    def book(self, row: str, nbytes: int) -> None:
        """Adds bytes really taken to a row."""
        assert row in self._planned, row
        self._actual[row] = self._actual.get(row, 0) + nbytes

    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(LedgerEntry(name, self._planned[name], self._actual.get(name)) for name in LEDGER_ROWS)

    def check(self) -> None:
        """Compares every booked row with its plan.

        A row may overrun by 2% or 128 MiB, whichever is more, but not by more than the headroom row holds in all.

        Raises:
            FitError: names the first row beyond tolerance, planned and actual.
        """
        for entry in self.entries():
            if entry.is_overrun:
                raise FitError(
                    f"ledger row {entry.name}: planned {format_size(entry.planned_bytes)}, "
                    f"took {format_size(entry.actual_bytes or 0)}",
                    "The machine or the libraries changed since the plan was made: make it again with gplan plan.",
                )


class ActivationHold:
    """Real device memory kept for eager activations while the KV pool and the graph pool are being taken.

    Released after capture, it goes back to the allocator, from which eager steps draw.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Filled, because a CPU gives memory only when it is first written.
        self._held: torch.Tensor | None = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(0)

    @property
    def nbytes(self) -> int:
        return 0 if self._held is None else self._held.nbytes

    def release(self) -> None:
        self._held = None
