"""Drawing's kernels where there is no GPU, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_interpreted_kernels_draw_the_references_tokens() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.drawn_without_gpu"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stderr
