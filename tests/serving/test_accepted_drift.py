"""Serving on another machine than planned for: refused by field, or accepted by name and on record."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from formats.container import read_plan, write_plan
from tests.cli.command import gplan
from tests.serving.live import Live


@pytest.fixture
def drifted(plan_path: Path, tmp_path: Path) -> Path:
    """A plan for another torch, and a chat template that was edited since."""
    plan = read_plan(plan_path)
    machine = msgspec.structs.replace(plan.fingerprint, torch="2.9.1")
    path = tmp_path / plan_path.name
    write_plan(msgspec.structs.replace(plan, fingerprint=machine), path)
    checkpoint = Path(shutil.copytree(plan_path.with_suffix(""), path.with_suffix("")))
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return path


def test_drift_is_refused_by_field_with_3(drifted: Path) -> None:
    done = gplan(
        "serve",
        drifted,
        "--checkpoint",
        drifted.with_suffix(""),
        "--port",
        "0",
        "--accept-drift",
        "chat_template_digest",
    )
    assert done.returncode == 3
    assert "torch: planned for 2.9.1, found 2." in done.stderr
    assert "must match" in done.stderr
    assert "--accept-drift" in done.stderr
    assert done.stdout == ""


def test_what_was_accepted_is_on_record(drifted: Path) -> None:
    with Live(drifted, "--accept-drift", "torch", "--accept-drift", "chat_template_digest") as live:
        accepted = live.get("/server_info").json()["accepted_drift"]
    assert [sentence.split(":")[0] for sentence in accepted] == ["chat_template_digest", "torch"]
    assert all(sentence in live.output for sentence in accepted)
