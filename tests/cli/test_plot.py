"""`--plot`: a picture of times, buckets and traffic, or a sentence on what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import cli, run
from formats.container import write_plan
from tests.formats.plans import make_plan

WORKLOAD = "closed:4,in=20-60,out=10,n=20"


@pytest.fixture
def plan(tmp_path: Path) -> str:
    write_plan(make_plan(), tmp_path / "p.gplan")
    return str(tmp_path / "p.gplan")


@pytest.mark.parametrize("command", [["show"], ["simulate", "--workload", WORKLOAD]])
@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".html", b"<!doctype html>")])
def test_a_picture_is_written(plan: str, tmp_path: Path, command: list[str], suffix: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"picture{suffix}"
    result = CliRunner().invoke(cli, [*command, plan, "--plot", str(target)])
    assert result.exit_code == 0, result.output
    assert target.read_bytes().startswith(start)
    assert str(target) in result.stderr


def test_the_same_plan_is_the_same_picture(plan: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "a.html", tmp_path / "b.html"]
    for picture in pictures:
        assert CliRunner().invoke(cli, ["show", plan, "--plot", str(picture)]).exit_code == 0
    page = pictures[0].read_text()
    assert page == pictures[1].read_text()
    assert "<svg" in page
    assert "<?xml" not in page


@pytest.mark.parametrize("name", ["picture.jpg", "picture", "missing/picture.png"])
def test_a_file_that_cannot_be_one_is_wrong_usage(plan: str, tmp_path: Path, name: str) -> None:
    assert CliRunner().invoke(cli, ["show", plan, "--plot", str(tmp_path / name)]).exit_code == 2


def test_without_the_library_it_says_what_to_install(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["show", plan, "--plot", str(tmp_path / "picture.png")]) == 1
    assert "pip install 'gplan[plot]'" in capsys.readouterr().err
