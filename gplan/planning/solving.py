"""Which sizes are captured: measures candidates, solves for the traffic, measures again where a guess could decide.

The default ladder is where measuring begins: the traffic is run on its times, ladders are solved for with times of all
other sizes read off the measured ones, and sizes whose uncertainty could change the ladder are captured and timed too.
What is served is chosen among measured sizes only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from formats.measurements import Prediction
from formats.plan import Bucket, Regret, Workload
from gplan.core import Phase, ShapeKey
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.variants import COMPILED, with_part
from gplan.planning.bench import Bench, Measured
from gplan.planning.buckets import Solution, candidate_sizes
from gplan.planning.capture_time import capture_limits
from gplan.planning.choices import Choices
from gplan.planning.curves import Curve, HeldOut, refine
from gplan.planning.decisions import (
    Decisions,
    Figures,
    Outcome,
    PhaseDecision,
    budget,
    figures_of,
    measure,
    outcome_of,
    served,
)
from gplan.planning.options import format_buckets
from gplan.planning.traffic import (
    PhaseFigures,
    Steps,
    Traffic,
    best_ladder,
    byte_price,
    even_steps,
    noise_of,
    problem_of,
    regrets,
    run_traffic,
    steps_of,
    workload_of,
)
from gplan.planning.uncompiled import uncompiled
from gplan.planning.variants import (
    Candidate,
    Pairs,
    restricted,
    share_of,
    steps_by_bucket,
    with_pairs,
    worth_capturing,
)
from gplan.scheduling.report import SimulationReport

MORE_SIZES = {"cpu": 4, "cuda": 12}
"""Sizes of a phase that are timed at most because they could change its ladder. On a CPU each takes seconds."""

TOLERANCE = 0.01
"""Of step time: what another ladder may be better by without being looked for; twice the noise where that is more."""


def solve_ladders(
    bench: Bench, decisions: Decisions, traffic: Traffic | None, budget_s: float | None, choices: Choices
) -> Outcome:
    """Measures the candidates and solves for the traffic; without any, every size is as likely.

    Raises:
        GplanError: the largest bucket alone takes longer to capture than the budget allows.
        VerificationError: a captured graph did not equal eager execution.
    """
    measured = measure(bench, decisions, is_final=lambda measured: False)
    if budget_s is not None:
        keeps = bench.resolved.prefill_backend is not None
        slots = bench.resolved.prefill_slots
        slower = uncompiled(decisions, measured.buckets, budget_s, choices, slots=slots, keeps_prefill=keeps)
        if slower is not None:
            decisions, measured = slower, measure(bench, slower, is_final=lambda measured: False)
    figures = {phase: figures_of(bench, decision, measured) for phase, decision in decisions.items()}
    run = _Run(bench, traffic, budget(bench, measured).num_kv_pages)
    report = run.seen(figures)
    steps = {phase: _steps(report, phase, figures[phase]) for phase in Phase}
    price = run.byte_price(figures)
    free = {phase: figures[phase].buckets for phase, decision in decisions.items() if not decision.is_locked}
    fixed = {phase: _captured(measured, decision) for phase, decision in decisions.items() if decision.is_locked}
    limits_ms = capture_limits(budget_s, free, fixed)
    solved: dict[Phase, PhaseDecision] = {}
    predictions: dict[Phase, tuple[Prediction, ...]] = {}
    for phase, decision in decisions.items():
        if decision.is_locked or not decision.setup.keys:
            solved[phase], predictions[phase] = decision, ()
            continue
        figures[phase], predictions[phase] = _refined(bench, figures[phase], steps[phase], limits_ms[phase], price)
        terms = _Terms(steps[phase], limits_ms[phase], price, "" if traffic is None else traffic.note)
        solved[phase] = _solved(decision, figures[phase], measured, terms, bench.resolved.prefill_slots, choices)
    buckets = {**measured.buckets, **{key: bucket for f in figures.values() for key, bucket in _by_key(f)}}
    known = Measured((), buckets, measured.costs, ())
    final = measure(bench, solved, known)
    judged = {phase: replace(figures[phase], setup=served(figures[phase], solved[phase], final)) for phase in Phase}
    phases = {phase: outcome_of(solved[phase], figures[phase].buckets, predictions[phase]) for phase in Phase}
    return Outcome(phases, final, *run.evidence(judged))


class _Run:
    """The traffic, if there is any, through the serving scheduler on measured times."""

    def __init__(self, bench: Bench, traffic: Traffic | None, num_pages: int) -> None:
        self._bench, self._traffic, self._num_pages = bench, traffic, num_pages

    def seen(self, figures: Figures) -> SimulationReport | None:
        if self._traffic is None:
            return None
        limits, lag = self._bench.resolved.limits, self._bench.result_lag
        return run_traffic(self._traffic.seen, limits, self._num_pages, figures, lag)

    def byte_price(self, figures: Figures) -> float:
        if self._traffic is None:
            return 0.0
        limits, page_bytes = self._bench.resolved.limits, self._bench.layout.bytes_per_page
        return byte_price(self._traffic, limits, self._num_pages, page_bytes, figures, self._bench.result_lag)

    def evidence(self, judged: Figures) -> tuple[Workload, tuple[Regret, ...]]:
        """The steps of the traffic with the ladders chosen, and the regrets of these and of others."""
        traffic, report = self._traffic, self.seen(judged)
        if traffic is None or report is None:
            return Workload(spec="default"), ()
        found = _judge(judged, report, traffic.spec)
        if traffic.held_out is not None:
            limits, lag = self._bench.resolved.limits, self._bench.result_lag
            other = run_traffic(traffic.held_out, limits, self._num_pages, judged, lag)
            found += _judge(judged, other, f"{traffic.spec}, held out")
        return workload_of(traffic, report), tuple(found)


def _judge(judged: Figures, report: SimulationReport, workload: str) -> list[Regret]:
    found = []
    for phase, figures in judged.items():
        if figures.setup.keys and (steps := steps_of(report, phase)):
            found += regrets(figures, steps, workload)
    return found


def _steps(report: SimulationReport | None, phase: Phase, figures: PhaseFigures) -> Steps:
    return even_steps(figures.setup.max_size) if report is None else steps_of(report, phase)


def _captured(measured: Measured, decision: PhaseDecision) -> list[Bucket]:
    return [measured.buckets[key] for key in decision.setup.keys]


def _refined(
    bench: Bench, figures: PhaseFigures, steps: Steps, limit_ms: float | None, price: float
) -> tuple[PhaseFigures, tuple[Prediction, ...]]:
    """The figures with all sizes measured that the best ladder needs, and how well their times had been foretold."""
    setup, noise = figures.setup, noise_of(figures)
    found = {bucket.size: bucket for bucket in figures.buckets}

    def measure(sizes: Sequence[int]) -> list[float]:
        sampled = bench.sample(setup, sizes)
        found.update((bucket.size, bucket) for bucket in sampled)
        return [bucket.graph.median_us for bucket in sampled if bucket.graph is not None]

    most = MORE_SIZES[bench.resolved.device.type]
    refined = refine(
        problem_of(figures, steps, candidate_sizes(setup.max_size, steps), limit_ms, price),
        Curve(tuple(sorted(figures.graph_us.items()))),
        measure,
        tolerance=max(TOLERANCE, 2 * noise),
        noise=max(0.005, noise),
        max_measurements=most,
        at_once=max(1, most // 2),
    )
    held_out = list(refined.held_out)
    ladder = refined.solution.ladder
    missing = sorted([size for size in _busiest(ladder, steps) if size not in found][: most - len(held_out)])
    if missing:
        line = refined.curve.over(setup.max_size)
        held_out += [HeldOut(n, float(line[n]), us) for n, us in zip(missing, measure(missing), strict=True)]
    predictions = tuple(
        Prediction(size=held.size, predicted_us=held.predicted, measured_us=held.measured) for held in held_out
    )
    return replace(figures, buckets=tuple(found[size] for size in sorted(found))), predictions


def _busiest(ladder: Sequence[int], steps: Steps) -> list[int]:
    """Buckets, those first that take most of the steps."""
    taken = dict.fromkeys(ladder, 0)
    for size, count in steps:
        taken[ladder[bisect_left(ladder, size)]] += count
    return sorted(ladder, key=lambda bucket: (-taken[bucket], bucket))


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a phase is solved under: the traffic's steps, milliseconds for capturing, and the price of a byte; and what
    there is to say of the traffic."""

    steps: Steps
    limit_ms: float | None
    price: float
    note: str


