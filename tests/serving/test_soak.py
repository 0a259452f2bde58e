"""The soak, short: a random mix of everything against a server gives no wrong token and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.serving.live import ROOT


def test_a_short_soak(plan_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", str(plan_path), "--checkpoint", str(plan_path.with_suffix(""))]
    options = ["--seconds", "12", "--questions", "30", "--clients", "8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["wrong"] == []
    assert report["left_over"] == {}
    assert report["right_answers"] > 10
    assert {outcome.split()[0] for outcome in report["outcomes"]} >= {"whole", "stream"}
