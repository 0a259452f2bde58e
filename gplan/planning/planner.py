"""The only author of a plan: measures, decides, proves and writes down.

The order is that of serving: weights, workspace, static buffers, KV pool; then everything runs once, so that first
calls are not booked as memory or time; then activation peaks and backends; then the candidate ladders are captured and
timed, traffic is run through the serving scheduler on those times, and ladders are solved for it; last, the graphs that
will be served are captured as serve will capture them, timed, weighed and checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from formats.plan import PhasePlan, Plan, Regret, Rejection, Timing, Workload
from gplan.core import Phase, ShapeKey
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.machine import read_fingerprint
from gplan.planning.backends import choose_backend
from gplan.planning.bench import Bench, Measured
from gplan.planning.budget import Budget, fill_ledger
from gplan.planning.choices import Choices
from gplan.planning.eager import cheaper_eagerly
from gplan.planning.ladders import check_sizes, default_ladder, largest_size
from gplan.planning.options import PlanOptions, Progress, format_buckets
from gplan.planning.profiler import Patience
from gplan.planning.resolve import Resolved, resolve
from gplan.planning.rules import Facts, candidates, rejections
from gplan.planning.traffic import (
    PhaseFigures,
    Traffic,
    best_ladder,
    byte_price,
    even_steps,
    read_traffic,
    regrets,
    run_traffic,
    steps_of,
    workload_of,
)
from gplan.units import format_size

LADDER_PADDING = {
    "cpu": {Phase.DECODE: 1.0, Phase.PREFILL: 1.0},
    "cuda": {Phase.DECODE: 0.125, Phase.PREFILL: 0.25},
}
"""How much larger than the bucket below a bucket of the default ladder is. Capturing on a CPU runs every size; on a GPU
it takes about 10 ms and hardly any memory."""


@dataclass(frozen=True, slots=True)
class PhaseDecision:
    """How a phase will run, and the backends that it will not.

    Attributes:
        eager: eager times at the sizes where backends were compared.
        is_locked: the user fixed the ladder.
    """

    setup: PhaseSetup
    rejected: tuple[Rejection, ...]
    eager: Mapping[int, Timing]
    is_locked: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the graphs to be served are, and the traffic they were chosen for."""

    decisions: dict[Phase, PhaseDecision]
    measured: Measured
    workload: Workload
    regrets: tuple[Regret, ...]


def make_plan(options: PlanOptions, progress: Progress, patience: Patience | None = None) -> Plan:
    """Plans a checkpoint for this machine.

    Raises:
        GplanError: something asked for cannot be; nothing was written.
        FitError: a ledger row does not fit.
        VerificationError: a captured graph did not equal eager execution.
    """
    resolved = resolve(options)
    choices = Choices(resolved.choices)
    traffic = None if options.workload is None else read_traffic(options.workload, resolved.limits.max_len)
    ladders = {phase: _ladder(phase, options, resolved, choices) for phase in Phase}
    fingerprint = read_fingerprint(resolved.device, resolved.kernels)
    bench = Bench(resolved, patience or Patience(), progress)
    locked = {Phase.DECODE: options.decode_buckets is not None, Phase.PREFILL: options.prefill_buckets is not None}
    decisions = {phase: _decide(bench, phase, ladders[phase], locked[phase], choices) for phase in Phase}
    outcome = _settle(bench, decisions, traffic, options.startup_budget_s, choices)
    budget = _budget(bench, outcome.measured)
    page = format_size(bench.layout.bytes_per_page)
    choices.measured("num_kv_pages", budget.num_kv_pages, f"what the ledger leaves, at {page} a page")
    return Plan(
        model=resolved.identity,
        fingerprint=fingerprint,
        kernels=resolved.kernels,
        dtype=str(resolved.dtype).removeprefix("torch."),
        limits=resolved.limits,
        num_kv_pages=budget.num_kv_pages,
        kv_bytes_per_page=bench.layout.bytes_per_page,
        decode=_phase_plan(outcome.decisions[Phase.DECODE], outcome.measured),
        prefill=_phase_plan(outcome.decisions[Phase.PREFILL], outcome.measured),
        ledger=budget.ledger,
        choices=choices.entries,
        workload=outcome.workload,
        regrets=outcome.regrets,
        receipts=outcome.measured.receipts,
    )


