"""Serves many unlike requests with every address checked before every replay. One JSON line.

    python -m benchmarks.bench_mixed PLAN --checkpoint DIR [--requests 2000] [--concurrency 400] [--longest 200]

Prompts, answers and sampling options are drawn at random from a seed; some requests are given up half-way. Reported:
steps that ran eagerly, by reason, and among them those that a captured key covers; kernels that were compiled after
ready; the most of the KV pool that was in use; preemptions. Any address that moved ends the run with the guard's error.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Sequence

from formats.container import read_plan
from formats.plan import Plan
from gplan.core import SamplingParams
from gplan.scheduling.packing import packer_of_plan
from gplan.serving.engine import Engine
from gplan.serving.protocol import Abort, Add, Drain, FromEngine, Idle, Outputs, ToEngine
from gplan.serving.startup import start_executor

ABORTED = 0.05
"""Part of the requests that are given up after their first token."""


class Load:
    """Keeps `concurrency` of the requests open until all are answered, and counts what their steps were."""

    def __init__(self, requests: Sequence[Add], concurrency: int, rng: random.Random) -> None:
        self._waiting, self._concurrency = list(requests), concurrency
        self._given_up = {request.id for request in requests if rng.random() < ABORTED}
        self._open: set[str] = set()
        self._aborts: list[str] = []
        self.steps: Counter[str] = Counter()
        self.eager: Counter[tuple[str, str, int]] = Counter()
        self.finished: Counter[str] = Counter()
        self.most_pages = self.preemptions = self.tokens = self.leaked_pages = 0

    def receive(self, wait_ms: int) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while self._waiting and len(self._open) < self._concurrency:
            request = self._waiting.pop()
            self._open.add(request.id)
            messages.append(request)
        if self._aborts:
            messages.append(Abort(self._aborts))
            self._open -= set(self._aborts)
            self.finished["given up"] += len(self._aborts)
            self._aborts = []
        if not self._open and not messages:
            messages.append(Drain())
        return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Idle):
            self.leaked_pages = message.pages_used
        if not isinstance(message, Outputs):
            return
        stats = message.stats
        self.steps[f"{stats.phase} {'replayed' if stats.key else 'eager'}"] += 1
        if not stats.key:
            self.eager[stats.phase, stats.reason, stats.size] += 1
        self.most_pages = max(self.most_pages, stats.pages_used)
        self.preemptions = stats.preemptions
        for output in message.outputs:
            self.tokens += len(output.tokens)
            if output.finish_reason:
                self._open.discard(output.id)
                self.finished[output.finish_reason] += 1
            elif output.id in self._given_up:
                self._given_up.remove(output.id)
                self._aborts.append(output.id)


def mixed_requests(plan: Plan, count: int, longest: int, rng: random.Random) -> list[Add]:
    """Half greedy, half with options of every kind; lengths uniform up to `longest` both ways."""
    vocab_size = plan.model.vocab_size
    longest = min(longest, plan.limits.max_len // 2)

    def params() -> SamplingParams:
        max_tokens = rng.randint(1, longest)
        if rng.random() < 0.5:
            return SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
            top_k=rng.choice([0, 1, 50]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.randrange(1 << 40),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, -0.5]),
            logit_bias=rng.choice([(), ((rng.randrange(vocab_size), 5.0),)]),
            logprobs=rng.choice([None, 0, 5]),
            stop_token_ids=frozenset(rng.sample(range(vocab_size), 20)),
        )

    def prompt() -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]

    return [Add(str(index), prompt(), params()) for index in range(count)]


def covered(plan: Plan, eager: Counter[tuple[str, str, int]]) -> int:
    """Eager steps whose size is that of a captured key, so that nothing but a fault explains them."""
    exact = {(phase.phase, bucket.size) for phase in (plan.decode, plan.prefill) for bucket in phase.ladder}
    return sum(count for (phase, _, size), count in eager.items() if (phase, size) in exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=400)
    parser.add_argument("--longest", type=int, default=200, help="tokens of a prompt, and of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    plan, rng = read_plan(arguments.plan), random.Random(arguments.seed)
    ready = start_executor(plan, arguments.checkpoint, lambda stage, done, total: None)
    gc.collect()
    gc.freeze()  # as the engine process does
    ready.executor.check_addresses = True
    load = Load(mixed_requests(plan, arguments.requests, arguments.longest, rng), arguments.concurrency, rng)
    compiled = ready.executor.device.compilations()
    started = time.perf_counter()
    Engine(ready.executor, plan.limits, plan.num_kv_pages, load, lambda: False, packer=packer_of_plan(plan)).run()
    seconds = time.perf_counter() - started
    reasons: Counter[str] = Counter()
    for (phase, reason, _), count in load.eager.items():
        reasons[f"{phase} {reason}"] += count
    line = {
        "case": "mixed",
        "requests": arguments.requests,
        "finished": dict(load.finished),
        "output_tokens_per_s": round(load.tokens / seconds),
        "steps": dict(load.steps),
        "eager": dict(reasons),
        "eager_at_a_captured_size": covered(plan, load.eager),
        "compiled_after_ready": ready.executor.device.compilations() - compiled,
        "most_kv_in_use": round(load.most_pages / (plan.num_kv_pages - 1), 4),
        "preemptions": load.preemptions,
        "leaked_pages": load.leaked_pages,
    }
    print(json.dumps(line), flush=True)
    ready.executor.close()


if __name__ == "__main__":
    main()
