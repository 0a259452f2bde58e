"""What was measured of a phase: times of steps, and what a step takes beside what its size says.

Evidence only: nothing here is acted on by serve, and no two runs measure the same. What was decided on it is `plan`'s.
"""

from __future__ import annotations

from formats.record import Record


class Timing(Record, frozen=True, kw_only=True):
    """Microseconds of one thing, measured `runs` times. `spread_us` is the distance between the quartiles."""

    median_us: float
    spread_us: float
    runs: int


class SizeTiming(Record, frozen=True, kw_only=True):
    """Times of a size that is no bucket: measured to choose the ladder, or to know what eager steps take."""

    size: int
    graph: Timing | None = None
    eager: Timing | None = None


class Prediction(Record, frozen=True, kw_only=True):
    """A replay of a size that was read off its neighbours before it was measured."""

    size: int
    predicted_us: float
    measured_us: float


class ContextTiming(Record, frozen=True, kw_only=True):
    """A step of `size`, of whose requests `decodes` decode after `context` cached tokens each; without any, it is one
    prompt's after `context` of its tokens."""

    size: int
    decodes: int
    context: int
    timing: Timing


class Costs(Record, frozen=True, kw_only=True):
    """What a step of a phase takes beside what its size says.

    Attributes:
        context: cached tokens of each request when sizes were timed.
        contexts: steps timed at this and other contexts in turns, from which the figures below come.
        cached_us: (requests, microseconds) ascending: per cached token that a request which decodes reads, in a step of
            so many requests. The fewer they are, the less of the device reads for each.
        rows_us: (requests, microseconds) ascending: what so many requests take, at `context`, beside as many rows of
            padding. Only differences have been measured: the first is what its reading takes. Empty where nothing is
            padded.
        pair_us: per prompt token and token before it, cached or in the same step: what attention compares.
        beyond_us: (requests, microseconds) ascending: what a step takes beyond its forward (sampling, and what the host
            does while the device waits) as steps follow each other.
        host_us: what the host does from a result to the next step's start; hidden where a step runs meanwhile.
    """

    context: int = 0
    contexts: tuple[ContextTiming, ...] = ()
    cached_us: tuple[tuple[int, float], ...] = ()
    rows_us: tuple[tuple[int, float], ...] = ()
    pair_us: float = 0.0
    beyond_us: tuple[tuple[int, float], ...] = ()
    host_us: float = 0.0
