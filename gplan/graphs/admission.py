"""Which batches are replayed, from which variant, and why the others are not.

A pure function of facts known when a step is scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formats.plan import BackendName, PhasePlan
from gplan.core import Batch, Phase, Request, ShapeKey
from gplan.graphs.variants import FULL, base_keys, draw_wanted, with_part


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSetup:
    """How one phase runs, with every choice made: the part of a plan that a runner needs.

    Attributes:
        keys: what is captured, ascending by size, width and variant.
        max_size: requests (decode) or tokens (prefill) of the largest batch.
        request_slots: request slots of a prefill graph that holds its attention; 0 where none does.
        padding_cap: replay only if key.size <= size * (1 + padding_cap); None for no cap.
        eager_sizes: [first, last] ranges that run eagerly although a key covers them.
    """

    phase: Phase
    backend: BackendName
    keys: tuple[ShapeKey, ...]
    max_size: int
    request_slots: int = 0
    padding_cap: float | None = None
    eager_sizes: tuple[tuple[int, int], ...] = ()

    @property
    def base_keys(self) -> tuple[ShapeKey, ...]:
        """Of each size the key that takes every batch."""
        return base_keys(self.keys)

    @property
    def slot_limit(self) -> int:
        """Requests of a step at most for it to be replayed at all; 0 for no limit."""
        return self.request_slots if self.backend == "full" else 0

    @staticmethod
    def from_plan(plan: PhasePlan) -> PhaseSetup:
        phase = Phase(plan.phase)
        return PhaseSetup(
            phase=phase,
            backend=plan.backend,
            keys=tuple(ShapeKey(phase, b.size, b.width, b.variant) for b in plan.ladder),
            max_size=plan.max_size,
            request_slots=plan.request_slots,
            padding_cap=plan.padding_cap,
            eager_sizes=plan.eager_sizes,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """A key to replay, or the reason for running eagerly (a short label: it names a metric)."""

    key: ShapeKey | None
    reason: str = ""


class Admission:
    """Decides by table: one verdict per size and variant, computed once."""

    def __init__(self, setup: PhaseSetup) -> None:
        self._setup = setup
        self._bases = base_keys(setup.keys)
        self._by_size = tuple(self._decide(size) for size in range(setup.max_size + 1))
        self._verdicts = {(key.size, key.variant): Verdict(key) for key in setup.keys}
        self._has_variants = len(self._bases) < len(setup.keys)
        self._last: tuple[list[Request], str] = ([], "")

    def verdict(self, batch: Batch) -> Verdict:
        """The key of the smallest bucket that holds the batch, in the variant made for it where there is one; or why
        there is no key."""
        size = batch.size
        if size >= len(self._by_size):
            return Verdict(None, "above_maximum")
        verdict = self._by_size[size]
        if verdict.key is None:
            return verdict
        if self._has_variants:
            wanted = with_part(verdict.key.variant, self._part_of(batch))
            special = self._verdicts.get((verdict.key.size, wanted))
            if special is not None:
                return special
        if 0 < self._setup.slot_limit < batch.num_requests:
            return Verdict(None, "request_slots")
        return verdict

    def at(self, size: int) -> Verdict:
        """The verdict on a batch of `size` that no variant is made for, with no more requests than there are slots."""
        return self._by_size[size] if size < len(self._by_size) else Verdict(None, "above_maximum")

    def _part_of(self, batch: Batch) -> str:
        """What a variant made for the batch is called; empty where none can be."""
        if self._setup.phase is Phase.PREFILL:
            return FULL if batch.num_requests <= self._setup.request_slots else ""
        requests = [chunk.request for chunk in batch.chunks]
        if requests != self._last[0]:
            self._last = (requests, draw_wanted(batch))
        return self._last[1]

    def _decide(self, size: int) -> Verdict:
        setup = self._setup
        if not self._bases:
            return Verdict(None, "eager_backend")
        key = _smallest_covering(self._bases, size)
        if key is None:
            return Verdict(None, "above_ladder")
        if any(first <= size <= last for first, last in setup.eager_sizes):
            return Verdict(None, "eager_cheaper")
        if setup.padding_cap is not None and key.size > size * (1 + setup.padding_cap):
            return Verdict(None, "padding_cap")
        return Verdict(key)


def _smallest_covering(keys: Sequence[ShapeKey], size: int) -> ShapeKey | None:
    return next((key for key in keys if key.size >= size), None)
