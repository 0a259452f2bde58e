"""Looks now and then whether memory still is as it was planned: the rows of the ledger that can grow while serving."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gplan.graphs.capture.base import GraphDevice
from gplan.memory.ledger import LedgerEntry
from gplan.serving.protocol import LedgerActual, LedgerNow

LOOK_EVERY_S = 30.0


class LedgerWatch:
    """Of one executor that is ready.

    What the allocator takes from the device after that is activations beyond their reserve, since all else was taken
    before; what the process takes outside the allocator is `non_torch`.

    Args:
        ledger: rows as they were when the executor was ready.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self, device: GraphDevice, ledger: Sequence[LedgerEntry], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._device, self._now = device, now
        self._rows = {entry.name: entry for entry in ledger}
        self._reserved = device.memory().reserved
        self._due = now() + LOOK_EVERY_S

    def look(self) -> LedgerNow | None:
        """The rows, where it is time to look again. Asks the driver for figures; waits for no work."""
        if self._now() < self._due:
            return None
        self._due = self._now() + LOOK_EVERY_S
        memory = self._device.memory()
        reserve = self._rows["activation_reserve"]
        grown = max(0, memory.reserved - self._reserved)
        entries = [
            replace(self._rows["non_torch"], actual_bytes=memory.non_torch),
            replace(reserve, actual_bytes=(reserve.actual_bytes or 0) + grown),
        ]
        return LedgerNow(
            rows=[LedgerActual(entry.name, entry.planned_bytes, entry.actual_bytes) for entry in entries],
            overrun=[entry.name for entry in entries if entry.is_overrun],
        )
