"""What steps take beside what their size says: cached tokens read, tokens compared, sampling, and the host's part.

Sizes are timed at one context; serving sees all. So a few steps are timed at other contexts, and slopes fitted to them:
per cached token that a decoding request reads, by how many decode, and per pair of tokens that a prompt compares. Rows
of padding read nothing, so a step's slope is that of its requests, not of its bucket; what they spare is timed in
buckets four times as large as the step. What a step takes
beyond its forward is the difference between steps that follow each other as in serving and their forwards alone. All of
these are differences, so what is compared is timed in turns: a machine that others use is not as fast now as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from formats.measurements import ContextTiming, Costs, Timing
from formats.plan import Limits
from gplan.core import Batch, Phase, Request, SamplingParams
from gplan.planning.profiler import Profiler
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.times import pairs_timed, prompt_pairs

LONGEST_CONTEXT = 4096
"""Tokens before a prompt's chunk that are timed at most."""

APART = 4
"""How much larger than the one before a decode step is whose slope is measured."""

RUN = 16
"""Decode steps that follow each other, with requests of unlike lengths as in serving: sizes are timed with equal ones,
over and over, which attention may find easier."""

COUNTED_STEPS = 64
"""Decode steps over which the scheduler's own time is averaged."""

Point = tuple[float, float]


def measure_costs(profiler: Profiler, phase: Phase, forward_us: Mapping[int, float]) -> Costs:
    """Measures a phase's costs.

    Args:
        forward_us: times of sizes as the phase runs them, replayed or eagerly, at the profiler's context.
    """
    if phase is Phase.DECODE:
        return _decode_costs(profiler, forward_us)
    return _prefill_costs(profiler, forward_us)


def _decode_costs(profiler: Profiler, forward_us: Mapping[int, float]) -> Costs:
    sizes, most = sorted(forward_us), profiler.context
    timed, cached_us, rows_us = _contexts_and_padding(profiler, _apart(sizes))
    context = max(1, min(most, profiler.limits.max_len - RUN))
    steps = min(RUN, profiler.limits.max_len - context)
    around = []
    for size in _ends(sizes):
        run = profiler.batches.uneven_run(size, context, steps)
        fewer = size * most - sum(chunk.start for chunk in run[0].chunks)
        around.append(_Around(size, run, profiler.batches.decode(size, most), cached_us[size] * fewer))
    beyond, host = _around(profiler, around)
    return Costs(
        context=most,
        contexts=_ordered(timed),
        cached_us=tuple(cached_us.items()),
        rows_us=tuple(rows_us.items()),
        beyond_us=beyond,
        host_us=host,
    )


def _contexts_and_padding(
    profiler: Profiler, sizes: Sequence[int]
) -> tuple[list[ContextTiming], dict[int, float], dict[int, float]]:
    """Steps of each size at several contexts; by size, what a cached token takes, and what so many rows take beside as
    many of padding: the requests of the size before are replayed from each size's bucket too."""
    batches, most = profiler.batches, profiler.context
    contexts = [most, *_contexts(most, profiler.limits)]
    timed, cached_us, rows_us = [], dict[int, float](), dict[int, float]()
    before = 0
    for size in sizes:
        steps = [batches.decode(size, context) for context in contexts]
        padded = [batches.decode(before, most)] if before and profiler.is_replayed(steps[0]) else []
        timings = profiler.forwards(steps, padded)
        points = []
        for context, timing in zip(contexts, timings, strict=False):
            timed.append(ContextTiming(size=size, decodes=size, context=context, timing=timing))
            points.append((size * (context - most), timing.median_us - timings[0].median_us))
        cached_us[size] = min(slope(points), timings[0].median_us / (size * most))
        if padded:
            spared = max(0.0, timings[0].median_us - timings[-1].median_us)
            rows_us = rows_us or {before: before * most * cached_us[before]}
            rows_us[size] = rows_us[before] + spared
        before = size
    return timed, cached_us, rows_us


def _apart(sizes: Sequence[int]) -> list[int]:
    """Of ascending sizes the first, those at least `APART` times the one before, and the last."""
    chosen = [sizes[0]]
    for size in sizes:
        if size >= APART * chosen[-1]:
            chosen.append(size)
    return [*chosen, *_ends(sizes)[1:]] if chosen[-1] != sizes[-1] else chosen


def _ends(sizes: Sequence[int]) -> list[int]:
    return sorted({sizes[0], sizes[-1]})


