"""A plan for other traffic, from what an earlier plan measured: no model, no device, no new measurement.

Traffic decides which of the captured sizes are worth having; it changes neither times nor bytes, nor how products are
multiplied. So the ladders are solved again among the sizes that the plan holds times of, and memory stays divided as it
is: what another division takes was not measured. Whatever would have to be measured is refused. A size that comes in
anew has no receipt: serve compares it with eager execution when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from formats.plan import DRAW_VARIANTS, Bucket, Choice, PhasePlan, Plan, Regret, bucket_key, is_base
from formats.plan_id import plan_id
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.graphs.admission import PhaseSetup
from gplan.models.checkpoint import source_of
from gplan.models.token_counts import token_counter
from gplan.planning.capture_time import capture_limits
from gplan.planning.eager import cheaper_eagerly
from gplan.planning.options import PlanOptions, format_buckets
from gplan.planning.traffic import (
    PhaseFigures,
    best_ladder,
    other_sizes,
    read_traffic,
    regrets,
    run_traffic,
    steps_of,
    workload_of,
)
from gplan.planning.variants import Candidate, steps_by_bucket, worth_capturing
from gplan.units import parse_size

Steps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Solved:
    """One phase's ladder for the traffic, and why it is that one; no reason where the ladder is locked."""

    plan: PhasePlan
    reason: str


def replan(old: Plan, options: PlanOptions) -> Plan:
    """Solves the ladders of `old` for another workload.

    Args:
        options: `workload` says what for, `startup_budget_s` bounds the capture time; anything else that is set must
            be as in `old`, since it would have to be measured.

    Raises:
        GplanError: no workload, an option that needs measuring, or a plan without the times that it takes.
        FormatError: the workload cannot be read.
    """
    _refuse_what_needs_measuring(old, options)
    if options.workload is None:
        raise GplanError("--from without --workload: nothing would change", "Give the traffic to plan for.")
    count_tokens = token_counter(options.checkpoint)
    traffic = read_traffic(options.workload, old.limits.max_len, options.speedup, count_tokens)
    figures = {phase: _figures(old, old.phase(phase)) for phase in Phase}
    lag = 1 if old.fingerprint.device == "cuda" else 0
    report = run_traffic(traffic.seen, old.limits, old.num_kv_pages, figures, lag)
    locked = {choice.field for choice in old.choices if choice.basis == "locked"}
    free = {phase: figures[phase].buckets for phase in Phase if f"{phase}.ladder" not in locked}
    fixed = {phase: old.phase(phase).ladder for phase in Phase if phase not in free}
    limits_ms = capture_limits(options.startup_budget_s, free, fixed)
    solved = {
        phase: _solve(old, figures[phase], phase, steps_of(report, phase), limits_ms[phase])
        if phase in free
        else _Solved(old.phase(phase), "")
        for phase in Phase
    }
    judged = {phase: _figures(old, solved[phase].plan, figures[phase]) for phase in Phase}
    found = _judge(judged, {phase: steps_of(report, phase) for phase in Phase}, traffic.spec)
    if traffic.held_out is not None:
        other = run_traffic(traffic.held_out, old.limits, old.num_kv_pages, judged, lag)
        found += _judge(judged, {phase: steps_of(other, phase) for phase in Phase}, f"{traffic.spec}, held out")
    kept = {bucket_key(p.plan.phase, bucket) for p in solved.values() for bucket in p.plan.ladder}
    return msgspec.structs.replace(
        old,
        decode=solved[Phase.DECODE].plan,
        prefill=solved[Phase.PREFILL].plan,
        choices=_choices(old, solved, traffic.note),
        workload=workload_of(traffic, report),
        regrets=tuple(found),
        receipts=tuple(receipt for receipt in old.receipts if receipt.key in kept),
    )


