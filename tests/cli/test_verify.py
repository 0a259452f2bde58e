"""`gplan verify`: every key on the tape, and exit 5 where a graph lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import run
from formats.container import write_plan
from gplan.core import Phase, ShapeKey
from gplan.errors import VerificationError
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


def test_a_graph_that_lies_is_named(planned: tuple[str, str]) -> None:
    from formats.container import read_plan

    plan = read_plan(planned[0])
    ready = start_executor(plan, planned[1], lambda stage, done, total: None)
    recordings = ready.executor.decode.backend._recordings
    recordings[ShapeKey(Phase.DECODE, 4)] = recordings[ShapeKey(Phase.DECODE, 2)]
    with pytest.raises(VerificationError, match="decode:4") as raised:
        verify_all(ready.executor, plan.model.vocab_size, lambda stage, done, total: None)
    assert raised.value.exit_code == 5


def test_drift_is_refused_first(planned: tuple[str, str], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=2)
    assert run(["verify", planned[0], "--checkpoint", str(other)]) == 3
