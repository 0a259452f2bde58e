"""Replay equals eager to the bit, padding touches nobody, and what would break either is caught."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gplan.core import Batch, Phase, ShapeKey
from gplan.errors import CaptureError, GuardError, VerificationError
from gplan.graphs.admission import Verdict
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions, full_batch
from gplan.graphs.synthetic import BatchMaker
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import greedy, limits_of, make_executor, serve

LIMITS = limits_of(max_batch=8, max_len=128, chunk=64)
NUM_PAGES = 120
BACKENDS = [("full", "breakable"), ("breakable", "full")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("receipts"), "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> dict[tuple[str, str], Executor]:
    return {pair: new_executor(checkpoint, *pair) for pair in BACKENDS}


@pytest.fixture(params=BACKENDS, ids="-".join)
def executor(request: pytest.FixtureRequest, shared: dict[tuple[str, str], Executor]) -> Executor:
    return shared[request.param]


def new_executor(checkpoint: Path, decode: str = "full", prefill: str = "breakable") -> Executor:
    return make_executor(
        checkpoint,
        decode=decode,
        prefill=prefill,
        limits=LIMITS,
        num_pages=NUM_PAGES,
        decode_ladder=(1, 2, 3, 5, 8),
        prefill_ladder=(4, 9, 16, 33, 64),
    )


def batches_of(key: ShapeKey) -> list[Batch]:
    maker = BatchMaker(LIMITS, NUM_PAGES, 256)
    if key.phase is Phase.DECODE:
        return [maker.decode(size, context) for size in range(1, key.size + 1) for context in (0, 7, 8, 100)]
    whole = [maker.prefill(size, cached) for size in {1, key.size // 2, key.size} for cached in (0, 5, 40)]
    return [*whole, maker.ragged(key.size, min(4, key.size)), maker.ragged(max(1, key.size - 1), 1, cached=13)]


def orders(keys: tuple[ShapeKey, ...]) -> Iterator[list[ShapeKey]]:
    ascending = sorted(keys)
    yield ascending
    yield ascending[::-1]
    shuffled = list(keys) * 2
    random.Random(5).shuffle(shuffled)
    yield shuffled


def test_replay_equals_eager_to_the_bit_in_any_order(executor: Executor) -> None:
    for order in orders(executor.keys):
        for key in order:
            receipt = check_key(executor, key, batches_of(key))
            assert receipt.bitwise
            assert receipt.cases == len(batches_of(key))


def test_padded_rows_change_no_page_but_the_dummy(executor: Executor) -> None:
    check_padding_of_every_key(executor)


def check_padding_of_every_key(executor: Executor) -> None:
    pool = executor.parts.kv_pool
    maker = BatchMaker(LIMITS, NUM_PAGES, 256)
    for key in executor.keys:
        batch = maker.decode(1, 20) if key.phase is Phase.DECODE else maker.prefill(1, 20)
        written = batch.chunks[0].pages[-1]
        pool.data.normal_()
        before = pool.data.clone()
        executor.parts.buffers.poison()
        executor.sampler.ensure_last_tokens(batch.chunks)
        executor.runner(key.phase).execute(batch, Verdict(key))
        same = (pool.data == before).flatten(3).all(-1).all(0).all(0)
        changed = set((~same).nonzero().flatten().tolist())
        assert changed <= {0, written}, key
        assert written in changed


@torch.no_grad()
def break_policy(executor: Executor, slot: str, value: int) -> None:
    """Makes every fill leave `value` in a slot's tail, as a wrong padding policy would."""
    buffers, fill = executor.parts.buffers, executor.parts.buffers.fill

    def wrong_fill(values: object, real: int, padded: int, **kwargs: object) -> None:
        fill(values, real, padded, **kwargs)
        buffers[slot][real:padded] = value

    executor.parts.buffers.fill = wrong_fill  # type: ignore[method-assign]


@pytest.mark.parametrize("variants", [(), ("greedy",)])
def test_a_pool_smaller_than_its_largest_batches_is_proven_with_what_it_holds(
    checkpoint: Path, variants: tuple[str, ...]
) -> None:
    """4 pages for buckets of 8 requests and 64 tokens: requests that shared a page would overwrite each other."""
    limits, num_pages = limits_of(max_batch=8, max_len=32, chunk=64), 1 + 4
    executor = make_executor(
        checkpoint,
        limits=limits,
        num_pages=num_pages,
        decode_ladder=(1, 8),
        prefill_ladder=(64,),
        decode_variants=variants,
    )
    maker = BatchMaker(limits, num_pages, 256)
    for key in executor.keys:
        batches = compositions(executor, key, maker)
        check_key(executor, key, [*batches, full_batch(executor, key, maker)])
        for batch in batches:
            pages = [page for chunk in batch.chunks for page in chunk.pages]
            assert len(set(pages)) == len(pages)
        if key.size > 1:
            assert max(batch.size for batch in batches) == (4 if key.phase is Phase.DECODE else 31)


def test_a_wrong_padding_policy_overwrites_a_request_and_is_seen(checkpoint: Path) -> None:
    executor = new_executor(checkpoint)
    break_policy(executor, "kv_slots", 50 * LIMITS.page_size)
    with pytest.raises(AssertionError, match="Extra items"):
        check_padding_of_every_key(executor)


def test_a_swapped_key_is_caught(checkpoint: Path) -> None:
    executor = new_executor(checkpoint)
    recordings = executor.decode.backend._recordings
    five, eight = ShapeKey(Phase.DECODE, 5), ShapeKey(Phase.DECODE, 8)
    recordings[eight] = recordings[five]
    with pytest.raises(VerificationError, match=r"decode:8.*row 5"):
        check_key(executor, eight, [BatchMaker(LIMITS, NUM_PAGES, 256).decode(8, 20)])


def test_a_rebound_buffer_is_refused_before_replay(checkpoint: Path) -> None:
    executor = new_executor(checkpoint)
    buffers = executor.parts.buffers
    buffers._tensors["positions"] = buffers["positions"].clone()
    with pytest.raises(GuardError, match="positions was rebound"):
        serve(executor, [greedy("a", [1, 2, 3], 4)])


def test_a_freed_kv_pool_is_refused_before_replay(checkpoint: Path) -> None:
    executor = new_executor(checkpoint)
    pool = executor.parts.kv_pool
    pool.data = torch.zeros_like(pool.data)
    pool.layers = tuple((pool.data[i, 0], pool.data[i, 1]) for i in range(len(pool.layers)))
    with pytest.raises(GuardError, match="kv_pool"):
        serve(executor, [greedy("a", [1, 2, 3], 4)])


def test_nothing_is_captured_after_ready(executor: Executor) -> None:
    with pytest.raises(CaptureError, match="after the keys were frozen"):
        executor.decode.capture(executor.decode.setup.keys[0])
