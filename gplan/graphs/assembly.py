"""Builds an executor in the planned order of memory, and captures its graphs.

The planner assembles what it measures with the same code that serve assembles what it runs with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from formats.plan import Limits, ProductChoice, is_base
from gplan.core import ShapeKey
from gplan.errors import CaptureError
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.buffers import StaticBuffers
from gplan.graphs.capture import make_backend
from gplan.graphs.capture.base import CaptureBackend, GraphDevice
from gplan.graphs.decode import DecodeRunner
from gplan.graphs.executor import Executor
from gplan.graphs.forward import ForwardParts, forward_slots, request_slots
from gplan.graphs.guard import AddressGuard
from gplan.graphs.masking import TokenMask, words_of
from gplan.graphs.prefill import PrefillRunner
from gplan.graphs.sampling import Sampler
from gplan.graphs.synthetic import DRAWN, EVERYTHING, GREEDY, PENALISED, BatchMaker
from gplan.graphs.variants import FULL
from gplan.kernels import kernels_class, make_kernels
from gplan.kernels.base import KernelShape
from gplan.kernels.products import Algorithms, ProductShape
from gplan.memory.failures import taking
from gplan.memory.kv_pool import KVLayout, KVPool
from gplan.memory.ledger import ActivationHold
from gplan.memory.page_table import PageTable
from gplan.models import ModelSpec
from gplan.models.base import Model

Book = Callable[[str, int], None]
"""`book(row, nbytes)`: bytes taken for a ledger row."""

Progress = Callable[[str, int, int], None]

MORE_PASSES = 2
"""Passes of warming up beyond those a device asks for, where memory has not come to rest by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Everything an executor is built from but the model's weights.

    Attributes:
        products: products by another algorithm than their library's own choice.
        debug_graphs: forwards are run again where they would be replayed; nothing is recorded.
    """

    kernels: str
    dtype: torch.dtype
    device: torch.device
    limits: Limits
    num_kv_pages: int
    activation_reserve: int
    decode: PhaseSetup
    prefill: PhaseSetup
    products: tuple[ProductChoice, ...] = ()
    debug_graphs: bool = False


def kv_layout(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> KVLayout:
    return KVLayout(
        num_layers=spec.num_layers,
        page_size=page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
    )


def kernel_shape(
    spec: ModelSpec, limits: Limits, num_kv_pages: int, dtype: torch.dtype, device: torch.device
) -> KernelShape:
    return KernelShape(
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        page_size=limits.page_size,
        max_batch=limits.max_batch,
        max_tokens=limits.chunk,
        max_len=limits.max_len,
        num_pages=num_kv_pages,
        dtype=dtype,
        device=device,
    )


def static_nbytes(shape: KernelShape) -> int:
    """Bytes of everything allocated once beside weights, workspace and KV pool."""
    slots = (*forward_slots(shape), *request_slots(shape))
    return StaticBuffers.nbytes(slots) + Sampler.nbytes(shape.max_batch, shape.vocab_size)


def workspace_nbytes(name: str, shape: KernelShape) -> int:
    return kernels_class(name).workspace_nbytes(shape)


def algorithms_of(products: Iterable[ProductChoice]) -> Algorithms:
    return {ProductShape(each.m, each.n, each.k, each.adds): each.algorithm for each in products}


def take_memory(model: Model, spec: ModelSpec, config: ExecutorConfig, book: Book) -> tuple[ForwardParts, Sampler]:
    """Takes workspace, static buffers and KV pool, in this order.

    Raises:
        FitError: memory ran out; names the row.
        GplanError: an algorithm of a product that the library refuses.
    """
    device, limits = config.device, config.limits
    shape = kernel_shape(spec, limits, config.num_kv_pages, config.dtype, device)
    with taking("workspace", workspace_nbytes(config.kernels, shape)):
        kernels = make_kernels(config.kernels, shape, algorithms_of(config.products))
    book("workspace", kernels.workspace_nbytes(shape))
    with taking("static_buffers", static_nbytes(shape)):
        buffers = StaticBuffers(forward_slots(shape), device)
        by_request = StaticBuffers(request_slots(shape), device)
        sampler = Sampler(kernels, limits.max_batch, spec.vocab_size, device)
    book("static_buffers", static_nbytes(shape))
    layout = kv_layout(spec, limits.page_size, config.dtype)
    with taking("kv_pool", KVPool.nbytes(layout, config.num_kv_pages)):
        pool = KVPool(layout, config.num_kv_pages, device)
    book("kv_pool", pool.data.nbytes)
    parts = ForwardParts(
        model=model,
        kernels=kernels,
        kv_pool=pool,
        page_table=PageTable(limits.max_batch, shape.max_pages_per_request, limits.page_size),
        buffers=buffers,
        last_tokens=sampler.last_tokens,
        by_request=by_request,
        limits=limits,
    )
    return parts, sampler


def attach(
    parts: ForwardParts,
    sampler: Sampler,
    graphs: GraphDevice,
    decode: PhaseSetup,
    prefill: PhaseSetup,
    *,
    debug: bool = False,
) -> Executor:
    """Puts runners and a graph device on memory that was taken; captures nothing."""
    return Executor(
        graphs,
        parts,
        DecodeRunner(parts, decode, make_backends(decode, graphs, debug=debug)),
        PrefillRunner(parts, prefill, make_backends(prefill, graphs, debug=debug)),
        sampler,
        AddressGuard(),
    )


def make_backends(setup: PhaseSetup, graphs: GraphDevice, *, debug: bool = False) -> dict[str, CaptureBackend]:
    """Capture backends of a phase by variant; that of the empty name captures all variants that are not named."""
    backends = {"": make_backend(setup.backend, graphs, debug=debug)}
    if any(key.variant == FULL for key in setup.keys):
        backends[FULL] = make_backend("full", graphs, debug=debug)
    return backends


def build(
    model: Model,
    spec: ModelSpec,
    config: ExecutorConfig,
    graphs: GraphDevice,
    book: Book,
    progress: Progress,
) -> Executor:
    """Takes the memory and captures, holding the activation memory by a real allocation until the graphs are there."""
    with taking("activation_reserve", config.activation_reserve):
        hold = ActivationHold(config.activation_reserve, config.device)
    book("activation_reserve", hold.nbytes)
    parts, sampler = take_memory(model, spec, config, book)
    with taking("workspace"):
        executor = attach(parts, sampler, graphs, config.decode, config.prefill, debug=config.debug_graphs)
    for captured in capture_all(executor, progress):
        book(f"graph_pool_{captured.key.phase}", captured.pool_bytes)
    hold.release()
    watch_addresses(executor)
    return executor


@dataclass(frozen=True, slots=True)
class Captured:
    """What capturing one key took: bytes by which the graph pool grew, and milliseconds, compiling included."""

    key: ShapeKey
    pool_bytes: int
    capture_ms: float


@torch.no_grad()
def capture_all(executor: Executor, progress: Progress) -> tuple[Captured, ...]:
    """Warms up and captures every key of both phases in all variants, largest first, then freezes the set.

    Raises:
        CaptureError: a key could not be captured, or no pass of warming up left memory and kernels as they were.
        FitError: memory ran out; names the row and the key.
    """
    keys = sorted(executor.keys, key=lambda key: (key.size * key.width, key.phase, key.variant), reverse=True)
    compile_ms = _compile(executor, keys, progress)
    _warm_up(executor, keys, progress)
    done = []
    with executor.device.session():
        for index, key in enumerate(keys):
            progress("capture", index, len(keys))
            done.append(_capture_one(executor, key, compile_ms.get(key, 0.0)))
    progress("capture", len(keys), len(keys))
    for runner in (executor.decode, executor.prefill):
        runner.freeze()
    return tuple(done)


def _compile(executor: Executor, keys: list[ShapeKey], progress: Progress) -> dict[ShapeKey, float]:
    """Has forwards compiled whose keys want it, or takes them from an earlier start's cache; milliseconds of each."""
    wanting = bases_first(key for key in keys if executor.runner(key.phase).is_compiled(key))
    spent = {}
    for index, key in enumerate(wanting):
        progress("compile", index, len(wanting))
        started = time.perf_counter()
        executor.runner(key.phase).warm_up(key)
        spent[key] = (time.perf_counter() - started) * 1e3
    if wanting:
        progress("compile", len(wanting), len(wanting))
    return spent


