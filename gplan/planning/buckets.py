"""The bucket solver: which sizes to capture, given traffic, times and what a graph costs.

Minimises, over ladders that hold the maximum,

    sum over sizes n of h(n) * T(n)  +  price * sum over buckets b of bytes(b)

where h(n) is how many steps run at n and T(n) is a replay of the smallest bucket that holds n (its padding rows read no
KV page, see `ladders`), or an eager step of n
where that is cheaper or the bucket is more than the padding cap above n. At most `max_buckets` buckets; capturing them
takes at most `capture_budget_ms`. Times need not grow with size.

Without a capture budget, or where the ladder found keeps within it anyway, the answer is exact: a dynamic programme
over (buckets used, last bucket). With a budget that binds, the programme is run with a price on capture time, which
gives a lower bound and a ladder within the budget, and the gap between the two is closed by a search over all ladders
that the bound does not exclude (`search`); that too is exact unless the search grows past its limit, which
`Solution.exact` tells and `Solution.bound_us` measures. Where answers are exact, a larger `max_buckets` or budget never
makes the objective worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gplan.errors import GplanError
from gplan.planning.ladders import FloatArray, IntArray, Steps, dense_us, may_take, split_steps
from gplan.planning.search import ALMOST, Graph, cheapest_path, cheapest_path_within

MAX_CANDIDATES = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What a ladder is solved for. Arrays are indexed by size, [maximum + 1] float64, entry 0 unused.

    Attributes:
        steps: (size, number of steps), sizes from 1 to `maximum`.
        candidates: sizes that may be buckets; `maximum` is one in any case.
        graph_us: a replay of a bucket of each size; read at candidates.
        eager_us: an eager step of each size.
        rows_us: of both, what real rows take by reading the KV pool; zero for nothing.
        graph_bytes, capture_ms: of a bucket of each size; read at candidates.
        byte_price_us: what a byte of graph memory costs, in the objective's microseconds.
        padding_cap: a bucket takes sizes n with bucket <= n * (1 + cap) only.
        eager_margin: eager has to be cheaper by this part of its own time.
    """

    maximum: int
    steps: Steps
    candidates: tuple[int, ...]
    graph_us: FloatArray
    eager_us: FloatArray
    rows_us: FloatArray
    graph_bytes: FloatArray
    capture_ms: FloatArray
    max_buckets: int
    byte_price_us: float = 0.0
    capture_budget_ms: float | None = None
    padding_cap: float | None = None
    eager_margin: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A ladder and what is expected of it.

    Attributes:
        eager_sizes: sizes up to the maximum that run eagerly because it is cheaper, as [first, last] ranges.
        total_us: of all steps.
        objective_us: `total_us` and the price of the graphs' bytes.
        bound_us: no ladder has a lower objective.
        dense_us: of all steps, each at the cheapest that any candidate or eager execution would give it.
        exact: whether this is the best ladder, to rounding.
    """

    ladder: tuple[int, ...]
    eager_sizes: tuple[tuple[int, int], ...]
    total_us: float
    objective_us: float
    bound_us: float
    dense_us: float
    graph_bytes: float
    capture_ms: float
    exact: bool

    @property
    def regret(self) -> float:
        """Expected step time over that of a ladder of all candidates, minus 1."""
        return self.total_us / self.dense_us - 1 if self.dense_us else 0.0


def solve(problem: Problem) -> Solution:
    """Finds the best ladder.

    Raises:
        GplanError: the largest bucket alone does not fit the capture budget.
    """
    _check(problem)
    sizes, counts = split_steps(problem.steps)
    candidates = np.array(sorted({*problem.candidates, problem.maximum}), dtype=np.int64)
    graph = Graph(
        arcs=_arc_costs(problem, sizes, counts, candidates),
        weights=np.asarray(problem.capture_ms[candidates], dtype=np.float64),
    )
    path = cheapest_path(graph, problem.max_buckets)
    budget = problem.capture_budget_ms
    if budget is not None and path.weight > budget * ALMOST:
        path = cheapest_path_within(graph, problem.max_buckets, budget)
    ladder = candidates[list(path.nodes)]
    times = _times(problem, sizes, _buckets_of(ladder, sizes), ladder)
    nbytes = float(problem.graph_bytes[ladder].sum())
    return Solution(
        ladder=tuple(ladder.tolist()),
        eager_sizes=eager_sizes(problem, ladder.tolist()),
        total_us=float(counts @ times),
        objective_us=float(counts @ times) + problem.byte_price_us * nbytes,
        bound_us=path.bound,
        dense_us=_dense(problem, sizes, counts, candidates),
        graph_bytes=nbytes,
        capture_ms=float(problem.capture_ms[ladder].sum()),
        exact=path.exact,
    )


def eager_sizes(problem: Problem, ladder: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sizes that a bucket may take and that are cheaper eagerly, as [first, last] ranges."""
    buckets = np.asarray(ladder, dtype=np.int64)
    sizes = np.arange(1, problem.maximum + 1)
    bucket = buckets[_buckets_of(buckets, sizes)]
    eager = _eager_is_cheaper(problem, sizes, bucket) & may_take(bucket, sizes, problem.padding_cap)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], eager, [False]])))
    return tuple((int(first) + 1, int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True))