def _refuse_what_needs_measuring(old: Plan, options: PlanOptions) -> None:
    """
    Raises:
        GplanError: names the first option whose value is not that of the plan.
    """
    limits, memory = old.limits, options.memory
    asked: Mapping[str, tuple[object, object]] = {
        "CHECKPOINT": (source_of(options.checkpoint), old.model.source),
        "--max-batch": (options.max_batch, limits.max_batch),
        "--max-len": (options.max_len, limits.max_len),
        "--chunk": (options.chunk, limits.chunk),
        "--page-size": (options.page_size, limits.page_size),
        "--prefix-cache": (options.prefix_cache, limits.prefix_cache),
        "--memory": (memory and _bytes(parse_size(memory, old.fingerprint.device_memory)), _bytes(limits.memory_bytes)),
        "--device": (options.device and options.device.partition(":")[0], old.fingerprint.device),
        "--dtype": (options.dtype, old.dtype),
        "--kernels": (options.kernels, old.kernels),
        "--decode-backend": (options.decode_backend, old.decode.backend),
        "--prefill-backend": (options.prefill_backend, old.prefill.backend),
        "--decode-buckets": (_with_maximum(options.decode_buckets, old.decode), _sizes(old.decode)),
        "--prefill-buckets": (_with_maximum(options.prefill_buckets, old.prefill), _sizes(old.prefill)),
        "--try-compile": (options.try_compile or None, old.prefill.backend == "piecewise"),
        "--prefill-slots": (options.prefill_slots, old.prefill.request_slots),
        "--decode-variants": (options.decode_variants, _draws(old.decode)),
        "--hash-contents": (options.hash_contents or None, bool(old.model.content_digest)),
    }
    for name, (value, planned) in asked.items():
        if value is not None and value != planned:
            raise GplanError(
                f"{name} with --from: the plan was measured with {_said(planned)}; {_said(value)} would have to be",
                "Leave it out, or plan from the checkpoint on its machine: gplan plan CHECKPOINT -o FILE",
            )


def _bytes(count: int) -> str:
    return f"{count:,} bytes"


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "it on" if value else "it off"
    return ",".join(value) or "none" if isinstance(value, tuple) else str(value)


def _sizes(phase: PhasePlan) -> str:
    return format_buckets(tuple(sorted({bucket.size for bucket in phase.ladder})))


def _draws(decode: PhasePlan) -> tuple[str, ...]:
    return tuple(note.variant for note in decode.variants if note.sizes and note.variant in DRAW_VARIANTS)


def _with_maximum(asked: tuple[int, ...] | None, phase: PhasePlan) -> str | None:
    return None if asked is None else format_buckets(tuple(sorted({*asked, phase.max_size})))


def _figures(old: Plan, phase: PhasePlan, known: PhaseFigures | None = None) -> PhaseFigures:
    """Times of a phase's own buckets, or of `known`, of which the phase has kept some.

    Raises:
        GplanError: the plan holds no times of the phase, or not of a bucket.
    """
    plain = tuple(bucket for bucket in phase.base_ladder if bucket.width == 1)
    setup = PhaseSetup.from_plan(msgspec.structs.replace(phase, ladder=plain))
    if known is not None:
        return replace(known, setup=setup)
    if not phase.eager_us or any(bucket.graph is None for bucket in plain):
        raise GplanError(
            f"--from: the plan holds no times of {phase.phase}, which its traffic cannot be run without",
            "Plan from the checkpoint, on its machine: gplan plan CHECKPOINT -o FILE measures them.",
        )
    eager = {entry.size: entry.eager.median_us for entry in phase.other_sizes if entry.eager is not None}
    buckets = sorted((*plain, *_left_out(phase, plain)), key=lambda bucket: bucket.size)
    return PhaseFigures(setup, tuple(buckets), eager, phase.costs, old.limits)


def _left_out(phase: PhasePlan, plain: Sequence[Bucket]) -> Iterator[Bucket]:
    """Sizes that the plan timed as buckets are, but left out: as buckets. What they take to capture was not kept; it is
    taken for what the next smaller bucket takes, since the largest pays for what the first capture sets up."""
    for entry in phase.other_sizes:
        smaller = [bucket for bucket in plain if bucket.size < entry.size]
        if plain and entry.graph is not None and entry.eager is not None:
            like = smaller[-1] if smaller else plain[0]
            yield msgspec.structs.replace(like, size=entry.size, graph=entry.graph, eager=entry.eager)


