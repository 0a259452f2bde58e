"""Runs `gplan` as a user does: a process of its own, with its two streams and its exit code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from cli.main import cli

ROOT = Path(__file__).parents[2]


def gplan(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs one command line from the repository's root; `environment` is added to this process's own."""
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def commands_in(text: str) -> list[list[str]]:
    """The lines of `text` that call gplan, as the words after it."""
    lines = re.findall(r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*gplan (.*)$", text, re.MULTILINE)
    return [shlex.split(line.partition("|")[0]) for line in lines]


def check_words(words: list[str]) -> None:
    """
    Raises:
        click.UsageError: no command line that gplan takes; nothing is run.
    """
    name, *arguments = words
    cli.commands[name].make_context(name, arguments)
