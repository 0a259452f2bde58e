"""Divides what capturing may take at start among the phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from formats.plan import Bucket
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.planning.search import ALMOST

MOST_SAID = 8
"""Sizes that an error names."""


def capture_limits(
    budget_s: float | None, candidates: Mapping[Phase, Sequence[Bucket]], fixed: Mapping[Phase, Sequence[Bucket]]
) -> dict[Phase, float | None]:
    """Milliseconds that capturing each phase may take, None for any.

    What has to be captured is set aside first: all of a phase that the user fixed, of others the largest bucket. The
    rest goes to phases by what all their candidates would take.

    Args:
        candidates: of each phase that is solved for, ascending.
        fixed: of each phase that is not, what will be captured of it.

    Raises:
        GplanError: what has to be captured takes longer than the budget.
    """
    if budget_s is None:
        return dict.fromkeys(Phase, None)
    needed = {phase: _capture_ms(buckets[-1:]) for phase, buckets in candidates.items()}
    needed |= {phase: _capture_ms(buckets) for phase, buckets in fixed.items()}
    budget_ms, least_ms = budget_s * 1e3, sum(needed.values())
    if least_ms > budget_ms * ALMOST:
        what = [*(_said(*entry) for entry in fixed.items()), *(_said(p, b[-1:]) for p, b in candidates.items())]
        raise GplanError(
            f"what has to be captured, {' and '.join(filter(None, what))}, takes {least_ms:,.1f} ms; there are "
            f"{budget_ms:,.1f} ms of the budget",
            "Raise --startup-budget, have nothing compiled, or run a phase eagerly.",
        )
    rest_ms = max(0.0, budget_ms - least_ms)
    more = {phase: _capture_ms(buckets[:-1]) for phase, buckets in candidates.items()}
    total = sum(more.values())
    return {
        phase: needed.get(phase, 0.0) + (rest_ms * more.get(phase, 0.0) / total if total else 0.0) for phase in Phase
    }


def _capture_ms(buckets: Sequence[Bucket]) -> float:
    return sum(bucket.capture_ms for bucket in buckets)


def _said(phase: Phase, buckets: Sequence[Bucket]) -> str:
    sizes = sorted({bucket.size for bucket in buckets})
    few = ", ".join(map(str, sizes)) if len(sizes) <= MOST_SAID else f"{len(sizes)} sizes up to {sizes[-1]}"
    return f"{phase} at {few}" if sizes else ""
