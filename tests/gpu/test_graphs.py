"""Whole models on a GPU: graphs against eager to the bit, CUDA kernels against float32, and serving through both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gplan.core import Batch, Phase
from gplan.errors import VerificationError
from gplan.graphs.admission import Verdict
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions
from gplan.graphs.synthetic import BatchMaker
from gplan.kernels.base import AttentionBatch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.gpu.operators import relative_error
from tests.graphs.drive import greedy, limits_of, make_executor, serve

pytestmark = pytest.mark.gpu

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BACKENDS = [("full", "breakable"), ("full", "full"), ("breakable", "breakable")]
WIDE = {"hidden_size": 256, "intermediate_size": 352, "head_dim": 64, "num_attention_heads": 8}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**WIDE, "num_attention_heads": 4} if request.param == "Qwen2ForCausalLM" else WIDE
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param, **config)


def executor_of(checkpoint: Path, decode: str = "full", prefill: str = "breakable", **options: object) -> Executor:
    defaults = {"device": "cuda", "dtype": torch.bfloat16, "kernels": "flashinfer", "limits": limits_of(page_size=16)}
    return make_executor(checkpoint, decode=decode, prefill=prefill, **{**defaults, **options})


@pytest.fixture(params=BACKENDS, ids="-".join)
def executor(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Executor]:
    executor = executor_of(checkpoint, *request.param)
    yield executor
    executor.close()


def test_every_key_equals_eager_to_the_bit_in_any_order(executor: Executor) -> None:
    batches = BatchMaker(executor.parts.limits, executor.parts.kv_pool.num_pages, VOCAB_SIZE)
    keys = list(executor.keys)
    for order in (keys, keys[::-1], random.Random(0).sample(keys, len(keys))):
        for key in order:
            receipt = check_key(executor, key, compositions(executor, key, batches))
            assert receipt.bitwise


def test_a_pool_smaller_than_its_largest_batches_is_proven_each_time(checkpoint: Path) -> None:
    """4 pages for buckets of 8 requests and 128 tokens: where requests shared one, who writes last is chance."""
    limits = limits_of(page_size=16, max_batch=8, max_len=64, chunk=128)
    executor = executor_of(checkpoint, limits=limits, num_pages=1 + 4, decode_ladder=(8,), prefill_ladder=(128,))
    for _ in range(20):
        for key in executor.keys:
            batches = compositions(executor, key, BatchMaker(limits, 1 + 4, VOCAB_SIZE))
            assert batches
            assert check_key(executor, key, batches).bitwise
    executor.close()


def test_answers_come_from_replays_and_pages_are_returned(executor: Executor) -> None:
    chance = random.Random(1)
    prompts = [[chance.randrange(256) for _ in range(chance.choice([1, 7, 40, 130, 300]))] for _ in range(20)]
    served = serve(executor, [greedy(str(i), prompt, 12) for i, prompt in enumerate(prompts)])
    assert all(len(answer) == 12 for answer in served.answers.values())
    assert not [step for step in served.steps if step.startswith("eager decode")]
    assert any(step.startswith("decode:") for step in served.steps)
    assert any(step.startswith("prefill:") for step in served.steps)


def test_logits_are_as_near_to_float32_as_the_reference_is(checkpoint: Path) -> None:
    """Both round to 8 bits at every step, in another order: their errors are of one size, in both phases."""
    ours = executor_of(checkpoint)
    rounded = reference_of(checkpoint, torch.bfloat16)
    exact = reference_of(checkpoint, torch.float32)
    executors = (ours, rounded, exact)
    batches = BatchMaker(ours.parts.limits, ours.parts.kv_pool.num_pages, VOCAB_SIZE)
    steps = [batches.prefill(size) for size in (1, 5, 33, 128)] + [batches.ragged(120, 7)]
    for batch in steps:
        check_errors(batch, *(logits(executor, batch) for executor in executors))
    for size in (1, 3, 16):
        for length in (1, 40, 100):
            # Decode reads what prefill stored: the same pages, laid out alike.
            prompt = batches.ragged(min(128, size * length), size)
            for executor in executors:
                logits(executor, prompt)
            batch = continued(prompt)
            check_errors(batch, *(logits(executor, batch) for executor in executors))
    for executor in executors:
        executor.close()


def reference_of(checkpoint: Path, dtype: torch.dtype) -> Executor:
    """Reference kernels read page lists on the host, so a GPU cannot capture them."""
    return executor_of(checkpoint, "eager", "eager", dtype=dtype, kernels="reference")


def check_errors(batch: Batch, ours: torch.Tensor, rounded: torch.Tensor, exact: torch.Tensor) -> None:
    expected = relative_error(rounded, exact)
    assert relative_error(ours, exact) < 1.5 * expected + 0.01, (batch.phase, batch.size, expected)
    assert expected < 0.2, "a reference as wrong as this says nothing"


def logits(executor: Executor, batch: Batch) -> torch.Tensor:
    runner = executor.runner(batch.phase)
    with torch.no_grad():
        if batch.phase is Phase.DECODE:
            executor.sampler.ensure_last_tokens(batch.chunks)
        return runner.execute(batch, Verdict(runner.can_run(batch).key)).clone()


def continued(prompt: Batch) -> Batch:
    """The last token of each prompt again, as a decode step: its key and value are stored anew."""
    return Batch(Phase.DECODE, tuple(last_token(chunk) for chunk in prompt.chunks))


def last_token(chunk: object) -> object:
    return type(chunk)(chunk.request, chunk.end - 1, 1, chunk.pages, samples=True)


def test_greedy_tokens_are_those_of_float32_up_to_rounding(checkpoint: Path) -> None:
    """Given the same tokens before it, each token is float32's likeliest, or so near to it that rounding decides."""
    chance = random.Random(2)
    prompts = [[chance.randrange(256) for _ in range(length)] for length in (1, 8, 33, 128, 200, 400)]
    executor = executor_of(checkpoint)
    served = serve(executor, [greedy(str(i), prompt, 16) for i, prompt in enumerate(prompts)])
    executor.close()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    same = 0
    for index, prompt in enumerate(prompts):
        answer = served.answers[str(index)]
        with torch.no_grad():
            scores = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
        best = scores.max(dim=1).values
        assert (best - chosen < 0.2 * scores.std(dim=1)).all(), index
        same += int((chosen == best).sum())
    assert same >= 0.85 * 16 * len(prompts)


@pytest.mark.parametrize("backends", BACKENDS, ids="-".join)
@pytest.mark.parametrize("phase", list(Phase))
def test_metadata_planned_for_another_batch_is_found(checkpoint: Path, backends: tuple[str, str], phase: Phase) -> None:
    """The negative control of receipts: a replay that reads what attention was planned with before its own batch."""
    executor = executor_of(checkpoint, *backends)
    runner = executor.runner(phase)
    key = runner.setup.keys[-1]
    attention, backend = runner.load_padding(key), runner.backend_of(key)
    prepare, replay = attention.prepare, backend.replay
    planned: list[AttentionBatch] = []

    def remembering(batch: AttentionBatch) -> None:
        planned.append(batch)
        prepare(batch)

    def stale(other: object) -> tuple[torch.Tensor, ...]:
        if other == key:
            prepare(planned[-2])
        return replay(other)

    batches = BatchMaker(executor.parts.limits, executor.parts.kv_pool.num_pages, VOCAB_SIZE)
    cases = compositions(executor, key, batches)
    check_key(executor, key, cases)
    attention.prepare, backend.replay = remembering, stale
    with pytest.raises(VerificationError, match=f"key {key}: "):
        check_key(executor, key, cases)
    executor.close()
