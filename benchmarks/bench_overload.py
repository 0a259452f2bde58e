"""What overload does: the rate a server sustains, then four times that for a minute. JSON lines.

    python -m benchmarks.bench_overload PLAN --checkpoint DIR [--seconds 60] [--times 4] [--timeout 30]

The peak is that of as many clients as the plan has rows, each asking again as soon as it is answered. Overload is an
open loop: requests arrive at random times at `times` the peak's rate, whatever becomes of those before, half of them
from one address and the others from three more; all of them read streams, and with `--timeout` give up after so many
seconds. The clients keep to the last core, and the server to the others where there are more than one: else what a load
generator takes would count as what overload does. Of two cores the server has both, at the peak as in overload.

Cases: `cores`; `peak` and `overload` with output tokens per second of complete answers (goodput), the 50th and 99th
percentiles of milliseconds between parts of an answer as clients saw them and, of the 99th, between tokens as the
server sent them, and the share of a core that clients, HTTP process and engine took; `ratio`, which compares them,
and the memory taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clients import cpu_seconds, resident_mib
from benchmarks.light_client import LightClient
from cli.local_server import LocalServer, local_server
from formats.container import read_plan
from formats.plan import Plan

ADDRESSES = ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
PROMPT, OUTPUT = (16, 96), (16, 48)
"""Tokens of a request, at least and at most."""


@dataclass
class Seen:
    """What clients saw. Times are seconds since the case began."""

    ends: list[tuple[float, int]] = field(default_factory=list)
    """When an answer was complete, and its tokens."""
    gaps: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def goodput(self, start: float, end: float) -> float:
        return sum(tokens for at, tokens in self.ends if start <= at < end) / (end - start)

    def summary(self, seconds: float, skipped: float) -> dict[str, Any]:
        middle, high = np.percentile(self.gaps, (50, 99)) * 1e3 if self.gaps else (0.0, 0.0)
        return {
            "goodput_per_s": round(self.goodput(skipped, seconds), 2),
            "gap_p50_ms": round(float(middle), 2),
            "gap_p99_ms": round(float(high), 2),
            "answers": len(self.ends),
            "outcomes": dict(self.outcomes),
        }


class Load:
    """Requests of one server, as many clients send them."""

    def __init__(self, server: LocalServer, plan: Plan, model: str, timeout: float | None, seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size, self._model = plan.model.vocab_size, model
        self._headers = {} if timeout is None else {"X-Request-Timeout": f"{timeout:g}"}
        host, _, port = server.url.removeprefix("http://").partition(":")
        self._clients = {address: LightClient(host, int(port), address) for address in ADDRESSES}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    async def one(self, seen: Seen, began: float) -> None:
        """One request, streamed."""
        rng = self._rng
        prompt = [rng.randrange(self._vocab_size) for _ in range(rng.randint(*PROMPT))]
        body = {"model": self._model, "prompt": prompt, "max_tokens": rng.randint(*OUTPUT), "ignore_eos": True}
        reply = await self._clients[rng.choice(ADDRESSES)].stream(body | {"temperature": 0}, **self._headers)
        seen.gaps += [after - before for before, after in pairwise(reply.arrivals)]
        seen.outcomes[reply.code or "complete"] += 1
        if not reply.code:
            seen.ends.append((time.perf_counter() - began, reply.tokens))

    async def closed(self, clients: int, seconds: float) -> Seen:
        """As many clients, each with one request at a time."""
        seen, began = Seen(), time.perf_counter()

        async def client() -> None:
            while time.perf_counter() - began < seconds:
                await self.one(seen, began)

        await asyncio.gather(*(client() for _ in range(clients)))
        return seen

    async def open(self, rate: float, seconds: float, memory: list[list[float]], server: LocalServer) -> Seen:
        """Arrivals at random times; who still waits when time is up leaves."""
        seen, began, tasks = Seen(), time.perf_counter(), set[asyncio.Task[None]]()
        for at in self._arrivals(rate, seconds):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            task = asyncio.create_task(self.one(seen, began))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if not memory or at // 2 >= len(memory):
                memory.append(resident_mib(server))
        await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        seen.outcomes["unanswered at the end"] += len(left)
        return seen

    def _arrivals(self, rate: float, seconds: float) -> Iterator[float]:
        at = self._rng.expovariate(rate)
        while at < seconds:
            yield at
            at += self._rng.expovariate(rate)


def sent_gaps(server: LocalServer) -> dict[float, float]:
    """Tokens sent so far, by upper bound in seconds of the time since the one before."""
    name = "gplan_inter_token_seconds"
    family = next(family for family in server.metrics() if family.name == name)
    return {float(s.labels["le"]): s.value for s in family.samples if s.name == f"{name}_bucket"}


def percentile_ms(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Of what was sent between; within a bucket as if evenly spread."""
    counts = [(bound, after[bound] - before[bound]) for bound in sorted(after)]
    wanted, lower, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted and count > below:
            return round((lower + (min(bound, 10.0) - lower) * (wanted - below) / (count - below)) * 1e3, 2)
        lower, below = bound, count
    return 0.0


