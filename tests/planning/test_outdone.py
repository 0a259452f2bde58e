"""Buckets that a larger one beats."""

from hypothesis import given
from hypothesis import strategies as st

from formats.measurements import Timing
from formats.plan import Bucket
from gplan.planning.outdone import LEAST_GAIN, outdone_sizes


def _bucket(size: int, us: float, spread_us: float = 0.0) -> Bucket:
    timing = Timing(median_us=us, spread_us=spread_us, runs=3)
    return Bucket(size=size, graph=timing, eager=timing, graph_bytes=0, capture_ms=1.0, num_segments=1)


def test_a_larger_prefill_graph_that_ends_on_a_tile_wins() -> None:
    ladder = [_bucket(384, 11200.0), _bucket(448, 15300.0), _bucket(512, 12900.0)]
    assert outdone_sizes(ladder) == (448,)


def test_what_the_spread_may_explain_is_kept() -> None:
    assert outdone_sizes([_bucket(1, 105.0), _bucket(2, 100.0)]) == (1,)
    assert outdone_sizes([_bucket(1, 105.0, 3.0), _bucket(2, 100.0, 3.0)]) == ()
    assert outdone_sizes([_bucket(1, 100.5), _bucket(2, 100.0)]) == ()


@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 1e3)), min_size=1, max_size=40))
def test_the_largest_stays_and_nothing_kept_is_beaten_by_more_than_it_may_be(times: list[tuple[float, float]]) -> None:
    ladder = [_bucket(size, us, spread) for size, (us, spread) in enumerate(times, start=1)]
    outdone = outdone_sizes(ladder)
    assert len(times) not in outdone
    kept = [bucket for bucket in ladder if bucket.size not in outdone]
    net = {b.size: times[b.size - 1][0] for b in ladder}
    for bucket in ladder:
        best = min(net[larger.size] for larger in kept if larger.size >= bucket.size)
        if bucket.size in outdone:
            assert best < net[bucket.size]
        else:
            slack = max(LEAST_GAIN * times[bucket.size - 1][0], 0.1 * times[bucket.size - 1][0])
            assert net[bucket.size] - best <= slack + 1e-6
