"""The record of why each value of a plan is what it is."""

from __future__ import annotations

from collections.abc import Iterable

from formats.plan import Choice


class Choices:
    """Collects why each value is what it is."""

    def __init__(self, entries: Iterable[Choice] = ()) -> None:
        self._entries = list(entries)

    def lock(self, field: str, value: object, flag: str) -> None:
        self._entries.append(Choice(field=field, value=str(value), basis="locked", reason=f"{flag} was given"))

    def default(self, field: str, value: object, reason: str) -> None:
        self._entries.append(Choice(field=field, value=str(value), basis="default", reason=reason))

    def rule(self, field: str, value: object, reason: str) -> None:
        self._entries.append(Choice(field=field, value=str(value), basis="rule", reason=reason))

    def measured(self, field: str, value: object, reason: str) -> None:
        self._entries.append(Choice(field=field, value=str(value), basis="measured", reason=reason))

    def revise(self, field: str, value: object, reason: str) -> None:
        """Measured again, or decided otherwise on what was measured: takes the place of what was said of a field."""
        self._entries = [entry for entry in self._entries if entry.field != field]
        self.measured(field, value, reason)

    @property
    def entries(self) -> tuple[Choice, ...]:
        return tuple(self._entries)
