"""From a plan to an executor that is ready: memory in the planned order, graphs, and proof that both are as planned."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from formats.drift import Drift
from formats.plan import Plan, Receipt
from gplan.core import ShapeKey
from gplan.errors import GuardError, VerificationError
from gplan.graphs.admission import PhaseSetup
from gplan.graphs.assembly import ExecutorConfig, Progress, build
from gplan.graphs.capture import make_graph_device
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions, full_batch
from gplan.graphs.synthetic import BatchMaker
from gplan.memory.failures import taking
from gplan.memory.ledger import LedgerEntry, MemoryLedger
from gplan.models import load_model
from gplan.serving.debugging import debug_costs
from gplan.serving.preflight import inspect
from gplan.serving.protocol import NO_DEBUG, Debug


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """An executor, and what `/server_info` tells of how it came about."""

    executor: Executor
    ledger: tuple[LedgerEntry, ...]
    drifts: tuple[Drift, ...]
    accepted: tuple[Drift, ...]
    seconds: float
    debug_costs: tuple[str, ...]


def start_executor(
    plan: Plan, checkpoint: str, progress: Progress, accept: Collection[str] = (), debug: Debug = NO_DEBUG
) -> Ready:
    """Checks, loads, takes memory, captures, and proves it.

    Raises:
        DriftError: checkpoint or machine are not those planned for.
        FitError: memory ran out, or a ledger row took more than planned, beyond tolerance; names the row.
        CaptureError, VerificationError: a graph could not be captured, or differs from eager execution.
    """
    started = time.perf_counter()
    preflight = inspect(plan, checkpoint, accept)
    preflight.require()
    device, dtype = torch.device(plan.fingerprint.device), getattr(torch, plan.dtype)
    ledger = MemoryLedger({row.name: row.planned_bytes for row in plan.ledger})
    graphs = make_graph_device(device)
    progress("load", 0, 1)
    with taking("weights", plan.planned_bytes("weights")):
        model = load_model(checkpoint, preflight.spec, dtype, device, plan.limits.max_len)
    ledger.book("weights", model.nbytes)
    progress("load", 1, 1)
    config = ExecutorConfig(
        kernels=plan.kernels,
        dtype=dtype,
        device=device,
        limits=plan.limits,
        num_kv_pages=plan.num_kv_pages,
        activation_reserve=plan.planned_bytes("activation_reserve"),
        decode=PhaseSetup.from_plan(plan.decode),
        prefill=PhaseSetup.from_plan(plan.prefill),
        products=plan.products,
        debug_graphs=debug.graphs,
    )
    executor = build(model, preflight.spec, config, graphs, ledger.book, progress)
    ledger.book("non_torch", graphs.memory().non_torch)
    ledger.check()
    with taking("activation_reserve", plan.planned_bytes("activation_reserve"), "checking receipts"):
        recheck_receipts(executor, preflight.spec.vocab_size, {receipt.key for receipt in plan.receipts})
    executor.check_addresses = debug.addresses
    if debug.kv:
        executor.check_kv()
    return Ready(
        executor=executor,
        ledger=ledger.entries(),
        drifts=preflight.drifts,
        accepted=preflight.accepted,
        seconds=time.perf_counter() - started,
        debug_costs=debug_costs(plan, executor, debug),
    )


@dataclass(frozen=True, slots=True)
class Verification:
    """What every key gave: a receipt, or the sentence that says what is wrong, with the key it is about."""

    receipts: tuple[Receipt, ...]
    failures: tuple[tuple[ShapeKey, str], ...]

    def require(self) -> None:
        """
        Raises:
            VerificationError: names each key that failed, and what is wrong with it.
        """
        if self.failures:
            lines = [sentence for _, sentence in self.failures]
            raise VerificationError(
                "\n  ".join(lines if len(lines) == 1 else [f"{len(lines)} keys are not safe to replay:", *lines]),
                "Plan again; report it if it stays. gplan serve --debug-graphs serves without replays meanwhile.",
            )


def verify_all(executor: Executor, vocab_size: int, progress: Progress) -> Verification:
    """Replays every key against eager, on batches of several sizes, lengths and prefixes, with its addresses and inputs
    checked."""
    parts = executor.parts
    parts.kv_pool.fill_with_noise()
    batches = BatchMaker(parts.limits, parts.kv_pool.num_pages, vocab_size)
    receipts, failures = [], []
    for index, key in enumerate(executor.keys):
        progress("verify", index, len(executor.keys))
        try:
            executor.guard.check(key)
            receipts.append(check_key(executor, key, compositions(executor, key, batches)))
        except (GuardError, VerificationError) as error:
            failures.append((key, error.message))
    progress("verify", len(executor.keys), len(executor.keys))
    return Verification(tuple(receipts), tuple(failures))


def recheck_receipts(executor: Executor, vocab_size: int, proven: Collection[str]) -> None:
    """Replays the smallest and the largest key of each phase, and those without a receipt, against eager, on a full
    batch each.

    Args:
        proven: keys that have a receipt.

    Raises:
        VerificationError: one of them differs.
    """
    parts = executor.parts
    batches = BatchMaker(parts.limits, parts.kv_pool.num_pages, vocab_size)
    for runner in (executor.decode, executor.prefill):
        unproven = (key for key in runner.setup.keys if str(key) not in proven)
        for key in dict.fromkeys((*runner.setup.keys[:1], *runner.setup.keys[-1:], *unproven)):
            check_key(executor, key, [full_batch(executor, key, batches)])
