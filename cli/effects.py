"""What going from one plan to another costs or gains: room for tokens, step times, memory and time of the graphs.

Derived from both plans, nothing of it is stored. Step times are those of the plans' own measurements, weighed by how
often each size runs under one traffic for both: the second plan's, else the first's; without any, they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cli.views import full_requests
from formats.plan import PhasePlan, Plan
from gplan.core import Phase
from gplan.scheduling.times import PS_PER_US, PhaseTimes, times_of_phase

Steps = Sequence[tuple[int, int]]


class Effect(msgspec.Struct, frozen=True):
    """One figure before and after.

    Attributes:
        change: of `b` against `a`, as a part of `a`; None where `a` is 0.
        note: what it was worked out under.
    """

    what: str
    a: float
    b: float
    unit: str
    change: float | None
    note: str = ""


def effects(a: Plan, b: Plan) -> tuple[Effect, ...]:
    """Figures that differ, the most telling first."""
    return tuple(effect for effect in _figures(a, b) if effect.a != effect.b)


def _figures(a: Plan, b: Plan) -> Iterator[Effect]:
    yield _effect("KV pool", _kv_tokens(a), _kv_tokens(b), "tokens")
    yield _effect("requests at full length", full_requests(a), full_requests(b), "requests")
    yield from _step_times(a, b)
    pools = [sum(plan.planned_bytes(f"graph_pool_{phase}") for phase in Phase) for plan in (a, b)]
    yield _effect("graph memory", pools[0] / (1 << 20), pools[1] / (1 << 20), "MiB")
    if [_sizes(phase) for phase in (a.decode, a.prefill)] != [_sizes(phase) for phase in (b.decode, b.prefill)]:
        spent = [sum(bucket.capture_ms for p in (plan.decode, plan.prefill) for bucket in p.ladder) for plan in (a, b)]
        yield _effect("capture at start", spent[0], spent[1], "ms")


def _kv_tokens(plan: Plan) -> int:
    return (plan.num_kv_pages - 1) * plan.limits.page_size


def _sizes(phase: PhasePlan) -> list[tuple[int, str]]:
    return [(bucket.size, bucket.variant) for bucket in phase.ladder]


def _step_times(a: Plan, b: Plan) -> Iterator[Effect]:
    """Of each phase the mean step, where both plans have times of every size that the traffic needs."""
    workload = b.workload if b.workload.decode_steps or b.workload.prefill_steps else a.workload
    for phase, steps in ((Phase.DECODE, workload.decode_steps), (Phase.PREFILL, workload.prefill_steps)):
        before, after = _mean_us(a, phase, steps), _mean_us(b, phase, steps)
        if before is not None and after is not None:
            yield _effect(f"{phase} step", before / 1e3, after / 1e3, "ms", f"on average, for {workload.spec}")


def _mean_us(plan: Plan, phase: Phase, steps: Steps) -> float | None:
    part, count = plan.phase(phase), sum(number for _, number in steps)
    if not count or not part.eager_us or max(size for size, _ in steps) > part.max_size:
        return None
    times = times_of_phase(part, plan.limits)
    return sum(_step_ps(times, size) * number for size, number in steps) / count / PS_PER_US


def _step_ps(times: PhaseTimes, size: int) -> int:
    """A step of `size` whose rows read as much as when sizes were timed; padding rows read nothing."""
    bucket = times.bucket[size]
    return times.graph_ps[bucket] - times.rows_ps[bucket] + times.rows_ps[size] if bucket else times.eager_ps[size]


def _effect(what: str, a: float, b: float, unit: str, note: str = "") -> Effect:
    return Effect(what, a, b, unit, b / a - 1 if a else None, note)
