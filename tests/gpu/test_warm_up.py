"""What has compiled by the time that a server is ready: everything that a request may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gplan.core import Request, SamplingParams
from gplan.graphs.executor import Executor
from gplan.graphs.masking import TokenMask, words_of
from gplan.graphs.synthetic import GREEDY, BatchMaker
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.gpu.test_graphs import WIDE, executor_of
from tests.graphs.drive import serve

pytestmark = pytest.mark.gpu

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": ((3, 2.0),)},
    {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": frozenset({7})},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "presence_penalty": 0.4, "logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 2},
)


def requests() -> list[Request]:
    """Steps of many sizes, mixed ones too."""
    prompts = [[(5 * index + at) % 256 for at in range(1 + 23 * index)] for index in range(2 * len(KINDS))]
    return [
        Request(str(index), len(prompt), prompt, SamplingParams(max_tokens=5 + index, seed=index, **kind))
        for index, (prompt, kind) in enumerate(zip(prompts, KINDS * 2, strict=True))
    ]


@pytest.mark.parametrize("decode_ladder", [(1, 2, 4, 8, 16), (4, 16), (2,)], ids=str)
def test_nothing_is_compiled_once_it_is_ready(tmp_path: Path, decode_ladder: tuple[int, ...]) -> None:
    """With the last of the ladders, steps of more than two requests run eagerly."""
    executor: Executor = executor_of(make_checkpoint(tmp_path / "model", **WIDE), decode_ladder=decode_ladder)
    compiled = executor.device.compilations()
    assert compiled > 0, "it is not counted"
    served = serve(executor, requests(), arrivals=[index // 2 for index in range(2 * len(KINDS))])
    assert served.steps
    batches = BatchMaker(executor.parts.limits, executor.parts.kv_pool.num_pages, VOCAB_SIZE)
    bits = torch.full((1, words_of(VOCAB_SIZE)), -1, dtype=torch.int32)
    executor.collect(executor.launch(batches.decode(2, 1, GREEDY), lambda: TokenMask((1,), bits)))
    assert executor.device.compilations() == compiled
    executor.close()
