"""Step times by size: buckets, eager ranges and what lies between measured sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from formats.measurements import Costs, SizeTiming, Timing
from formats.plan import Bucket, Limits, PhasePlan
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.scheduling.times import interpolate, phase_times, prompt_pairs, reads_us, rows_us, times_of_phase


def timing(us: float) -> Timing:
    return Timing(median_us=us, spread_us=0.0, runs=3)


def added(phase: Phase, costs: Costs, maximum: int, max_len: int) -> dict[str, list[float]]:
    asked = phase, costs, maximum, max_len
    return {"rows_us": rows_us(*asked), "reads_us": reads_us(*asked)}


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


def test_rows_add_what_they_read_and_padding_reads_nothing() -> None:
    costs = Costs(context=4, cached_us=((4, 0.5),))
    times = phase_times(4, [4], {4: 20.0}, {4: 60.0}, costs=costs, **added(Phase.DECODE, costs, 4, 32))
    assert times.step_ps(4, 4, 16) == 20_000_000, "as it was timed"
    assert times.step_ps(4, 4, 20) == 22_000_000
    assert times.step_ps(3, 3, 12) == 18_000_000, "the padding row has no context"
    assert times.step_ps(4, 4, -1000) == 1


def test_few_requests_read_more_slowly_than_many() -> None:
    costs = Costs(context=4, cached_us=((1, 2.0), (3, 1.0)))
    times = phase_times(4, [4], {4: 20.0}, {4: 60.0}, costs=costs, **added(Phase.DECODE, costs, 4, 32))
    nothing = 20 - 4 * 4 * 1.0
    for requests, slope in enumerate([2.0, 1.5, 1.0, 1.0], 1):
        assert times.step_ps(requests, requests, 10) == round((nothing + 10 * slope) * 1e6), "the bucket's, not its own"


def test_padding_spares_what_was_measured_and_contexts_add_to_it() -> None:
    costs = Costs(context=4, cached_us=((1, 1.0),), rows_us=((1, 4.0), (4, 10.0)))
    measured = Phase.DECODE, costs, 4, 32
    rows, reads = rows_us(*measured), reads_us(*measured)
    assert (rows, reads) == ([0, 4, 6, 8, 10], [0, 4, 8, 12, 16])
    times = phase_times(4, [4], {4: 50.0}, {4: 60.0}, costs=costs, rows_us=rows, reads_us=reads)
    assert times.step_ps(4, 4, 16) == 50_000_000, "as it was timed"
    assert times.step_ps(1, 1, 4) == 44_000_000, "a row's reading takes 4, and three rows of padding spare 6"
    assert times.step_ps(1, 1, 14) == 54_000_000
    assert times.padding_ps(1) == 0
    alone = phase_times(4, [], {}, {4: 60.0}, costs=costs, rows_us=rows, reads_us=reads)
    assert alone.step_ps(4, 4, 16) == 60_000_000, "nothing is padded"


def test_prompts_compare_each_token_with_those_before_it() -> None:
    assert [prompt_pairs(0, 3), prompt_pairs(5, 1), prompt_pairs(2, 3)] == [6, 6, 12]
    costs = Costs(pair_us=0.1)
    rows = rows_us(Phase.PREFILL, costs, 10, 7)
    assert rows[6] == pytest.approx(2.1)
    assert rows[10] == pytest.approx(2.1 + 1.0), "two prompts, the first at the longest"
    times = phase_times(6, [6], {6: 20.0}, {6: 60.0}, costs=costs, rows_us=rows[:7], reads_us=rows[:7])
    assert times.step_ps(6, 1, 0, pairs=21) == 20_000_000
    assert times.step_ps(6, 1, 0, pairs=21 + 60) == 26_000_000, "after 10 tokens"
    assert times.step_ps(6, 6, 0, pairs=6) == 18_500_000, "six prompts of one token"


def test_what_a_step_takes_beyond_its_forward_goes_by_requests() -> None:
    costs = Costs(beyond_us=((1, 2.0), (3, 6.0)))
    times = phase_times(8, [8], {8: 20.0}, {8: 60.0}, costs=costs, max_batch=4)
    assert [times.step_ps(8, requests, 0) for requests in (1, 2, 3, 4)] == [22e6, 24e6, 26e6, 26e6]


def test_times_of_a_plan() -> None:
    bounds = Limits(max_batch=4, max_len=16, chunk=8, page_size=4, memory_bytes=0)
    ladder = (Bucket(size=2, graph=timing(10), eager=timing(20)), Bucket(size=4, graph=timing(30), eager=timing(40)))
    other = (SizeTiming(size=1, graph=timing(6)), SizeTiming(size=3, eager=timing(33)))
    plan = PhasePlan(phase="decode", backend="full", max_size=4, ladder=ladder, eager_sizes=((3, 3),))
    times = times_of_phase(plan, bounds)
    assert times.bucket == (0, 2, 2, 0, 4)
    assert times.graph_ps[1:] == (10_000_000, 10_000_000, 20_000_000, 30_000_000)
    assert times.eager_ps[3] == 30_000_000
    more = times_of_phase(replace(plan, other_sizes=other), bounds)
    assert (more.graph_ps[1], more.eager_ps[3]) == (6_000_000, 33_000_000)


def test_an_eager_phase_has_eager_times() -> None:
    bounds = Limits(max_batch=4, max_len=16, chunk=8, page_size=4, memory_bytes=0)
    eager = PhasePlan(phase="prefill", backend="eager", max_size=8, ladder=())
    with pytest.raises(GplanError, match="no times of prefill"):
        times_of_phase(eager, bounds)
    times = times_of_phase(replace(eager, other_sizes=(SizeTiming(size=8, eager=timing(50)),)), bounds)
    assert (times.bucket[8], times.step_ps(5, 1, 0)) == (0, 50_000_000)


@given(
    graph_us=st.dictionaries(st.integers(1, 12), st.floats(1, 50), min_size=1),
    rows=st.dictionaries(st.integers(1, 12), st.floats(0, 500)),
    phase=st.sampled_from(Phase),
    slope=st.floats(0, 100),
)
def test_padding_never_makes_a_step_quicker_than_the_quickest(
    graph_us: dict[int, float], rows: dict[int, float], phase: Phase, slope: float
) -> None:
    costs = Costs(context=8, cached_us=((1, slope), (9, slope / 9)), rows_us=tuple(sorted(rows.items())), pair_us=slope)
    found = rows_us(phase, costs, 12, 9, graph_us)
    for size in range(1, 13):
        for bucket in range(size, 13):
            padded = interpolate(graph_us, bucket) - found[bucket] + found[size]
            assert padded >= min(graph_us.values()) - 1e-6


def test_what_rows_add_stays_where_it_leaves_more_than_the_quickest() -> None:
    costs = Costs(context=4, cached_us=((1, 1.0),), rows_us=((1, 4.0), (4, 10.0)))
    assert rows_us(Phase.DECODE, costs, 4, 32, {1: 40.0, 4: 46.0}) == [0, 4, 6, 8, 10]
    assert rows_us(Phase.DECODE, costs, 4, 32, {1: 40.0, 4: 43.0}) == [0, 4, 5, 6, 7]
