"""`gplan simulate`: the scheduler's own report, repeatable, as a page and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from cli.main import cli
from cli.simulate import SimulationView
from formats.container import write_plan
from formats.plan_id import plan_id
from tests.checkpoints import make_checkpoint
from tests.formats.plans import make_plan

WORKLOAD = "closed:8,in=16,out=8,n=40"


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    write_plan(make_plan(), tmp_path / "p.gplan")
    return tmp_path / "p.gplan"


def simulate(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli, ["simulate", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_json_holds_the_whole_report(plan_file: Path) -> None:
    view = msgspec.json.decode(simulate(plan_file, "--workload", WORKLOAD, "--json"), type=SimulationView)
    assert view.plan_id == plan_id(make_plan())
    assert view.workload == WORKLOAD
    report = view.report
    assert (report.num_requests, report.output_tokens) == (40, 40 * 8)
    assert report.decode.replayed + report.decode.eager == sum(steps for _, steps in report.decode.steps)
    assert report.decode.replayed > 0


def test_the_same_input_prints_the_same(plan_file: Path) -> None:
    arguments = (plan_file, "--workload", "poisson:rate=50,in=20,out=10,n=100")
    assert simulate(*arguments) == simulate(*arguments)
    assert simulate(*arguments) != simulate(*arguments, "--speedup", "4")


def test_the_page_tells_it_to_people(plan_file: Path) -> None:
    page = simulate(plan_file, "--workload", WORKLOAD)
    for expected in (WORKLOAD, "40 requests", "tokens/s", "to first token", "between tokens", "steps replayed"):
        assert expected in page
    assert "█" in page


def test_requests_longer_than_the_plan_allows_are_cut(plan_file: Path) -> None:
    view = msgspec.json.decode(
        simulate(plan_file, "--workload", "closed:1,in=1000,out=100,n=2", "--json"), type=SimulationView
    )
    assert view.report.input_tokens + view.report.output_tokens == 2 * make_plan().limits.max_len
    assert view.num_cut == 2
    assert "2 requests cut" in simulate(plan_file, "--workload", "closed:1,in=1000,out=100,n=2")
    assert "cut" not in simulate(plan_file, "--workload", WORKLOAD)


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (("--workload", "poisson:rate=x"), 1, "rate"),
        (("--workload", "nowhere.csv"), 1, "nowhere.csv"),
        (("--workload", WORKLOAD, "--speedup", "0"), 2, "--speedup"),
        ((), 2, "--workload"),
    ],
)
def test_a_wrong_workload_is_refused(flags: tuple[str, ...], code: int, named: str, plan_file: Path) -> None:
    result = CliRunner().invoke(cli, ["simulate", str(plan_file), *flags])
    assert result.exit_code == code
    assert named in result.stderr


def test_a_phase_without_times_is_refused_with_the_way_to_have_them(tmp_path: Path) -> None:
    write_plan(make_plan(prefill_backend="eager"), tmp_path / "p.gplan")
    result = CliRunner().invoke(cli, ["simulate", str(tmp_path / "p.gplan"), "--workload", WORKLOAD])
    assert result.exit_code == 1
    assert "gplan plan CHECKPOINT" in result.stderr


def test_texts_are_counted_by_the_checkpoints_tokenizer(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    write_plan(make_plan(), tmp_path / "p.gplan")
    turns = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four"}]
    (tmp_path / "texts.json").write_text(json.dumps([{"conversations": turns}] * 3))
    arguments = ["simulate", str(tmp_path / "p.gplan"), "--workload", str(tmp_path / "texts.json"), "--json"]
    done = CliRunner().invoke(cli, [*arguments, "--checkpoint", str(checkpoint)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["report"]["num_requests"] == 3
    missing = CliRunner().invoke(cli, [*arguments, "--checkpoint", str(tmp_path)])
    assert missing.exit_code == 1
    assert "the workload holds texts" in missing.stderr
