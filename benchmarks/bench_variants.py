"""What variants gain on a well-known shape with random weights: each against the base of its bucket, in turns.

    python -m benchmarks.bench_variants [--model llama-3.1-8b] [--device cuda] [--no-compile]

Prefill that holds its attention (`full`) against graphs cut at it, 32 to 512 tokens; decode that draws in the graph
against drawing outside, as whole served steps; compiled forwards against uncompiled ones, prefill piecewise and small
decode buckets; with the time that capturing each took, compiling included. One JSON line per case; ratio is the
variant's time over its base's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import torch

from benchmarks.checkpoints import CONFIGS, config_of
from formats.measurements import Timing
from formats.plan import BackendName, Limits
from gplan.core import Phase, ShapeKey
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.assembly import Captured, ExecutorConfig, attach, capture_all, take_memory
from gplan.graphs.capture import make_graph_device
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions
from gplan.models import ModelSpec, random_model
from gplan.planning.profiler import Patience, Profiler

PAGE_SIZE, SLOTS = 16, 16
PREFILL = (32, 64, 128, 256, 512)
DECODE = (1, 8, 64)


class Bench:
    """A model and its memory; executors over it differ in what they capture."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        spec = ModelSpec.from_config(config_of(arguments.model, arguments.layers))
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.limits = Limits(
            max_batch=max(DECODE),
            max_len=2048 if self.device.type == "cuda" else 640,
            chunk=max(PREFILL),
            page_size=PAGE_SIZE,
            memory_bytes=1 << 40,
        )
        model = random_model(spec, dtype, self.device, self.limits.max_len)
        config = ExecutorConfig(
            kernels="flashinfer" if self.device.type == "cuda" else "reference",
            dtype=dtype,
            device=self.device,
            limits=self.limits,
            num_kv_pages=1 + self.limits.max_batch * self.limits.max_len // PAGE_SIZE,
            activation_reserve=0,
            decode=self.nothing(Phase.DECODE),
            prefill=self.nothing(Phase.PREFILL),
        )
        self.vocab_size = spec.vocab_size
        self.parts, self.sampler = take_memory(model, spec, config, lambda row, nbytes: None)

    def nothing(self, phase: Phase) -> PhaseSetup:
        most = self.limits.max_batch if phase is Phase.DECODE else self.limits.chunk
        return PhaseSetup(phase=phase, backend="eager", keys=(), max_size=most)

    def captured(self, phase: Phase, backend: BackendName, sizes: tuple[int, ...], *variants: str) -> Executor:
        setup = PhaseSetup(
            phase=phase,
            backend=backend,
            keys=tuple(ShapeKey(phase, size, variant=variant) for size in sizes for variant in ("", *variants)),
            max_size=self.nothing(phase).max_size,
            request_slots=min(SLOTS, self.limits.max_batch) if "full" in variants else 0,
        )
        setups = {Phase.DECODE: self.nothing(Phase.DECODE), Phase.PREFILL: self.nothing(Phase.PREFILL), phase: setup}
        graphs = make_graph_device(self.device)
        executor = attach(self.parts, self.sampler, graphs, setups[Phase.DECODE], setups[Phase.PREFILL])
        self.spent = {entry.key: entry for entry in capture_all(executor, lambda stage, done, total: None)}
        return executor

    def profiler(self, executor: Executor) -> Profiler:
        return Profiler(executor, self.vocab_size, Patience(min_runs=5, max_runs=40, seconds=1.0))


def main() -> None:
    arguments = _parse()
    with torch.no_grad():
        bench = Bench(arguments)
        for case in _cases(bench, arguments):
            print(json.dumps(case), flush=True)


def _cases(bench: Bench, arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    yield from _compare(bench, Phase.PREFILL, "breakable", PREFILL, ("full",))
    yield from _compare(bench, Phase.DECODE, "full", DECODE, ("greedy", "sampled"))
    if arguments.no_compile:
        return
    yield from _compare(bench, Phase.DECODE, "full", (1, 8), ("compiled",))
    started = time.perf_counter()
    executor = bench.captured(Phase.PREFILL, "piecewise", PREFILL)
    yield {"case": "compiling and capturing piecewise prefill", "seconds": round(time.perf_counter() - started, 1)}
    profiler = bench.profiler(executor)
    piecewise = {key.size: profiler.replay(key) for key in executor.prefill.setup.keys}
    executor.close()
    executor = bench.captured(Phase.PREFILL, "breakable", PREFILL)
    profiler = bench.profiler(executor)
    for key in executor.prefill.setup.keys:
        yield _case(key, "piecewise", profiler.replay(key), piecewise[key.size], bench.spent[key])
    executor.close()


def _compare(
    bench: Bench, phase: Phase, backend: BackendName, sizes: tuple[int, ...], variants: tuple[str, ...]
) -> Iterator[dict[str, object]]:
    executor = bench.captured(phase, backend, sizes, *variants)
    profiler = bench.profiler(executor)
    for size in sizes:
        for variant in variants:
            base, special = ShapeKey(phase, size), ShapeKey(phase, size, variant=variant)
            draws = variant in ("greedy", "sampled")
            before = executor.decode.num_steps_without_input
            times = (profiler.base_and_draw if draws else profiler.base_and_special)(base, special)
            case = _case(base, variant, *times, bench.spent[special])
            case["receipt"] = check_key(executor, special, compositions(executor, special, profiler.batches)).bitwise
            if draws:
                case["steps_without_host_input"] = executor.decode.num_steps_without_input - before
            yield case
    executor.close()


def _case(key: ShapeKey, variant: str, base: Timing, special: Timing, spent: Captured) -> dict[str, object]:
    return {
        "case": f"{key} {variant}",
        "base_ms": round(base.median_us / 1e3, 3),
        "variant_ms": round(special.median_us / 1e3, 3),
        "ratio": round(special.median_us / base.median_us, 4),
        "spread": round(max(base.spread_us, special.spread_us) / base.median_us, 4),
        "capture_ms": round(spent.capture_ms, 1),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true", help="leave out what needs a compiler")
    return parser.parse_args()


if __name__ == "__main__":
    main()
