"""The decoder itself, in both phases and through both graph backends: replay equals eager to the bit at the same padded
size, with every buffer poisoned, in any order of keys; padded rows change the cache of nobody."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gplan.core import DUMMY_PAGE, Batch, Chunk, Phase, Request, SamplingParams, ShapeKey
from gplan.graphs.admission import Verdict
from gplan.graphs.executor import Executor
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import limits_of, make_executor

LIMITS = limits_of(max_batch=8, chunk=24, page_size=4, max_len=32)
DECODE_LADDER, PREFILL_LADDER = (1, 3, 8), (4, 16, 24)
REQUEST_SLOTS = 4


@pytest.fixture(
    scope="module",
    params=[
        ("LlamaForCausalLM", "full", "breakable", torch.float32),
        ("Qwen3ForCausalLM", "breakable", "full", torch.float32),
        ("Qwen2ForCausalLM", "full", "full", torch.bfloat16),
    ],
    ids=lambda param: "-".join(str(part).removeprefix("torch.").removesuffix("ForCausalLM") for part in param),
)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    architecture, decode, prefill, dtype = request.param
    executor = make_executor(
        make_checkpoint(tmp_path_factory.mktemp("checkpoint"), architecture),
        decode=decode,
        prefill=prefill,
        limits=LIMITS,
        num_pages=1 + LIMITS.max_batch * LIMITS.max_len // LIMITS.page_size,
        decode_ladder=DECODE_LADDER,
        prefill_ladder=PREFILL_LADDER,
        dtype=dtype,
    )
    executor.parts.kv_pool.data.normal_(generator=torch.Generator().manual_seed(0))
    yield executor
    executor.close()


def make_batch(chance: random.Random, phase: Phase, lengths: Sequence[int]) -> Batch:
    """A step that extends one request per length, each after a cached prefix and on scattered pages."""
    pages = chance.sample(range(1, 1 + LIMITS.max_batch * LIMITS.max_len // LIMITS.page_size), k=64)
    rows = chance.sample(range(1, LIMITS.max_batch + 1), k=len(lengths))
    chunks = []
    for row, length in zip(rows, lengths, strict=True):
        start = chance.randrange(LIMITS.max_len - length)
        tokens = [chance.randrange(256) for _ in range(start + length)]
        held = tuple(pages.pop() for _ in range(-(-len(tokens) // LIMITS.page_size)))
        request = Request(f"{row}", len(tokens), tokens, SamplingParams(max_tokens=1), row=row)
        chunks.append(Chunk(request, start, length, held, samples=True))
    return Batch(phase, tuple(chunks))


def batch_for(chance: random.Random, key: ShapeKey) -> Batch:
    """Any batch that the key covers."""
    if key.phase is Phase.DECODE:
        return make_batch(chance, key.phase, [1] * chance.randint(1, key.size))
    parts = min(chance.randint(1, REQUEST_SLOTS), key.size)
    cuts = sorted(chance.sample(range(1, chance.randint(parts, key.size) + 1), k=parts))
    return make_batch(chance, key.phase, [end - start for start, end in zip([0, *cuts], cuts, strict=False)])


@torch.no_grad()
def check_replay(executor: Executor, key: ShapeKey, batch: Batch) -> None:
    runner, buffers, cache = executor.runner(key.phase), executor.parts.buffers, executor.parts.kv_pool.data
    executor.sampler.ensure_last_tokens(batch.chunks)
    before = cache.clone()
    buffers.poison()
    expected = [runner.execute_padded(batch, key).clone(), cache[:, :, 1:].clone()]
    cache.copy_(before)
    buffers.poison()
    executor.guard.check(key)
    found = [runner.execute(batch, Verdict(key)), cache[:, :, 1:]]
    assert torch.equal(found[0], expected[0]), f"{key}: replay differs from eager"
    assert torch.equal(found[1], expected[1]), f"{key}: replay leaves another cache than eager"
    mine = {page for chunk in batch.chunks for page in chunk.pages} | {DUMMY_PAGE}
    others = [page for page in range(cache.shape[2]) if page not in mine]
    assert torch.equal(cache[:, :, others], before[:, :, others]), f"{key}: the cache of another request changed"


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_replay_equals_eager_in_order(executor: Executor, order: str) -> None:
    chance = random.Random(order)
    for key in sorted(executor.keys, reverse=order == "descending"):
        check_replay(executor, key, batch_for(chance, key))


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), picks=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_replay_equals_eager_in_any_order(executor: Executor, seed: int, picks: list[int]) -> None:
    chance = random.Random(seed)
    for pick in picks:
        key = executor.keys[pick]
        check_replay(executor, key, batch_for(chance, key))


def test_smaller_keys_take_no_memory(tmp_path: Path) -> None:
    """The pool that serves every key of both phases is that of the largest alone."""
    checkpoint = make_checkpoint(tmp_path)

    def pool_of(decode_ladder: Sequence[int], prefill_ladder: Sequence[int]) -> int:
        limits = limits_of(chunk=512)
        executor = make_executor(
            checkpoint, limits=limits, decode_ladder=decode_ladder, prefill_ladder=prefill_ladder, prefill="full"
        )
        nbytes = executor.device.pool_nbytes()
        executor.close()
        return nbytes

    largest = pool_of((), (512,))
    assert largest > 512 << 10
    assert pool_of((1, 4, 16), (32, 100, 256, 511, 512)) == largest
