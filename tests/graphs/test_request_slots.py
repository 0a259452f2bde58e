"""Prefill graphs that hold their attention: a fixed number of request slots, any prefix, the head inside."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gplan.core import Batch, Phase, Request, ShapeKey
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions
from gplan.graphs.synthetic import BatchMaker
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.graphs.drive import greedy, limits_of, make_executor, serve

CHUNK, MAX_LEN, SLOTS, VOCAB = 16, 320, 4, VOCAB_SIZE
LIMITS = limits_of(max_batch=8, max_len=MAX_LEN, chunk=CHUNK)
NUM_PAGES = 1 + 8 * MAX_LEN // 8
PREFIXES = (0, 1, 2, 4, 8, 16)
"""In chunks."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("slots"), "LlamaForCausalLM")


def new_executor(checkpoint: Path, prefill: str, *variants: str) -> Executor:
    return make_executor(
        checkpoint,
        prefill=prefill,
        limits=LIMITS,
        num_pages=NUM_PAGES,
        decode_ladder=(8,),
        prefill_ladder=(4, CHUNK),
        prefill_variants=variants,
    )


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> Iterator[Executor]:
    made = new_executor(checkpoint, "breakable", "full")
    yield made
    made.close()


def full_keys(executor: Executor) -> list[ShapeKey]:
    return [key for key in executor.keys if key.variant == "full"]


def test_one_graph_serves_every_cached_prefix(executor: Executor) -> None:
    """Lengths are read from memory at replay: no variant by prefix is needed, as the receipts of one key show."""
    batches = BatchMaker(LIMITS, NUM_PAGES, VOCAB)
    keys = full_keys(executor)
    assert [key.size for key in keys] == [4, CHUNK]
    for key in keys:
        cases: list[Batch] = []
        for prefix in PREFIXES:
            cases += [batches.prefill(size, prefix * CHUNK) for size in (1, key.size)]
            cases.append(batches.ragged(key.size, SLOTS, prefix * CHUNK))
        receipt = check_key(executor, key, cases + compositions(executor, key, batches))
        assert receipt.bitwise
        assert receipt.cases == 3 * len(PREFIXES) + 4


def test_logits_are_at_request_width_and_of_those_that_sample(executor: Executor) -> None:
    batches = BatchMaker(LIMITS, NUM_PAGES, VOCAB)
    whole = batches.ragged(CHUNK, 3)
    part = Batch(whole.phase, (*whole.chunks[:1], _silent(whole.chunks[1]), whole.chunks[2]))
    runner, key = executor.prefill, ShapeKey(Phase.PREFILL, CHUNK, variant="full")
    verdict = runner.can_run(whole)
    assert verdict.key == key
    logits = runner.execute(whole, verdict).clone()
    assert logits.shape == (3, VOCAB)
    some = runner.execute(part, verdict)
    assert some.shape == (2, VOCAB)
    assert some.equal(logits[[0, 2]])


def _silent(chunk: object) -> object:
    return type(chunk)(chunk.request, chunk.start, chunk.length, chunk.pages, samples=False)


def requests_of(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.choice((1, 3, 17, 40, 90)))] for _ in range(count)]
    return [greedy(str(index), prompt, 8) for index, prompt in enumerate(prompts)]


def test_more_requests_than_slots_run_from_the_base(checkpoint: Path, executor: Executor) -> None:
    eager = new_executor(checkpoint, "eager")
    arrivals = [0, 0, 1, 2, 3, 3, 3, 3, 4, 20]
    expected = serve(eager, requests_of(5, 10), arrivals=arrivals)
    found = serve(executor, requests_of(5, 10), arrivals=arrivals)
    assert found.answers == expected.answers
    ways = {step for step in found.steps if step.startswith("prefill")}
    assert {"prefill:16", "prefill:16:full"} <= ways
    assert not [step for step in found.steps if step.startswith("eager")]
    eager.close()


def test_more_requests_than_slots_run_eagerly_where_there_is_no_base(checkpoint: Path) -> None:
    alone = new_executor(checkpoint, "full")
    found = serve(alone, requests_of(5, 8))
    assert "eager prefill request_slots" in found.steps
    assert any(step.startswith("prefill:") for step in found.steps)
    alone.close()