def candidate_sizes(maximum: int, steps: Steps = (), multiple: int = 1, limit: int = MAX_CANDIDATES) -> tuple[int, ...]:
    """Sizes worth considering as buckets: an even grid, the busiest sizes, and the maximum.

    Args:
        multiple: sizes other than the maximum are multiples of this.
        limit: how many at most, at least 2.
    """
    spacing = multiple * math.ceil(maximum / multiple / max(1, limit // 2))
    if maximum // multiple < limit:
        spacing = multiple
    found = {maximum, *range(spacing, maximum + 1, spacing)}
    busiest = sorted(steps, key=lambda step: (-step[1], step[0]))
    for size, _ in busiest:
        if len(found) >= limit:
            break
        aligned = -(-size // multiple) * multiple
        if aligned <= maximum:
            found.add(aligned)
    return tuple(sorted(found))


def alignment(tp_size: int, width: int = 1) -> int:
    """What decode buckets must be multiples of, so that their tokens (`width` each) split evenly over `tp_size`."""
    return tp_size // math.gcd(tp_size, width)


def _check(problem: Problem) -> None:
    assert problem.maximum >= 1
    assert problem.max_buckets >= 1
    assert all(1 <= size <= problem.maximum for size in problem.candidates), problem.candidates
    assert all(1 <= size <= problem.maximum for size, _ in problem.steps), problem.steps
    budget, alone = problem.capture_budget_ms, float(problem.capture_ms[problem.maximum])
    if budget is not None and alone > budget * ALMOST:
        raise GplanError(
            f"capturing the largest bucket, {problem.maximum}, takes {alone:,.1f} ms; the phase has "
            f"{budget:,.1f} ms of the budget",
            "Raise --startup-budget, or run this phase eagerly.",
        )


def _arc_costs(problem: Problem, sizes: IntArray, counts: FloatArray, candidates: IntArray) -> FloatArray:
    """[m + 1, m]: entry (i, j) is the cost of bucket j with bucket i - 1 as the next below it, none for i = 0: the time
    of the sizes between them and the price of j's bytes. Infinite where i - 1 is not below j."""
    m = len(candidates)
    costs = np.full((m + 1, m), np.inf)
    below = np.concatenate([[0], np.searchsorted(sizes, candidates, side="right")])
    prices = problem.byte_price_us * problem.graph_bytes[candidates]
    for j in range(m):
        covered = np.arange(below[j + 1])
        times = _times(problem, sizes[covered], np.full(len(covered), j), candidates)
        from_above = np.concatenate([[0.0], np.cumsum((counts[covered] * times)[::-1])])
        costs[: j + 1, j] = from_above[below[j + 1] - below[: j + 1]] + prices[j]
    return costs


def _times(problem: Problem, sizes: IntArray, bucket_index: IntArray, ladder: IntArray) -> FloatArray:
    """Of a step of each size, the bucket above it given as an index into `ladder`."""
    if not len(sizes):
        return np.zeros(0)
    bucket = ladder[bucket_index]
    eager = _eager_is_cheaper(problem, sizes, bucket) | ~may_take(bucket, sizes, problem.padding_cap)
    return np.where(eager, problem.eager_us[sizes], _replay_us(problem, sizes, bucket))


def _replay_us(problem: Problem, sizes: IntArray, bucket: IntArray) -> FloatArray:
    return problem.graph_us[bucket] - problem.rows_us[bucket] + problem.rows_us[sizes]


def _eager_is_cheaper(problem: Problem, sizes: IntArray, bucket: IntArray) -> npt.NDArray[np.bool_]:
    return problem.eager_us[sizes] * (1 + problem.eager_margin) < _replay_us(problem, sizes, bucket)


def _buckets_of(ladder: IntArray, sizes: IntArray) -> IntArray:
    return np.searchsorted(ladder, sizes)


def _dense(problem: Problem, sizes: IntArray, counts: FloatArray, candidates: IntArray) -> float:
    graph_us = np.full(problem.maximum + 1, np.inf)
    graph_us[candidates] = problem.graph_us[candidates]
    return float(counts @ dense_us(sizes, graph_us, problem.eager_us, problem.padding_cap, problem.rows_us))
