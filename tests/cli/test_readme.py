"""What the README tells a reader to type works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import cli
from formats.container import write_plan
from tests.cli.command import ROOT, check_words, commands_in, gplan
from tests.formats.plans import make_plan


def commands() -> list[str]:
    """Lines of the README's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_git_shows_plans_as_pages(tmp_path: Path) -> None:
    """The README's two lines in a fresh repository; `gplan` is the one under test."""
    lines = [line for line in commands() if "diff.gplan.textconv" in line or ">> .gitattributes" in line]
    assert len(lines) == 2
    bin_folder, repository = tmp_path / "bin", tmp_path / "repository"
    bin_folder.mkdir()
    repository.mkdir()
    shim = bin_folder / "gplan"
    shim.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -P -m cli.main "$@"\n')
    shim.chmod(0o755)
    environment = {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "GIT_CONFIG_NOSYSTEM": "1",
    }

    def bash(command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", command], cwd=repository, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    bash("git init -q && git config user.name t && git config user.email t@t")
    write_plan(make_plan(max_batch=8), repository / "model.gplan")
    bash("\n".join([*lines, "git add .", "git commit -qm one"]))
    write_plan(make_plan(max_batch=12), repository / "model.gplan")
    shown = bash("git diff")
    assert re.search(r"^-limits +8 requests at once", shown, re.MULTILINE)
    assert re.search(r"^\+limits +12 requests at once", shown, re.MULTILINE)
    assert "Binary files" not in shown


def test_the_one_command_and_the_test_command_are_there() -> None:
    assert any(line.endswith("gplan quickstart") for line in commands())
    assert "pip install -e '.[test]' && pytest" in commands()


def test_the_file_of_options_is_one(tmp_path: Path) -> None:
    """It is read before anything is done with it: that goes as far as the plan that is not there."""
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "plan.toml").write_text(block)
    done = gplan("plan", "--config", tmp_path / "plan.toml", "--from", tmp_path / "missing.gplan")
    assert done.returncode == 1, done.stderr
    assert "missing.gplan: does not exist" in done.stderr


def test_commands_that_are_shown_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)[0])
    shown = commands_in("".join(re.findall(r"```(?:sh|console)\n(.*?)```", readme, re.DOTALL)))
    assert {words[0] for words in shown} >= set(cli.commands) - {"quickstart"}
    for words in shown:
        check_words(words)


def test_metrics_that_are_named_are_there() -> None:
    from gplan.serving.metrics import Metrics

    named = set(re.findall(r"`(gplan_\w+)", (ROOT / "README.md").read_text()))
    assert named
    metrics = Metrics(make_plan()).render().decode()
    assert [name for name in named if f"# TYPE {name} " not in metrics] == []