def bases_first(keys: Iterable[ShapeKey]) -> list[ShapeKey]:
    """Keys in the order they are compiled in: a bucket's variants run the forward that was compiled for its base, so
    that what compiling took is the base's."""
    return sorted(keys, key=lambda key: not is_base(key.variant))


def _warm_up(executor: Executor, keys: list[ShapeKey], progress: Progress) -> None:
    """Passes over all keys and over sampling until one of them compiles nothing and takes no memory: after the first,
    usually the second."""
    device = executor.device
    most = device.warmup_passes + MORE_PASSES if device.warmup_passes else 0
    for number in range(1, most + 1):
        reserved, compiled = device.memory().reserved, device.compilations()
        for index, key in enumerate(keys):
            progress("warm up", (number - 1) * len(keys) + index, device.warmup_passes * len(keys))
            with taking(f"graph_pool_{key.phase}", what=f"warming up {key}"):
                executor.runner(key.phase).warm_up(key)
            device.synchronize()  # memory that is given back when a kernel ends is so before the next asks for some
        with taking("activation_reserve", what="warming up sampling"):
            _warm_up_sampling(executor)
        device.synchronize()
        grown, compiled = device.memory().reserved - reserved, device.compilations() - compiled
        if number >= device.warmup_passes and not grown and not compiled:
            return
    if most:
        raise CaptureError(
            f"warm-up: pass {most} still took {grown} bytes from the device and compiled {compiled} kernels",
            "Memory is not in a steady state before capture; report this with the plan.",
        )


