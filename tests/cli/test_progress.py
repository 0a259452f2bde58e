"""Progress: plain lines where nobody watches, a live bar on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from cli.progress import show_progress
from tests.cli.command import ROOT


def test_lines_say_when_a_stage_begins_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress() as progress:
        for done in range(1001):
            progress("capture", done, 1000)
        progress("load", 0, 1)
        progress("load", 1, 1)
    told = capsys.readouterr()
    lines = told.err.splitlines()
    assert told.out == ""
    assert lines[0] == "capture: 0/1000"
    assert [line.split(" in ")[0] for line in lines[1:]] == ["capture: done", "load: 0/1", "load: done"]


def test_a_stage_without_a_beginning_still_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress() as progress:
        progress("load", 1, 1)
    assert capsys.readouterr().err.startswith("load: done in ")


def test_a_terminal_gets_a_bar() -> None:
    script = (
        "from cli.progress import show_progress\n"
        "with show_progress() as progress:\n"
        "    for done in range(4):\n        progress('capture', done, 3)\n"
    )
    here, there = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=there, stdout=subprocess.PIPE)
    os.close(there)
    seen = b""
    while True:
        try:
            block = os.read(here, 4096)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        seen += block
    assert process.wait(60) == 0
    assert process.stdout is not None
    assert process.stdout.read() == b""
    process.stdout.close()
    os.close(here)
    assert b"capture" in seen
    assert b"3/3" in seen
    assert "━".encode() in seen
