"""Serves a plan in this process, without HTTP, and measures what requests see. One JSON line per case.

    python -m benchmarks.bench_serve PLAN --checkpoint DIR [--guard]

Cases: decode at fixed batch sizes (milliseconds per output token once every request decodes), prefill to first token,
and a burst of mixed requests (output tokens per second). Everything goes through the engine loop that `gplan serve`
runs; requests arrive by its own messages.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from formats.container import read_plan
from formats.plan import Plan
from gplan.core import SamplingParams
from gplan.scheduling.packing import packer_of_plan
from gplan.serving.engine import Engine
from gplan.serving.protocol import Add, Drain, FromEngine, Outputs, ToEngine
from gplan.serving.startup import Ready, start_executor


class Wire:
    """Hands a fixed set of requests to the engine, notes when tokens come back, and drains when all are done."""

    def __init__(self, requests: Sequence[Add]) -> None:
        self._pending: list[ToEngine] = list(requests)
        self._open = {request.id for request in requests}
        self.sent_at = self._last_sent = 0.0
        self.token_times: dict[str, list[float]] = defaultdict(list)
        self.steps: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def receive(self, wait_ms: int) -> list[ToEngine]:
        if not self.sent_at:
            self.sent_at = self._last_sent = time.perf_counter()
        messages, self._pending = self._pending, []
        if not self._open:
            messages.append(Drain())
        return messages

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, Outputs):
            return
        now = time.perf_counter()
        step = message.stats.key or f"eager {message.stats.phase} {message.stats.reason}"
        self.steps[step] += 1
        self.seconds[step] += now - self._last_sent
        self._last_sent = now
        for output in message.outputs:
            self.token_times[output.id].extend([now] * len(output.tokens))
            if output.finish_reason:
                self._open.discard(output.id)


def run(ready: Ready, plan: Plan, requests: Sequence[Add]) -> Wire:
    wire = Wire(requests)
    Engine(ready.executor, plan.limits, plan.num_kv_pages, wire, lambda: False, packer=packer_of_plan(plan)).run()
    return wire


def request(name: str, rng: random.Random, vocab_size: int, num_input: int, num_output: int) -> Add:
    prompt = [rng.randrange(vocab_size) for _ in range(num_input)]
    return Add(name, prompt, SamplingParams(max_tokens=num_output, temperature=0.0))


def decode_case(ready: Ready, plan: Plan, batch: int, num_input: int, num_output: int) -> dict[str, Any]:
    """Milliseconds between tokens while all requests decode; those that start first wait for the last by decoding
    beside its prompt, so they are given as many tokens more as that takes steps."""
    rng = random.Random(batch)
    num_output += batch * num_input // (plan.limits.chunk - plan.limits.max_batch) + 1
    requests = [request(str(i), rng, plan.model.vocab_size, num_input, num_output) for i in range(batch)]
    wire = run(ready, plan, requests)
    all_decode_from = max(times[0] for times in wire.token_times.values())
    until = min(times[-1] for times in wire.token_times.values())
    times = [t for t in wire.token_times["0"] if all_decode_from <= t <= until]
    gaps = [(b - a) * 1e3 for a, b in pairwise(times)]
    return {
        "case": "decode",
        "batch": batch,
        "ms_per_token": (times[-1] - times[0]) / max(1, len(times) - 1) * 1e3,
        "median_gap_ms": statistics.median(gaps),
        "tokens": len(times),
        "steps": dict(wire.steps),
    }


def prefill_case(ready: Ready, plan: Plan, num_input: int, repeats: int) -> dict[str, Any]:
    """Milliseconds from a request's arrival to its first token, one request at a time."""
    samples, steps = [], Counter[str]()
    for index in range(repeats + 1):
        wire = run(ready, plan, [request("0", random.Random(index), plan.model.vocab_size, num_input, 1)])
        samples.append((wire.token_times["0"][0] - wire.sent_at) * 1e3)
        steps += wire.steps
    return {"case": "prefill", "tokens": num_input, "ttft_ms": statistics.median(samples[1:]), "steps": dict(steps)}


def burst_case(ready: Ready, plan: Plan, count: int, low: int, high: int) -> dict[str, Any]:
    """Output tokens a second of `count` requests at once, lengths uniform in low..high both ways."""
    rng = random.Random(0)
    sizes = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(count)]
    requests = [request(str(i), rng, plan.model.vocab_size, a, b) for i, (a, b) in enumerate(sizes)]
    wire = run(ready, plan, requests)
    num_output = sum(len(times) for times in wire.token_times.values())
    seconds = max(times[-1] for times in wire.token_times.values()) - wire.sent_at
    return {
        "case": "burst",
        "requests": count,
        "output_tokens": num_output,
        "seconds": seconds,
        "output_tokens_per_s": num_output / seconds,
        "mean_ms": {step: round(wire.seconds[step] / count * 1e3, 3) for step, count in wire.steps.items()},
        "steps": dict(wire.steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--prefills", default="32,128,512,2048")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--burst", type=int, default=256)
    parser.add_argument("--burst-range", default="100,1024")
    parser.add_argument("--guard", action="store_true", help="check every address before every replay")
    arguments = parser.parse_args()
    plan = read_plan(arguments.plan)
    started = time.perf_counter()
    ready = start_executor(plan, arguments.checkpoint, lambda stage, done, total: None)
    gc.collect()
    gc.freeze()  # as the engine process does
    ready.executor.check_addresses = arguments.guard
    rows = {entry.name: (entry.planned_bytes, entry.actual_bytes) for entry in ready.ledger}
    emit({"case": "start", "seconds": time.perf_counter() - started, "ledger": rows})
    medians = {bucket.size: bucket.graph.median_us / 1e3 for bucket in plan.decode.ladder if bucket.graph}
    for batch in (int(text) for text in arguments.batches.split(",") if text):
        if batch <= plan.limits.max_batch:
            case = decode_case(ready, plan, batch, arguments.input, arguments.output)
            bucket = min((size for size in medians if size >= batch), default=None)
            emit(case | {"planned_step_ms": medians.get(bucket) if bucket else None})
    for tokens in (int(text) for text in arguments.prefills.split(",") if text):
        emit(prefill_case(ready, plan, tokens, 5))
    low, high = (int(text) for text in arguments.burst_range.split(","))
    if arguments.burst:
        emit(burst_case(ready, plan, arguments.burst, low, high))
    ready.executor.close()


def emit(case: dict[str, Any]) -> None:
    print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
