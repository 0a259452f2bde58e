"""What is planned instead where compiling alone would take longer at start than capturing may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from formats.plan import Bucket, Rejection
from gplan.core import Phase, ShapeKey
from gplan.graphs.variants import COMPILED
from gplan.planning.choices import Choices
from gplan.planning.decisions import Decisions, PhaseDecision
from gplan.planning.variants import with_pairs


def uncompiled(
    decisions: Decisions,
    buckets: Mapping[ShapeKey, Bucket],
    budget_s: float,
    choices: Choices,
    *,
    slots: int,
    keeps_prefill: bool,
) -> Decisions | None:
    """The same decisions with nothing compiled; None where all that was compiled fits the budget.

    Args:
        buckets: measured: what capturing each took, compiling included.
        choices: are told of another backend.
        slots: request slots of graphs that hold their attention.
        keeps_prefill: the user has asked for the backend of prefill.
    """
    compiled_s = sum(bucket.capture_ms for key, bucket in buckets.items() if _is_compiled(key, decisions)) / 1e3
    if compiled_s <= budget_s:
        return None
    reason = f"compiling takes {compiled_s:,.1f} s, and capturing may take {budget_s:g} s at start (--startup-budget)"
    decode, prefill = decisions[Phase.DECODE], decisions[Phase.PREFILL]
    slower = {Phase.DECODE: _plain_decode(decode, reason, slots), Phase.PREFILL: prefill}
    if prefill.setup.backend == "piecewise" and not keeps_prefill:
        slower[Phase.PREFILL] = _breakable_prefill(prefill, reason)
        choices.revise("prefill.backend", "breakable", f"in place of piecewise: {reason}")
    return None if slower == dict(decisions) else slower


def _is_compiled(key: ShapeKey, decisions: Decisions) -> bool:
    return COMPILED in key.variant.split("+") or decisions[key.phase].setup.backend == "piecewise"


def _plain_decode(decision: PhaseDecision, reason: str, slots: int) -> PhaseDecision:
    pairs = decision.pairs
    if not any(part == COMPILED for _, part in pairs.saved_us):
        return decision
    saved = {(size, part): us for (size, part), us in pairs.saved_us.items() if part != COMPILED}
    reasons = {**pairs.reasons, COMPILED: f"{pairs.reasons[COMPILED]}; {reason}"}
    plain = replace(pairs, saved_us=saved, reasons=reasons)
    bases = tuple(ShapeKey(key.phase, key.size, key.width) for key in decision.setup.base_keys)
    return replace(decision, setup=with_pairs(replace(decision.setup, keys=bases), plain, slots), pairs=plain)


def _breakable_prefill(decision: PhaseDecision, reason: str) -> PhaseDecision:
    others = (entry for entry in decision.rejected if entry.backend != "breakable")
    rejected = (Rejection(backend="piecewise", reason=reason), *others)
    return replace(decision, setup=replace(decision.setup, backend="breakable"), rejected=rejected)
