"""What the rows of a static buffer past the real ones hold: one policy per slot, each with its reason to be safe.

A replayed graph reads every row of its bucket. The tail `[real, padded)` must therefore hold values that the kernels
accept and that touch nothing of another request, or values that no kernel reads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Zero:
    """Zeros, written at every fill: KV locations and page ids that then point at the reserved dummy page or row."""


@dataclass(frozen=True, slots=True)
class Sentinel:
    """One value, written at every fill: the least that the kernel accepts, such as a sequence length of 1."""

    value: float


@dataclass(frozen=True, slots=True)
class Stale:
    """Whatever is there: the tail is never read, or is written before it is read. `reason` says why, as a sentence."""

    reason: str

    def __post_init__(self) -> None:
        assert len(self.reason.split()) >= 3, f"a stale tail needs a reason that explains, not {self.reason!r}"


Padding = Zero | Sentinel | Stale
