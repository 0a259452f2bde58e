"""How long a step takes, as a plan measured it: by phase and size, replayed from a bucket or run eagerly.

Times are whole picoseconds, so that sums do not depend on their order. Sizes between measured ones are read off the
straight line between their neighbours.

A step takes what its bucket takes for padding rows, which read nothing of the KV pool, and what its real rows add:
tokens read by requests that decode, pairs of tokens compared by prompts. Sizes were timed with real rows throughout, so
what these had added is taken off first. How much a row of padding spares has been measured where it can be: it leaves a
program of a graph without work, not the device without the program.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from formats.measurements import Costs
from formats.plan import Limits, PhasePlan, Plan
from gplan.core import Phase
from gplan.errors import GplanError

PS_PER_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Times of one phase by size; entry 0 of each sequence is unused.

    Attributes:
        bucket: the bucket that a step of each size is replayed from, 0 where it runs eagerly.
        graph_ps: a replay of a bucket of exactly each size, as it was timed.
        eager_ps: an eager step of each size, as it was timed.
        rows_ps: of both, what so many rows add to as many of padding.
        reads_ps: of both, what reading and comparing cached tokens took.
        request_slots: a step of more requests runs eagerly; 0 for no limit.
        cached_ps: by number of requests, for each cached token that one which decodes reads; empty for nothing.
        pair_ps: for each pair of a prompt's token and a token before it.
        beyond_ps: by number of requests, beyond the forward; empty for nothing.
        host_ps: from a result to the start of the next step, on the host.
    """

    bucket: tuple[int, ...]
    graph_ps: tuple[int, ...]
    eager_ps: tuple[int, ...]
    rows_ps: tuple[int, ...]
    reads_ps: tuple[int, ...]
    request_slots: int = 0
    cached_ps: tuple[int, ...] = ()
    pair_ps: int = 0
    beyond_ps: tuple[int, ...] = ()
    host_ps: int = 0

    @property
    def max_size(self) -> int:
        return len(self.bucket) - 1

    def is_eager(self, size: int, num_requests: int) -> bool:
        return not self.bucket[size] or 0 < self.request_slots < num_requests

    def step_ps(self, size: int, num_requests: int, cached_tokens: int, pairs: int = 0) -> int:
        """A step of `size` whose decoding requests read `cached_tokens` in all and whose prompts compare `pairs`; at
        least 1 ps."""
        cached_ps = self.cached_ps[num_requests] if self.cached_ps else 0
        fixed = self.fixed_ps(size, num_requests)
        return max(1, fixed + cached_ps * cached_tokens + self.pair_ps * pairs)

    def fixed_ps(self, size: int, num_requests: int) -> int:
        """Of a step, what does not depend on its tokens' contexts."""
        if 0 < self.request_slots < num_requests:
            fixed = self.eager_ps[size] - self.reads_ps[size]
        else:
            fixed = self.padded_ps(size)
        return fixed + self.beyond_ps[num_requests] if self.beyond_ps else fixed

    def padded_ps(self, size: int) -> int:
        """A step of `size` as its size says, without what its rows read or compare."""
        bucket = self.bucket[size]
        if not bucket:
            return self.eager_ps[size] - self.reads_ps[size]
        return self.graph_ps[bucket] - self.rows_ps[bucket] + self.rows_ps[size] - self.reads_ps[size]

    def padding_ps(self, size: int) -> int:
        """Of a replay at `size`, what a bucket of exactly that size would spare, if it spares anything."""
        bucket = self.bucket[size]
        return max(0, self.graph_ps[bucket] - self.rows_ps[bucket] - (self.graph_ps[size] - self.rows_ps[size]))


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
    costs: Costs | None = None,
    rows_us: Sequence[float] = (),
    reads_us: Sequence[float] = (),
    max_batch: int = 0,
) -> PhaseTimes:
    """Times of a phase from what was measured at some sizes.

    Args:
        ladder: ascending; a size runs from the smallest bucket that holds it, unless that is more than `padding_cap`
            above it or `eager_sizes` ([first, last] ranges) says otherwise.
        graph_us, eager_us: microseconds by size, at least one of each (`graph_us` may lack where `ladder` is empty).
        rows_us, reads_us: of each size, see the functions of these names; empty for nothing.
        max_batch: requests of a step at most; `maximum` where it is not given.
    """
    sizes = range(1, maximum + 1)
    bucket = [_bucket(ladder, size, padding_cap, eager_sizes) for size in sizes]
    costs = costs or Costs()
    requests = range(1, (max_batch or maximum) + 1)
    return PhaseTimes(
        bucket=(0, *bucket),
        graph_ps=(0, *_picoseconds(graph_us or eager_us, sizes)),
        eager_ps=(0, *_picoseconds(eager_us, sizes)),
        rows_ps=tuple(round(us * PS_PER_US) for us in rows_us) or (0,) * (maximum + 1),
        reads_ps=tuple(round(us * PS_PER_US) for us in reads_us) or (0,) * (maximum + 1),
        request_slots=request_slots,
        cached_ps=_by_requests(costs.cached_us, requests),
        pair_ps=round(costs.pair_us * PS_PER_US),
        beyond_ps=_by_requests(costs.beyond_us, requests),
        host_ps=round(costs.host_us * PS_PER_US),
    )


