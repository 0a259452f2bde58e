"""Measures a model on this machine: bytes and microseconds of what a plan decides about. Decides nothing itself."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from formats.measurements import Timing
from formats.plan import Bucket
from gplan.core import Batch, Phase, ShapeKey
from gplan.graphs.admission import Verdict
from gplan.graphs.assembly import Captured
from gplan.graphs.capture.base import GraphDevice
from gplan.graphs.executor import Executor, Step
from gplan.graphs.synthetic import DRAWN, EVERYTHING, GREEDY, BatchMaker
from gplan.graphs.variants import SAMPLED, draw_of

MAX_CONTEXT = 1024
"""Tokens each request has behind it when decode is timed, where the maximum length allows."""

LEAST_STEPS, MOST_STEPS = 4, 16
"""Served steps that follow each other, timed together."""

FORWARDS_A_TURN = 3

EAGER = Verdict(None, "measured eagerly")

EAGER_PARTS = 3
"""Eager steps are timed with so small a part of the patience: they are slow, and only large differences count."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long one figure may take: at least `min_runs` (2 or more), then until `seconds` have passed or `max_runs`.

    Attributes:
        turns: figures that are compared take their runs in so many turns: what slows a machine for a while, as others
            on it do, then slows all of them.
    """

    min_runs: int = 3
    max_runs: int = 20
    seconds: float = 0.3
    turns: int = 1

    def divided(self, parts: int) -> Patience:
        """For figures that less hangs on."""
        return Patience(self.min_runs, max(self.min_runs, self.max_runs // parts), self.seconds / parts, self.turns)

    @property
    def of_a_turn(self) -> Patience:
        """Its part of the runs, at least one."""
        least, most = (-(-runs // self.turns) for runs in (self.min_runs, self.max_runs))
        return Patience(least, most, self.seconds / self.turns)

    def is_over(self, runs: int, seconds: float) -> bool:
        return runs >= self.max_runs or (runs >= self.min_runs and seconds >= self.seconds)


def run_times(device: GraphDevice, fn: Callable[[], object], patience: Patience) -> list[float]:
    """Microseconds of runs of `fn` after one that is thrown away; of what takes longer than all the patience, the first
    run counts."""
    first = device.time_us(fn, 1)[0]
    affordable = int(patience.seconds * 1e6 / max(first, 1.0))
    runs = min(patience.max_runs, max(patience.min_runs, affordable))
    return [first, *device.time_us(fn, runs - 1)] if affordable == 0 else device.time_us(fn, runs)


def time_in_turns(device: GraphDevice, fns: Sequence[Callable[[], object]], patience: Patience) -> list[Timing]:
    """Times several functions over the same stretch of time."""
    found: list[list[float]] = [[] for _ in fns]
    for _ in range(patience.turns):
        for fn, samples in zip(fns, found, strict=True):
            samples += run_times(device, fn, patience.of_a_turn)
    return [timing_of(samples) for samples in found]


def timing_of(samples: Sequence[float]) -> Timing:
    """Median and spread of at least two times."""
    quartiles = statistics.quantiles(samples, n=4)
    return Timing(median_us=statistics.median(samples), spread_us=quartiles[2] - quartiles[0], runs=len(samples))


def in_turns(one: Callable[[], float], other: Callable[[], float], patience: Patience) -> tuple[Timing, Timing]:
    """Two things that tell what they took, one after the other again and again; the first pair is thrown away."""
    one(), other()
    pairs: list[tuple[float, float]] = []
    started = time.perf_counter()
    while len(pairs) < 2 or not patience.is_over(len(pairs), time.perf_counter() - started):
        pairs.append((one(), other()))
    first, second = zip(*pairs, strict=True)
    return timing_of(first), timing_of(second)


class Profiler:
    """Runs made-up batches through an executor that was assembled as serve will assemble it."""

    def __init__(self, executor: Executor, vocab_size: int, patience: Patience) -> None:
        parts = executor.parts
        self.executor, self.limits, self.patience = executor, parts.limits, patience
        self.batches = BatchMaker(parts.limits, parts.kv_pool.num_pages, vocab_size)
        self.context = min(MAX_CONTEXT, parts.limits.max_len - 1)

    def batch(self, phase: Phase, size: int) -> Batch:
        """The batch that is timed: decode at the stated context, prefill from nothing."""
        if phase is Phase.DECODE:
            return self.batches.decode(size, self.context)
        return self.batches.prefill(size)

    @torch.no_grad()
    def warm_up_eager(self) -> None:
        """Runs the largest eager steps once, so that first calls are not measured."""
        for batch in self._largest():
            self._step(batch)

    @torch.no_grad()
    def activation_peak(self) -> dict[Phase, int]:
        """Most bytes that an eager step allocates: decode at the largest batch, prefill at the chunk, both with all of
        sampling."""
        return {batch.phase: self.executor.device.measure_peak(partial(self._step, batch)) for batch in self._largest()}

    @torch.no_grad()
    def served_peak(self) -> int:
        """Most bytes outside graphs that a step takes as it is served: the largest steps, and the largest that run
        eagerly, all with all of sampling."""
        batches = [*self._largest(), *self._largest_eager()]
        return max(self.executor.device.measure_peak(partial(self._step, batch)) for batch in batches)

    def _largest_eager(self) -> Iterator[Batch]:
        for runner in (self.executor.decode, self.executor.prefill):
            sizes = [n for n in range(1, runner.setup.max_size + 1) if runner.verdict_at(n).key is None]
            if sizes and runner.phase is Phase.DECODE:
                yield self.batches.decode(sizes[-1], self.context, EVERYTHING)
            elif sizes:
                yield self.batches.ragged(sizes[-1], min(sizes[-1], self.limits.max_batch), params=EVERYTHING)

    def _step(self, batch: Batch) -> None:
        self.executor.collect(self.executor.launch(batch))

    def _largest(self) -> tuple[Batch, Batch]:
        return (
            self.batches.decode(self.limits.max_batch, self.context, EVERYTHING),
            self.batches.ragged(self.limits.chunk, self.limits.max_batch, params=EVERYTHING),
        )

    @torch.no_grad()
    def buckets(self, captured: Sequence[Captured], progress: Callable[[int, int], None]) -> tuple[Bucket, ...]:
        """Times captured keys in turns, replayed and at the same padded shapes eagerly.

        Args:
            progress: how much of it is done, and all there is.
        """
        device, patience, turns = self.executor.device, self.patience.of_a_turn, self.patience.turns
        replays: dict[ShapeKey, list[float]] = defaultdict(list)
        eager: dict[tuple[Phase, int], list[float]] = defaultdict(list)
        shapes = {(entry.key.phase, entry.key.size): entry.key for entry in reversed(captured)}
        for turn in range(turns):
            for index, key in enumerate(entry.key for entry in captured):
                progress(turn * len(captured) + index, turns * len(captured))
                replays[key] += run_times(device, self._run(self._full_batch(key), Verdict(key)), patience)
                # Variants of a bucket have one eager time.
                if shapes[key.phase, key.size] is key:
                    parts = self.patience.divided(EAGER_PARTS).of_a_turn
                    eager[key.phase, key.size] += run_times(
                        device, self._run(self.batch(key.phase, key.size), EAGER), parts
                    )
        progress(turns * len(captured), turns * len(captured))
        return tuple(
            Bucket(
                size=entry.key.size,
                width=entry.key.width,
                variant=entry.key.variant,
                graph=timing_of(replays[entry.key]),
                eager=timing_of(eager[entry.key.phase, entry.key.size]),
                graph_bytes=entry.pool_bytes,
                capture_ms=entry.capture_ms,
                num_segments=self.executor.runner(entry.key.phase).backend_of(entry.key).num_segments(entry.key),
            )
            for entry in captured
        )

    def eager(self, phase: Phase, size: int) -> Timing:
        """Times an eager step of `size`, without padding."""
        return self.forward(self.batch(phase, size), EAGER, self.patience.divided(EAGER_PARTS))

    def replay(self, key: ShapeKey) -> Timing:
        """Times a replay of `key`."""
        return self.forward(self._full_batch(key), Verdict(key))

    def _full_batch(self, key: ShapeKey) -> Batch:
        """What a replay of `key` is timed with."""
        if draw_of(key) == SAMPLED:
            return self.batches.decode(key.size, self.context, DRAWN)
        slots = self.executor.runner(key.phase).slots_of(key) or self.limits.max_batch
        return self.batch(key.phase, min(key.size, slots * (self.limits.max_len - 1)))

    @torch.no_grad()
    def forward(self, batch: Batch, verdict: Verdict | None = None, patience: Patience | None = None) -> Timing:
        """Times the forward of a batch: device time, without what samples its tokens.

        Args:
            verdict: how it runs; as serve would run it, with its tokens drawn outside, unless given.
        """
        return timing_of(run_times(self.executor.device, self._run(batch, verdict), patience or self.patience))

    @torch.no_grad()
    def forwards(self, batches: Sequence[Batch], padded: Sequence[Batch] = ()) -> list[Timing]:
        """Times the forwards of several batches in turns, each as serve would run it, and of `padded` ones, run as the
        first is."""
        first = self.executor.runner(batches[0].phase).verdict_at(batches[0].size)
        runs = [*(self._run(batch) for batch in batches), *(self._run(batch, first) for batch in padded)]
        return time_in_turns(self.executor.device, runs, self.patience)

    def is_replayed(self, batch: Batch) -> bool:
        return self.executor.runner(batch.phase).verdict_at(batch.size).key is not None

    def _run(self, batch: Batch, verdict: Verdict | None = None) -> Callable[[], Tensor]:
        """The forward of a batch; as serve would run it unless `verdict` is given, with its tokens drawn outside."""
        runner = self.executor.runner(batch.phase)
        # A decode variant that draws would be timed with its draw.
        how = verdict or (runner.verdict_at(batch.size) if batch.phase is Phase.DECODE else runner.can_run(batch))
        return partial(runner.execute, batch, how)

    @torch.no_grad()
    def cadence_and_forward_us(self, batches: Sequence[Batch], like: Batch) -> tuple[float, float]:
        """Microseconds from one result to the next where `batches` follow each other as they do in serving, and those
        of the forward of `like`: in turns."""
        gaps: list[float] = []
        forwards: list[float] = []
        patience = self.patience.of_a_turn
        for _ in range(self.patience.turns):
            gaps += self._gaps(batches, self.executor.result_lag, patience)
            forwards += run_times(self.executor.device, self._run(like), patience)
        return statistics.median(gaps), statistics.median(forwards)

    @torch.no_grad()
    def latency_us(self, batch: Batch) -> float:
        """Microseconds from launching a step on an idle device to its result."""
        return statistics.median(self._gaps([batch], 0, self.patience))

    @torch.no_grad()
    def base_and_draw(self, base: ShapeKey, special: ShapeKey) -> tuple[Timing, Timing]:
        """Times a served decode step, result included, drawn outside the graph of `base` and in that of `special`: in
        turns, over steps that follow each other."""
        params = DRAWN if draw_of(special) == SAMPLED else GREEDY
        first_us = self.latency_us(self.batches.decode(base.size, self.context, params))
        steps = min(MOST_STEPS, max(LEAST_STEPS, int(self.patience.seconds * 1e6 / first_us)))
        context = max(0, min(self.context, self.limits.max_len - steps))
        run = self.batches.decode_run(base.size, context, min(steps, self.limits.max_len - context), params)
        one, other = Verdict(base), Verdict(special)
        return in_turns(lambda: self._served_us(run, one), lambda: self._served_us(run, other), self.patience)

    @torch.no_grad()
    def base_and_special(self, base: ShapeKey, special: ShapeKey) -> tuple[Timing, Timing]:
        """Times the forward of one batch replayed from either key: in turns."""
        device, runner = self.executor.device, self.executor.runner(base.phase)
        slots = runner.slots_of(special) or self.limits.max_batch
        batch = self.batch(base.phase, min(base.size, slots * (self.limits.max_len - 1)))

        def forward_us(key: ShapeKey) -> float:
            return statistics.median(device.time_us(lambda: runner.execute(batch, Verdict(key)), FORWARDS_A_TURN))

        return in_turns(lambda: forward_us(base), lambda: forward_us(special), self.patience)

    def _served_us(self, run: Sequence[Batch], verdict: Verdict) -> float:
        """Of each of some steps that follow each other, launched as the engine does."""
        under_way: deque[Step] = deque()
        started = time.perf_counter()
        for batch in run:
            under_way.append(self.executor.launch(batch, verdict=verdict))
            if len(under_way) > self.executor.result_lag:
                self.executor.collect(under_way.popleft())
        while under_way:
            self.executor.collect(under_way.popleft())
        return (time.perf_counter() - started) * 1e6 / len(run)

    def _gaps(self, batches: Sequence[Batch], lag: int, patience: Patience) -> list[float]:
        under_way: deque[Step] = deque()
        results: list[float] = []
        following = itertools.cycle(batches)
        started = time.perf_counter()
        while len(results) < 2 or not patience.is_over(len(results) - 1, time.perf_counter() - started):
            under_way.append(self.executor.launch(next(following)))
            if len(under_way) > lag:
                self.executor.collect(under_way.popleft())
                results.append(time.perf_counter())
        while under_way:
            self.executor.collect(under_way.popleft())
        return [(after - before) * 1e6 for before, after in pairwise(results)]
