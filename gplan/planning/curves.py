"""Times of sizes that were not measured, how wrong they may be, and which size to measure next.

Times between two measured sizes lie on a line. How far the truth may be from it is read off the measurements
themselves: each inner point is compared with the line that its neighbours would have drawn without it. Where times
have steps, that error is large at both sides of a step, so measuring goes on there and stops elsewhere.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gplan.planning.buckets import Problem, Solution, solve
from gplan.planning.ladders import FloatArray


@dataclass(frozen=True, slots=True)
class Curve:
    """Microseconds by size: `points` ascending by size, at least one. Beyond the outer points, their values."""

    points: tuple[tuple[int, float], ...]

    def over(self, maximum: int) -> FloatArray:
        """[maximum + 1]: times of all sizes, entry 0 unused."""
        sizes, values = zip(*self.points, strict=True)
        return np.asarray(np.interp(np.arange(maximum + 1), sizes, values), dtype=np.float64)

    def between(self, maximum: int, noise: float) -> tuple[FloatArray, FloatArray]:
        """[maximum + 1] each: the least and the most that times of all sizes may be; equal where measured.

        Between two measured sizes that is the line more or less the larger error of its two ends, `noise` at least,
        and never outside the two values by more than `noise`.
        """
        line = self.over(maximum)
        low, high = line.copy(), line.copy()
        errors = dict(self.errors())
        for (left, below), (right, above) in itertools.pairwise(self.points):
            error = max(errors.get(left, 0.0), errors.get(right, 0.0), noise)
            if left not in errors and right not in errors:
                error = np.inf
            inside = slice(left + 1, right)
            low[inside] = np.maximum(line[inside] * (1 - error), min(below, above) * (1 - noise))
            high[inside] = np.minimum(line[inside] * (1 + error), max(below, above) * (1 + noise))
        return low, high

    def errors(self) -> tuple[tuple[int, float], ...]:
        """Of each inner point, how far it is from the line between its neighbours, as a part of its own value."""
        found = []
        for (left, below), (size, value), (right, above) in zip(
            self.points, self.points[1:], self.points[2:], strict=False
        ):
            line = below + (above - below) * (size - left) / (right - left)
            found.append((size, abs(line - value) / value))
        return tuple(found)

    def widest_gaps(self, count: int) -> list[int]:
        """The middles of the gaps between neighbours whose sizes are furthest apart in proportion, ascending."""
        gaps = [(right / left, (left + right) // 2) for (left, _), (right, _) in itertools.pairwise(self.points)]
        known = {size for size, _ in self.points}
        widest = sorted((gap for gap in gaps if gap[1] not in known), reverse=True)[:count]
        return sorted(size for _, size in widest)

    def with_point(self, size: int, value: float) -> Curve:
        return Curve(tuple(sorted([*self.points, (size, value)])))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A size that was predicted before it was measured; microseconds."""

    size: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, as a part of the measurement."""
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True, slots=True)
class Refined:
    """A curve that is good enough to decide on, or as good as the measurements allowed made it.

    Attributes:
        solution: the best ladder if times are as they may be at worst.
        held_out: what was measured on the way, each with what it was predicted to be.
        gap: how much lower the objective of another ladder could be if times are as low as they may be, as a part of
            the solution's. As good as the errors it is estimated from: a step between two sizes that happen to lie on
            one line is not seen.
    """

    curve: Curve
    solution: Solution
    held_out: tuple[HeldOut, ...]
    gap: float


def refine(
    problem: Problem,
    curve: Curve,
    measure: Callable[[Sequence[int]], Sequence[float]],
    *,
    tolerance: float = 0.01,
    noise: float = 0.005,
    max_measurements: int = 32,
    at_once: int = 8,
) -> Refined:
    """Measures until no ladder is likely to be better than the chosen one by more than `tolerance`.

    Args:
        problem: its `graph_us` is replaced by what the curve says.
        curve: first measurements, the maximum among them.
        measure: replays of sizes, ascending, in microseconds.
        noise: how far two measurements of one size may be apart, as a part of it.
        at_once: sizes that are measured together at most, before it is looked at again what is in doubt.
    """
    assert curve.points[-1][0] == problem.maximum
    held_out: list[HeldOut] = []
    while True:
        hopeful, careful = _solutions(problem, curve, noise)
        gap = max(0.0, 1 - hopeful.objective_us / careful.objective_us) if careful.objective_us else 0.0
        most = min(at_once, max_measurements - len(held_out))
        sizes = [] if gap <= tolerance else _doubtful(problem, curve, (hopeful, careful), noise)[:most]
        if not sizes:
            return Refined(curve, careful, tuple(held_out), gap)
        line = curve.over(problem.maximum)
        for size, measured in zip(sorted(sizes), measure(sorted(sizes)), strict=True):
            held_out.append(HeldOut(size, float(line[size]), measured))
            curve = curve.with_point(size, measured)


def _solutions(problem: Problem, curve: Curve, noise: float) -> tuple[Solution, Solution]:
    """The best ladders if times are as low, and as high, as they may be."""
    low, high = curve.between(problem.maximum, noise)
    return solve(replace(problem, graph_us=low)), solve(replace(problem, graph_us=high))


def _doubtful(problem: Problem, curve: Curve, solutions: tuple[Solution, ...], noise: float) -> list[int]:
    """Candidates in the middle of gaps between measured sizes, those first in whose gap a chosen bucket's time, over
    the steps that it would take, is least certain; none where every chosen bucket is measured."""
    low, high = curve.between(problem.maximum, noise)
    known = {size for size, _ in curve.points}
    doubts: dict[int, float] = {}
    for solution in solutions:
        taken = _steps_by_bucket(problem, solution)
        for bucket in solution.ladder:
            if bucket not in known:
                middle = _middle(problem, curve, bucket)
                doubt = taken.get(bucket, 0) * float(high[bucket] - low[bucket])
                doubts[middle] = max(doubts.get(middle, 0.0), doubt)
    return sorted(doubts, key=lambda size: (-doubts[size], size))


def _steps_by_bucket(problem: Problem, solution: Solution) -> dict[int, float]:
    taken: dict[int, float] = {}
    for size, count in problem.steps:
        if not any(first <= size <= last for first, last in solution.eager_sizes):
            bucket = solution.ladder[bisect_left(solution.ladder, size)]
            taken[bucket] = taken.get(bucket, 0) + count
    return taken


def _middle(problem: Problem, curve: Curve, bucket: int) -> int:
    """The unmeasured candidate nearest to the middle of the gap that `bucket` lies in."""
    sizes = [size for size, _ in curve.points]
    index = bisect_left(sizes, bucket)
    left, right = sizes[index - 1] if index else 0, sizes[index]
    inside = [size for size in problem.candidates if left < size < right]
    return min(inside, key=lambda size: (abs(2 * size - left - right), size))
