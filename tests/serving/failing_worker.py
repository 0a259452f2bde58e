"""An engine process with a device of its own kind: one in 61 replays of a segment finds no memory, and once the file
exists whose path is in GPLAN_TEST_DEVICE_FAILS all of them report an illegal access."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from gplan.graphs.capture.tape import TapeSegment

broken = Path(os.environ["GPLAN_TEST_DEVICE_FAILS"])
replays = 0
real_replay = TapeSegment.replay


def replay(self: TapeSegment) -> None:
    global replays
    replays += 1
    if broken.exists():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with DSA.")
    if replays % 61 == 0:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    real_replay(self)


if __name__ == "__main__":
    from gplan.serving.worker import run

    TapeSegment.replay = replay  # type: ignore[method-assign]
    run(sys.argv[1], int(sys.argv[2]))
