"""Sizes that run eagerly although a bucket covers them, because padding them to it costs more than eager execution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from formats.plan import Bucket
from gplan.planning.backends import MAX_NOISE
from gplan.scheduling.times import interpolate

LEAST_GAIN = 0.03
"""Less is not worth an eager step: beside a running server the host has other work than launching kernels."""


LEAST_WORK = 1.5
"""Times the least eager time, of which most is launching: below that the host and not the device sets eager times."""


def device_bound_us(eager_us: Iterable[float]) -> float:
    """What an eager step takes at least where the device sets its time, given eager times of some sizes."""
    return LEAST_WORK * min(eager_us, default=0.0)


def cheaper_eagerly(
    ladder: Sequence[Bucket], eager_us: Mapping[int, float], rows_us: Sequence[float]
) -> tuple[tuple[int, int], ...]:
    """Ranges [first, last] of sizes whose eager time, read off the measured sizes beside them, is below the replay of
    the bucket that covers them by more than both measurements spread (`MAX_NOISE` at most), and by `LEAST_GAIN`.
    Only where the device and not the host sets the eager time (`device_bound_us`).

    Sizes that are a bucket are never among them: the backend as a whole was chosen for those.

    Args:
        eager_us: at every measured size, those of the ladder among them.
        rows_us: of each size, what its real rows took of its time; padding rows take none of it.
    """
    least_us = device_bound_us(eager_us.values())
    found: list[tuple[int, int]] = []
    below = 0
    for bucket in ladder:
        assert bucket.graph is not None
        noise = min(MAX_NOISE * bucket.graph.median_us, bucket.graph.spread_us + bucket.eager.spread_us)
        bound = bucket.graph.median_us - max(noise, LEAST_GAIN * bucket.graph.median_us) - rows_us[bucket.size]
        between = range(below + 1, bucket.size)
        cheaper = [size for size in between if least_us <= interpolate(eager_us, size) < bound + rows_us[size]]
        found += _ranges(cheaper)
        below = bucket.size
    return tuple(found)


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for size in sizes:
        if ranges and ranges[-1][1] == size - 1:
            ranges[-1] = (ranges[-1][0], size)
        else:
            ranges.append((size, size))
    return ranges
