"""What the checks that a user asked for cost, said before they cost anything: by the plan's times, or as timed here."""

from __future__ import annotations

import time
from collections.abc import Iterator

from formats.plan import Bucket, PhasePlan, Plan, bucket_key
from gplan.core import Batch, Phase, ShapeKey
from gplan.graphs.executor import Executor
from gplan.graphs.kv_check import CANARY_PAGES
from gplan.serving.protocol import Debug

_CHECKS = 20


def debug_costs(plan: Plan, executor: Executor, debug: Debug) -> tuple[str, ...]:
    """A sentence for each check that is on."""
    return tuple(_sentences(plan, executor, debug))


def _sentences(plan: Plan, executor: Executor, debug: Debug) -> Iterator[str]:
    if debug.graphs:
        slower = [_slowdown(phase) for phase in (plan.decode, plan.prefill) if phase.ladder]
        yield f"--debug-graphs: nothing is replayed; {'; '.join(slower) or 'nothing would be either'}"
    if debug.addresses and executor.keys:
        yield f"--check-addresses: before every replay {_check_cost(plan, executor)}"
    if debug.kv:
        yield f"--check-kv: {_kv_check_cost(executor)}"


def _slowdown(phase: PhasePlan) -> str:
    ratios = [bucket.eager.median_us / bucket.graph.median_us for bucket in phase.ladder if bucket.graph is not None]
    if not ratios:
        return f"the plan has no times of {phase.phase}"
    least, most = f"{min(ratios):.2g}", f"{max(ratios):.2g}"
    times = least if least == most else f"{least} to {most}"
    return f"by the plan's times {phase.phase} takes {times} times as long"


def _check_cost(plan: Plan, executor: Executor) -> str:
    """Of the key where it weighs most: that of the shortest replay."""
    replays = [(bucket, phase) for phase in (plan.decode, plan.prefill) for bucket in phase.ladder]
    bucket, phase = min(replays, key=lambda entry: _replay_us(entry[0]))
    key = ShapeKey(Phase(phase.phase), bucket.size, bucket.width, bucket.variant)
    started = time.perf_counter()
    for _ in range(_CHECKS):
        executor.guard.check(key)
    spent_us = (time.perf_counter() - started) / _CHECKS * 1e6
    share = f", {spent_us / _replay_us(bucket):.1%} of a replay of {bucket_key(phase.phase, bucket)}"
    return f"{spent_us:.0f} µs of the host" + (share if bucket.graph is not None else "")


def _kv_check_cost(executor: Executor) -> str:
    """Of what a step costs whatever it holds; reading its inputs comes on top."""
    check = executor.decode.kv_check
    assert check is not None
    nothing = Batch(Phase.DECODE, ())
    started = time.perf_counter()
    for _ in range(_CHECKS):
        check.after(nothing)
    spent_us = (time.perf_counter() - started) / _CHECKS * 1e6
    return (
        f"{CANARY_PAGES} page less, {spent_us:.0f} µs after every step, its inputs read back before it, "
        "and no step is prepared while another runs"
    )


def _replay_us(bucket: Bucket) -> float:
    return bucket.eager.median_us if bucket.graph is None else bucket.graph.median_us