def part_cores() -> dict[str, list[int]]:
    """Gives this process, and what it starts from now on, the server's cores; returns who is to have which."""
    cores = sorted(os.sched_getaffinity(0))
    parts = {"generator": cores[-1:], "server": cores[:-1] if len(cores) > 2 else cores}
    os.environ.setdefault("OMP_NUM_THREADS", str(len(parts["server"])))
    os.sched_setaffinity(0, parts["server"])
    return parts


class Meter:
    """What tokens and processor took since it was last read."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._read()

    def _read(self) -> None:
        self._at, self._sent, self._cpu = time.perf_counter(), sent_gaps(self._server), cpu_seconds(self._server)

    def summary(self) -> dict[str, Any]:
        at, sent, cpu = self._at, self._sent, self._cpu
        self._read()
        shares = {name: round((self._cpu[name] - cpu[name]) / (self._at - at), 3) for name in cpu}
        return {"sent_gap_p99_ms": percentile_ms(sent, self._sent, 0.99), "cpu": shares}


async def measure(server: LocalServer, plan: Plan, arguments: argparse.Namespace) -> None:
    load = Load(server, plan, server.model_name(), arguments.timeout, arguments.seed)
    rows, warm = plan.limits.max_batch, arguments.seconds / 10
    await load.closed(rows, warm)
    meter = Meter(server)
    peak = await load.closed(rows, arguments.seconds)
    rate = sum(1 for at, _ in peak.ends if at < arguments.seconds) / arguments.seconds
    at_peak = peak.summary(arguments.seconds, warm) | meter.summary()
    print(json.dumps({"case": "peak", "requests_per_s": round(rate, 2)} | at_peak), flush=True)
    memory: list[list[float]] = []
    seen = await load.open(arguments.times * rate, arguments.seconds, memory, server)
    over = seen.summary(arguments.seconds, warm) | meter.summary()
    print(json.dumps({"case": "overload", "requests_per_s": round(arguments.times * rate, 2)} | over), flush=True)
    third = max(1, len(memory) // 3)
    growth = [round(b - a, 1) for a, b in zip(memory[third], memory[-1], strict=True)]
    ratio = {
        "case": "ratio",
        "goodput": round(over["goodput_per_s"] / at_peak["goodput_per_s"], 3),
        "gap_p99": round(over["gap_p99_ms"] / at_peak["gap_p99_ms"], 3),
        "sent_gap_p99": round(over["sent_gap_p99_ms"] / at_peak["sent_gap_p99_ms"], 3),
        "resident_mib": [round(value) for value in memory[-1]],
        "growth_mib": growth,
    }
    print(json.dumps(ratio), flush=True)
    load.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=float, default=4)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "serve.log"
    cores = part_cores()
    print(json.dumps({"case": "cores"} | cores), flush=True)
    with local_server((arguments.plan, "--checkpoint", arguments.checkpoint), log) as server:
        os.sched_setaffinity(0, cores["generator"])
        asyncio.run(measure(server, read_plan(arguments.plan), arguments))


if __name__ == "__main__":
    main()
