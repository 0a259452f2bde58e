"""Which sizes are captured where nothing is said of the traffic: the default ladder, without what it need not hold.

A few sizes beside the ladder show how well times between its buckets are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from formats.measurements import Prediction
from formats.plan import Bucket, Workload
from gplan.core import Phase
from gplan.planning.bench import Bench, Measured
from gplan.planning.choices import Choices
from gplan.planning.curves import Curve
from gplan.planning.decisions import Decisions, Outcome, PhaseDecision, measure, outcome_of
from gplan.planning.options import format_buckets
from gplan.planning.outdone import outdone_sizes
from gplan.planning.variants import with_pairs

HELD_OUT_SIZES = {"cpu": 1, "cuda": 2}
"""Sizes of a phase beside the default ladder that are timed to see how well they were foretold."""


def keep_default_ladders(bench: Bench, decisions: Decisions, choices: Choices) -> Outcome:
    """Measures the default ladders and keeps them, but for sizes that a larger graph beats.

    Raises:
        VerificationError: a captured graph did not equal eager execution.
    """
    count = HELD_OUT_SIZES[bench.resolved.device.type]
    others: dict[Phase, tuple[Bucket, ...]] = {}
    for phase, decision in decisions.items():
        ladder = [key.size for key in decision.setup.base_keys]
        gaps = Curve(tuple((size, 0.0) for size in ladder)).widest_gaps(count) if ladder else []
        others[phase] = bench.sample(decision.setup, gaps) if gaps else ()
    measured = measure(bench, decisions, is_final=lambda found: not any(_outdone(bench, decisions, found).values()))
    outdone = _outdone(bench, decisions, measured)
    kept = {phase: _without(decision, outdone[phase], bench) for phase, decision in decisions.items()}
    final = measure(bench, kept, measured) if any(outdone.values()) else measured
    phases = {}
    for phase, decision in kept.items():
        ladder = [key.size for key in decision.setup.base_keys]
        if ladder and not decision.is_locked:
            choices.default(f"{phase}.ladder", format_buckets(tuple(ladder)), _default_reason(outdone[phase]))
        bases = [measured.buckets[key] for key in decisions[phase].setup.base_keys]
        known = {bucket.size: bucket.graph.median_us for bucket in bases if bucket.graph}
        predictions = _predictions(known, decision.setup.max_size, others[phase])
        phases[phase] = outcome_of(decision, [*bases, *others[phase]], predictions)
    return Outcome(phases, final, Workload(spec="default"), ())


def _outdone(bench: Bench, decisions: Decisions, measured: Measured) -> dict[Phase, tuple[int, ...]]:
    """Sizes that a larger one beats; on a CPU none: its products are cut so finely that only noise would say so."""
    if bench.resolved.device.type == "cpu":
        return dict.fromkeys(decisions, ())
    return {
        phase: () if decision.is_locked else outdone_sizes([measured.buckets[key] for key in decision.setup.base_keys])
        for phase, decision in decisions.items()
    }


def _without(decision: PhaseDecision, sizes: Sequence[int], bench: Bench) -> PhaseDecision:
    """The decision without buckets of some sizes, and without their variants."""
    bases = tuple(key for key in decision.setup.base_keys if key.size not in sizes)
    setup = with_pairs(replace(decision.setup, keys=bases), decision.pairs, bench.resolved.prefill_slots)
    return replace(decision, setup=setup)


def _default_reason(outdone: Sequence[int]) -> str:
    reason = "the default ladder up to the exact maximum"
    if outdone:
        sizes = ", ".join(map(str, outdone))
        reason += f", without {sizes}: a larger graph takes less time"
    return reason


def _predictions(known: Mapping[int, float], maximum: int, found: Sequence[Bucket]) -> tuple[Prediction, ...]:
    if not found:
        return ()
    line = Curve(tuple(sorted(known.items()))).over(maximum)
    return tuple(
        Prediction(size=bucket.size, predicted_us=float(line[bucket.size]), measured_us=bucket.graph.median_us)
        for bucket in found
        if bucket.graph is not None
    )
