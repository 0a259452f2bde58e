"""Measured times to solve ladders for: of a plan, or of a file beside this one that holds another machine's."""

from __future__ import annotations

from pathlib import Path

import msgspec

from formats.container import read_plan
from formats.measurements import Costs, Timing
from formats.plan import Bucket, Limits, PhasePlan, Plan
from gplan.core import Phase, ShapeKey
from gplan.graphs.admission import PhaseSetup
from gplan.planning.traffic import PhaseFigures


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds by size. `costs`: what steps take beside what their size says, where that was measured."""

    graph_us: dict[int, float]
    eager_us: dict[int, float]
    costs: Costs = Costs()


class Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one machine takes for steps of one model.

    Attributes:
        source: which commands measured what.
        result_lag: steps that run while the host schedules the next.
    """

    model: str
    machine: str
    source: str
    result_lag: int
    num_kv_pages: int
    limits: Limits
    decode: Times
    prefill: Times

    def figures(self) -> dict[Phase, PhaseFigures]:
        """Both phases with every measured size captured."""
        return {Phase.DECODE: self._figures(Phase.DECODE), Phase.PREFILL: self._figures(Phase.PREFILL)}

    def _figures(self, phase: Phase) -> PhaseFigures:
        times, limits = (self.decode, self.limits) if phase is Phase.DECODE else (self.prefill, self.limits)
        maximum = limits.max_batch if phase is Phase.DECODE else limits.chunk
        keys = tuple(ShapeKey(phase, size) for size in sorted(times.graph_us))
        buckets = tuple(_bucket(key.size, times) for key in keys)
        setup = PhaseSetup(phase=phase, backend="full", keys=keys, max_size=maximum)
        return PhaseFigures(setup, buckets, times.eager_us, times.costs, limits)


def read_curves(path: str) -> Curves:
    """Of a plan (`.gplan`) or a JSON file.

    Raises:
        FormatError: the plan cannot be read.
        msgspec.DecodeError: the JSON is no such file.
    """
    if path.endswith(".gplan"):
        return _of_plan(read_plan(path))
    return msgspec.json.decode(Path(path).read_bytes(), type=Curves)


def _of_plan(plan: Plan) -> Curves:
    machine = plan.fingerprint
    return Curves(
        model=plan.model.source,
        machine=machine.device_name,
        source="gplan plan",
        result_lag=1 if machine.device == "cuda" else 0,
        num_kv_pages=plan.num_kv_pages,
        limits=plan.limits,
        decode=_times(plan.decode),
        prefill=_times(plan.prefill),
    )


def _times(phase: PhasePlan) -> Times:
    return Times(phase.graph_us, phase.eager_us, phase.costs)


def _bucket(size: int, times: Times) -> Bucket:
    eager = times.eager_us.get(size, times.graph_us[size])
    return Bucket(size=size, graph=_timing(times.graph_us[size]), eager=_timing(eager))


def _timing(us: float) -> Timing:
    return Timing(median_us=us, spread_us=0.0, runs=1)
