"""Step times by size: buckets, eager ranges and what lies between measured sizes."""

from __future__ import annotations

import pytest

from formats.plan import Bucket, PhasePlan, Timing
from gplan.errors import GplanError
from gplan.scheduling.times import interpolate, phase_times, times_of_plan


def timing(us: float) -> Timing:
    return Timing(median_us=us, spread_us=0.0, runs=3)


def test_sizes_between_measured_ones_lie_on_a_line() -> None:
    points = {4: 10.0, 8: 30.0}
    assert [interpolate(points, size) for size in (1, 4, 5, 8, 9)] == [10, 10, 15, 30, 30]


def test_a_step_takes_the_time_of_its_bucket_or_of_eager() -> None:
    times = phase_times(8, [2, 8], {2: 10.0, 8: 40.0}, {1: 50.0, 8: 60.0}, eager_sizes=((4, 5),), padding_cap=1.0)
    assert times.bucket == (0, 2, 2, 0, 0, 0, 8, 8, 8)
    assert times.step_ps(1, 1, 0) == 10_000_000
    assert times.step_ps(6, 6, 0) == 40_000_000
    assert times.step_ps(3, 3, 0) == round((50 + 10 * 2 / 7) * 1e6)
    assert not times.is_eager(6, 6)
    assert times.is_eager(4, 4)


def test_more_requests_than_slots_run_eagerly() -> None:
    times = phase_times(8, [8], {8: 40.0}, {8: 60.0}, request_slots=2)
    assert times.step_ps(8, 2, 0) == 40_000_000
    assert times.step_ps(8, 3, 0) == 60_000_000


def test_cached_tokens_add_to_what_was_measured() -> None:
    times = phase_times(2, [2], {2: 10.0}, {2: 60.0}, cached_us=0.5, context=4)
    assert [times.step_ps(2, 2, cached) for cached in (8, 10, 6)] == [10_000_000, 11_000_000, 9_000_000]
    assert times.step_ps(2, 2, -1000) == 1


def test_times_of_a_plan() -> None:
    ladder = (Bucket(size=2, graph=timing(10), eager=timing(20)), Bucket(size=4, graph=timing(30), eager=timing(40)))
    plan = PhasePlan(phase="decode", backend="full", max_size=4, ladder=ladder, eager_sizes=((3, 3),))
    times = times_of_plan(plan)
    assert times.bucket == (0, 2, 2, 0, 4)
    assert times.graph_ps[3] == 20_000_000
    assert times.eager_ps[3] == 30_000_000


def test_a_plan_without_times_is_refused() -> None:
    with pytest.raises(GplanError, match="no times of prefill"):
        times_of_plan(PhasePlan(phase="prefill", backend="eager", max_size=4, ladder=()))
