"""Measures a model on this machine: bytes and microseconds of what a plan decides about. Decides nothing itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from formats.plan import Bucket, Timing
from gplan.core import Batch, Phase, ShapeKey
from gplan.graphs.admission import Verdict
from gplan.graphs.assembly import Captured
from gplan.graphs.capture.base import GraphDevice
from gplan.graphs.executor import Executor
from gplan.graphs.synthetic import EVERYTHING, BatchMaker

MAX_CONTEXT = 1024
"""Tokens each request has behind it when decode is timed, where the maximum length allows."""

EAGER = Verdict(None, "measured eagerly")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long one figure may take: at least `min_runs` (2 or more), then until `seconds` have passed or `max_runs`."""

    min_runs: int = 3
    max_runs: int = 20
    seconds: float = 0.3


def time_call(device: GraphDevice, fn: Callable[[], object], patience: Patience) -> Timing:
    """Times `fn` after a run that is thrown away; of what takes longer than all the patience, the first run counts."""
    first = device.time_us(fn, 1)[0]
    affordable = int(patience.seconds * 1e6 / max(first, 1.0))
    runs = min(patience.max_runs, max(patience.min_runs, affordable))
    samples = [first, *device.time_us(fn, runs - 1)] if affordable == 0 else device.time_us(fn, runs)
    quartiles = statistics.quantiles(samples, n=4)
    return Timing(median_us=statistics.median(samples), spread_us=quartiles[2] - quartiles[0], runs=runs)


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

    def _step(self, batch: Batch) -> None:
        self.executor.collect(self.executor.launch(batch))

    def _largest(self) -> tuple[Batch, Batch]:
        return (
            self.batches.decode(self.limits.max_batch, self.context, EVERYTHING),
            self.batches.ragged(self.limits.chunk, self.limits.max_batch, params=EVERYTHING),
        )

    @torch.no_grad()
    def bucket(self, captured: Captured) -> Bucket:
        """Times one captured key, replayed and at the same padded shape eagerly."""
        key, runner = captured.key, self.executor.runner(captured.key.phase)
        return Bucket(
            size=key.size,
            width=key.width,
            variant=key.variant,
            graph=self.replay(key),
            eager=self.eager(key.phase, key.size),
            graph_bytes=captured.pool_bytes,
            capture_ms=captured.capture_ms,
            num_segments=runner.backend.num_segments(key),
        )

    @torch.no_grad()
    def eager(self, phase: Phase, size: int) -> Timing:
        """Times an eager step of `size`, without padding."""
        runner, batch = self.executor.runner(phase), self.batch(phase, size)
        return time_call(self.executor.device, lambda: runner.execute(batch, EAGER), self.patience)

    @torch.no_grad()
    def replay(self, key: ShapeKey) -> Timing:
        """Times a replay of `key`."""
        runner, batch = self.executor.runner(key.phase), self.batch(key.phase, key.size)
        verdict = Verdict(key)
        return time_call(self.executor.device, lambda: runner.execute(batch, verdict), self.patience)
