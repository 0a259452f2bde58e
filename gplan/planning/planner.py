"""The only author of a plan: measures, decides, proves and writes down.

The order is that of serving: weights, after which matrix products are timed, workspace, static buffers, KV pool; then
everything runs once, so that first calls are not booked as memory or time; then activation peaks and backends; then the
candidate ladders are captured and timed and, where traffic or a budget is given, ladders are solved for it (`solving`,
else `without_traffic`); last, the graphs that will be served are captured as serve will capture them, weighed and
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from formats.plan import Limits, PhasePlan, Plan, Rejection
from gplan.core import Phase
from gplan.graphs.compiler import require_cache
from gplan.graphs.machine import read_fingerprint
from gplan.kernels import kernels_class
from gplan.models.token_counts import token_counter
from gplan.planning.backends import choose_backend
from gplan.planning.bench import Bench
from gplan.planning.choices import Choices
from gplan.planning.decisions import Outcome, PhaseDecision, PhaseOutcome, budget
from gplan.planning.eager import cheaper_eagerly
from gplan.planning.ladders import check_sizes, default_ladder, largest_size
from gplan.planning.options import PlanOptions, Progress, format_buckets
from gplan.planning.profiler import Patience
from gplan.planning.resolve import Resolved, resolve
from gplan.planning.rules import candidates, rejections
from gplan.planning.solving import solve_ladders
from gplan.planning.traffic import read_traffic
from gplan.planning.trying import compiled, draws, facts_of, whole
from gplan.planning.variants import together, with_pairs
from gplan.planning.without_traffic import keep_default_ladders
from gplan.scheduling.times import rows_us
from gplan.units import format_size

UNTRIED = Rejection(backend="piecewise", reason="not tried: compiling takes minutes; --try-compile measures it")

LADDER_PADDING = {
    "cpu": {Phase.DECODE: 1.0, Phase.PREFILL: 1.0},
    "cuda": {Phase.DECODE: 0.125, Phase.PREFILL: 0.25},
}
"""How much larger than the bucket below a bucket of the default ladder is. Capturing on a CPU runs every size; on a GPU
it takes about 10 ms and hardly any memory."""

PATIENCE = {"cpu": Patience(turns=3), "cuda": Patience(max_runs=10, seconds=0.15)}
"""A GPU is ours alone and repeats itself; a CPU is as fast as its other users let it be."""


def make_plan(
    options: PlanOptions,
    progress: Progress,
    patience: Patience | None = None,
    *,
    before_measuring: Callable[[], None] = lambda: None,
) -> Plan:
    """Plans a checkpoint for this machine.

    Args:
        before_measuring: called once the weights are loaded, before anything is timed; what it raises ends planning.

    Raises:
        GplanError: something asked for cannot be; nothing was written.
        FitError: a ledger row does not fit.
        VerificationError: a captured graph did not equal eager execution.
    """
    resolved = resolve(options)
    if options.try_compile or resolved.prefill_backend == "piecewise":
        require_cache()
    choices = Choices(resolved.choices)
    traffic = None
    if options.workload is not None:
        count_tokens = token_counter(options.checkpoint)
        traffic = read_traffic(options.workload, resolved.limits.max_len, options.speedup, count_tokens)
    ladders = {phase: _ladder(phase, options, resolved, choices) for phase in Phase}
    kernels = kernels_class(resolved.kernels)
    prefill_kernel = kernels.prefill_kernel(resolved.dtype, resolved.spec.head_dim, resolved.device)
    fingerprint = read_fingerprint(resolved.device, resolved.kernels, prefill_kernel, kernels.blas_version())
    sizes = {size for ladder in ladders.values() for size in ladder}
    bench = Bench(resolved, sizes, patience or PATIENCE[resolved.device.type], progress, before_measuring)
    if bench.products.num_timed:
        choices.measured("products", len(bench.products.choices), bench.products.reason)
    locked = {Phase.DECODE: options.decode_buckets is not None, Phase.PREFILL: options.prefill_buckets is not None}
    decisions = {phase: _decide(bench, phase, ladders[phase], locked[phase], options, choices) for phase in Phase}
    if traffic is None and options.startup_budget_s is None:
        outcome = keep_default_ladders(bench, decisions, choices)
    else:
        outcome = solve_ladders(bench, decisions, traffic, options.startup_budget_s, choices)
    memory = budget(bench, outcome.measured)
    page = format_size(bench.layout.bytes_per_page)
    choices.measured("num_kv_pages", memory.num_kv_pages, f"what the ledger leaves, at {page} a page")
    return Plan(
        model=resolved.identity,
        fingerprint=fingerprint,
        kernels=resolved.kernels,
        dtype=str(resolved.dtype).removeprefix("torch."),
        limits=resolved.limits,
        num_kv_pages=memory.num_kv_pages,
        kv_bytes_per_page=bench.layout.bytes_per_page,
        decode=_phase_plan(outcome.phases[Phase.DECODE], outcome, resolved.limits),
        prefill=_phase_plan(outcome.phases[Phase.PREFILL], outcome, resolved.limits),
        ledger=memory.ledger,
        choices=choices.entries,
        workload=outcome.workload,
        regrets=outcome.regrets,
        receipts=outcome.measured.receipts,
        products=bench.products.choices,
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


def _decide(
    bench: Bench, phase: Phase, ladder: Sequence[int], is_locked: bool, options: PlanOptions, choices: Choices
) -> PhaseDecision:
    """Chooses the backend of a phase, and what variants its buckets have, by measuring the candidates, unless the user
    fixed them."""
    resolved, field = bench.resolved, f"{phase}.backend"
    fixed = resolved.decode_backend if phase is Phase.DECODE else resolved.prefill_backend
    facts = facts_of(resolved)
    probes, tries = _probes(ladder), options.try_compile
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
        trials = [bench.trial(phase, name, compared) for name in candidates(phase, None, facts, tries_compiler=tries)]
        verdict = choose_backend(trials, eager, f"--{phase}-buckets" if is_locked else "")
        choices.measured(field, verdict.backend, verdict.reason)
        backend, rejected = verdict.backend, verdict.rejected
    setup = bench.setup(phase, backend, () if backend == "eager" else ladder)
    if phase is Phase.DECODE:
        pairs = together(compiled(bench, setup, options), draws(bench, setup, options, choices))
    else:
        pairs = whole(bench, setup, options, choices)
    setup = with_pairs(setup, pairs, resolved.prefill_slots)
    rejected = (*rejected, *rejections(phase, facts))
    if phase is Phase.PREFILL and backend != "piecewise" and all(entry.backend != "piecewise" for entry in rejected):
        rejected = (*rejected, UNTRIED)
    return PhaseDecision(setup, rejected, eager.times, is_locked, pairs)


def _probes(ladder: Sequence[int]) -> tuple[int, ...]:
    """The smallest, the middle and the largest size."""
    return tuple(sorted({ladder[0], ladder[len(ladder) // 2], ladder[-1]}))


# Writing down -------------------------------------------------------------------------------------------------------


def _phase_plan(found: PhaseOutcome, outcome: Outcome, limits: Limits) -> PhasePlan:
    setup, measured = found.decision.setup, outcome.measured
    ladder = tuple(measured.buckets[key] for key in setup.keys)
    plan = PhasePlan(
        phase=setup.phase.value,
        backend=setup.backend,
        max_size=setup.max_size,
        ladder=ladder,
        request_slots=setup.request_slots,
        padding_cap=setup.padding_cap,
        rejected=found.decision.rejected,
        other_sizes=found.other_sizes,
        predictions=found.predictions,
        costs=measured.costs[setup.phase],
        variants=found.decision.pairs.notes(setup.keys),
    )
    rows = rows_us(setup.phase, plan.costs, setup.max_size, limits.max_len, plan.graph_us)
    return msgspec.structs.replace(plan, eager_sizes=cheaper_eagerly(plan.base_ladder, plan.eager_us, rows))
