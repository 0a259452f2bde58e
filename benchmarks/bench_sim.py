"""Serves a plan for real, with a trace's arrivals, and compares with the simulation. One JSON line per repetition.

    python -m benchmarks.bench_sim PLAN --checkpoint DIR --workload poisson:rate=4,in=50-200,out=20-60,n=60

The real run goes through the engine loop that `gplan serve` runs, in this process, without HTTP. `throughput_error` is
simulated over real output tokens a second, less 1; `steps_distance` half the sum of the differences between the shares
of steps at each phase and size (total variation), `buckets_distance` the same by graph replayed.

Plans hold medians. On a CPU that others keep busy, steps that are interrupted take many times as long, and serving is
slowed by them: so `undisturbed_error` compares tokens per second of work, each step taken for the median of those that
ran from the same bucket. Plan, then run this, while the machine is as quiet as it gets.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import Counter, defaultdict, deque
from typing import Any

from formats.container import read_plan
from formats.plan import Plan
from formats.trace import Trace
from formats.workload import read_workload
from gplan.core import Phase, SamplingParams
from gplan.scheduling.packing import packer_of_plan
from gplan.scheduling.report import SimulationReport
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.simulator import simulate
from gplan.scheduling.times import times_of_plan
from gplan.serving.engine import Engine
from gplan.serving.protocol import Add, Drain, FromEngine, Outputs, ToEngine
from gplan.serving.startup import Ready, start_executor

Shares = Counter[tuple[str, int]]


class Arrivals:
    """Hands the engine the requests of a trace when they come, or when a client is free, and notes what comes back."""

    def __init__(self, trace: Trace, vocab_size: int, seed: int) -> None:
        self._trace, self._waiting = trace, deque(enumerate(trace.requests))
        self._clients = trace.concurrency
        self._rng, self._vocab_size = random.Random(seed), vocab_size
        self._blocks: dict[int, list[int]] = {}
        self._open: set[str] = set()
        self._is_over = False
        self._started = time.perf_counter()
        self._arrived: dict[str, float] = {}
        self.ttft_ms: list[float] = []
        self.sizes: Shares = Counter()
        self.buckets: Shares = Counter()
        self.output_tokens, self.seconds = 0, 0.0
        self._last = 0.0
        self._gaps: dict[tuple[str, int], list[float]] = defaultdict(list)

    def receive(self, wait_ms: int) -> list[ToEngine]:
        if not self._waiting and not self._open and not self._is_over:
            self._is_over = True
            return [Drain()]
        if wait_ms and self._waiting and not self._trace.concurrency:
            time.sleep(max(0.0, min(wait_ms / 1e3, self._waiting[0][1].arrival_s - self._now)))
            self._last = self._now
        arrived: list[ToEngine] = []
        while self._waiting and self._has_come(self._waiting[0][1].arrival_s):
            index, asked = self._waiting.popleft()
            name = str(index)
            self._open.add(name)
            self._arrived[name] = self._now if self._trace.concurrency else asked.arrival_s
            params = SamplingParams(max_tokens=asked.output_tokens, temperature=0.0)
            arrived.append(Add(name, self._prompt(asked.input_tokens, asked.prefix_ids), params))
        return arrived

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, Outputs):
            return
        now, stats = self._now, message.stats
        self.sizes[stats.phase, stats.size] += 1
        bucket = stats.phase, stats.size + stats.padding_rows if stats.key else 0
        self.buckets[bucket] += 1
        self._gaps[bucket].append(now - self._last)
        self._last = now
        for output in message.outputs:
            self.output_tokens += len(output.tokens)
            arrived = self._arrived.pop(output.id, None)
            if arrived is not None:
                self.ttft_ms.append((now - arrived) * 1e3)
            if output.finish_reason:
                self._open.discard(output.id)
                self.seconds = now

    @property
    def undisturbed_s(self) -> float:
        """Of all steps, each taken for the median of those that ran from its bucket."""
        return sum(len(gaps) * statistics.median(gaps) for gaps in self._gaps.values())

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _has_come(self, arrival_s: float) -> bool:
        return len(self._open) < self._clients if self._trace.concurrency else arrival_s <= self._now

    def _prompt(self, length: int, prefix_ids: tuple[int, ...]) -> list[int]:
        block, tokens = self._trace.prefix_block_tokens, list[int]()
        for name in prefix_ids:
            tokens += self._blocks.setdefault(name, self._random(block))
        return (tokens + self._random(max(0, length - len(tokens))))[:length]

    def _random(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]


def compare(plan: Plan, real: Arrivals, simulated: SimulationReport) -> dict[str, Any]:
    times = times_of_plan(plan)
    sizes = Counter({("decode", size): n for size, n in simulated.decode.steps})
    sizes.update({("prefill", size): n for size, n in simulated.prefill.steps})
    buckets: Shares = Counter()
    for (phase, size), count in sizes.items():
        buckets[phase, times.phase(Phase(phase)).bucket[size]] += count
    rate, undisturbed = real.output_tokens / real.seconds, real.output_tokens / real.undisturbed_s
    ttft = statistics.quantiles(real.ttft_ms, n=100)
    return {
        "real_tokens_per_s": round(rate, 2),
        "simulated_tokens_per_s": round(simulated.output_tokens_per_s, 2),
        "throughput_error": round(simulated.output_tokens_per_s / rate - 1, 4),
        "undisturbed_error": round(simulated.output_tokens / simulated.busy_s / undisturbed - 1, 4),
        "steps_distance": round(distance(real.sizes, sizes), 4),
        "buckets_distance": round(distance(real.buckets, buckets), 4),
        "steps": [real.sizes.total(), sizes.total()],
        "ttft_p50_ms": [round(ttft[49], 1), round(simulated.ttft_ms.p50, 1)],
        "ttft_p99_ms": [round(ttft[98], 1), round(simulated.ttft_ms.p99, 1)],
    }


def distance(a: Shares, b: Shares) -> float:
    """Total variation between two distributions."""
    return sum(abs(a[key] / a.total() - b[key] / b.total()) for key in {*a, *b}) / 2


def serve(ready: Ready, plan: Plan, trace: Trace, seed: int) -> Arrivals:
    real = Arrivals(trace, plan.model.vocab_size, seed)
    Engine(ready.executor, plan.limits, plan.num_kv_pages, real, lambda: False, packer=packer_of_plan(plan)).run()
    return real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--speedup", type=float, default=1.0)
    parser.add_argument("--requests", type=int, help="of the workload, so many")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    plan = read_plan(arguments.plan)
    trace = read_workload(arguments.workload).sped_up(arguments.speedup).truncated(plan.limits.max_len)
    trace = first(trace, arguments.requests)
    ready = start_executor(plan, arguments.checkpoint, lambda stage, done, total: None)
    gc.collect()
    gc.freeze()  # as the engine process does
    serve(ready, plan, first(trace, 4), 0)
    scheduler = Scheduler(plan.limits, plan.num_kv_pages, packer_of_plan(plan))
    started = time.perf_counter()
    simulated = simulate(trace, scheduler, times_of_plan(plan), lag=ready.executor.result_lag)
    rate = simulated.num_steps / (time.perf_counter() - started)
    for repeat in range(arguments.repeats):
        real = serve(ready, plan, trace, repeat)
        case: dict[str, Any] = {
            "case": "simulated against real",
            "workload": arguments.workload,
            "requests": len(trace.requests),
        }
        case["simulated_steps_per_s"] = round(rate)
        print(json.dumps(case | compare(plan, real, simulated)), flush=True)
    ready.executor.close()


def first(trace: Trace, count: int | None) -> Trace:
    return Trace(
        requests=trace.requests[:count],
        concurrency=trace.concurrency,
        prefix_block_tokens=trace.prefix_block_tokens,
    )


if __name__ == "__main__":
    main()
