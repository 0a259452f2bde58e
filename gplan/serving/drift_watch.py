"""Whether what is served still is what was planned for: times of replays, sizes of steps, bytes of memory.

Lives in the HTTP process and is told of every step. It changes nothing: it keeps gauges, and logs one line when a limit
is passed, with the command that makes a plan anew; of one kind, not again for an hour.

Of times, the median of the last `WINDOW` timed replays of a bucket is compared with the plan's. A step that reads more
of the KV pool than the plan's did is granted what the plan measured for that, and left out where it measured nothing.

Of traffic, the distance is the total variation between the shares of steps by size, served and planned for: half the
sum of their differences, 0 for the same shares and 1 for none in common. Sizes are taken together by half of the way
from one bucket to the next.
"""

from __future__ import annotations

import logging
import shlex
import statistics
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Gauge

from formats.measurements import Timing
from formats.plan import PhasePlan, Plan, bucket_key
from gplan.scheduling.times import interpolate
from gplan.serving.protocol import LedgerActual, StepStats

log = logging.getLogger("gplan.drift")

WINDOW = 32
"""Timed replays of a bucket whose median counts."""

MIN_SLOWER = 0.25
SPREADS = 3
"""A bucket is slower than planned where its median is beyond the planned one by more than a quarter of it, and by more
than three times the planned spread."""

MIN_STEPS = 4096
FADE_STEPS = 65536
MAX_DISTANCE = 0.25
"""Traffic is another where, over 4,096 steps of a phase or more, its distance from the plan's is more than this. When
65,536 steps are counted, all counts are halved."""

EVALUATE_EVERY = 256
QUIET_S = 3600.0


class DriftWatch:
    """Of one served plan.

    Args:
        path: of the plan's file, for the commands that are logged.
        times_replays: whether what is reported as a replay is one.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        plan: Plan,
        registry: CollectorRegistry,
        *,
        path: str = "PLAN",
        times_replays: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        phases = (plan.decode, plan.prefill)
        self._path, self._checkpoint, self._now = path, plan.model.source, now
        self._timings = dict(_timings(phases)) if times_replays else {}
        self._context, self._cached_us = plan.decode.costs.context, dict(plan.decode.costs.cached_us)
        self._replays: Mapping[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._traffic: Mapping[str, _Shares] = {
            str(phase.phase): _Shares(phase, steps)
            for phase, steps in zip(phases, (plan.workload.decode_steps, plan.workload.prefill_steps), strict=True)
            if steps
        }
        self._is_beyond: dict[str, bool] = {}
        self._said_at: dict[str, float] = {}
        self._ratio = Gauge(
            "gplan_replay_time_ratio", "Median of timed replays over the planned.", ["key"], registry=registry
        )
        self._distance = Gauge(
            "gplan_traffic_distance", "Total variation, by size, from the plan's.", ["phase"], registry=registry
        )
        self._overrun = Gauge(
            "gplan_ledger_overrun_bytes", "Bytes beyond the planned; below 0, unspent.", ["row"], registry=registry
        )
        self._drift = Gauge(
            "gplan_drift", "1 where a limit is passed: times, traffic or ledger.", ["kind", "what"], registry=registry
        )

    def on_step(self, step: StepStats) -> None:
        if step.replay_us is not None and step.key in self._timings:
            self._on_replay(step, step.replay_us)
        shares = self._traffic.get(step.phase)
        if shares is not None and shares.count(step.size):
            self._on_traffic(step.phase, shares.distance())

    def on_ledger(self, rows: Sequence[LedgerActual], overrun: Sequence[str]) -> None:
        """
        Args:
            overrun: names of the rows beyond tolerance.
        """
        for row in rows:
            if row.actual_bytes is None:
                continue
            self._overrun.labels(row.name).set(row.actual_bytes - row.planned_bytes)
            self._judge(
                "ledger",
                row.name,
                row.name in overrun,
                f"ledger row {row.name} holds {row.actual_bytes:,} bytes, planned {row.planned_bytes:,}",
                self._measure_again,
            )

    def _on_replay(self, step: StepStats, replay_us: float) -> None:
        granted_us = self._granted_us(step)
        if granted_us is None:
            return
        window, planned = self._replays[step.key], self._timings[step.key]
        window.append(replay_us - granted_us)
        if len(window) < WINDOW:
            return
        median = statistics.median(window)
        self._ratio.labels(step.key).set(median / planned.median_us)
        allowed = max(MIN_SLOWER * planned.median_us, SPREADS * planned.spread_us)
        self._judge(
            "times",
            step.key,
            median - planned.median_us > allowed,
            f"a replay of {step.key} takes {median / 1e3:.3g} ms, planned {planned.median_us / 1e3:.3g} ms "
            f"with a spread of {planned.spread_us:.3g} µs",
            self._measure_again,
        )

    def _granted_us(self, step: StepStats) -> float | None:
        """What a step may take beyond its bucket's time, for the tokens that it reads; None where that is not known."""
        if step.phase != "decode":
            return None if step.cached_tokens else 0.0
        timed = (step.size + step.padding_rows) * self._context
        if not self._cached_us:
            return 0.0 if step.cached_tokens <= timed else None
        timed_us = timed * interpolate(self._cached_us, step.size + step.padding_rows)
        return max(0.0, step.cached_tokens * interpolate(self._cached_us, step.size) - timed_us)

    def _on_traffic(self, phase: str, distance: float) -> None:
        self._distance.labels(phase).set(distance)
        self._judge(
            "traffic",
            phase,
            distance > MAX_DISTANCE,
            f"{phase} steps have other sizes than planned for: total variation {distance:.2f}, limit {MAX_DISTANCE}",
            f"gplan plan --from {shlex.quote(self._path)} --workload TRACE -o NEW.gplan",
        )

    @property
    def _measure_again(self) -> str:
        return f"gplan plan {shlex.quote(self._checkpoint)} -o NEW.gplan"

    def _judge(self, kind: str, what: str, is_beyond: bool, sentence: str, command: str) -> None:
        """Sets the gauge; of a kind that begins to be beyond its limit, logs one line, at most once in `QUIET_S`."""
        name = f"{kind} {what}"
        if is_beyond == self._is_beyond.get(name, False):
            return
        self._is_beyond[name] = is_beyond
        self._drift.labels(kind, what).set(int(is_beyond))
        if is_beyond and self._now() - self._said_at.get(kind, -QUIET_S) >= QUIET_S:
            self._said_at[kind] = self._now()
            log.warning("drift: %s; plan again: %s", sentence, command)


