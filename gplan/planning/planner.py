"""The only author of a plan: measures, decides, proves and writes down.

The order is that of serving: weights, workspace, static buffers, KV pool; then everything runs once, so that first
calls are not booked as memory or time; then activation peaks and backends; then the graphs that will be served are
captured as serve will capture them, timed, weighed and checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formats.plan import PhasePlan, Plan, Rejection, Workload
from gplan.core import Phase
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.machine import read_fingerprint
from gplan.planning.backends import choose_backend
from gplan.planning.bench import Bench, Measured
from gplan.planning.budget import fill_ledger
from gplan.planning.choices import Choices
from gplan.planning.eager import cheaper_eagerly
from gplan.planning.ladders import check_sizes, default_ladder, largest_size
from gplan.planning.options import PlanOptions, Progress, format_buckets
from gplan.planning.profiler import Patience
from gplan.planning.resolve import Resolved, resolve
from gplan.planning.rules import Facts, candidates, rejections
from gplan.units import format_size

LADDER_PADDING = {"cpu": 1.0, "cuda": 0.25}
"""How much larger than the bucket below a bucket of the default ladder is; capturing on a CPU runs every size."""


@dataclass(frozen=True, slots=True)
class PhaseDecision:
    """How a phase will run, and the backends that it will not."""

    setup: PhaseSetup
    rejected: tuple[Rejection, ...]


def make_plan(options: PlanOptions, progress: Progress, patience: Patience | None = None) -> Plan:
    """Plans a checkpoint for this machine.

    Raises:
        GplanError: something asked for cannot be; nothing was written.
        FitError: a ledger row does not fit.
        VerificationError: a captured graph did not equal eager execution.
    """
    resolved = resolve(options)
    choices = Choices(resolved.choices)
    ladders = {phase: _ladder(phase, options, resolved, choices) for phase in Phase}
    fingerprint = read_fingerprint(resolved.device, resolved.kernels)
    bench = Bench(resolved, patience or Patience(), progress)
    decisions = {phase: _decide(bench, phase, ladders[phase], choices) for phase in Phase}
    measured = bench.measure({phase: decision.setup for phase, decision in decisions.items()})
    budget = fill_ledger(resolved.limits.memory_bytes, bench.needs(measured), bench.layout, resolved.limits)
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
        decode=_phase_plan(decisions[Phase.DECODE], measured),
        prefill=_phase_plan(decisions[Phase.PREFILL], measured),
        ledger=budget.ledger,
        choices=choices.entries,
        workload=Workload(spec="default"),
        receipts=measured.receipts,
    )


def _ladder(phase: Phase, options: PlanOptions, resolved: Resolved, choices: Choices) -> tuple[int, ...]:
    """Sizes to capture: what the user asked for, with the maximum, or the default.

    Raises:
        GplanError: a size that no step can have.
    """
    limits = resolved.limits
    most = largest_size(phase, limits)
    asked = options.decode_buckets if phase is Phase.DECODE else options.prefill_buckets
    field = f"{phase}.ladder"
    if asked is None:
        ladder = default_ladder(phase, most, LADDER_PADDING[resolved.device.type])
        choices.default(field, format_buckets(ladder), "the default ladder up to the exact maximum")
        return ladder
    check_sizes(asked, phase, limits)
    ladder = tuple(sorted({*asked, most}))
    choices.lock(field, format_buckets(ladder), f"--{phase}-buckets")
    return ladder


def _decide(bench: Bench, phase: Phase, ladder: Sequence[int], choices: Choices) -> PhaseDecision:
    """Chooses the backend of a phase by measuring the candidates, unless the user fixed one."""
    resolved, field = bench.resolved, f"{phase}.backend"
    locked = resolved.decode_backend if phase is Phase.DECODE else resolved.prefill_backend
    facts = Facts(device=resolved.device.type, kernels=resolved.kernels, dtype=str(resolved.dtype))
    if locked is not None:
        if locked != "eager":
            candidates(phase, locked, facts)
        choices.lock(field, locked, f"--{phase}-backend")
        return PhaseDecision(bench.setup(phase, locked, () if locked == "eager" else ladder), rejections(phase, facts))
    probes = _probes(ladder)
    trials = [bench.trial(phase, name, probes) for name in candidates(phase, None, facts)]
    verdict = choose_backend(trials, bench.trial(phase, "eager", probes))
    choices.measured(field, verdict.backend, verdict.reason)
    sizes = () if verdict.backend == "eager" else ladder
    return PhaseDecision(bench.setup(phase, verdict.backend, sizes), (*verdict.rejected, *rejections(phase, facts)))


def _probes(ladder: Sequence[int]) -> tuple[int, ...]:
    """The smallest, the middle and the largest size."""
    return tuple(sorted({ladder[0], ladder[len(ladder) // 2], ladder[-1]}))


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
