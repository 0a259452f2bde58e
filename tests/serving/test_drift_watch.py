"""Drift while serving: what passes a limit is measured, told once with the command that helps, and nothing else is."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from formats.measurements import Costs
from formats.plan import Plan, Workload
from gplan.graphs.capture.base import DeviceMemory
from gplan.memory.ledger import LedgerEntry
from gplan.serving.drift_watch import FADE_STEPS, MAX_DISTANCE, MIN_STEPS, QUIET_S, WINDOW, DriftWatch
from gplan.serving.ledger_watch import LOOK_EVERY_S, LedgerWatch
from gplan.serving.protocol import LedgerActual, StepStats
from tests.formats.plans import make_plan

MIB = 1 << 20
EVEN = tuple((size, 100) for size in range(1, 17))
PLAN = make_plan(max_batch=16, chunk=64, workload=Workload(spec="trace.csv", decode_steps=EVEN, prefill_steps=()))
PLANNED_US = 400.0 + 4 * 8
"""Of decode:8."""


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Watched:
    def __init__(self, plan: Plan = PLAN, **options: object) -> None:
        self.registry, self.clock = CollectorRegistry(), Clock()
        self.watch = DriftWatch(plan, self.registry, path="p.gplan", now=self.clock, **options)  # type: ignore[arg-type]

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def replays(self, us: float, number: int = WINDOW, *, cached: int = 0, phase: str = "decode") -> None:
        for _ in range(number):
            self.watch.on_step(stats(size=7, key=f"{phase}:8", phase=phase, replay_us=us, cached_tokens=cached))

    def steps(self, sizes: range | list[int], number: int) -> None:
        for index in range(number):
            self.watch.on_step(stats(size=sizes[index % len(sizes)]))


def stats(size: int = 1, key: str = "", phase: str = "decode", **fields: object) -> StepStats:
    return StepStats(
        phase, size, key, "", 8 - size if key else 0, 0.001, 1, 0, 1, 0, 0, size, **fields  # type: ignore[arg-type]
    )  # fmt: skip


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gplan.drift"]


# Times --------------------------------------------------------------------------------------------------------------


def test_slow_replays_are_told_once_with_the_command(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.replays(PLANNED_US * 1.3, WINDOW - 1)
    assert watched.value("gplan_replay_time_ratio", key="decode:8") is None
    assert not lines(caplog)
    watched.replays(PLANNED_US * 1.3, 5 * WINDOW)
    assert watched.value("gplan_replay_time_ratio", key="decode:8") == pytest.approx(1.3)
    assert watched.value("gplan_drift", kind="times", what="decode:8") == 1
    (line,) = lines(caplog)
    assert line == (
        "drift: a replay of decode:8 takes 0.562 ms, planned 0.432 ms with a spread of 3.25 µs; "
        f"plan again: gplan plan {PLAN.model.source} -o NEW.gplan"
    )


@pytest.mark.parametrize("factor", [0.2, 1.0, 1.24])
def test_replays_near_the_plan_are_no_drift(factor: float, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.replays(PLANNED_US * factor, 3 * WINDOW)
    assert watched.value("gplan_drift", kind="times", what="decode:8") is None
    assert not lines(caplog)


def test_a_wide_spread_allows_more(caplog: pytest.LogCaptureFixture) -> None:
    ladder = tuple(
        msgspec.structs.replace(bucket, graph=msgspec.structs.replace(bucket.graph, spread_us=100.0))
        for bucket in PLAN.decode.ladder
    )
    watched = Watched(msgspec.structs.replace(PLAN, decode=msgspec.structs.replace(PLAN.decode, ladder=ladder)))
    watched.replays(PLANNED_US + 290)
    assert not lines(caplog)
    watched.replays(PLANNED_US + 310)
    assert len(lines(caplog)) == 1


def test_a_few_slow_replays_are_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for _ in range(10):
        watched.replays(PLANNED_US, 20)
        watched.replays(PLANNED_US * 50, 10)
    assert not lines(caplog)


def with_costs(costs: Costs) -> Plan:
    return msgspec.structs.replace(PLAN, decode=msgspec.structs.replace(PLAN.decode, costs=costs))


def test_steps_that_read_more_than_was_measured_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(with_costs(Costs(context=100)))
    watched.replays(PLANNED_US * 3, 2 * WINDOW, cached=8 * 100 + 1)
    watched.replays(PLANNED_US * 3, 2 * WINDOW, cached=1, phase="prefill")
    assert not lines(caplog)
    watched.replays(PLANNED_US * 3, WINDOW, cached=8 * 100)
    assert len(lines(caplog)) == 1


def test_a_longer_context_is_granted_its_time(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(with_costs(Costs(context=100, cached_us=((8, 0.5),))))
    watched.replays(PLANNED_US + 500, cached=800 + 1000)
    assert watched.value("gplan_replay_time_ratio", key="decode:8") == pytest.approx(1)
    watched.replays(PLANNED_US + 500, cached=800)
    assert len(lines(caplog)) == 1


def test_what_comes_and_goes_is_told_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for _ in range(10):
        watched.replays(PLANNED_US * 2)
        watched.replays(PLANNED_US)
        assert watched.value("gplan_drift", kind="times", what="decode:8") == 0
    assert len(lines(caplog)) == 1
    watched.clock.seconds = QUIET_S
    watched.replays(PLANNED_US * 2)
    assert len(lines(caplog)) == 2


def test_what_is_not_replayed_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(times_replays=False)
    watched.replays(PLANNED_US * 9, 3 * WINDOW)
    assert not lines(caplog)


# Traffic ------------------------------------------------------------------------------------------------------------


def test_the_traffic_that_was_planned_for_has_no_distance(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.steps(range(1, 17), MIN_STEPS)
    assert watched.value("gplan_traffic_distance", phase="decode") == pytest.approx(0)
    assert not lines(caplog)


def test_other_traffic_is_told_once_with_the_command(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.steps([16], MIN_STEPS - 1)
    assert watched.value("gplan_traffic_distance", phase="decode") is None
    watched.steps([16], 3 * MIN_STEPS)
    assert watched.value("gplan_traffic_distance", phase="decode") == pytest.approx(0.75), "sizes 13 to 16 are one"
    (line,) = lines(caplog)
    assert "decode steps have other sizes than planned for: total variation 0.75, limit 0.25" in line
    assert line.endswith("plan again: gplan plan --from p.gplan --workload TRACE -o NEW.gplan")


def test_a_shift_within_a_bucket_is_seen() -> None:
    """Steps of 9 are replayed from the bucket of 16, as those of 16 are, and waste half of it."""
    plan = make_plan(max_batch=16, workload=Workload(spec="x", decode_steps=((16, 100),)))
    watched = Watched(plan)
    watched.steps([9], MIN_STEPS)
    assert watched.value("gplan_traffic_distance", phase="decode") == 1


def test_what_was_served_long_ago_fades() -> None:
    watched = Watched()
    watched.steps([16], FADE_STEPS)
    watched.steps(range(1, 17), 4 * FADE_STEPS)
    distance = watched.value("gplan_traffic_distance", phase="decode")
    assert distance is not None
    assert distance < MAX_DISTANCE
    assert watched.value("gplan_drift", kind="traffic", what="decode") == 0


def test_a_plan_for_no_traffic_has_no_distance(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(make_plan(max_batch=16, workload=Workload(spec="default")))
    watched.steps([16], 2 * MIN_STEPS)
    assert watched.value("gplan_traffic_distance", phase="decode") is None
    assert not lines(caplog)


def test_every_size_has_its_place() -> None:
    for maximum in (1, 2, 3, 16, 37):
        plan = make_plan(
            max_batch=maximum,
            chunk=64,
            prefill_backend="eager",
            workload=Workload(spec="x", decode_steps=((1, 1),), prefill_steps=((64, 1),)),
        )
        watched = Watched(plan)
        watched.steps(range(1, maximum + 1), MIN_STEPS)
        for size in range(1, 65):
            watched.watch.on_step(stats(size=size, phase="prefill"))
        assert 0 <= (watched.value("gplan_traffic_distance", phase="decode") or 0) <= 1


# Memory -------------------------------------------------------------------------------------------------------------


def test_an_overrun_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    rows = [LedgerActual("non_torch", 100, 350), LedgerActual("kv_pool", 9, None), LedgerActual("weights", 9, 5)]
    watched.watch.on_ledger(rows, [])
    assert watched.value("gplan_ledger_overrun_bytes", row="non_torch") == 250
    assert watched.value("gplan_ledger_overrun_bytes", row="weights") == -4
    assert watched.value("gplan_ledger_overrun_bytes", row="kv_pool") is None
    assert not lines(caplog)
    for _ in range(3):
        watched.watch.on_ledger(rows, ["non_torch"])
    (line,) = lines(caplog)
    assert "ledger row non_torch holds 350 bytes, planned 100" in line
    assert watched.value("gplan_drift", kind="ledger", what="non_torch") == 1


@dataclass
class Memory:
    """A device that takes what it is told to take."""

    reserved: int = 500 * MIB
    non_torch: int = 100 * MIB

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 40, 1 << 39, self.reserved, self.reserved, self.non_torch)


def test_rows_that_grow_are_looked_at_now_and_then() -> None:
    device, clock = Memory(), Clock()
    ledger = (LedgerEntry("activation_reserve", 50 * MIB, 50 * MIB), LedgerEntry("non_torch", 100 * MIB, 100 * MIB))
    watch = LedgerWatch(device, ledger, clock)  # type: ignore[arg-type]
    assert watch.look() is None
    clock.seconds = LOOK_EVERY_S
    seen = watch.look()
    assert seen is not None
    assert (seen.overrun, [row.actual_bytes for row in seen.rows]) == ([], [100 * MIB, 50 * MIB])
    assert watch.look() is None, "once in a while, not at every step"
    device.reserved += 200 * MIB
    clock.seconds *= 2
    seen = watch.look()
    assert seen is not None
    assert (seen.overrun, [row.actual_bytes for row in seen.rows]) == (["activation_reserve"], [100 * MIB, 250 * MIB])


def test_a_step_costs_next_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Of most steps nothing is asked but a dictionary or two: no figure is computed, no gauge is set."""
    caplog.set_level(logging.DEBUG)
    watched = Watched()
    before = {metric.name: metric.samples for metric in watched.registry.collect()}
    watched.steps(range(1, 17), 200)
    assert {metric.name: metric.samples for metric in watched.registry.collect()} == before
