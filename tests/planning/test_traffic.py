"""Ladders for traffic, on times measured on an H200: how much they cost on the traffic they are for, and on other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.bench_ladders import BOUNDS, Figures, Histograms, cases, cost_of, histograms, solved
from benchmarks.bench_packing import changes, without_and_with
from benchmarks.curves import Curves, read_curves
from formats.measurements import Costs, Timing
from formats.plan import Bucket, Limits
from formats.workload import read_workload
from gplan.core import Phase, ShapeKey
from gplan.graphs.admission import PhaseSetup
from gplan.planning.eager import cheaper_eagerly
from gplan.planning.traffic import (
    DOUBT,
    MAX_BUCKETS,
    PhaseFigures,
    best_ladder,
    halves,
    read_traffic,
    with_doubt,
)
from gplan.scheduling.times import interpolate

CURVES = Path(__file__).parents[2] / "benchmarks" / "curves" / "llama-3.1-8b-h200.json"
OTHER = "poisson:rate=7,in=50-900,out=20-300,n=300,seed=5"


@pytest.fixture(scope="module")
def curves() -> Curves:
    return read_curves(str(CURVES))


@pytest.fixture(scope="module", params=[2, 8, 24])
def seen(curves: Curves, request: pytest.FixtureRequest) -> Histograms:
    """Steps of one load: of the half that ladders are solved for, the other half, and other traffic."""
    first, second = halves(read_workload(f"poisson:rate={request.param},in=100-1500,out=50-400,n=300"))
    return histograms(curves, curves.figures(), {"first": first, "second": second, "other": read_workload(OTHER)})


@pytest.mark.parametrize("phase", list(Phase))
def test_sixteen_buckets_cost_little_on_the_traffic_and_on_other(
    curves: Curves, seen: Histograms, phase: Phase
) -> None:
    found = list(cases(curves.figures()[phase], "first", seen, MAX_BUCKETS, ""))
    assert [case["judged_on"] for case in found] == ["first", "second", "other"]
    for case in found:
        assert len(case["ladder"]) <= 16
        assert 0 <= case["regret"] <= BOUNDS[phase], case
        assert not case["named_better_at_equal_count"], case


def test_more_buckets_never_cost_more(curves: Curves, seen: Histograms) -> None:
    figures: Figures = curves.figures()
    for phase in Phase:
        expected = with_doubt(seen["first"][phase], figures[phase].setup.max_size)
        ladders = [solved(figures[phase], seen["first"][phase], count) for count in (1, 2, 4, 8, 16, 32)]
        regrets = [cost_of(ladder, expected).regret for ladder in ladders]
        assert all(more <= fewer + 1e-9 for fewer, more in itertools.pairwise(regrets))


def test_doubt_is_a_part_of_the_steps_spread_over_all_sizes() -> None:
    expected = dict(with_doubt(((2, 70), (4, 30)), 5))
    assert expected[2] - 70 == expected[4] - 30 == expected[5] == pytest.approx(100 * DOUBT / 5)
    assert with_doubt((), 5) == []


def test_a_workload_may_be_sped_up() -> None:
    slow, fast = (read_traffic("poisson:rate=4,in=9,out=9,n=40", 64, speedup) for speedup in (None, 2.0))
    assert fast.spec == f"{slow.spec}, 2 times as fast"
    assert fast.seen.requests[-1].arrival_s == pytest.approx(slow.seen.requests[-1].arrival_s / 2, abs=1e-5)


@pytest.mark.parametrize("rate", [2, 12])
def test_prompts_cut_at_buckets_wait_no_longer(curves: Curves, rate: int) -> None:
    trace = read_workload(f"poisson:rate={rate},in=100-1500,out=20-100,n=300")
    plain, packed = without_and_with(curves, (8, 64, 256, 512, 1024, 2048), trace)
    assert packed.prefill.replayed > plain.prefill.replayed, "prompts were cut"
    first = changes(plain.ttft_ms, packed.ttft_ms)
    assert all(first[rank] <= 0 for rank in ("mean", "p50", "p90", "p95", "p99")), first
    assert changes(plain.inter_token_ms, packed.inter_token_ms)["mean"] <= 0


def test_a_size_that_will_not_be_served_eagerly_keeps_a_bucket_near() -> None:
    """Eager execution is as fast as replays here, but not used where most of its time may be launching."""
    times = {8: 85181.0, 16: 100723.0, 32: 125921.0, 64: 184029.0, 128: 286214.0, 256: 475955.0}
    buckets = tuple(_bucket(size, us) for size, us in times.items())
    limits = Limits(max_batch=8, max_len=1024, chunk=256, page_size=16, memory_bytes=1 << 31)
    keys = tuple(ShapeKey(Phase.PREFILL, size) for size in times)
    setup = PhaseSetup(phase=Phase.PREFILL, backend="breakable", keys=keys, max_size=256)
    figures = PhaseFigures(setup, buckets, {}, Costs(), limits)
    steps = (*((size, 5) for size in range(70, 131)), (256, 40))
    ladder = best_ladder(figures, steps, None, 0.0).ladder
    eager_sizes = cheaper_eagerly([_bucket(size, times[size]) for size in ladder], times, figures.rows_us)
    for size in range(1, 257):
        bucket = min(each for each in ladder if each >= size)
        if not any(first <= size <= last for first, last in eager_sizes):
            assert times[bucket] <= 1.6 * interpolate(times, size), f"{size} tokens replay {bucket}"


def _bucket(size: int, us: float) -> Bucket:
    timing = Timing(median_us=us, spread_us=us / 1000, runs=3)
    return Bucket(size=size, graph=timing, eager=timing, graph_bytes=0, capture_ms=1.0, num_segments=1)
