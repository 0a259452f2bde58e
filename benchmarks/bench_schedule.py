"""What the prefix cache costs the host: the scheduler and the simulator with it and without, in one run. One JSON line
a case.

    python -m benchmarks.bench_schedule [--requests 500]

Prompts share nothing, so that the cache only costs: `simulate` is the simulator, `schedule` a scheduler driven as the
engine drives it, over real batches. Microseconds are of this process's CPU time, the least of several runs that take
turns; `ratio` is with the cache over without.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from formats.plan import Limits
from formats.trace import Trace, TraceRequest
from gplan.core import Request, SamplingParams
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.simulator import simulate
from gplan.scheduling.times import StepTimes, phase_times

NUM_PAGES = 10_000
LENGTHS = {"512/128": (512, 128), "2000/64": (2000, 64), "64/256": (64, 256)}
RUNS = 7


def limits_of(prefix_cache: bool) -> Limits:
    return Limits(max_batch=256, max_len=8192, chunk=2048, page_size=16, memory_bytes=0, prefix_cache=prefix_cache)


def times() -> StepTimes:
    decode = phase_times(256, range(8, 257, 8), {1: 4000.0, 256: 15000.0}, {1: 7000.0, 256: 15000.0})
    prefill = phase_times(2048, range(128, 2049, 128), {1: 4000.0, 2048: 50000.0}, {1: 12000.0, 2048: 50000.0})
    return StepTimes(decode, prefill)


def trace(num_requests: int, tokens_in: int, tokens_out: int) -> Trace:
    rng, now, made = random.Random(1), 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(20)
        tokens = _about(rng, tokens_in), _about(rng, tokens_out)
        made.append(TraceRequest(arrival_s=round(now, 6), input_tokens=tokens[0], output_tokens=tokens[1]))
    return Trace(requests=tuple(made))


def _about(rng: random.Random, number: int) -> int:
    return rng.randint(number // 2, number * 3 // 2)


def schedule(asked: Sequence[tuple[list[int], int]], scheduler: Scheduler) -> None:
    """Every prompt with its answer's length, a new one for each step that has none waiting."""
    waiting = iter(enumerate(asked))
    while True:
        if not scheduler.num_waiting and (found := next(waiting, None)) is not None:
            index, (prompt, max_tokens) = found
            scheduler.add(Request(str(index), len(prompt), list(prompt), SamplingParams(max_tokens=max_tokens)))
        batch = scheduler.schedule()
        if batch is None:
            return
        scheduler.update(batch, [7] * sum(chunk.samples for chunk in batch.chunks))


def run_simulation(served: Trace, measured: StepTimes, prefix_cache: bool) -> None:
    simulate(served, Scheduler(limits_of(prefix_cache), NUM_PAGES), measured)


def run_schedule(asked: Sequence[tuple[list[int], int]], prefix_cache: bool) -> None:
    schedule(asked, Scheduler(limits_of(prefix_cache), NUM_PAGES))


def measure(num_requests: int, run: Callable[[bool], object]) -> tuple[float, float]:
    """Microseconds a request, with the cache and without."""
    best = {True: float("inf"), False: float("inf")}
    for _ in range(RUNS):
        for prefix_cache in best:
            started = time.process_time()
            run(prefix_cache)
            best[prefix_cache] = min(best[prefix_cache], time.process_time() - started)
    return best[True] / num_requests * 1e6, best[False] / num_requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    number = parser.parse_args().requests
    rng, measured = random.Random(2), times()
    for name, (tokens_in, tokens_out) in LENGTHS.items():
        served = trace(number, tokens_in, tokens_out)
        asked = [([rng.randrange(50_000) for _ in range(r.input_tokens)], r.output_tokens) for r in served.requests]
        cases: dict[str, Callable[[bool], object]] = {
            "simulate": partial(run_simulation, served, measured),
            "schedule": partial(run_schedule, asked),
        }
        for case, run in cases.items():
            on_us, off_us = measure(number, run)
            line = {"case": case, "lengths": name, "on_us": round(on_us, 1), "off_us": round(off_us, 1)}
            print(json.dumps(line | {"ratio": round(on_us / off_us, 2)}), flush=True)


if __name__ == "__main__":
    main()
