"""How a server ran its steps, read off its `/metrics`: replayed from which bucket, or eager for which reason."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import Metric

from cli.text import columns

STEPS = "gplan_steps"
PADDING = "gplan_padding_rows"


class Outcome(msgspec.Struct, frozen=True, order=True):
    """Steps of one phase that went one way. `bucket` is 0, and `reason` given, where they ran eagerly."""

    phase: str
    bucket: int
    variant: str
    reason: str
    steps: int


class Replays(msgspec.Struct, frozen=True):
    """Attributes:
    padding_rows: rows of buckets beyond their batches, by phase.
    """

    outcomes: tuple[Outcome, ...]
    padding_rows: dict[str, int]

    @property
    def replayed(self) -> int:
        return sum(outcome.steps for outcome in self.outcomes if outcome.bucket)

    @property
    def total(self) -> int:
        return sum(outcome.steps for outcome in self.outcomes)


def read_replays(metrics: Iterable[Metric]) -> Replays:
    outcomes: list[Outcome] = []
    padding: dict[str, int] = {}
    for metric in metrics:
        for sample in metric.samples:
            labels = sample.labels
            if sample.name == f"{STEPS}_total":
                bucket = int(labels["bucket"] or 0)
                outcome = (labels["phase"], bucket, labels.get("variant", ""), labels["reason"])
                outcomes.append(Outcome(*outcome, int(sample.value)))
            elif sample.name == f"{PADDING}_total":
                padding[labels["phase"]] = int(sample.value)
    return Replays(tuple(sorted(outcomes)), padding)


def replays_table(replays: Replays) -> list[str]:
    """Lines for people: one for each bucket or reason, then the sum."""
    rows = [
        (
            outcome.phase,
            _how(outcome),
            str(outcome.steps),
        )
        for outcome in replays.outcomes
    ]
    padding = ", ".join(f"{rows} in {phase}" for phase, rows in sorted(replays.padding_rows.items()))
    return [
        *columns(("phase", "how", "steps"), rows, left=2),
        f"{replays.replayed} of {replays.total} steps replayed; padding rows: {padding or 'none'}",
    ]


def _how(outcome: Outcome) -> str:
    if not outcome.bucket:
        return f"eager: {outcome.reason}"
    return f"replayed, bucket {outcome.bucket}" + (f", {outcome.variant}" if outcome.variant else "")
