"""Greedy answers equal transformers' `generate`, token for token, however the steps are run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gplan.core import Request
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import greedy, limits_of, make_executor, serve

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 32, 33, 64, 65, 100, 127, 128, 129, 255, 400, 700)
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Callable[[list[int], int], list[int]]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
        return out[0, len(prompt) :].tolist()

    return generate


@pytest.fixture(scope="module")
def expected(reference: Callable[[list[int], int], list[int]], prompts: list[list[int]]) -> dict[str, list[int]]:
    return {str(index): reference(prompt, NUM_TOKENS) for index, prompt in enumerate(prompts)}


def requests_of(prompts: list[list[int]]) -> list[Request]:
    return [greedy(str(index), prompt, NUM_TOKENS) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("decode", ["full", "breakable", "eager"])
@pytest.mark.parametrize("prefill", ["breakable", "full", "eager"])
def test_every_backend_in_each_phase(
    checkpoint: Path, prompts: list[list[int]], expected: dict[str, list[int]], decode: str, prefill: str
) -> None:
    executor = make_executor(checkpoint, decode=decode, prefill=prefill)
    served = serve(executor, requests_of(prompts))
    assert served.answers == expected
    replayed = {key.split(":")[0] for key in served.steps if not key.startswith("eager")}
    assert ("decode" in replayed) == (decode != "eager")
    assert ("prefill" in replayed) == (prefill != "eager")
    executor.close()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_pool_so_small_that_requests_are_preempted(
    checkpoint: Path, reference: Callable[[list[int], int], list[int]], lag: int
) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(5, 40))] for _ in range(12)]
    executor = make_executor(checkpoint, num_pages=1 + 96)
    served = serve(executor, [greedy(str(index), prompt, 60) for index, prompt in enumerate(prompts)], lag=lag)
    assert served.num_preemptions > 0
    assert served.answers == {str(index): reference(prompt, 60) for index, prompt in enumerate(prompts)}


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_arrival(
    checkpoint: Path, prompts: list[list[int]], expected: dict[str, list[int]], seed: int
) -> None:
    rng = random.Random(seed)
    requests = requests_of(prompts)
    rng.shuffle(requests)
    executor = make_executor(checkpoint)
    served = serve(executor, requests, arrivals=[rng.randrange(40) for _ in requests])
    assert served.answers == expected


@pytest.mark.parametrize("lag", [1, 2])
def test_steps_launched_before_the_last_results_are_read(
    checkpoint: Path, prompts: list[list[int]], expected: dict[str, list[int]], lag: int
) -> None:
    executor = make_executor(checkpoint, num_pages=1 + 96)
    served = serve(executor, requests_of(prompts), lag=lag)
    assert served.answers == expected


def test_limits_that_divide_nothing(checkpoint: Path, prompts: list[list[int]], expected: dict[str, list[int]]) -> None:
    limits = limits_of(max_batch=7, chunk=37, page_size=5, max_len=713)
    executor = make_executor(
        checkpoint, limits=limits, num_pages=1 + 200, decode_ladder=(3, 7), prefill_ladder=(13, 37)
    )
    served = serve(executor, requests_of(prompts))
    assert served.answers == expected
    assert set(served.steps) <= {"decode:3", "decode:7", "prefill:13", "prefill:37"}