def _contexts(context: int, limits: Limits) -> list[int]:
    """Other contexts than `context`, shorter and longer as far as lengths allow."""
    return sorted({max(1, context // 4), min(2 * context, limits.max_len - 1)} - {context})


def _prefill_costs(profiler: Profiler, forward_us: Mapping[int, float]) -> Costs:
    limits, batches = profiler.limits, profiler.batches
    timed: list[ContextTiming] = []
    pair_us = 0.0
    size = min(_largest(forward_us, limits.max_len // 2), limits.max_len // 2)
    longest = min(LONGEST_CONTEXT, limits.max_len - 1 - size)
    if longest > 0:
        points, contexts = [], sorted({0, -(-longest // 2), longest})
        timings = profiler.forwards([batches.prefill(size, context) for context in contexts])
        for context, timing in zip(contexts, timings, strict=True):
            timed.append(ContextTiming(size=size, decodes=0, context=context, timing=timing))
            points.append((size * context, timing.median_us - timings[0].median_us))
        pair_us = min(slope(points), most_pair_us(forward_us, limits.max_len))
    cached_us: tuple[tuple[int, float], ...] = ()
    for mixed, plain in _mixed(profiler, forward_us):
        timed.append(mixed)
        spared = prompt_pairs(0, mixed.size) - prompt_pairs(0, mixed.size - mixed.decodes)
        added = mixed.timing.median_us - plain.median_us + pair_us * spared
        cached_us = ((mixed.decodes + 1, slope([(mixed.decodes * mixed.context, added)])),)
    one, rows = _largest(forward_us, limits.max_len - 1), _most_requests(profiler)
    alone, many = batches.prefill(one), batches.ragged(_smallest(forward_us, rows), rows)
    around = [_Around(n, [batch], batch, 0.0) for n, batch in ((1, alone), (rows, many))[:rows]]
    beyond, host = _around(profiler, around)
    return Costs(
        context=0, contexts=_ordered(timed), cached_us=cached_us, pair_us=pair_us, beyond_us=beyond, host_us=host
    )


def most_pair_us(forward_us: Mapping[int, float], max_len: int) -> float:
    """With which all that the largest size takes beyond the quickest would be for comparing tokens: times that spread
    widely over few tokens can say more."""
    largest, quickest = max(forward_us), min(forward_us.values())
    known = forward_us[largest] - (quickest if len(forward_us) > 1 else 0.0)
    return known / pairs_timed(largest, max_len)


def _mixed(profiler: Profiler, forward_us: Mapping[int, float]) -> list[tuple[ContextTiming, Timing]]:
    """A step in which a prompt shares with as many decodes as there may be, beside one of prompts alone; none where it
    cannot."""
    rows, context = _most_requests(profiler), profiler.context
    size = _smallest(forward_us, 2 * rows)
    decodes = min(rows - 1, size - 1)
    if decodes < 1 or size - decodes >= profiler.limits.max_len:
        return []
    batches = profiler.batches
    timing, alone = profiler.forwards([batches.mixed(size, decodes, context), batches.prefill(size)])
    return [(ContextTiming(size=size, decodes=decodes, context=context, timing=timing), alone)]


def _most_requests(profiler: Profiler) -> int:
    """Of a prefill step that is run as its size says."""
    slots = profiler.executor.prefill.setup.slot_limit
    return min(slots or profiler.limits.max_batch, profiler.limits.max_batch)


def _largest(sizes: Mapping[int, float], bound: int) -> int:
    """The largest size in the lower half of those measured that is within `bound`; the smallest where none is."""
    ordered = sorted(sizes)
    return max((size for size in ordered[: len(ordered) // 2 + 1] if size <= bound), default=ordered[0])


def _smallest(sizes: Mapping[int, float], bound: int) -> int:
    """The smallest size of at least `bound`; the largest where none is."""
    return min((size for size in sizes if size >= bound), default=max(sizes))


@dataclass(frozen=True, slots=True)
class _Around:
    """Steps that follow each other, of so many requests, and a batch whose forward takes `fewer_us` more than theirs by
    what is known of contexts."""

    requests: int
    steps: Sequence[Batch]
    like: Batch
    fewer_us: float


def _around(profiler: Profiler, runs: Sequence[_Around]) -> tuple[tuple[tuple[int, float], ...], float]:
    """By requests, what steps take beyond their forwards; and what the host does before one, which another may hide."""
    beyond, idle = {}, []
    for run in runs:
        cadence, forward = profiler.cadence_and_forward_us(run.steps, run.like)
        beyond[run.requests] = max(0.0, cadence - (forward - run.fewer_us))
        if profiler.executor.result_lag:
            idle.append(max(0.0, profiler.latency_us(run.steps[0]) - max(cadence, forward - run.fewer_us)))
    host = (sum(idle) / len(idle) if idle else 0.0) + scheduling_us(profiler.limits)
    return tuple(sorted(beyond.items())), host


def scheduling_us(limits: Limits) -> float:
    """What the scheduler takes for a decode step of the largest batch, its results taken in."""
    tokens = min(COUNTED_STEPS, limits.max_len - 1)
    pages = -(-limits.max_len // limits.page_size)
    scheduler = Scheduler(limits, 1 + limits.max_batch * pages)
    for index in range(limits.max_batch):
        scheduler.add(Request(str(index), 1, [0], SamplingParams(max_tokens=tokens)))
    steps, started = 0, time.perf_counter()
    while (batch := scheduler.schedule()) is not None:
        scheduler.update(batch, [1] * len(batch.chunks))
        steps += 1
    return (time.perf_counter() - started) * 1e6 / steps


def slope(points: Sequence[Point]) -> float:
    """Of the line through the origin that is nearest to the points (least squares), 0 where it would fall."""
    squares = sum(x * x for x, _ in points)
    return max(0.0, sum(x * y for x, y in points) / squares) if squares else 0.0


def _ordered(timed: Sequence[ContextTiming]) -> tuple[ContextTiming, ...]:
    return tuple(sorted(timed, key=lambda entry: (entry.size, entry.decodes, entry.context)))
