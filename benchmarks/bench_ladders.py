"""Solves ladders for a trace at several loads and judges them, and other engines', on traffic. One JSON line per case.

    python -m benchmarks.bench_ladders benchmarks/curves/llama-3.1-8b-h200.json --trace TRACE [--other TRACE]

TIMES is a plan or a file of `benchmarks/curves`. Ladders are solved on the first half of the trace, for each speed-up,
with at most `--buckets` sizes of each phase out of all sizes there are, and judged on both halves and on every other
trace given. Each line has the regret of the solved ladder, of each named ladder, and of a ladder solved for the same
traffic with as many buckets as that one. `holds`: the regret is within the bound, and no named ladder is better than a
solved one of its length, on the half that was solved for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.curves import Curves, read_curves
from formats.trace import Trace
from formats.workload import is_stated, read_workload
from gplan.core import Phase, ShapeKey
from gplan.planning.buckets import candidate_sizes, solve
from gplan.planning.curves import Curve
from gplan.planning.ladders import NAMED_LADDERS, LadderCost, ladder_cost, named_ladder
from gplan.planning.ladders import Steps as Expected
from gplan.planning.traffic import PhaseFigures, Steps, halves, problem_of, run_traffic, steps_of

BOUNDS = {Phase.DECODE: 0.01, Phase.PREFILL: 0.02}
SLACK = 1e-9

Figures = Mapping[Phase, PhaseFigures]
Histograms = Mapping[str, Mapping[Phase, Steps]]


def histograms(curves: Curves, figures: Figures, traces: Mapping[str, Trace]) -> Histograms:
    """How many steps run at each size, by trace and phase."""
    found = {}
    for name, trace in traces.items():
        report = run_traffic(trace, curves.limits, curves.num_kv_pages, figures, curves.result_lag)
        found[name] = {phase: steps_of(report, phase) for phase in Phase}
    return found


def solved(figures: PhaseFigures, steps: Steps, max_buckets: int) -> PhaseFigures:
    """The figures with the best ladder of all sizes."""
    candidates = candidate_sizes(figures.setup.max_size, steps)
    solution = solve(problem_of(figures, steps, candidates, None, 0.0, max_buckets))
    keys = tuple(ShapeKey(figures.setup.phase, size) for size in solution.ladder)
    return replace(figures, setup=replace(figures.setup, keys=keys, eager_sizes=solution.eager_sizes))


def cost_of(figures: PhaseFigures, steps: Expected) -> LadderCost:
    return cost(figures, [key.size for key in figures.setup.keys], steps, figures.setup.eager_sizes)


def cost(
    figures: PhaseFigures, ladder: Sequence[int], steps: Expected, eager_sizes: Sequence[tuple[int, int]] = ()
) -> LadderCost:
    maximum = figures.setup.max_size
    graph_us, eager_us = (
        Curve(tuple(sorted(points.items()))).over(maximum) for points in (figures.graph_us, figures.eager_us)
    )
    return ladder_cost(ladder, steps, graph_us, eager_us, None, eager_sizes, np.asarray(figures.rows_us))


def cases(
    figures: PhaseFigures, solved_for: str, seen: Histograms, max_buckets: int, load: str
) -> Iterator[dict[str, Any]]:
    """One per trace that a phase's ladder is judged on."""
    phase = figures.setup.phase
    steps = seen[solved_for][phase]
    best = solved(figures, steps, max_buckets)
    named = {name: named_ladder(name, phase, figures.setup.max_size) for name in NAMED_LADDERS}
    equals = {name: solved(figures, steps, len(ladder)) for name, ladder in named.items()}
    for judged_on, found in seen.items():
        if not found[phase]:
            continue
        own = cost_of(best, found[phase])
        others = {}
        for name, ladder in named.items():
            theirs, equal = cost(figures, ladder, found[phase]), cost_of(equals[name], found[phase])
            others[name] = {
                "buckets": len(ladder),
                "regret": round(theirs.regret, 6),
                "solved_with_as_many": round(equal.regret, 6),
                "padding_ms": round(theirs.padding_us / 1e3, 1),
            }
        beaten = [name for name, other in others.items() if other["regret"] < other["solved_with_as_many"] - SLACK]
        yield {
            "phase": phase,
            "load": load,
            "solved_for": solved_for,
            "judged_on": judged_on,
            "steps": sum(count for _, count in found[phase]),
            "ladder": [key.size for key in best.setup.keys],
            "regret": round(own.regret, 6),
            "bound": BOUNDS[phase],
            "padding_ms": round(own.padding_us / 1e3, 1),
            "named": others,
            "named_as_good": [name for name, other in others.items() if other["regret"] <= own.regret],
            "named_better_at_equal_count": beaten,
            "holds": own.regret <= BOUNDS[phase] and not (beaten and judged_on == solved_for),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", metavar="TIMES")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--other", action="append", default=[], help="traffic to judge on; may be given again")
    parser.add_argument("--speedups", default="1,2,4")
    parser.add_argument("--buckets", type=int, default=16)
    arguments = parser.parse_args()
    curves = read_curves(arguments.times)
    figures, max_len = curves.figures(), curves.limits.max_len
    trace = read_workload(arguments.trace).truncated(max_len)
    others = {
        (spec if is_stated(spec) else spec.rpartition("/")[2]): read_workload(spec).truncated(max_len)
        for spec in arguments.other
    }
    for speedup in (float(text) for text in arguments.speedups.split(",")):
        first, second = halves(trace.sped_up(speedup))
        seen = histograms(curves, figures, {"first half": first, "second half": second, **others})
        for phase in Phase:
            for case in cases(figures[phase], "first half", seen, arguments.buckets, f"{speedup:g}x"):
                print(json.dumps({"model": curves.model, "machine": curves.machine, **case}), flush=True)


if __name__ == "__main__":
    main()
