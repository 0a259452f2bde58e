"""`gplan verify`: every key on the tape, and exit 5 where a graph lies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.main import run
from formats.container import read_plan, write_plan
from gplan.core import Phase, ShapeKey
from gplan.errors import VerificationError
from gplan.graphs.buffers import StaticBuffers
from gplan.graphs.capture.breakable import graph_break
from gplan.planning.options import PlanOptions
from gplan.planning.planner import make_plan
from gplan.planning.profiler import Patience
from gplan.serving.startup import start_executor, verify_all
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("verify")
    checkpoint = make_checkpoint(folder / "model")
    options = PlanOptions(
        checkpoint=str(checkpoint),
        max_batch=4,
        max_len=96,
        chunk=24,
        memory="1GiB",
        device="cpu",
        decode_backend="full",
        prefill_backend="breakable",
    )
    write_plan(make_plan(options, lambda stage, done, total: None, Patience(3, 3, 0)), folder / "a.gplan")
    return str(folder / "a.gplan"), str(checkpoint)


def test_every_key_equals_eager(planned: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    plan, checkpoint = planned
    assert run(["verify", plan, "--checkpoint", checkpoint, "--json"]) == 0
    receipts = json.loads(capfd.readouterr().out)["receipts"]
    assert {receipt["key"] for receipt in receipts} >= {"decode:1", "decode:4", "prefill:24"}
    assert all(receipt["bitwise"] and receipt["cases"] >= 3 for receipt in receipts)


def test_a_graph_that_lies_is_named_and_the_others_are_told(planned: tuple[str, str]) -> None:
    plan = read_plan(planned[0])
    ready = start_executor(plan, planned[1], lambda stage, done, total: None)
    recordings = ready.executor.decode.backend._recordings
    recordings[ShapeKey(Phase.DECODE, 4)] = recordings[ShapeKey(Phase.DECODE, 2)]
    found = verify_all(ready.executor, plan.model.vocab_size, lambda stage, done, total: None)
    assert [str(key) for key, _ in found.failures] == ["decode:4"]
    assert len(found.receipts) == len(ready.executor.keys) - 1
    with pytest.raises(VerificationError, match="decode:4: replay differs from eager in row 0") as raised:
        found.require()
    assert raised.value.exit_code == 5


def test_the_command_tells_every_failure_and_exits_5(
    planned: tuple[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is made to store keys and values of padding on page 2 of decode, and nowhere else."""
    fill = StaticBuffers.fill

    def wrong_fill(self: StaticBuffers, values: object, real: int, padded: int, **unread: object) -> None:
        fill(self, values, real, padded, **unread)  # type: ignore[arg-type]
        if "host_ids" in unread.get("unread", ()) and real > 0:
            self["kv_slots"][real:padded] = 32

    monkeypatch.setattr(StaticBuffers, "fill", wrong_fill)
    assert run(["verify", planned[0], "--checkpoint", planned[1], "--json"]) == 5
    told = capfd.readouterr()
    failures = dict(json.loads(told.out)["failures"])
    assert failures["decode:4"] == (
        "key decode:4: slot kv_slots, padding row 1: holds 32 instead of 0 to 15, in a batch of 1"
    )
    assert "prefill:24" in {receipt["key"] for receipt in json.loads(told.out)["receipts"]}
    assert failures["decode:4"] in told.err


def test_a_graph_that_cannot_be_captured_is_5_too(
    planned: tuple[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attention call of the model is no declared break."""
    monkeypatch.setattr("gplan.graphs.runner.graph_break", _forgetting(graph_break))
    assert run(["verify", planned[0], "--checkpoint", planned[1]]) == 5
    assert "prefill:24: expected 3 breaks, met 2" in capfd.readouterr().err


def _forgetting(declare: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        declared, calls = declare(fn), itertools.count()
        return lambda *arguments: (fn if next(calls) % 3 == 1 else declared)(*arguments)

    return decorate


def test_drift_is_refused_first(planned: tuple[str, str], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=2)
    assert run(["verify", planned[0], "--checkpoint", str(other)]) == 3
