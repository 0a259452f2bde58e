"""Times of sizes that were not measured, and measuring where it could change the ladder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Phase
from gplan.planning.buckets import Problem, candidate_sizes, solve
from gplan.planning.curves import Curve, HeldOut, refine
from gplan.planning.ladders import FloatArray, default_ladder, ladder_cost


def problem(times: FloatArray, max_buckets: int = 16) -> Problem:
    maximum = len(times) - 1
    steps = [(size, 10 + 5000 // size) for size in range(1, maximum + 1)]
    return Problem(
        maximum=maximum,
        steps=steps,
        candidates=candidate_sizes(maximum, steps, limit=256),
        graph_us=times,
        eager_us=times * 1.5,
        rows_us=np.zeros(maximum + 1),
        graph_bytes=np.zeros(maximum + 1),
        capture_ms=np.zeros(maximum + 1),
        max_buckets=max_buckets,
    )


class Machine:
    """Measures true times and counts how often."""

    def __init__(self, times: FloatArray) -> None:
        self.times, self.measured = times, 0

    def __call__(self, sizes: Sequence[int]) -> list[float]:
        assert list(sizes) == sorted(set(sizes))
        self.measured += len(sizes)
        return [float(self.times[size]) for size in sizes]

    def first(self, phase: Phase) -> Curve:
        sizes = default_ladder(phase, len(self.times) - 1)
        return Curve(tuple((size, float(self.times[size])) for size in sizes))


def test_times_lie_on_a_line_between_measured_sizes() -> None:
    curve = Curve(((2, 10.0), (6, 30.0)))
    assert curve.over(8).tolist()[1:] == [10, 10, 15, 20, 25, 30, 30, 30]
    assert curve.with_point(4, 50.0).over(6).tolist()[2:] == [10, 30, 50, 40, 30]


def test_the_error_of_a_point_is_its_distance_from_its_neighbours_line() -> None:
    curve = Curve(((2, 10.0), (4, 25.0), (6, 30.0)))
    assert curve.errors() == ((4, 0.2),)
    low, high = curve.between(6, noise=0.0)
    assert (low[4], high[4]) == (25, 25)
    assert (low[3], high[3]) == (pytest.approx(17.5 * 0.8), pytest.approx(17.5 * 1.2))
    assert (low[5], high[5]) == (25, 30), "never outside the values beside it"


def test_nothing_is_known_between_two_points_alone() -> None:
    low, high = Curve(((2, 10.0), (6, 30.0))).between(6, noise=0.0)
    assert (low[4], high[4]) == (10, 30)


@given(st.lists(st.floats(1, 1e4), min_size=2, max_size=12), st.floats(0, 0.1))
def test_the_line_is_between_the_least_and_the_most(values: list[float], noise: float) -> None:
    curve = Curve(tuple((1 + 3 * index, value) for index, value in enumerate(values)))
    maximum = curve.points[-1][0]
    low, high = curve.between(maximum, noise)
    line = curve.over(maximum)
    assert np.all(low <= line * (1 + 1e-9))
    assert np.all(line <= high * (1 + 1e-9))


def test_straight_times_need_no_more_measurements() -> None:
    machine = Machine(5000 + 12.0 * np.arange(257))
    refined = refine(problem(machine.times), machine.first(Phase.DECODE), machine)
    assert machine.measured == 0
    assert refined.gap <= 0.01


def test_steps_in_times_are_found_and_decided_on() -> None:
    sizes = np.arange(257)
    machine = Machine(5000 + 5 * sizes + 2000 * np.ceil(sizes / 48))
    asked = problem(machine.times, max_buckets=8)
    refined = refine(asked, machine.first(Phase.DECODE), machine)
    assert 0 < machine.measured == len(refined.held_out) <= 32
    assert refined.gap <= 0.01
    best, ladder = solve(asked), refined.solution.ladder
    cost = ladder_cost(ladder, asked.steps, asked.graph_us, asked.eager_us, None, refined.solution.eager_sizes)
    assert cost.total_us <= best.total_us * 1.01
    unrefined = solve(problem(machine.first(Phase.DECODE).over(256), max_buckets=8))
    without = ladder_cost(unrefined.ladder, asked.steps, asked.graph_us, asked.eager_us)
    assert without.total_us > cost.total_us, "measuring changed the ladder for the better"


def test_predictions_are_reported_beside_what_was_measured() -> None:
    machine = Machine(5000 + 2000 * np.ceil(np.arange(257) / 48))
    refined = refine(problem(machine.times), machine.first(Phase.DECODE), machine, max_measurements=3)
    assert len(refined.held_out) == 3
    assert all(held.measured == machine.times[held.size] for held in refined.held_out)
    assert refined.curve.over(256)[refined.held_out[0].size] == refined.held_out[0].measured
    assert HeldOut(4, 11.0, 10.0).error == pytest.approx(0.1)
