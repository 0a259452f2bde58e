"""Ladders for given traffic: which sizes its steps have, which buckets are best for them, and what others would cost.

Nothing is measured here: times come from a bench, step sizes from the serving scheduler on those times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from formats.plan import Bucket, Limits, Regret, Timing, Workload
from formats.trace import Trace
from formats.workload import is_stated, read_workload
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.graphs.admission import PhaseSetup
from gplan.planning.buckets import Problem, Solution, solve
from gplan.planning.curves import Curve
from gplan.planning.ladders import NAMED_LADDERS, FloatArray, ladder_cost, named_ladder
from gplan.scheduling.report import SimulationReport
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.simulator import simulate
from gplan.scheduling.times import PhaseTimes, StepTimes, phase_times

MAX_BUCKETS = 16
"""Buckets of a phase at most, where traffic was given to choose them by."""

MIN_HALF = 10
"""Requests of a half of the workload at least, for the second half to be held out."""

Steps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload, cut to the plan's lengths. Ladders are solved for `seen`; `held_out` judges them."""

    spec: str
    seen: Trace
    held_out: Trace | None


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """What is known of a phase's times: at its buckets where it is captured, else eager times alone."""

    setup: PhaseSetup
    buckets: tuple[Bucket, ...]
    eager: Mapping[int, Timing]

    @property
    def graph_us(self) -> dict[int, float]:
        return {bucket.size: bucket.graph.median_us for bucket in self.buckets if bucket.graph is not None}

    @property
    def eager_us(self) -> dict[int, float]:
        return {size: timing.median_us for size, timing in self.eager.items()} | {
            bucket.size: bucket.eager.median_us for bucket in self.buckets
        }

    def times(self) -> PhaseTimes:
        setup = self.setup
        return phase_times(
            setup.max_size,
            [bucket.size for bucket in self.buckets],
            self.graph_us,
            self.eager_us,
            padding_cap=setup.padding_cap,
            eager_sizes=setup.eager_sizes,
            request_slots=setup.slot_limit,
        )


def read_traffic(spec: str, max_len: int) -> Traffic:
    """Reads a workload; its second half is held out where it is long enough.

    Raises:
        GplanError: it holds no request.
        FormatError: it cannot be read; names file, line and field.
    """
    trace = read_workload(spec).truncated(max_len)
    if not trace.requests:
        raise GplanError(f"--workload {spec}: no requests in it", "Give a trace of at least one request.")
    name = spec if is_stated(spec) else spec.rsplit("/", 1)[-1]
    middle = len(trace.requests) // 2
    if middle < MIN_HALF:
        return Traffic(name, trace, None)
    return Traffic(name, _part(trace, 0, middle), _part(trace, middle, len(trace.requests)))


def run_traffic(
    trace: Trace, limits: Limits, num_pages: int, figures: Mapping[Phase, PhaseFigures], lag: int
) -> SimulationReport:
    """The serving scheduler on measured times."""
    times = StepTimes(figures[Phase.DECODE].times(), figures[Phase.PREFILL].times())
    return simulate(trace, Scheduler(limits, num_pages), times, lag=lag)


def workload_of(traffic: Traffic, report: SimulationReport) -> Workload:
    return Workload(
        spec=traffic.spec,
        digest=traffic.seen.digest(),
        num_requests=len(traffic.seen.requests),
        decode_steps=report.decode.steps,
        prefill_steps=report.prefill.steps,
    )


def steps_of(report: SimulationReport, phase: Phase) -> Steps:
    return report.decode.steps if phase is Phase.DECODE else report.prefill.steps


def even_steps(maximum: int) -> Steps:
    """Every size as often as any other: what is assumed where no traffic was given."""
    return tuple((size, 1) for size in range(1, maximum + 1))


def best_ladder(figures: PhaseFigures, steps: Steps, budget_ms: float | None, byte_price_us: float) -> Solution:
    """The best ladder among the buckets that were measured.

    Raises:
        GplanError: the largest bucket alone takes longer to capture than the budget allows.
    """
    maximum = figures.setup.max_size
    sizes = [bucket.size for bucket in figures.buckets]
    return solve(
        Problem(
            maximum=maximum,
            steps=steps,
            candidates=tuple(sizes),
            graph_us=_over(figures.graph_us, maximum),
            eager_us=_over(figures.eager_us, maximum),
            graph_bytes=_at(sizes, [bucket.graph_bytes for bucket in figures.buckets], maximum),
            capture_ms=_at(sizes, [bucket.capture_ms for bucket in figures.buckets], maximum),
            max_buckets=MAX_BUCKETS,
            byte_price_us=byte_price_us,
            capture_budget_ms=budget_ms,
            eager_margin=_noise(figures),
        )
    )


def byte_price(
    traffic: Traffic, limits: Limits, num_pages: int, page_bytes: int, figures: Mapping[Phase, PhaseFigures], lag: int
) -> float:
    """Microseconds of step time that a byte less of KV pool costs under this traffic: the difference that a tenth of
    the pages makes. Nothing where pages are not what limits it."""
    fewer = max(1 + -(-limits.max_len // limits.page_size), num_pages - num_pages // 10)
    if fewer >= num_pages:
        return 0.0
    busy = [run_traffic(traffic.seen, limits, pages, figures, lag).busy_s for pages in (num_pages, fewer)]
    return max(0.0, busy[1] - busy[0]) * 1e6 / ((num_pages - fewer) * page_bytes)


def regrets(figures: PhaseFigures, steps: Steps, workload: str) -> list[Regret]:
    """The regret of the chosen ladder and of other engines' ladders, under the same times and traffic."""
    setup, maximum = figures.setup, figures.setup.max_size
    own = [key.size for key in setup.keys]
    ladders = {"gplan": own} | {name: list(named_ladder(name, setup.phase, maximum)) for name in NAMED_LADDERS}
    graph_us, eager_us = _over(figures.graph_us, maximum), _over(figures.eager_us, maximum)
    found = []
    for name, ladder in ladders.items():
        cap = setup.padding_cap if name == "gplan" else None
        eager_sizes = setup.eager_sizes if name == "gplan" else ()
        cost = ladder_cost(ladder, steps, graph_us, eager_us, cap, eager_sizes)
        found.append(
            Regret(
                phase=setup.phase.value,
                ladder=name,
                num_buckets=len(ladder),
                workload=workload,
                regret=max(0.0, cost.regret),
                padding_ms=max(0.0, cost.padding_us) / 1e3,
            )
        )
    return found


def _noise(figures: PhaseFigures) -> float:
    spreads = [b.graph.spread_us / b.graph.median_us for b in figures.buckets if b.graph is not None]
    return float(np.median(spreads)) if spreads else 0.0


def _over(points: Mapping[int, float], maximum: int) -> FloatArray:
    return Curve(tuple(sorted(points.items()))).over(maximum)


def _at(sizes: list[int], values: list[float] | list[int], maximum: int) -> FloatArray:
    found = np.zeros(maximum + 1)
    found[sizes] = values
    return found


def _part(trace: Trace, first: int, last: int) -> Trace:
    requests = trace.requests[first:last]
    start = requests[0].arrival_s
    shifted = tuple(msgspec.structs.replace(each, arrival_s=each.arrival_s - start) for each in requests)
    return msgspec.structs.replace(trace, requests=shifted)
