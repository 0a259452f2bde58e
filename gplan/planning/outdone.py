"""Buckets that a larger one beats: matrix products are cut into tiles, and just above a tile's end they take more time
than at the end of the next."""

from __future__ import annotations

from collections.abc import Sequence

from formats.plan import Bucket
from gplan.planning.backends import MAX_NOISE

LEAST_GAIN = 0.01
"""Of a replay: what is gained by less is left as it is, so that ladders repeat."""


def outdone_sizes(ladder: Sequence[Bucket]) -> tuple[int, ...]:
    """Sizes of buckets that take more time than a larger one that is kept, by more than both measurements spread
    (`MAX_NOISE` at most) and by `LEAST_GAIN`. Both were timed full; padding rows take no more than real ones.

    Args:
        ladder: ascending, with the times of their graphs.
    """
    outdone: list[int] = []
    kept: list[Bucket] = []
    for bucket in reversed(ladder):
        if any(_beats(larger, bucket) for larger in kept):
            outdone.append(bucket.size)
        else:
            kept.append(bucket)
    return tuple(reversed(outdone))


def _beats(larger: Bucket, bucket: Bucket) -> bool:
    assert larger.graph is not None
    assert bucket.graph is not None
    gain = bucket.graph.median_us - larger.graph.median_us
    noise = min(MAX_NOISE * bucket.graph.median_us, bucket.graph.spread_us + larger.graph.spread_us)
    return gain > max(noise, LEAST_GAIN * bucket.graph.median_us)
