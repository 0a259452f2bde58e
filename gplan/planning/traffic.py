"""Ladders for given traffic: which sizes its steps have, which buckets are best for them, and what others would cost.

Nothing is measured here: times come from a bench, step sizes from the serving scheduler on those times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from formats.measurements import Costs, SizeTiming
from formats.plan import Bucket, Limits, Regret, Workload
from formats.trace import Trace
from formats.trace_readers import CountTokens
from formats.workload import is_stated, read_workload
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.graphs.admission import PhaseSetup
from gplan.planning.backends import MAX_NOISE
from gplan.planning.buckets import Problem, Solution, solve
from gplan.planning.curves import Curve
from gplan.planning.eager import LEAST_GAIN, device_bound_us
from gplan.planning.ladders import NAMED_LADDERS, FloatArray, ladder_cost, named_ladder
from gplan.scheduling.packing import packer_of
from gplan.scheduling.report import SimulationReport
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.simulator import simulate
from gplan.scheduling.times import PhaseTimes, StepTimes, phase_times, reads_us, rows_us

MAX_BUCKETS = 16
"""Buckets of a phase at most, where traffic was given to choose them by."""

DOUBT = 0.2
"""Part of the steps that are taken to be of any size: tomorrow's traffic is not today's, and a size that never ran
should not cost many times its own."""

MIN_HALF = 10
"""Requests of a half of the workload at least, for the second half to be held out."""

Steps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload, cut to the plan's lengths. Ladders are solved for `seen`; `held_out` judges them. `num_cut`: requests
    of both that were longer."""

    spec: str
    seen: Trace
    held_out: Trace | None
    num_cut: int = 0

    @property
    def note(self) -> str:
        """What there is to say of it behind the reason for a ladder."""
        return f"; {self.num_cut} of the workload's requests cut to the maximum length" if self.num_cut else ""


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """What is known of a phase's times: at every size that was captured and timed, at others eagerly.

    Attributes:
        setup: how the phase runs; more buckets than its keys may be known.
        eager: microseconds by size, where no bucket is.
    """

    setup: PhaseSetup
    buckets: tuple[Bucket, ...]
    eager: Mapping[int, float]
    costs: Costs
    limits: Limits

    @property
    def graph_us(self) -> dict[int, float]:
        return {bucket.size: bucket.graph.median_us for bucket in self.buckets if bucket.graph is not None}

    @property
    def eager_us(self) -> dict[int, float]:
        return {**self.eager} | {bucket.size: bucket.eager.median_us for bucket in self.buckets}

    @property
    def rows_us(self) -> list[float]:
        return rows_us(self.setup.phase, self.costs, self.setup.max_size, self.limits.max_len, self.graph_us)

    def times(self) -> PhaseTimes:
        """Of steps as the setup runs them."""
        setup = self.setup
        return phase_times(
            setup.max_size,
            [key.size for key in setup.base_keys],
            self.graph_us,
            self.eager_us,
            padding_cap=setup.padding_cap,
            eager_sizes=setup.eager_sizes,
            request_slots=setup.slot_limit,
            costs=self.costs,
            rows_us=self.rows_us,
            reads_us=reads_us(setup.phase, self.costs, setup.max_size, self.limits.max_len),
            max_batch=self.limits.max_batch,
        )


