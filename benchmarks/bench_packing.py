"""What cutting prompts at buckets does to waiting times, in the simulator. One JSON line per ladder and speed.

    python -m benchmarks.bench_packing benchmarks/curves/llama-3.1-8b-h200.json --trace TRACE [--requests 4000]

TIMES is a plan or a file of `benchmarks/curves`. Every step of a trace is decided by the serving scheduler, once with
prompts cut at buckets and once as they come; figures are the change of each percentile, as a part: below 0 is sooner.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.curves import Curves, read_curves
from formats.trace import Trace
from formats.workload import read_workload
from gplan.core import Phase, ShapeKey
from gplan.scheduling.packing import packer_of
from gplan.scheduling.report import Distribution, SimulationReport
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.simulator import simulate
from gplan.scheduling.times import StepTimes

LADDERS = ((128, 512, 2048), (8, 64, 256, 512, 1024, 2048), (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024, 2048))
RANKS = ("mean", "p50", "p90", "p95", "p99", "max")


def without_and_with(curves: Curves, ladder: Sequence[int], trace: Trace) -> tuple[SimulationReport, SimulationReport]:
    """The trace served with prompts as they come, and cut at the buckets of a prefill ladder."""
    figures = curves.figures()
    keys = tuple(ShapeKey(Phase.PREFILL, size) for size in ladder)
    prefill = replace(figures[Phase.PREFILL], setup=replace(figures[Phase.PREFILL].setup, keys=keys))
    times = StepTimes(figures[Phase.DECODE].times(), prefill.times())
    plain, packed = (
        simulate(trace, Scheduler(curves.limits, curves.num_kv_pages, packer), times, lag=curves.result_lag)
        for packer in (None, packer_of(times.prefill))
    )
    return plain, packed


def changes(plain: Distribution, packed: Distribution) -> dict[str, float]:
    return {rank: round(getattr(packed, rank) / getattr(plain, rank) - 1, 4) for rank in RANKS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", metavar="TIMES")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--speedups", default="1,3")
    arguments = parser.parse_args()
    curves = read_curves(arguments.times)
    whole = read_workload(arguments.trace).truncated(curves.limits.max_len)
    for speedup in (float(text) for text in arguments.speedups.split(",")):
        trace = whole.sped_up(speedup)
        trace = Trace(requests=trace.requests[: arguments.requests], concurrency=trace.concurrency)
        for ladder in LADDERS:
            kept = [*(size for size in ladder if size < curves.limits.chunk), curves.limits.chunk]
            plain, packed = without_and_with(curves, kept, trace)
            case: dict[str, Any] = {"ladder": kept, "speedup": speedup, "ttft_ms": round(plain.ttft_ms.p50, 1)}
            case["ttft"] = changes(plain.ttft_ms, packed.ttft_ms)
            case["inter_token"] = changes(plain.inter_token_ms, packed.inter_token_ms)
            print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