def _solved(
    decision: PhaseDecision,
    figures: PhaseFigures,
    measured: Measured,
    terms: _Terms,
    slots: int,
    choices: Choices,
) -> PhaseDecision:
    """The best ladder among the measured sizes, and the variants of its buckets that pay beside it."""
    solution = best_ladder(figures, terms.steps, terms.limit_ms, terms.price)
    reason = _reason(solution, len(figures.buckets), terms.limit_ms) + terms.note
    choices.measured(f"{decision.setup.phase}.ladder", format_buckets(solution.ladder), reason)
    kept = tuple(ShapeKey(decision.setup.phase, size) for size in solution.ladder)
    setup = replace(decision.setup, keys=kept, eager_sizes=solution.eager_sizes)
    candidates = _candidates(setup, decision.pairs, measured, terms)
    room_ms = None if terms.limit_ms is None else terms.limit_ms - solution.capture_ms
    pairs = restricted(decision.pairs, worth_capturing(candidates, room_ms), candidates)
    setup = with_pairs(replace(setup, eager_sizes=decision.setup.eager_sizes), pairs, slots)
    return replace(decision, setup=setup, pairs=pairs)


def _candidates(setup: PhaseSetup, pairs: Pairs, measured: Measured, terms: _Terms) -> list[Candidate]:
    """The pairs whose buckets are on the ladder, with what they gain under the traffic."""
    taken, found = steps_by_bucket(setup, terms.steps), []
    for (size, part), saved_us in pairs.saved_us.items():
        names = (part, with_part(COMPILED, part))
        keys = (ShapeKey(setup.phase, size, variant=name) for name in names)
        bucket = next(measured.buckets[key] for key in keys if key in measured.buckets)
        gain = taken.get(size, 0) * share_of(part) * saved_us - terms.price * bucket.graph_bytes
        if size in taken:
            found.append(Candidate(size, part, gain, bucket.capture_ms))
    return found


def _reason(solution: Solution, num_measured: int, limit_ms: float | None) -> str:
    reason = f"{len(solution.ladder)} of {num_measured} measured sizes, {solution.regret:.2%} above having all of them"
    if limit_ms is not None:
        reason += f", captured in {solution.capture_ms:.0f} of {limit_ms:.0f} ms"
    if not solution.exact:
        better = 1 - solution.bound_us / solution.objective_us
        reason += f"; not proven best: a ladder {better:.2%} cheaper cannot be excluded"
    return reason


def _by_key(figures: PhaseFigures) -> list[tuple[ShapeKey, Bucket]]:
    return [(ShapeKey(figures.setup.phase, b.size, b.width, b.variant), b) for b in figures.buckets]
