"""Serves prompts through the real scheduler and executor, as the engine does, without processes around them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from formats.plan import BackendName, Limits, ProductChoice
from gplan.core import Phase, Request, SamplingParams, ShapeKey
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.assembly import ExecutorConfig, build
from gplan.graphs.capture import make_graph_device
from gplan.graphs.executor import Executor, StepResult
from gplan.graphs.kv_check import CANARY_PAGES
from gplan.models import load_model, read_headers, read_spec
from gplan.scheduling.holdings import PrefixCounts
from gplan.scheduling.scheduler import Scheduler

DECODE_LADDER = (1, 2, 4, 8, 16)
PREFILL_LADDER = (8, 32, 64, 128)


def limits_of(**changes: int) -> Limits:
    values = {"max_batch": 16, "max_len": 768, "chunk": 128, "page_size": 8, "memory_bytes": 1 << 30}
    return Limits(**{**values, **changes})


def setup_of(
    phase: Phase,
    backend: BackendName,
    sizes: Sequence[int],
    limits: Limits,
    request_slots: int = 4,
    variants: Sequence[str] = (),
    base: str = "",
) -> PhaseSetup:
    keys = tuple(ShapeKey(phase, size, variant=variant) for size in sizes for variant in (base, *sorted(variants)))
    return PhaseSetup(
        phase=phase,
        backend=backend,
        keys=() if backend == "eager" else keys,
        max_size=limits.max_batch if phase is Phase.DECODE else limits.chunk,
        request_slots=request_slots if phase is Phase.PREFILL and "full" in (backend, *variants) else 0,
    )


def make_executor(
    checkpoint: Path,
    *,
    decode: BackendName = "full",
    prefill: BackendName = "breakable",
    limits: Limits | None = None,
    num_pages: int = 400,
    decode_ladder: Sequence[int] = DECODE_LADDER,
    prefill_ladder: Sequence[int] = PREFILL_LADDER,
    decode_variants: Sequence[str] = (),
    prefill_variants: Sequence[str] = (),
    decode_base: str = "",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kernels: str = "reference",
    products: tuple[ProductChoice, ...] = (),
    debug_graphs: bool = False,
) -> Executor:
    limits = limits or limits_of()
    headers = read_headers(str(checkpoint))
    spec = read_spec(str(checkpoint), headers, limits.max_len)
    where = torch.device(device)
    graphs = make_graph_device(where)
    model = load_model(str(checkpoint), spec, dtype, where, limits.max_len)
    config = ExecutorConfig(
        kernels=kernels,
        dtype=dtype,
        device=where,
        limits=limits,
        num_kv_pages=num_pages,
        activation_reserve=1 << 20,
        decode=setup_of(Phase.DECODE, decode, decode_ladder, limits, variants=decode_variants, base=decode_base),
        prefill=setup_of(Phase.PREFILL, prefill, prefill_ladder, limits, variants=prefill_variants),
        products=products,
        debug_graphs=debug_graphs,
    )
    executor = build(model, spec, config, graphs, lambda row, nbytes: None, lambda stage, done, total: None)
    executor.check_addresses = True
    return executor


@dataclass
class Served:
    """Tokens by request, and what ran: steps by key (or reason), and preemptions."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    num_preemptions: int = 0
    prefixes: PrefixCounts | None = None


def serve(
    executor: Executor,
    requests: Sequence[Request],
    *,
    arrivals: Sequence[int] | None = None,
    lag: int | None = None,
    aborts: Mapping[int, str] | None = None,
    prefix_cache: bool = True,
) -> Served:
    """Runs requests to the end.

    Args:
        arrivals: step before which each request arrives; all at once where left out.
        lag: steps left uncollected, beyond what the executor asks for.
        aborts: by step, the request that is aborted before it.
    """
    limits, pool = executor.parts.limits, executor.parts.kv_pool
    num_pages = pool.num_pages - (CANARY_PAGES if executor.decode.kv_check else 0)
    scheduler = Scheduler(msgspec.structs.replace(limits, prefix_cache=prefix_cache), num_pages)
    waiting = deque(sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0]))
    served, flying, step = Served(), deque(), 0
    lag = executor.result_lag if lag is None else lag
    while waiting or scheduler.has_work or flying:
        while waiting and waiting[0][0] <= step:
            scheduler.add(waiting.popleft()[1])
        if aborts and step in aborts:
            scheduler.abort(aborts[step])
        batch = scheduler.schedule()
        if batch is not None:
            flying.append(executor.launch(batch))
        while len(flying) > (lag if batch is not None else 0):
            _collect(executor, scheduler, flying.popleft(), served)
        step += 1
    served.num_preemptions = sum(request.num_preemptions for request in requests)
    served.answers = {r.id: r.tokens[r.prompt_len :] for r in requests}
    served.prefixes = scheduler.prefix_counts
    scheduler.check()
    assert scheduler.num_free_pages == num_pages - 1, "pages leaked"
    return served


def _collect(executor: Executor, scheduler: Scheduler, step: object, served: Served) -> StepResult:
    result = executor.collect(step)
    scheduler.update(step.batch, result.tokens)
    outcome = result.outcome
    served.steps[str(outcome.key) if outcome.key else f"eager {outcome.phase} {outcome.reason}"] += 1
    return result


def greedy(name: str, prompt: Sequence[int], max_tokens: int, **changes: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **changes})
    return Request(name, len(prompt), list(prompt), params)