def rows_us(
    phase: Phase, costs: Costs, maximum: int, max_len: int, graph_us: Mapping[int, float] | None = None
) -> list[float]:
    """[maximum + 1]: of the time of each size, what its rows added to as many rows of padding: all that they read or
    compared, where nothing else was measured.

    Args:
        graph_us: of replays, which bound it: no step is quicker for its padding than the quickest replay, though times
            that spread widely can say so.
    """
    if costs.rows_us:
        known = {0: 0.0} | dict(costs.rows_us)
        rows = [interpolate(known, size) for size in range(maximum + 1)]
    else:
        rows = reads_us(phase, costs, maximum, max_len)
    rows = list(accumulate(rows, max))
    if not graph_us:
        return rows
    quickest = min(graph_us.values())
    replays = [interpolate(graph_us, size) for size in range(1, maximum + 1)]
    room = list(accumulate(reversed(replays), min))[::-1]
    return [rows[0], *(min(row, rows[1] + most - quickest) for row, most in zip(rows[1:], room, strict=True))]


def reads_us(phase: Phase, costs: Costs, maximum: int, max_len: int) -> list[float]:
    """[maximum + 1]: of the time of each size, what its rows added by reading or comparing tokens before them: in
    decode `costs.context` each; prompts were timed from nothing, as few and as long as possible."""
    if phase is Phase.DECODE:
        cached_us = dict(costs.cached_us) or {1: 0.0}
        return [size * costs.context * interpolate(cached_us, size) for size in range(maximum + 1)]
    return [pairs_timed(size, max_len) * costs.pair_us for size in range(maximum + 1)]


def pairs_timed(size: int, max_len: int) -> int:
    """Pairs that prompts of `size` tokens in all compare, as few and as long as possible."""
    longest = max_len - 1
    return size // longest * prompt_pairs(0, longest) + prompt_pairs(0, size % longest)


def prompt_pairs(start: int, length: int) -> int:
    """Pairs of a token and one before it or itself, of `length` tokens of a prompt after `start` of it."""
    return length * start + length * (length + 1) // 2


def times_of_plan(plan: Plan) -> StepTimes:
    """Times of all steps as a plan has them.

    Raises:
        GplanError: it holds no times of a phase.
    """
    return StepTimes(times_of_phase(plan.decode, plan.limits), times_of_phase(plan.prefill, plan.limits))


def times_of_phase(plan: PhasePlan, limits: Limits) -> PhaseTimes:
    """As `times_of_plan`, of one phase."""
    if not plan.eager_us:
        raise GplanError(
            f"the plan holds no times of {plan.phase}", "Plan again: gplan plan CHECKPOINT -o FILE measures them."
        )
    phase, graph_us = Phase(plan.phase), plan.graph_us
    return phase_times(
        plan.max_size,
        [bucket.size for bucket in plan.base_ladder],
        graph_us,
        plan.eager_us,
        padding_cap=plan.padding_cap,
        eager_sizes=plan.eager_sizes,
        request_slots=plan.slot_limit,
        costs=plan.costs,
        rows_us=rows_us(phase, plan.costs, plan.max_size, limits.max_len, graph_us),
        reads_us=reads_us(phase, plan.costs, plan.max_size, limits.max_len),
        max_batch=limits.max_batch,
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


def _by_requests(figures: Sequence[tuple[int, float]], requests: range) -> tuple[int, ...]:
    return (0, *_picoseconds(dict(figures), requests)) if figures else ()


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
