"""How long a step takes, as a plan measured it: by phase and size, replayed from a bucket or run eagerly.

Times are whole picoseconds, so that sums do not depend on their order. Sizes between measured ones are read off the
straight line between their neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from formats.plan import PhasePlan
from gplan.core import Phase
from gplan.errors import GplanError

PS_PER_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Times of one phase by size; entry 0 of each sequence is unused.

    Attributes:
        bucket: the bucket that a step of each size is replayed from, 0 where it runs eagerly.
        graph_ps: a replay of a bucket of exactly each size.
        eager_ps: an eager step of each size.
        request_slots: a step of more requests runs eagerly; 0 for no limit.
        cached_ps: for each cached token that a step reads beyond `context` per request; less below it.
        context: cached tokens per request when the times were measured.
    """

    bucket: tuple[int, ...]
    graph_ps: tuple[int, ...]
    eager_ps: tuple[int, ...]
    request_slots: int = 0
    cached_ps: int = 0
    context: int = 0

    @property
    def max_size(self) -> int:
        return len(self.bucket) - 1

    def is_eager(self, size: int, num_requests: int) -> bool:
        return not self.bucket[size] or 0 < self.request_slots < num_requests

    def step_ps(self, size: int, num_requests: int, cached_tokens: int) -> int:
        """A step of `size` whose requests read `cached_tokens` in all; at least 1 ps."""
        eager = not self.bucket[size] or 0 < self.request_slots < num_requests
        base = self.eager_ps[size] if eager else self.graph_ps[self.bucket[size]]
        return max(1, base + self.cached_ps * (cached_tokens - num_requests * self.context))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of both phases."""

    decode: PhaseTimes
    prefill: PhaseTimes

    def phase(self, phase: Phase) -> PhaseTimes:
        return self.decode if phase is Phase.DECODE else self.prefill


def phase_times(
    maximum: int,
    ladder: Sequence[int],
    graph_us: Mapping[int, float],
    eager_us: Mapping[int, float],
    *,
    padding_cap: float | None = None,
    eager_sizes: Sequence[tuple[int, int]] = (),
    request_slots: int = 0,
    cached_us: float = 0.0,
    context: int = 0,
) -> PhaseTimes:
    """Times of a phase from what was measured at some sizes.

    Args:
        ladder: ascending; a size runs from the smallest bucket that holds it, unless that is more than `padding_cap`
            above it or `eager_sizes` ([first, last] ranges) says otherwise.
        graph_us, eager_us: microseconds by size, at least one of each (`graph_us` may lack where `ladder` is empty).
        cached_us: microseconds per cached token beyond `context` per request.
    """
    sizes = range(1, maximum + 1)
    bucket = [_bucket(ladder, size, padding_cap, eager_sizes) for size in sizes]
    return PhaseTimes(
        bucket=(0, *bucket),
        graph_ps=(0, *_picoseconds(graph_us or eager_us, sizes)),
        eager_ps=(0, *_picoseconds(eager_us, sizes)),
        request_slots=request_slots,
        cached_ps=round(cached_us * PS_PER_US),
        context=context,
    )


def times_of_plan(plan: PhasePlan, *, cached_us: float = 0.0, context: int = 0) -> PhaseTimes:
    """Times of a phase as its plan has them.

    Raises:
        GplanError: the phase runs eagerly, so the plan holds no times of it.
    """
    if not plan.ladder:
        raise GplanError(
            f"the plan holds no times of {plan.phase}: it runs eagerly and has no buckets",
            f"Plan again with --{plan.phase}-backend full to have its times.",
        )
    return phase_times(
        plan.max_size,
        [bucket.size for bucket in plan.base_ladder],
        {bucket.size: bucket.graph.median_us for bucket in plan.base_ladder if bucket.graph is not None},
        {bucket.size: bucket.eager.median_us for bucket in plan.base_ladder},
        padding_cap=plan.padding_cap,
        eager_sizes=plan.eager_sizes,
        request_slots=plan.slot_limit,
        cached_us=cached_us,
        context=context,
    )


def interpolate(points: Mapping[int, float], size: int) -> float:
    """The value at `size` on the straight line between the points beside it; beyond the outer points, theirs."""
    return _interpolate(sorted(points.items()), [*sorted(points)], size)


def _interpolate(points: Sequence[tuple[int, float]], sizes: Sequence[int], size: int) -> float:
    right = bisect_left(sizes, size)
    if right == len(points):
        return points[-1][1]
    high, above = points[right]
    if right == 0 or high == size:
        return above
    low, below = points[right - 1]
    return below + (above - below) * (size - low) / (high - low)


def _picoseconds(points: Mapping[int, float], sizes: range) -> list[int]:
    ordered, known = sorted(points.items()), sorted(points)
    return [round(_interpolate(ordered, known, size) * PS_PER_US) for size in sizes]


def _bucket(ladder: Sequence[int], size: int, padding_cap: float | None, eager_sizes: Sequence[tuple[int, int]]) -> int:
    index = bisect_left(ladder, size)
    if index == len(ladder) or any(first <= size <= last for first, last in eager_sizes):
        return 0
    if padding_cap is not None and ladder[index] > size * (1 + padding_cap):
        return 0
    return ladder[index]
