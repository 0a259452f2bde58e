"""A GPU whose memory runs out for real while a plan is made ready: the start ends with the ledger row."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from formats.container import write_plan
from formats.plan import LEDGER_ROWS
from gplan.graphs.machine import read_fingerprint
from gplan.models import read_headers, read_spec
from tests.checkpoints import make_checkpoint
from tests.formats.plans import make_plan

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

START = """
import sys, torch
from formats.container import read_plan
from gplan.errors import FitError
from gplan.serving.startup import start_executor

plan, checkpoint, mib = read_plan(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.cuda.set_per_process_memory_fraction(mib * 2**20 / torch.cuda.mem_get_info()[1])
try:
    start_executor(plan, checkpoint, lambda stage, done, total: None, accept=sys.argv[4:])
except FitError as error:
    print(error.message)
    raise SystemExit(4)
"""


@pytest.mark.parametrize("mib", [1, 2, 4, 8, 22, 44, 64])
def test_memory_that_runs_out_before_ready_names_the_ledger_row(tmp_path: Path, mib: int) -> None:
    """The allocator is given `mib` MiB in all, far less than the KV pool takes."""
    checkpoint = str(make_checkpoint(tmp_path / "model"))
    headers = read_headers(checkpoint)
    plan = make_plan(
        max_batch=4,
        max_len=512,
        chunk=64,
        num_kv_pages=1 << 18,
        memory_bytes=1 << 34,
        fingerprint=read_fingerprint("cuda", "reference"),
        model=headers.identity(read_spec(checkpoint, headers)),
        decode_backend="eager",
        prefill_backend="eager",
        dtype="float32",
        kernels="reference",
    )
    write_plan(plan, tmp_path / "model.gplan")
    command = [sys.executable, "-c", START, str(tmp_path / "model.gplan"), checkpoint, str(mib)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert ended.returncode == 4, ended.stderr
    found = re.search(r"ledger row (\w+)", ended.stdout)
    assert found, ended.stdout
    assert found[1] in LEDGER_ROWS
