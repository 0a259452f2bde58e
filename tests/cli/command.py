"""Runs `gplan` as a user does: a process of its own, with its two streams and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
