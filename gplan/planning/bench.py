"""A model loaded for measuring: takes memory as serve will, tries backends, captures ladders, weighs rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec
import torch

from formats.measurements import Costs, Timing
from formats.plan import DRAW_VARIANTS, LEDGER_ROWS, BackendName, Bucket, Receipt, is_base
from gplan.core import Phase, ShapeKey
from gplan.errors import FitError
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.assembly import (
    Captured,
    ExecutorConfig,
    attach,
    capture_all,
    kernel_shape,
    kv_layout,
    static_nbytes,
    take_memory,
    workspace_nbytes,
)
from gplan.graphs.capture import make_graph_device
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions
from gplan.graphs.variants import FULL
from gplan.kernels import kernels_class
from gplan.kernels.base import KernelShape
from gplan.memory.failures import taking
from gplan.models import load_model
from gplan.planning.backends import Trial
from gplan.planning.budget import Needs, fill_ledger, most_useful_pages, pages_of
from gplan.planning.costs import measure_costs
from gplan.planning.options import Progress
from gplan.planning.product_timing import choose_products
from gplan.planning.products import Products, products_asked
from gplan.planning.profiler import Patience, Profiler
from gplan.planning.resolve import Resolved
from gplan.planning.stillness import still
from gplan.planning.variants import Saving
from gplan.units import format_size

Item = TypeVar("Item")

POOL_SHARE = 0.6
"""Of the memory left beside weights and buffers, what the measuring KV pool may take at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Graphs of both phases in one pool: what capturing each took, its times, and its receipt where it was checked."""

    captured: tuple[Captured, ...]
    buckets: Mapping[ShapeKey, Bucket]
    costs: Mapping[Phase, Costs]
    receipts: tuple[Receipt, ...]

    def pool_bytes(self, phase: Phase) -> int:
        return sum(entry.pool_bytes for entry in self.captured if entry.key.phase is phase)


class Bench:
    """Weights and buffers of one model on one device, with made-up batches to run through them.

    Args:
        sizes: of both phases' ladders. Their matrix products are timed first, since all other times rest on them.
        before_measuring: called once the weights are loaded.
    """

    def __init__(
        self,
        resolved: Resolved,
        sizes: Collection[int],
        patience: Patience,
        progress: Progress,
        before_measuring: Callable[[], None],
    ) -> None:
        self.resolved, self._patience, self._progress = resolved, patience, progress
        self.layout = kv_layout(resolved.spec, resolved.limits.page_size, resolved.dtype)
        self._refuse_heavy_weights()
        graphs = make_graph_device(resolved.device)
        progress("load", 0, 1)
        with taking("weights"):
            self._model = load_model(
                resolved.checkpoint, resolved.spec, resolved.dtype, resolved.device, resolved.limits.max_len
            )
        progress("load", 1, 1)
        before_measuring()
        self._refuse_what_cannot_fit()
        self.products = self._choose_products(sizes)
        self._config = self._measuring_config()
        self._parts, self._sampler = take_memory(self._model, resolved.spec, self._config, lambda row, nbytes: None)
        self._parts.kv_pool.fill_with_noise()
        self.result_lag = graphs.result_lag
        self._eager = attach(self._parts, self._sampler, graphs, self._config.decode, self._config.prefill)
        self.profiler = self._profiler(self._eager)
        progress("warm up", 0, 1)
        with taking("activation_reserve"):
            self.profiler.warm_up_eager()
        progress("warm up", 1, 1)
        with taking("activation_reserve"), still(graphs, "while activations were measured"):
            self._peaks = self.profiler.activation_peak()
        self._served_peak = self._non_torch = 0

    def _choose_products(self, sizes: Collection[int]) -> Products:
        """By what the kernels leave to a library: nothing where they leave nothing, or the choice is not theirs."""
        resolved = self.resolved
        kernels = kernels_class(resolved.kernels)
        asked = products_asked(self._model.projections(), kernels, sizes)
        library = kernels.product_library(resolved.dtype, resolved.device) if asked else None
        if library is None:
            return Products()
        graphs = make_graph_device(resolved.device)
        with taking("activation_reserve", what="timing products"):
            products = choose_products(asked, library, graphs, self._patience, self._progress)
        graphs.close()
        torch.cuda.empty_cache()  # operands lay on a stream of their own, whose memory no other would use again
        return products

    def trial(self, phase: Phase, backend: BackendName, sizes: Sequence[int]) -> Trial:
        """Times one backend at a few sizes; `eager` captures nothing."""
        progress, about = self._progress, f"{phase} {backend}"
        if backend == "eager":
            probed = reporting(progress, f"time {about}", sizes)
            return Trial(backend, {size: self.profiler.eager(phase, size) for size in probed})
        setup = self.setup(phase, backend, sizes)
        other = self._empty_setup(Phase.PREFILL if phase is Phase.DECODE else Phase.DECODE)
        with self._captured({phase: setup, other.phase: other}, about) as (executor, _):
            profiler = self._profiler(executor)
            timed = reporting(progress, f"time {about}", setup.keys)
            return Trial(backend, {key.size: profiler.replay(key) for key in timed})

    def savings(self, phase: Phase, backend: BackendName, sizes: Sequence[int], part: str) -> list[Saving]:
        """Times a variant against the base of each size."""
        keys = [(ShapeKey(phase, size), ShapeKey(phase, size, variant=part)) for size in sizes]
        setup = replace(self.setup(phase, backend, ()), keys=tuple(sorted(key for pair in keys for key in pair)))
        setup = replace(setup, request_slots=self.resolved.prefill_slots if part == FULL else setup.request_slots)
        other = self._empty_setup(Phase.PREFILL if phase is Phase.DECODE else Phase.DECODE)
        about = f"{phase} {part}"
        with self._captured({phase: setup, other.phase: other}, about) as (executor, _):
            profiler = self._profiler(executor)
            compare = profiler.base_and_draw if part in DRAW_VARIANTS else profiler.base_and_special
            timed = reporting(self._progress, f"time {about}", keys)
            return [Saving(base.size, part, *compare(base, special)) for base, special in timed]

    def measure(
        self,
        setups: Mapping[Phase, PhaseSetup],
        eager: Mapping[Phase, Mapping[int, Timing]],
        known: Measured | None = None,
        *,
        is_final: Callable[[Measured], bool] = lambda measured: True,
    ) -> Measured:
        """Captures both phases as serve will, times every key, and compares it with eager.

        Args:
            eager: eager times of each phase, for one that captures nothing.
            known: keys that it holds times of are not timed again.
            is_final: whether these graphs, as they turned out, will be served; only then they are compared with eager.
        """
        with self._captured(setups) as (executor, captured):
            profiler, before = self._profiler(executor), {} if known is None else known.buckets
            new = [entry for entry in captured if entry.key not in before]
            timed = iter(profiler.buckets(new, partial(self._progress, "measure")))
            buckets = {
                entry.key: _captured_again(before[entry.key], entry) if entry.key in before else next(timed)
                for entry in captured
            }
            costs = _costs(profiler, buckets, eager, self._progress) if known is None else known.costs
            measured = Measured(captured, buckets, costs, ())
            if is_final(measured):
                measured = replace(measured, receipts=self._receipts(executor, captured, profiler))
            self._served_peak = profiler.served_peak()
            # Graphs themselves take device memory outside the allocator, so this is read while they are there.
            self._non_torch = executor.device.memory().non_torch
        return measured

    def _receipts(self, executor: Executor, captured: Sequence[Captured], profiler: Profiler) -> tuple[Receipt, ...]:
        """Of each key in ascending order, compared with eager."""
        receipts = []
        for entry in reporting(self._progress, "prove", captured):
            receipts.append(check_key(executor, entry.key, compositions(executor, entry.key, profiler.batches)))
        return tuple(reversed(receipts))

    def sample(self, setup: PhaseSetup, sizes: Sequence[int]) -> tuple[Bucket, ...]:
        """Times a few more sizes of a phase, captured by themselves; ascending."""
        keys = tuple(ShapeKey(setup.phase, size) for size in sizes)
        other = self._empty_setup(Phase.PREFILL if setup.phase is Phase.DECODE else Phase.DECODE)
        setups, about = {setup.phase: replace(setup, keys=keys), other.phase: other}, f"more {setup.phase} sizes"
        with self._captured(setups, about) as (executor, captured):
            profiler = self._profiler(executor)
            return tuple(reversed(profiler.buckets(captured, partial(self._progress, f"time {about}"))))

    @contextmanager
    def _captured(
        self, setups: Mapping[Phase, PhaseSetup], about: str = ""
    ) -> Iterator[tuple[Executor, tuple[Captured, ...]]]:
        """What is captured only to be compared says in its progress what it is about."""

        def progress(stage: str, done: int, total: int) -> None:
            self._progress(f"{stage} {about}".rstrip(), done, total)

        graphs = make_graph_device(self.resolved.device)
        executor = attach(self._parts, self._sampler, graphs, setups[Phase.DECODE], setups[Phase.PREFILL])
        captured = capture_all(executor, progress)
        with still(executor.device, "while graphs were timed"):
            yield executor, captured
        executor.close()

    def needs(self, measured: Measured) -> Needs:
        """Every ledger row but the KV pool's and the headroom, with how its figure came about."""
        resolved, peaks = self.resolved, self._peaks
        shape = self._shape(most_useful_pages(resolved.limits))
        forwards = max(peaks.values())
        return Needs(
            rows={
                "weights": (self._model.nbytes, "bytes of the loaded tensors"),
                "non_torch": (self._non_torch, "this process outside the allocator, graphs captured"),
                "workspace": (workspace_nbytes(resolved.kernels, shape), f"asked of the {resolved.kernels} kernels"),
                "static_buffers": (static_nbytes(shape), "sum of the buffers' sizes"),
                "activation_reserve": (
                    self._served_peak,
                    "what served steps take outside graphs, all of sampling included; "
                    f"{format_size(forwards)} if every size ran eagerly",
                ),
                "graph_pool_decode": (measured.pool_bytes(Phase.DECODE), "growth of the graph pool while capturing"),
                "graph_pool_prefill": (measured.pool_bytes(Phase.PREFILL), "growth of the graph pool while capturing"),
            },
            comparison=max(0, forwards - self._served_peak),
        )

    def setup(self, phase: Phase, backend: BackendName, sizes: Sequence[int]) -> PhaseSetup:
        """A phase with these sizes and nothing else decided."""
        whole_prefill = phase is Phase.PREFILL and backend == "full"
        return replace(
            self._empty_setup(phase),
            backend=backend,
            keys=tuple(ShapeKey(phase, size) for size in sizes),
            request_slots=self.resolved.prefill_slots if whole_prefill else 0,
        )

    def _empty_setup(self, phase: Phase) -> PhaseSetup:
        limits = self.resolved.limits
        most = limits.max_batch if phase is Phase.DECODE else limits.chunk
        return PhaseSetup(phase=phase, backend="eager", keys=(), max_size=most)

    def _profiler(self, executor: Executor) -> Profiler:
        return Profiler(executor, self.resolved.spec.vocab_size, self._patience)

    def _measuring_config(self) -> ExecutorConfig:
        resolved = self.resolved
        limits, context = resolved.limits, min(1024, resolved.limits.max_len - 1)
        shape = self._shape(most_useful_pages(limits))
        taken = self._model.nbytes + workspace_nbytes(resolved.kernels, shape) + static_nbytes(shape)
        wanted = limits.max_batch * pages_of(context + 1, limits.page_size)
        affordable = int((limits.memory_bytes - taken) * POOL_SHARE) // self.layout.bytes_per_page
        return ExecutorConfig(
            kernels=resolved.kernels,
            dtype=resolved.dtype,
            device=resolved.device,
            limits=limits,
            num_kv_pages=max(2, 1 + min(wanted, affordable)),
            activation_reserve=0,
            decode=self._empty_setup(Phase.DECODE),
            prefill=self._empty_setup(Phase.PREFILL),
            products=self.products.choices,
        )

    def _shape(self, num_pages: int) -> KernelShape:
        resolved = self.resolved
        return kernel_shape(resolved.spec, resolved.limits, num_pages, resolved.dtype, resolved.device)

    def _refuse_heavy_weights(self) -> None:
        resolved = self.resolved
        nbytes = resolved.identity.num_parameters * resolved.dtype.itemsize
        if nbytes > resolved.limits.memory_bytes:
            raise FitError(
                f"ledger row weights: needs {format_size(nbytes)}, the memory is "
                f"{format_size(resolved.limits.memory_bytes)} in all",
                "Give more with --memory.",
            )

    def _refuse_what_cannot_fit(self) -> None:
        """Before any of it is taken: what is known without measuring, and a KV pool of one request.

        Raises:
            FitError: names the row.
        """
        resolved, limits = self.resolved, self.resolved.limits
        shape = self._shape(most_useful_pages(limits))
        known = {
            "weights": self._model.nbytes,
            "workspace": workspace_nbytes(resolved.kernels, shape),
            "static_buffers": static_nbytes(shape),
        }
        rows = {name: (known.get(name, 0), "") for name in LEDGER_ROWS if name not in ("kv_pool", "headroom")}
        fill_ledger(limits.memory_bytes, Needs(rows=rows), self.layout, limits)


def reporting(progress: Progress, stage: str, items: Sequence[Item]) -> Iterator[Item]:
    """The items, each once those before it are done with; progress is told of every one."""
    for index, item in enumerate(items):
        progress(stage, index, len(items))
        yield item
    progress(stage, len(items), len(items))


def _captured_again(bucket: Bucket, captured: Captured) -> Bucket:
    """A bucket with what capturing it among others took; times are as they were."""
    return msgspec.structs.replace(bucket, graph_bytes=captured.pool_bytes, capture_ms=captured.capture_ms)


def _costs(
    profiler: Profiler,
    buckets: Mapping[ShapeKey, Bucket],
    eager: Mapping[Phase, Mapping[int, Timing]],
    progress: Progress,
) -> dict[Phase, Costs]:
    found = {}
    for phase in reporting(progress, "measure costs", tuple(Phase)):
        bases = {key: b for key, b in buckets.items() if key.phase is phase and is_base(key.variant)}
        replays = {key.size: b.graph.median_us for key, b in bases.items() if b.graph}
        forward_us = replays or {size: timing.median_us for size, timing in eager[phase].items()}
        found[phase] = measure_costs(profiler, phase, forward_us)
    return found
