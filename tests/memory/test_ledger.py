"""The ledger names the row that overran; the hold on activation memory is memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from formats.plan import LEDGER_ROWS
from gplan.errors import FitError
from gplan.graphs.assembly import ExecutorConfig, build
from gplan.graphs.capture import make_graph_device
from gplan.memory.ledger import ActivationHold, MemoryLedger
from gplan.units import MIB
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import limits_of, setup_of


def ledger(**planned: int) -> MemoryLedger:
    return MemoryLedger(dict.fromkeys(LEDGER_ROWS, 0) | planned)


def test_rows_within_tolerance_pass() -> None:
    books = ledger(weights=1000 * MIB)
    books.book("weights", 1000 * MIB)
    books.book("weights", 127 * MIB)
    books.check()
    entry = next(entry for entry in books.entries() if entry.name == "weights")
    assert (entry.planned_bytes, entry.actual_bytes, entry.overrun_bytes) == (1000 * MIB, 1127 * MIB, 127 * MIB)


def test_a_row_beyond_tolerance_is_named_with_both_figures() -> None:
    books = ledger(weights=1000 * MIB, kv_pool=10 * MIB)
    books.book("weights", 1000 * MIB)
    books.book("kv_pool", 10 * MIB + 129 * MIB)
    with pytest.raises(FitError, match=r"kv_pool: planned 10 MiB, took 139 MiB"):
        books.check()


def test_what_was_not_booked_is_unknown_not_nothing() -> None:
    assert all(entry.actual_bytes is None for entry in ledger().entries())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_hold_takes_memory_and_gives_it_back() -> None:
    before = resident()
    hold = ActivationHold(256 * MIB, torch.device("cpu"))
    assert resident() - before > 200 * MIB
    assert hold.nbytes == 256 * MIB
    hold.release()
    assert resident() - before < 56 * MIB
    assert hold.nbytes == 0


def test_the_hold_is_made_before_the_kv_pool_and_released_after_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gplan.core import Phase
    from gplan.models import load_model, read_headers, read_spec

    events: list[str] = []
    real_release = ActivationHold.release

    def release(hold: ActivationHold) -> None:
        events.append("released")
        real_release(hold)

    monkeypatch.setattr(ActivationHold, "release", release)
    checkpoint, limits = str(make_checkpoint(tmp_path / "model")), limits_of()
    spec = read_spec(checkpoint, read_headers(checkpoint))
    device = torch.device("cpu")
    config = ExecutorConfig(
        kernels="reference",
        dtype=torch.float32,
        device=device,
        limits=limits,
        num_kv_pages=120,
        activation_reserve=MIB,
        decode=setup_of(Phase.DECODE, "full", (1, 2), limits),
        prefill=setup_of(Phase.PREFILL, "breakable", (8,), limits),
    )
    build(
        load_model(checkpoint, spec, torch.float32, device, limits.max_len),
        spec,
        config,
        make_graph_device(device),
        lambda row, nbytes: events.append(row),
        lambda stage, done, total: None,
    )
    first = list(dict.fromkeys(events))
    assert first == [
        "activation_reserve",
        "workspace",
        "static_buffers",
        "kv_pool",
        "graph_pool_prefill",
        "graph_pool_decode",
        "released",
    ]
