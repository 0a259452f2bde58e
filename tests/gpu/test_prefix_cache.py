"""Shared prefixes on a GPU: replayed, with every step's pages checked and the canaries whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from formats.plan import BackendName
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import greedy, limits_of, make_executor, serve

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 256, "intermediate_size": 352, "head_dim": 64, "num_attention_heads": 8}


@pytest.mark.parametrize("prefill", ["breakable", "full"])
def test_prompts_that_begin_alike_share_pages_that_hold_their_tokens(tmp_path: Path, prefill: BackendName) -> None:
    executor = make_executor(
        make_checkpoint(tmp_path / "checkpoint", **WIDE),
        prefill=prefill,
        device="cuda",
        dtype=torch.bfloat16,
        kernels="flashinfer",
        limits=limits_of(page_size=16),
        num_pages=1 + 120,
    )
    check = executor.check_kv()
    chance = random.Random(2)
    system = [chance.randrange(256) for _ in range(100)]
    prompts = [system[: chance.choice((0, 48, 100))] + [chance.randrange(256) for _ in range(20)] for _ in range(30)]
    requests = [greedy(str(index), prompt, 20) for index, prompt in enumerate([*prompts, prompts[-1], prompts[-1]])]
    served = serve(executor, requests, arrivals=[2 * index for index in range(len(requests))])
    assert all(len(answer) == 20 for answer in served.answers.values())
    assert served.prefixes is not None
    assert served.prefixes.hit_tokens > 1000
    assert check.num_checks == served.steps.total()
    eager = {step for step in served.steps if not step.startswith(("decode:", "prefill:"))}
    assert eager <= ({"eager prefill request_slots"} if prefill == "full" else set())
    executor.close()
