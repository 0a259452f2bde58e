"""`gplan explain`: the bucket, the padding and the other way, or the reason for eager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from cli.main import cli, run
from formats.container import write_plan
from formats.measurements import Costs, Timing
from formats.plan import Plan
from tests.formats.plans import make_bucket, make_plan


def saved(plan: Plan, folder: Path) -> str:
    write_plan(plan, folder / "a.gplan")
    return str(folder / "a.gplan")


def explain(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["explain", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def plan(tmp_path: Path) -> str:
    made = make_plan()
    ladder = tuple(make_bucket(size) for size in (1, 4, made.decode.max_size))
    decode = msgspec.structs.replace(made.decode, ladder=ladder, eager_sizes=((5, 6),))
    return saved(msgspec.structs.replace(made, decode=decode, receipts=()), tmp_path)


def test_a_covered_size_names_its_bucket_and_padding(plan: str) -> None:
    found = explain(plan, "--phase", "decode", "--size", "3")
    assert (found["key"], found["padding_rows"], found["reason"]) == ("decode:4", 1, "")
    assert found["alternative"] == "eager"
    assert found["step_us"] >= found["padding_us"] >= 0


def test_a_size_that_runs_eagerly_says_why_and_what_else_there_is(plan: str) -> None:
    found = explain(plan, "--phase", "decode", "--size", "5")
    assert found["key"] == ""
    assert "eager execution is cheaper" in found["reason"]
    assert found["alternative"] == "replay decode:8"


def test_the_page_says_the_same(plan: str) -> None:
    result = CliRunner().invoke(cli, ["explain", plan, "--phase", "decode", "--size", "3"])
    assert "replayed from decode:4, 1 row of padding" in result.stdout


def test_variants_of_the_bucket_are_named_with_what_they_take(tmp_path: Path) -> None:
    made = make_plan()
    decode_ladder = (make_bucket(8), make_bucket(8, variant="greedy"))
    one = msgspec.structs.replace(make_bucket(1), graph=Timing(median_us=1.0, spread_us=0.0, runs=3))
    costs = Costs(context=10, cached_us=((1, 0.1),))
    decode = msgspec.structs.replace(made.decode, ladder=(one, *decode_ladder), costs=costs)
    last = made.prefill.max_size
    prefill_ladder = (make_bucket(last), make_bucket(last, variant="full"))
    prefill = msgspec.structs.replace(made.prefill, backend="breakable", ladder=prefill_ladder, request_slots=4)
    path = saved(msgspec.structs.replace(made, decode=decode, prefill=prefill, receipts=()), tmp_path)
    result = CliRunner().invoke(cli, ["explain", path, "--phase", "decode", "--size", "3"])
    assert "is replayed from decode:8," in result.stdout
    assert "a batch whose requests are all greedy: decode:8:greedy" in result.stdout
    whole, few = (explain(path, "--phase", "decode", "--size", size) for size in ("8", "3"))
    spared = whole["step_us"] - few["step_us"]
    assert spared > 0, "what rows of padding do not read"
    assert few["variants"][0]["step_us"] == pytest.approx(whole["variants"][0]["step_us"] - spared)
    found = explain(path, "--phase", "prefill", "--size", "3")
    assert [(v["key"], v["takes"]) for v in found["variants"]] == [(f"prefill:{last}:full", "of at most 4 requests")]


def test_a_size_that_no_step_has_is_an_error(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", plan, "--phase", "decode", "--size", "100000"]) == 1
    assert "no decode step has more than 8 requests" in capsys.readouterr().err


def test_an_eager_phase_says_so(tmp_path: Path) -> None:
    found = explain(saved(make_plan(decode_backend="eager"), tmp_path), "--phase", "decode", "--size", "2")
    assert "captures nothing in this phase" in found["reason"]
    assert found["step_us"] is None
