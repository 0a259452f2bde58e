"""An engine process whose device fails after a while: replays of segments raise what GPLAN_TEST_FAILURE says.

`illegal:N`: the N-th replay of a decode graph after ready, and whatever follows, reports an illegal access.
`memory:N`: every N-th finds no memory.
"""

from __future__ import annotations

import os
import sys

import torch

from gplan.graphs.capture.tape import TapeSegment

kind, number = os.environ["GPLAN_TEST_FAILURE"].split(":")
replays = 0
real_replay = TapeSegment.replay


def replay(self: TapeSegment) -> None:
    global replays
    replays += 1
    if kind == "illegal" and replays >= int(number):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with DSA.")
    if kind == "memory" and replays % int(number) == 0:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    real_replay(self)


if __name__ == "__main__":
    from gplan.serving.worker import run

    TapeSegment.replay = replay  # type: ignore[method-assign]
    run(sys.argv[1], int(sys.argv[2]))
