"""`gplan plan` on a tiny checkpoint: the file, what goes to which stream, and the refusals."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import cli
from formats.container import read_plan
from formats.plan_id import plan_id
from tests.checkpoints import make_checkpoint
from tests.cli.command import gplan

LIMITS = ("--max-batch", "2", "--max-len", "32", "--chunk", "8", "--device", "cpu")
LOCKS = ("--decode-backend", "full", "--prefill-backend", "breakable", "--prefill-buckets", "4,8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def test_a_plan_is_written_and_leads_on(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "tiny.gplan"
    done = gplan("plan", checkpoint, "-o", output, "--memory", "1GiB", *LIMITS, *LOCKS)
    assert done.returncode == 0, done.stderr
    plan = read_plan(output)
    assert done.stdout == f"{plan_id(plan)}  {output}\n"
    assert f"next: gplan serve {output} --checkpoint {checkpoint}" in done.stderr
    assert "capture: done in" in done.stderr
    assert (plan.limits.max_batch, plan.limits.max_len, plan.limits.chunk) == (2, 32, 8)
    assert plan.limits.memory_bytes == 1 << 30
    assert (plan.decode.backend, plan.prefill.backend) == ("full", "breakable")
    assert [bucket.size for bucket in plan.prefill.ladder] == [4, 8]
    locked = {choice.field for choice in plan.choices if choice.basis == "locked"}
    assert {"decode.backend", "prefill.backend", "prefill.ladder", "limits.max_len"} <= locked
    assert plan.model.source == "tiny"
    assert str(tmp_path) not in gplan("show", output, "--json").stdout


def test_too_little_memory_is_4_and_names_the_row(checkpoint: Path, tmp_path: Path) -> None:
    done = gplan("plan", checkpoint, "-o", tmp_path / "p.gplan", "--memory", "20MiB", *LIMITS, *LOCKS)
    assert done.returncode == 4
    assert done.stderr.splitlines()[-2].startswith("error: ledger row ")
    assert "--memory" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--decode-buckets", "1,3"), "no step has 3 requests"),
        (("--max-len", "100000"), "100000"),
        (("--device", "tpu"), "tpu"),
        (("--kernels", "flashinfer"), "flashinfer"),
        (("--speedup", "2"), "no workload to speed up"),
        (("--try-compile", "--decode-backend", "eager", "--prefill-backend", "full"), "anything to compile"),
        (("--startup-budget", "1", "--decode-backend", "eager", "--prefill-backend", "eager"), "nothing is captured"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    flags: tuple[str, ...], named: str, checkpoint: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(cli, ["plan", str(checkpoint), "-o", str(tmp_path / "p.gplan"), *LIMITS, *flags])
    assert result.exit_code == 1, result.stderr
    assert named in result.stderr
    assert "hint: " in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["plan", str(tmp_path / "nowhere"), "-o", str(tmp_path / "p.gplan")])
    assert result.exit_code == 1
    assert "nowhere" in result.stderr


@pytest.mark.parametrize("output", ["missing/p.gplan", ".", "link.gplan", "n" * 300, "pipe"])
def test_where_nothing_can_be_written_is_found_out_first(output: str, tmp_path: Path) -> None:
    (tmp_path / "link.gplan").symlink_to("another")
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(cli, ["plan", str(tmp_path / "nowhere"), "-o", str(tmp_path / output)])
    assert result.exit_code == 2
    assert "-o" in result.stderr
    assert "nowhere" not in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"link.gplan", "pipe"}


def test_a_broken_tokenizer_is_found_before_anything_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{}")
    result = CliRunner().invoke(cli, ["plan", str(broken), "-o", str(tmp_path / "p.gplan"), *LIMITS])
    assert result.exit_code == 1
    assert "no usable tokenizer" in result.stderr
    assert "warm up" not in result.stderr


def test_a_file_that_is_no_plan_is_not_written_over(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("precious")
    result = CliRunner().invoke(cli, ["plan", str(tmp_path / "nowhere"), "-o", str(notes)])
    assert result.exit_code == 2
    assert "is there, and is no plan" in result.stderr
    assert notes.read_text() == "precious"
    notes.write_text("")
    result = CliRunner().invoke(cli, ["plan", str(tmp_path / "nowhere"), "-o", str(notes)])
    assert "is no plan" not in result.stderr, "an empty file, as mktemp makes one, is no loss"
