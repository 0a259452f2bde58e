"""Steps as they are served beside their forwards as the planner times them, on a CPU. One JSON line per graph.

    python -m benchmarks.bench_beyond PLAN --checkpoint DIR

Every step that the scheduler decides is launched and collected; then its forward alone is run again, and the two are
compared: so a machine that others slow down slows both. `served_over_forward`, the median quotient, is what comes of
steps following each other (other pages, colder caches, sampling, reading results); a plan has it as `beyond_us`. With
one thread the times are the process's own, which others disturb least; with more they are the clock's.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict

import torch

from formats.container import read_plan
from formats.plan import Plan
from gplan.core import Request, SamplingParams
from gplan.graphs.executor import Executor
from gplan.scheduling.packing import packer_of_plan
from gplan.scheduling.scheduler import Scheduler
from gplan.serving.startup import start_executor

Times = dict[str, list[tuple[int, int]]]
"""By graph: nanoseconds of a served step, and of its forward alone."""


def serve(executor: Executor, plan: Plan, tokens_in: int, tokens_out: int, seed: int) -> Times:
    """Serves as many requests as run at once."""
    clock = time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    rng, found = random.Random(seed), defaultdict(list)
    scheduler = Scheduler(plan.limits, plan.num_kv_pages, packer_of_plan(plan))
    for index in range(plan.limits.max_batch):
        prompt = [rng.randrange(plan.model.vocab_size) for _ in range(tokens_in)]
        params = SamplingParams(max_tokens=tokens_out, temperature=0.0)
        scheduler.add(Request(str(index), tokens_in, prompt, params))
    while (batch := scheduler.schedule()) is not None:
        started = clock()
        step = executor.launch(batch)
        result = executor.collect(step)
        served = clock()
        with torch.no_grad():
            executor.runner(batch.phase).execute(batch)
        found[str(step.key or f"eager {batch.phase}")].append((served - started, clock() - served))
        scheduler.update(batch, result.tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--tokens-in", type=int, default=128)
    parser.add_argument("--tokens-out", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    plan = read_plan(arguments.plan)
    executor = start_executor(plan, arguments.checkpoint, lambda stage, done, total: None).executor
    gc.collect()
    gc.freeze()  # as the engine process does
    times: Times = defaultdict(list)
    for repeat in range(arguments.repeats + 1):
        for key, pairs in serve(executor, plan, arguments.tokens_in, arguments.tokens_out, repeat).items():
            times[key] += pairs if repeat else []  # the first is thrown away
    for key, pairs in sorted(times.items()):
        case = {
            "case": "served step against its forward",
            "key": key,
            "steps": len(pairs),
            "served_ms": round(statistics.median(served for served, _ in pairs) / 1e6, 3),
            "forward_ms": round(statistics.median(forward for _, forward in pairs) / 1e6, 3),
            "served_over_forward": round(statistics.median(served / forward for served, forward in pairs), 4),
        }
        print(json.dumps(case))
    executor.close()


if __name__ == "__main__":
    main()
