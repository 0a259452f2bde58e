"""The bucket solver against all ladders there are, and what must hold for any problem."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import Phase
from gplan.errors import GplanError
from gplan.planning import search
from gplan.planning.buckets import MAX_CANDIDATES, Problem, alignment, candidate_sizes, eager_sizes, solve
from gplan.planning.ladders import NAMED_LADDERS, ladder_cost, named_ladder, regret


def random_problem(seed: int, maximum: int, **changes: object) -> Problem:
    """Times with steps and noise, so that they do not grow with size everywhere; eager sometimes cheaper."""
    rng = np.random.default_rng(seed)
    sizes = np.arange(maximum + 1)
    busy = rng.integers(0, 2, maximum + 1) * rng.integers(1, 1000, maximum + 1)
    problem = Problem(
        maximum=maximum,
        steps=[(size, int(busy[size])) for size in range(1, maximum + 1)],
        candidates=tuple(range(1, maximum + 1)),
        graph_us=100 + 10 * sizes + 30 * (sizes // 4) + rng.normal(0, 15, maximum + 1),
        eager_us=100 + 12 * sizes + rng.choice([0, 60, 400]) + rng.normal(0, 40, maximum + 1),
        rows_us=rng.choice([0.0, 4.0]) * sizes,
        graph_bytes=rng.uniform(1e5, 1e6, maximum + 1),
        capture_ms=rng.uniform(50, 150, maximum + 1),
        max_buckets=maximum,
    )
    return replace(problem, **changes)  # type: ignore[arg-type]


def objective(problem: Problem, ladder: tuple[int, ...]) -> float:
    """What a ladder costs, straight from the definition."""
    total = problem.byte_price_us * sum(problem.graph_bytes[b] for b in ladder)
    for size, count in problem.steps:
        bucket = min(b for b in ladder if b >= size)
        replayed = problem.graph_us[bucket] - problem.rows_us[bucket] + problem.rows_us[size]
        eager = problem.eager_us[size]
        capped = problem.padding_cap is not None and bucket > size * (1 + problem.padding_cap)
        total += count * (eager if capped or eager * (1 + problem.eager_margin) < replayed else replayed)
    return float(total)


def best_of_all(problem: Problem) -> float:
    smaller = [size for size in problem.candidates if size != problem.maximum]
    best = math.inf
    for count in range(min(len(smaller), problem.max_buckets - 1) + 1):
        for chosen in itertools.combinations(smaller, count):
            ladder = (*chosen, problem.maximum)
            if problem.capture_budget_ms is None or problem.capture_ms[list(ladder)].sum() <= problem.capture_budget_ms:
                best = min(best, objective(problem, ladder))
    return best


problems = st.builds(
    lambda seed, maximum, buckets, price, cap, budget, margin, keep: random_problem(
        seed,
        maximum,
        max_buckets=buckets,
        byte_price_us=price,
        padding_cap=cap,
        capture_budget_ms=budget,
        eager_margin=margin,
        candidates=tuple(size for size in range(1, maximum + 1) if keep >> size & 1),
    ),
    seed=st.integers(0, 2**32 - 1),
    maximum=st.integers(1, 10),
    buckets=st.integers(1, 11),
    price=st.sampled_from([0.0, 1e-3, 0.03, 1.0]),
    cap=st.none() | st.sampled_from([0.0, 0.25, 1.0]),
    budget=st.none() | st.floats(150, 900),
    margin=st.sampled_from([0.0, 0.2]),
    keep=st.integers(0, 2**11 - 1),
)


@settings(max_examples=600)
@given(problems)
def test_no_ladder_is_better(problem: Problem) -> None:
    solution = solve(problem)
    assert solution.exact
    assert solution.objective_us == pytest.approx(best_of_all(problem), rel=1e-9)
    assert solution.objective_us == pytest.approx(objective(problem, solution.ladder), rel=1e-9)
    assert solution.bound_us == pytest.approx(solution.objective_us, rel=1e-9)
    assert solution.ladder[-1] == problem.maximum
    assert set(solution.ladder) <= {*problem.candidates, problem.maximum}
    assert len(solution.ladder) <= problem.max_buckets
    assert solution.capture_ms <= (problem.capture_budget_ms or math.inf) * (1 + 1e-9)


@given(problems)
def test_figures_are_those_of_the_ladder(problem: Problem) -> None:
    solution = solve(problem)
    cost = ladder_cost(
        solution.ladder,
        problem.steps,
        problem.graph_us,
        problem.eager_us,
        problem.padding_cap,
        solution.eager_sizes,
        problem.rows_us,
    )
    assert solution.total_us == pytest.approx(cost.total_us)
    assert solution.graph_bytes == pytest.approx(sum(problem.graph_bytes[b] for b in solution.ladder))
    assert solution.capture_ms == pytest.approx(sum(problem.capture_ms[b] for b in solution.ladder))
    assert solution.regret >= -1e-12


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(2, 60), st.sampled_from([0.0, 1e-3]))
def test_more_buckets_and_more_time_never_cost_more(seed: int, maximum: int, price: float) -> None:
    problem = random_problem(seed, maximum, byte_price_us=price)
    by_count = [solve(replace(problem, max_buckets=k)).objective_us for k in (1, 2, 3, 5, 8, 13, 60)]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in itertools.pairwise(by_count))
    for buckets in (4, 12):
        budgets = [
            replace(problem, max_buckets=buckets, capture_budget_ms=ms) for ms in (150, 200, 350, 420, 800, 3000)
        ]
        solutions = [solve(problem) for problem in budgets]
        assert all(solution.exact for solution in solutions)
        costs = [solution.objective_us for solution in solutions]
        assert all(more <= fewer * (1 + 1e-9) for fewer, more in itertools.pairwise(costs))


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_free_graphs_leave_no_regret_and_no_useless_bucket(seed: int, maximum: int) -> None:
    problem = random_problem(seed, maximum)
    solution = solve(problem)
    assert solution.regret == pytest.approx(0, abs=1e-9)
    for bucket in solution.ladder[:-1]:
        fewer = tuple(other for other in solution.ladder if other != bucket)
        assert objective(problem, fewer) > solution.objective_us


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_graphs_beyond_price_leave_the_maximum_alone(seed: int, maximum: int) -> None:
    assert solve(random_problem(seed, maximum, byte_price_us=1e6)).ladder == (maximum,)


def test_a_higher_price_never_takes_more_bytes() -> None:
    problem = random_problem(7, 60)
    taken = [solve(replace(problem, byte_price_us=price)).graph_bytes for price in (0, 1e-4, 1e-3, 1e-2, 1e-1, 1)]
    assert taken == sorted(taken, reverse=True)
    assert len(set(taken)) > 3


def test_the_exact_maximum_is_always_a_bucket() -> None:
    for maximum in range(1, 601):
        steps = [(1, 100), (max(1, maximum // 2), 10)]
        candidates = candidate_sizes(maximum, steps, multiple=8, limit=32)
        times = np.arange(maximum + 1, dtype=np.float64)
        solution = solve(
            Problem(
                maximum=maximum,
                steps=steps,
                candidates=candidates,
                graph_us=100 + times,
                eager_us=200 + times,
                rows_us=np.zeros_like(times),
                graph_bytes=times,
                capture_ms=times,
                max_buckets=4,
            )
        )
        assert solution.ladder[-1] == maximum
        assert all(size % 8 == 0 for size in candidates if size != maximum)
        assert len(candidates) <= 32


def test_traffic_without_steps_needs_one_bucket() -> None:
    solution = solve(random_problem(1, 20, steps=()))
    assert (solution.ladder, solution.total_us, solution.regret) == ((20,), 0, 0)


def test_sizes_run_eagerly_where_that_is_cheaper() -> None:
    graph, eager = np.full(9, 50.0), np.array([0, 40, 60, 40, 40, 60, 49, 60, 49], dtype=np.float64)
    problem = random_problem(1, 8, graph_us=graph, eager_us=eager, candidates=(4,))
    assert eager_sizes(problem, (4, 8)) == ((1, 1), (3, 4), (6, 6), (8, 8))
    assert eager_sizes(replace(problem, eager_margin=0.1), (4, 8)) == ((1, 1), (3, 4))
    assert eager_sizes(replace(problem, padding_cap=0.2), (4, 8)) == ((4, 4), (8, 8))


def test_a_budget_below_the_largest_bucket_is_refused() -> None:
    problem = random_problem(1, 8, capture_ms=np.full(9, 100.0), capture_budget_ms=99)
    with pytest.raises(GplanError, match=r"largest bucket, 8, takes 100\.0 ms; the phase has 99\.0 ms"):
        solve(problem)


def test_a_search_cut_short_says_so_and_keeps_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(2, 30, max_buckets=12, capture_budget_ms=703)
    best = solve(problem)
    monkeypatch.setattr(search, "BEAM", 1)
    monkeypatch.setattr(search, "MAX_LABELS", 1)
    cut = solve(problem)
    assert best.exact
    assert not cut.exact
    assert cut.bound_us < best.objective_us <= cut.objective_us
    assert cut.capture_ms <= 703


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("name", NAMED_LADDERS)
def test_no_named_ladder_of_as_many_buckets_is_better(name: str, phase: Phase) -> None:
    problem = random_problem(11, 300)
    named = named_ladder(name, phase, 300)
    solution = solve(replace(problem, max_buckets=len(named)))
    assert solution.regret <= regret(named, problem.steps, problem.graph_us, problem.eager_us) + 1e-12


@pytest.mark.parametrize("budget_ms", [None, 2500.0])
def test_512_candidates_are_solved_in_passing(budget_ms: float | None) -> None:
    problem = random_problem(5, 512, max_buckets=32, capture_budget_ms=budget_ms)
    started = time.process_time()
    assert solve(problem).exact
    assert time.process_time() - started < 5, "it takes a fraction of a second; the limit is for slow machines"


def test_candidates_hold_the_busiest_sizes() -> None:
    assert candidate_sizes(5) == (1, 2, 3, 4, 5)
    found = candidate_sizes(8192, [(1000, 5), (1001, 900), (3, 7)])
    assert {1001, 1000, 3, 8192} <= set(found)
    assert len(found) <= MAX_CANDIDATES
    assert candidate_sizes(20, [(3, 1)], multiple=8) == (8, 16, 20)


def test_alignment_makes_tokens_split_evenly() -> None:
    assert [alignment(tp, width) for tp, width in ((1, 1), (8, 1), (8, 4), (8, 3), (4, 8))] == [1, 8, 2, 8, 1]