def _solve(old: Plan, figures: PhaseFigures, phase: Phase, steps: Steps, budget_ms: float | None) -> _Solved:
    before = old.phase(phase)
    if not before.ladder:
        return _Solved(before, "")
    # Memory stays divided as it is, so a graph's bytes have no price.
    solution = best_ladder(figures, steps, budget_ms, byte_price_us=0.0)
    chosen = frozenset(solution.ladder)
    room_ms = None if budget_ms is None else budget_ms - solution.capture_ms
    special = _variants(before, chosen, steps, room_ms)
    kept = [bucket for bucket in before.ladder if bucket.size in chosen]
    known = {bucket.size for bucket in kept}
    added = [bucket for bucket in figures.buckets if bucket.size in chosen - known]
    every = sorted((*kept, *added), key=lambda bucket: (bucket.size, bucket.width, bucket.variant))
    ladder = tuple(bucket for bucket in every if is_base(bucket.variant) or (bucket.size, bucket.variant) in special)
    reason = (
        f"{len(solution.ladder)} of the {len(figures.buckets)} sizes that plan {plan_id(old)} measured, "
        f"{solution.regret:.2%} above having all of them"
        + (f"; {format_buckets(tuple(b.size for b in added))} not compared with eager yet" if added else "")
    )
    plain = [bucket for bucket in figures.buckets if bucket.size in chosen]
    changed = msgspec.structs.replace(
        before,
        ladder=ladder,
        request_slots=before.request_slots if before.slot_limit or _have(ladder, "full") else 0,
        variants=tuple(msgspec.structs.replace(n, sizes=_have(ladder, n.variant)) for n in before.variants),
        eager_sizes=cheaper_eagerly(plain, before.eager_us, figures.rows_us),
        other_sizes=other_sizes(figures.buckets, chosen, before.other_sizes),
    )
    return _Solved(changed, reason)


def _variants(
    before: PhasePlan, chosen: frozenset[int], steps: Steps, room_ms: float | None
) -> frozenset[tuple[int, str]]:
    """Variants of the chosen sizes: all, or where capture time is short those that take most steps."""
    setup = PhaseSetup.from_plan(before)
    taken = steps_by_bucket(replace(setup, keys=tuple(key for key in setup.keys if key.size in chosen)), steps)
    candidates = [
        Candidate(b.size, b.variant, float(taken[b.size]), b.capture_ms)
        for b in before.ladder
        if b.size in chosen and not is_base(b.variant)
    ]
    kept = candidates if room_ms is None else worth_capturing(candidates, room_ms)
    return frozenset((each.size, each.part) for each in kept)


def _have(ladder: Sequence[Bucket], part: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(bucket.size for bucket in ladder if part in bucket.variant.split("+")))


def _judge(figures: Mapping[Phase, PhaseFigures], steps: Mapping[Phase, Steps], workload: str) -> list[Regret]:
    judged = (phase for phase in Phase if steps[phase] and figures[phase].setup.keys)
    return [entry for phase in judged for entry in regrets(figures[phase], steps[phase], workload)]


def _choices(old: Plan, solved: Mapping[Phase, _Solved], note: str) -> tuple[Choice, ...]:
    """The old choices in their order, those of solved ladders replaced."""
    made = {
        f"{phase}.ladder": Choice(
            field=f"{phase}.ladder",
            value=_sizes(found.plan),
            basis="measured",
            reason=found.reason + note,
        )
        for phase, found in solved.items()
        if found.reason
    }
    known = {choice.field for choice in old.choices}
    kept = tuple(made.get(choice.field, choice) for choice in old.choices)
    return kept + tuple(choice for field, choice in made.items() if field not in known)