# Backends -----------------------------------------------------------------------------------------------------------


def _ladder(phase: Phase, options: PlanOptions, resolved: Resolved, choices: Choices) -> tuple[int, ...]:
    """Sizes to capture: what the user asked for, with the maximum, or the default.

    Raises:
        GplanError: a size that no step can have.
    """
    limits = resolved.limits
    most = largest_size(phase, limits)
    asked = options.decode_buckets if phase is Phase.DECODE else options.prefill_buckets
    if asked is None:
        return default_ladder(phase, most, LADDER_PADDING[resolved.device.type][phase])
    check_sizes(asked, phase, limits)
    ladder = tuple(sorted({*asked, most}))
    choices.lock(f"{phase}.ladder", format_buckets(ladder), f"--{phase}-buckets")
    return ladder


def _decide(bench: Bench, phase: Phase, ladder: Sequence[int], is_locked: bool, choices: Choices) -> PhaseDecision:
    """Chooses the backend of a phase by measuring the candidates, unless the user fixed one."""
    resolved, field = bench.resolved, f"{phase}.backend"
    fixed = resolved.decode_backend if phase is Phase.DECODE else resolved.prefill_backend
    facts = Facts(device=resolved.device.type, kernels=resolved.kernels, dtype=str(resolved.dtype))
    probes = _probes(ladder)
    eager = bench.trial(phase, "eager", probes)
    no_rejections: tuple[Rejection, ...] = ()
    if fixed is not None:
        if fixed != "eager":
            candidates(phase, fixed, facts)
        choices.lock(field, fixed, f"--{phase}-backend")
        backend, rejected = fixed, no_rejections
    else:
        # At the largest size a CPU computes so long that how it is told to makes no difference.
        compared = probes[:-1] or probes if resolved.device.type == "cpu" else probes
        trials = [bench.trial(phase, name, compared) for name in candidates(phase, None, facts)]
        verdict = choose_backend(trials, eager)
        choices.measured(field, verdict.backend, verdict.reason)
        backend, rejected = verdict.backend, verdict.rejected
    setup = bench.setup(phase, backend, () if backend == "eager" else ladder)
    return PhaseDecision(setup, (*rejected, *rejections(phase, facts)), eager.times, is_locked)