def _warm_up_sampling(executor: Executor) -> None:
    """Draws tokens in every way there is, from all tokens and from those that a mask leaves."""
    parts = executor.parts
    logits = parts.buffers["logits"]
    vocab_size = logits.shape[1]
    batches = BatchMaker(parts.limits, parts.kv_pool.num_pages, vocab_size)
    mask = TokenMask(rows=(0,), bits=torch.full((1, words_of(vocab_size)), -1, dtype=torch.int32))
    for params in (GREEDY, PENALISED, DRAWN, EVERYTHING):
        chunks = batches.decode(min(2, parts.limits.max_batch), 1, params).chunks
        for masked in (None, mask):
            executor.sampler.sample(logits[: len(chunks)], chunks, masked)


def _capture_one(executor: Executor, key: ShapeKey, compile_ms: float) -> Captured:
    device, started = executor.device, time.perf_counter()
    before = device.pool_nbytes()
    with taking(f"graph_pool_{key.phase}", what=f"capturing {key}"):
        executor.runner(key.phase).capture(key)
    return Captured(key, device.pool_nbytes() - before, (time.perf_counter() - started) * 1e3 + compile_ms)


def watch_addresses(executor: Executor) -> None:
    """Makes the guard know every buffer that the captured graphs refer to."""
    parts, guard = executor.parts, executor.guard
    for name in parts.buffers:
        guard.watch(f"buffer {name}", partial(parts.buffers.__getitem__, name))
    for name in parts.by_request:
        guard.watch(f"buffer {name}", partial(parts.by_request.__getitem__, name))
    for layer in range(len(parts.kv_pool.layers)):
        guard.watch(f"kv_pool keys {layer}", partial(_cache, parts.kv_pool, layer, 0))
        guard.watch(f"kv_pool values {layer}", partial(_cache, parts.kv_pool, layer, 1))
    guard.watch("last_tokens", lambda: executor.sampler.last_tokens)
    for runner in (executor.decode, executor.prefill):
        for key in runner.setup.keys:
            guard.snapshot(key, (*runner.tensors(key), *parts.model.tensors()))


def _cache(pool: KVPool, layer: int, part: int) -> Tensor:
    return pool.layers[layer][part]
