"""What is decided of each phase while a plan is made, and what every way of deciding does: measures what was decided,
and reads off the measurements what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from formats.measurements import Prediction, SizeTiming, Timing
from formats.plan import Bucket, Regret, Rejection, Workload
from gplan.core import Phase
from gplan.graphs.admission import PhaseSetup
from gplan.planning.bench import Bench, Measured
from gplan.planning.budget import Budget, fill_ledger
from gplan.planning.eager import cheaper_eagerly
from gplan.planning.traffic import PhaseFigures, other_sizes
from gplan.planning.variants import NONE, Pairs


@dataclass(frozen=True, slots=True)
class PhaseDecision:
    """How a phase will run, and the backends that it will not.

    Attributes:
        eager: eager times at the sizes where backends were compared.
        is_locked: the user fixed the ladder.
        pairs: variants of buckets, and what they save.
    """

    setup: PhaseSetup
    rejected: tuple[Rejection, ...]
    eager: Mapping[int, Timing]
    is_locked: bool
    pairs: Pairs = NONE


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """What was decided of a phase, and times that its ladder does not hold."""

    decision: PhaseDecision
    other_sizes: tuple[SizeTiming, ...]
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the graphs to be served are, and the traffic they were chosen for."""

    phases: Mapping[Phase, PhaseOutcome]
    measured: Measured
    workload: Workload
    regrets: tuple[Regret, ...]


Decisions = Mapping[Phase, PhaseDecision]
Figures = Mapping[Phase, PhaseFigures]


def measure(
    bench: Bench,
    decisions: Decisions,
    known: Measured | None = None,
    *,
    is_final: Callable[[Measured], bool] = lambda measured: True,
) -> Measured:
    setups = {phase: decision.setup for phase, decision in decisions.items()}
    eager = {phase: decision.eager for phase, decision in decisions.items()}
    return bench.measure(setups, eager, known, is_final=is_final)


def figures_of(bench: Bench, decision: PhaseDecision, measured: Measured) -> PhaseFigures:
    setup, costs = decision.setup, measured.costs[decision.setup.phase]
    buckets = tuple(measured.buckets[key] for key in setup.base_keys)
    eager = {size: timing.median_us for size, timing in decision.eager.items()}
    figures = PhaseFigures(setup, buckets, eager, costs, bench.resolved.limits)
    return replace(figures, setup=served(figures, decision, measured))


def served(figures: PhaseFigures, decision: PhaseDecision, measured: Measured) -> PhaseSetup:
    """The setup with the sizes that its ladder leaves to eager execution."""
    ladder = [measured.buckets[key] for key in decision.setup.base_keys]
    return replace(decision.setup, eager_sizes=cheaper_eagerly(ladder, figures.eager_us, figures.rows_us))


def outcome_of(decision: PhaseDecision, buckets: Sequence[Bucket], predictions: tuple[Prediction, ...]) -> PhaseOutcome:
    compared = [SizeTiming(size=size, eager=timing) for size, timing in decision.eager.items()]
    ladder = [key.size for key in decision.setup.base_keys]
    return PhaseOutcome(decision, other_sizes(buckets, ladder, compared), predictions)


def budget(bench: Bench, measured: Measured) -> Budget:
    return fill_ledger(bench.resolved.limits.memory_bytes, bench.needs(measured), bench.layout, bench.resolved.limits)