class _Shares:
    """Shares of steps by size, planned and served."""

    def __init__(self, phase: PhasePlan, planned: Sequence[tuple[int, int]]) -> None:
        sizes = sorted({bucket.size for bucket in phase.ladder}) or [phase.max_size]
        middles = [(low + high) // 2 for low, high in pairwise([0, *sizes])]
        edges = sorted({*sizes, *middles})
        self._bin = [bisect_left(edges, size) for size in range(phase.max_size + 1)]
        self._planned = self._counted(planned)
        self._served = [0.0] * len(self._planned)
        self._num_steps, self._num_seen = 0.0, 0

    def _counted(self, steps: Sequence[tuple[int, int]]) -> list[float]:
        counts = [0.0] * (max(self._bin) + 1)
        for size, number in steps:
            counts[self._bin[size]] += number
        return counts

    def count(self, size: int) -> bool:
        """Counts a step; whether it is time to compare."""
        self._served[self._bin[size]] += 1
        self._num_steps += 1
        self._num_seen += 1
        if self._num_steps >= FADE_STEPS:
            self._served = [number / 2 for number in self._served]
            self._num_steps /= 2
        return self._num_steps >= MIN_STEPS and self._num_seen % EVALUATE_EVERY == 0

    def distance(self) -> float:
        planned, served = sum(self._planned), self._num_steps
        pairs = zip(self._planned, self._served, strict=True)
        return sum(abs(before / planned - now / served) for before, now in pairs) / 2


def _timings(phases: Sequence[PhasePlan]) -> list[tuple[str, Timing]]:
    buckets = [(bucket_key(phase.phase, bucket), bucket.graph) for phase in phases for bucket in phase.ladder]
    return [(key, timing) for key, timing in buckets if timing is not None]