def read_traffic(
    spec: str, max_len: int, speedup: float | None = None, count_tokens: CountTokens | None = None
) -> Traffic:
    """Reads a workload; its second half is held out where it is long enough.

    Args:
        speedup: of its arrivals.
        count_tokens: of a text, for a workload that holds texts.

    Raises:
        GplanError: it holds no request.
        FormatError: it cannot be read; names file, line and field.
    """
    whole = read_workload(spec, count_tokens).sped_up(speedup or 1.0)
    trace = whole.truncated(max_len)
    num_cut = sum(cut is not asked for cut, asked in zip(trace.requests, whole.requests, strict=True))
    if not trace.requests:
        raise GplanError(f"--workload {spec}: no requests in it", "Give a trace of at least one request.")
    name = spec if is_stated(spec) else spec.rsplit("/", 1)[-1]
    if speedup is not None:
        name += f", {speedup:g} times as fast"
    if len(trace.requests) < 2 * MIN_HALF:
        return Traffic(name, trace, None, num_cut)
    return Traffic(name, *halves(trace), num_cut)


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The first and the second half of the requests, of which there are at least two; each begins at its first."""
    middle = len(trace.requests) // 2
    return _part(trace, 0, middle), _part(trace, middle, len(trace.requests))


def run_traffic(
    trace: Trace, limits: Limits, num_pages: int, figures: Mapping[Phase, PhaseFigures], lag: int
) -> SimulationReport:
    """The serving scheduler on measured times."""
    times = StepTimes(figures[Phase.DECODE].times(), figures[Phase.PREFILL].times())
    return simulate(trace, Scheduler(limits, num_pages, packer_of(times.prefill)), times, lag=lag)


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


def with_doubt(steps: Steps, maximum: int) -> list[tuple[int, float]]:
    """The steps, and a part of as many (`DOUBT`) spread evenly over all sizes."""
    each = DOUBT * sum(count for _, count in steps) / maximum
    counts = dict(steps)
    return [(size, counts.get(size, 0) + each) for size in range(1, maximum + 1)] if each else []


def problem_of(
    figures: PhaseFigures,
    steps: Steps,
    candidates: Sequence[int],
    budget_ms: float | None,
    byte_price_us: float,
    max_buckets: int = MAX_BUCKETS,
) -> Problem:
    """What the ladder of a phase is solved for. What was not measured at a candidate is read off its neighbours; sizes
    that will not be served eagerly take for ever so."""
    maximum, buckets = figures.setup.max_size, figures.buckets
    eager_us = _over(figures.eager_us, maximum)
    eager_us[eager_us < device_bound_us(figures.eager_us.values())] = np.inf
    return Problem(
        maximum=maximum,
        steps=with_doubt(steps, maximum),
        candidates=tuple(candidates),
        graph_us=_over(figures.graph_us, maximum),
        eager_us=eager_us,
        rows_us=np.asarray(figures.rows_us),
        graph_bytes=_over({bucket.size: float(bucket.graph_bytes) for bucket in buckets}, maximum),
        capture_ms=_over({bucket.size: bucket.capture_ms for bucket in buckets}, maximum),
        max_buckets=max_buckets,
        byte_price_us=byte_price_us,
        capture_budget_ms=budget_ms,
        eager_margin=max(LEAST_GAIN, min(MAX_NOISE, noise_of(figures))),
    )


def best_ladder(figures: PhaseFigures, steps: Steps, budget_ms: float | None, byte_price_us: float) -> Solution:
    """The best ladder among the buckets that were measured.

    Raises:
        GplanError: the largest bucket alone takes longer to capture than the budget allows.
    """
    return solve(problem_of(figures, steps, [bucket.size for bucket in figures.buckets], budget_ms, byte_price_us))


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
    own = [key.size for key in setup.base_keys]
    ladders = {"gplan": own} | {name: list(named_ladder(name, setup.phase, maximum)) for name in NAMED_LADDERS}
    graph_us, eager_us = _over(figures.graph_us, maximum), _over(figures.eager_us, maximum)
    rows, found = np.asarray(figures.rows_us), []
    for name, ladder in ladders.items():
        cap = setup.padding_cap if name == "gplan" else None
        eager_sizes = setup.eager_sizes if name == "gplan" else ()
        cost = ladder_cost(ladder, steps, graph_us, eager_us, cap, eager_sizes, rows)
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


def other_sizes(
    buckets: Iterable[Bucket], ladder: Collection[int], more: Iterable[SizeTiming]
) -> tuple[SizeTiming, ...]:
    """Times of sizes that are not on the ladder: of buckets left out, and `more`."""
    found = {entry.size: entry for entry in more}
    found |= {bucket.size: SizeTiming(size=bucket.size, graph=bucket.graph, eager=bucket.eager) for bucket in buckets}
    return tuple(found[size] for size in sorted(found) if size not in ladder)


def noise_of(figures: PhaseFigures) -> float:
    """How far a phase's times are spread in the middle, as a part of them."""
    spreads = [b.graph.spread_us / b.graph.median_us for b in figures.buckets if b.graph is not None]
    return float(np.median(spreads)) if spreads else 0.0


def _over(points: Mapping[int, float], maximum: int) -> FloatArray:
    return Curve(tuple(sorted(points.items()))).over(maximum)


def _part(trace: Trace, first: int, last: int) -> Trace:
    requests = trace.requests[first:last]
    start = requests[0].arrival_s
    shifted = tuple(msgspec.structs.replace(each, arrival_s=each.arrival_s - start) for each in requests)
    return msgspec.structs.replace(trace, requests=shifted)
