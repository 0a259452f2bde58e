"""Times single steps of a well-known shape with random weights: replayed, and eager. One JSON line per case.

    python -m benchmarks.bench_step [--model llama-3.1-8b] [--decode 1,8,64] [--prefill 32,512] [--profile]

A decode step is the whole forward and the vocabulary head in one CUDA graph, each request at the given context; its
floor is the bytes it must read over the bandwidth at which a product reads weights. A prefill step is the forward of
one prompt and its head, run eagerly and from both kinds of graph; its floor is the larger of bytes and arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.checkpoints import CONFIGS, config_of
from formats.plan import Limits
from gplan.core import Phase, ShapeKey
from gplan.graphs.admission import PhaseSetup, Verdict
from gplan.graphs.assembly import ExecutorConfig, attach, capture_all, take_memory
from gplan.graphs.capture import make_graph_device
from gplan.graphs.executor import Executor
from gplan.graphs.synthetic import BatchMaker
from gplan.models import ModelSpec, random_model

BANDWIDTH = 4.13e12
"""Bytes per second at which a product of one row reads weights on an H200."""
BF16_FLOPS = 0.79e15
"""Arithmetic of a large product in bfloat16 on an H200."""
PAGE_SIZE = 16
CUDA = torch.device("cuda")
EAGER = Verdict(None)


def main() -> None:
    arguments = _parse()
    spec = ModelSpec.from_config(config_of(arguments.model, arguments.layers))
    bench = Bench(spec, arguments)
    _print(case="copy", tb_per_s=round(copy_bandwidth() / 1e12, 3), device=torch.cuda.get_device_name())
    with torch.no_grad():
        bench.decode()
        bench.prefill("breakable")
        bench.prefill("full")
    if arguments.transformers:
        from benchmarks.transformers_step import run

        bench.close()
        run(config_of(arguments.model, arguments.layers), arguments.decode, arguments.context, _print)


class Bench:
    """A model, its memory, and executors over it that differ in how prefill is captured."""

    def __init__(self, spec: ModelSpec, arguments: argparse.Namespace) -> None:
        self.spec, self.context, self.repeats = spec, arguments.context, arguments.repeats
        self.decode_sizes, self.prefill_sizes = arguments.decode, arguments.prefill
        self.profile = arguments.profile
        most = max((1, *arguments.decode))
        pages = 1 + most * -(-(arguments.context + 1) // PAGE_SIZE)
        chunk = max((most, *arguments.prefill))
        self.limits = Limits(
            max_batch=most,
            max_len=max(arguments.context, chunk) + 1,
            chunk=chunk,
            page_size=PAGE_SIZE,
            memory_bytes=torch.cuda.get_device_properties(CUDA).total_memory,
        )
        model = random_model(spec, torch.bfloat16, CUDA, self.limits.max_len)
        self.config = ExecutorConfig(
            kernels=arguments.kernels,
            dtype=torch.bfloat16,
            device=CUDA,
            limits=self.limits,
            num_kv_pages=max(pages, 2 + -(-chunk // PAGE_SIZE)),
            activation_reserve=0,
            decode=self._setup(Phase.DECODE, "eager", ()),
            prefill=self._setup(Phase.PREFILL, "eager", ()),
        )
        self.parts, self.sampler = take_memory(model, spec, self.config, lambda row, nbytes: None)
        self.parts.kv_pool.data.normal_()
        self.batches = BatchMaker(self.limits, self.config.num_kv_pages, spec.vocab_size)

    def decode(self) -> None:
        executor = self._executor(self._setup(Phase.DECODE, "full", self.decode_sizes), self.config.prefill)
        for key in executor.decode.setup.keys:
            _print(**self._decode_case(executor, key))
        executor.close()

    def prefill(self, backend: str) -> None:
        executor = self._executor(self.config.decode, self._setup(Phase.PREFILL, backend, self.prefill_sizes))
        for key in executor.prefill.setup.keys:
            _print(**self._prefill_case(executor, key, backend))
        executor.close()

    def close(self) -> None:
        """Gives the memory back."""
        del self.parts, self.sampler
        torch.cuda.empty_cache()

    def _decode_case(self, executor: Executor, key: ShapeKey) -> dict[str, object]:
        batch, runner = self.batches.decode(key.size, self.context), executor.decode
        self.sampler.ensure_last_tokens(batch.chunks)
        step = self._median_ms(executor, lambda: runner.execute(batch, Verdict(key)))
        replay = self._median_ms(executor, lambda: runner.backend.replay(key))
        kernels = kernel_times(lambda: runner.backend.replay(key)) if self.profile else {}
        eager = self._median_ms(executor, lambda: runner.execute(batch, EAGER))
        floor = self._decode_bytes(key.size) / BANDWIDTH * 1e3
        return {
            "case": f"decode {key.size}",
            "floor_ms": round(floor, 3),
            "graph_ms": round(replay, 3),
            "graph_over_floor": round(replay / floor, 3),
            "step_ms": round(step, 3),
            "eager_ms": round(eager, 3),
            **kernels,
        }

    def _prefill_case(self, executor: Executor, key: ShapeKey, backend: str) -> dict[str, object]:
        batch, runner = self.batches.prefill(key.size), executor.prefill
        graph = self._median_ms(executor, lambda: runner.execute(batch, Verdict(key)))
        kernels = kernel_times(lambda: runner.execute(batch, Verdict(key))) if self.profile else {}
        eager = self._median_ms(executor, lambda: runner.execute(batch, EAGER))
        floor = self._prefill_floor_ms(key.size)
        return {
            "case": f"prefill {key.size} {backend}",
            "floor_ms": round(floor, 3),
            "graph_ms": round(graph, 3),
            "graph_over_floor": round(graph / floor, 3),
            "eager_ms": round(eager, 3),
            "eager_over_graph": round(eager / graph, 3),
            "segments": runner.backend.num_segments(key),
            **kernels,
        }

    def _executor(self, decode: PhaseSetup, prefill: PhaseSetup) -> Executor:
        executor = attach(self.parts, self.sampler, make_graph_device(CUDA), decode, prefill)
        capture_all(executor, lambda stage, done, total: None)
        return executor

    def _setup(self, phase: Phase, backend: str, sizes: tuple[int, ...]) -> PhaseSetup:
        return PhaseSetup(
            phase=phase,
            backend=backend,
            keys=tuple(ShapeKey(phase, size) for size in sorted(sizes)),
            max_size=self.limits.max_batch if phase is Phase.DECODE else self.limits.chunk,
            request_slots=min(16, self.limits.max_batch) if phase is Phase.PREFILL and backend == "full" else 0,
        )

    def _median_ms(self, executor: Executor, fn: Callable[[], object]) -> float:
        for _ in range(3):
            fn()
        return statistics.median(executor.device.time_us(fn, self.repeats)) / 1e3

    def _weight_bytes(self) -> int:
        """All that every step reads: each tensor but the embedding, of which it reads a row per token."""
        embedding = self.spec.vocab_size * self.spec.hidden_size * 2
        return self.parts.model.nbytes - (0 if self.spec.tied_head else embedding)

    def _decode_bytes(self, size: int) -> int:
        spec = self.spec
        per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
        return self._weight_bytes() + size * self.context * per_token

    def _prefill_floor_ms(self, size: int) -> float:
        spec = self.spec
        head = spec.vocab_size * spec.hidden_size
        weights = self._weight_bytes() // 2 - head
        attention = 2 * size * size * spec.num_layers * spec.q_size
        return 1e3 * max(weights * 2 / BANDWIDTH, (2 * size * weights + attention) / BF16_FLOPS)


def kernel_times(fn: Callable[[], object], most: int = 10) -> dict[str, Any]:
    """Kernels of one run, and microseconds of those that take longest, summed by name."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        fn()
        torch.cuda.synchronize()
    events = [event for event in trace.key_averages() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: -event.self_device_time_total)
    times = {event.key[:60]: [event.count, round(event.self_device_time_total)] for event in events[:most]}
    return {"num_kernels": sum(event.count for event in events), "kernels_us": times}


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=CUDA).random_()
    target, seconds = torch.empty_like(source), []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(seconds)


def _print(**line: object) -> None:
    print(json.dumps(line), flush=True)


def _parse() -> argparse.Namespace:
    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(size) for size in text.split(",") if size)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--kernels", choices=("flashinfer", "reference"), default="flashinfer")
    parser.add_argument("--decode", type=sizes, default=(1, 8, 16, 64, 256), metavar="SIZES")
    parser.add_argument("--prefill", type=sizes, default=(32, 128, 512, 2048), metavar="SIZES")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="add the kernels of a step and their times")
    parser.add_argument("--transformers", action="store_true", help="time the same model in transformers too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