def _probes(ladder: Sequence[int]) -> tuple[int, ...]:
    """The smallest, the middle and the largest size."""
    return tuple(sorted({ladder[0], ladder[len(ladder) // 2], ladder[-1]}))


# Ladders ------------------------------------------------------------------------------------------------------------


def _settle(
    bench: Bench,
    decisions: dict[Phase, PhaseDecision],
    traffic: Traffic | None,
    budget_s: float | None,
    choices: Choices,
) -> Outcome:
    """Measures the candidates and, where traffic or a budget was given, solves for it and measures what is left."""
    measured = _measure(bench, decisions)
    figures = {phase: _figures(decision, measured) for phase, decision in decisions.items()}
    if traffic is None and budget_s is None:
        _note_default(decisions, choices)
        return Outcome(decisions, measured, Workload(spec="default"), ())
    limits, lag = bench.resolved.limits, bench.result_lag
    pages = _budget(bench, measured).num_kv_pages
    report = None if traffic is None else run_traffic(traffic.seen, limits, pages, figures, lag)
    price = 0.0
    if traffic is not None:
        price = byte_price(traffic, limits, pages, bench.layout.bytes_per_page, figures, lag)
    solved = {}
    for phase, decision in decisions.items():
        steps = even_steps(decision.setup.max_size) if report is None else steps_of(report, phase)
        budget_ms = None if budget_s is None else budget_s * 1e3 * _share(phase, figures)
        solved[phase] = _solved(decision, figures[phase], steps, budget_ms, price, choices)
    if any(solved[phase].setup.keys != decisions[phase].setup.keys for phase in Phase):
        measured = _measure(bench, solved)
    if traffic is None or report is None:
        return Outcome(solved, measured, Workload(spec="default"), ())
    judged = {phase: replace(figures[phase], setup=solved[phase].setup) for phase in Phase}
    found = [entry for phase in Phase for entry in _judge(judged[phase], steps_of(report, phase), traffic.spec)]
    if traffic.held_out is not None:
        other = run_traffic(traffic.held_out, limits, pages, judged, lag)
        for phase in Phase:
            found += _judge(judged[phase], steps_of(other, phase), f"{traffic.spec}, held out")
    return Outcome(solved, measured, workload_of(traffic, report), tuple(found))


def _solved(
    decision: PhaseDecision,
    figures: PhaseFigures,
    steps: tuple[tuple[int, int], ...],
    budget_ms: float | None,
    price: float,
    choices: Choices,
) -> PhaseDecision:
    setup = decision.setup
    if decision.is_locked or not setup.keys:
        return decision
    solution = best_ladder(figures, steps, budget_ms, price)
    kept = tuple(ShapeKey(setup.phase, size) for size in solution.ladder)
    reason = (
        f"{len(kept)} of {len(setup.keys)} measured sizes, {solution.regret:.2%} above having all of them"
        + ("" if budget_ms is None else f", captured in {solution.capture_ms:.0f} of {budget_ms:.0f} ms")
        + (
            ""
            if solution.exact
            else f"; not proven best: a ladder {1 - solution.bound_us / solution.objective_us:.2%}"
            " cheaper cannot be excluded"
        )
    )
    choices.measured(f"{setup.phase}.ladder", format_buckets(solution.ladder), reason)
    return replace(decision, setup=replace(setup, keys=kept, eager_sizes=solution.eager_sizes))


def _judge(figures: PhaseFigures, steps: tuple[tuple[int, int], ...], workload: str) -> list[Regret]:
    return regrets(figures, steps, workload) if figures.setup.keys and steps else []


def _note_default(decisions: dict[Phase, PhaseDecision], choices: Choices) -> None:
    for phase, decision in decisions.items():
        if decision.setup.keys and not decision.is_locked:
            sizes = format_buckets(tuple(key.size for key in decision.setup.keys))
            choices.default(f"{phase}.ladder", sizes, "the default ladder up to the exact maximum")


def _share(phase: Phase, figures: Mapping[Phase, PhaseFigures]) -> float:
    """The part of a capture budget that a phase gets: that of its candidates' capture time."""
    spent = {each: sum(bucket.capture_ms for bucket in figures[each].buckets) for each in Phase}
    total = sum(spent.values())
    return spent[phase] / total if total else 1.0


def _measure(bench: Bench, decisions: dict[Phase, PhaseDecision]) -> Measured:
    return bench.measure({phase: decision.setup for phase, decision in decisions.items()})


def _figures(decision: PhaseDecision, measured: Measured) -> PhaseFigures:
    buckets = tuple(measured.buckets[key] for key in decision.setup.keys)
    setup = replace(decision.setup, eager_sizes=cheaper_eagerly(buckets))
    return PhaseFigures(setup, buckets, decision.eager)


def _budget(bench: Bench, measured: Measured) -> Budget:
    return fill_ledger(bench.resolved.limits.memory_bytes, bench.needs(measured), bench.layout, bench.resolved.limits)


def _phase_plan(decision: PhaseDecision, measured: Measured) -> PhasePlan:
    setup = decision.setup
    ladder = tuple(measured.buckets[key] for key in setup.keys)
    return PhasePlan(
        phase=setup.phase.value,
        backend=setup.backend,
        max_size=setup.max_size,
        ladder=ladder,
        request_slots=setup.request_slots,
        padding_cap=setup.padding_cap,
        eager_sizes=cheaper_eagerly(ladder),
        rejected=decision.rejected,
    )
