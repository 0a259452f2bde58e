"""What verification is for: each fault that a replay can have, made on purpose, is found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gplan.core import Phase, ShapeKey
from gplan.errors import VerificationError
from gplan.graphs.buffers import StaticBuffers
from gplan.graphs.executor import Executor
from gplan.graphs.padding import Stale
from gplan.kernels.base import AttentionBatch
from gplan.serving.startup import recheck_receipts, verify_all
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.graphs.drive import limits_of, make_executor

LIMITS = limits_of(max_batch=4, max_len=64, chunk=16)
"""Pages of 8 tokens."""

DECODE, PREFILL = ShapeKey(Phase.DECODE, 4), ShapeKey(Phase.PREFILL, 16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("controls"))


def executor_of(checkpoint: Path, decode: str = "full", prefill: str = "breakable") -> Executor:
    return make_executor(
        checkpoint,
        decode=decode,
        prefill=prefill,
        limits=LIMITS,
        num_pages=40,
        decode_ladder=(1, 2, 4),
        prefill_ladder=(8, 16),
    )


def failures(executor: Executor) -> dict[ShapeKey, str]:
    return dict(verify_all(executor, VOCAB_SIZE, lambda stage, done, total: None).failures)


@pytest.mark.parametrize("pair", [("full", "breakable"), ("breakable", "full"), ("full", "full")], ids="-".join)
def test_without_a_fault_nothing_is_found(checkpoint: Path, pair: tuple[str, str]) -> None:
    assert failures(executor_of(checkpoint, *pair)) == {}


# Padding ------------------------------------------------------------------------------------------------------------

PADDING = {
    "rows": (3, "holds 3 instead of 0"),
    "positions": (LIMITS.max_len, f"holds {LIMITS.max_len} instead of 0 to {LIMITS.max_len - 1}"),
    "kv_slots": (50, "holds 50 instead of 0 to 7"),
    "host_ids": (VOCAB_SIZE, f"holds {VOCAB_SIZE} instead of 0 to {VOCAB_SIZE - 1}"),
}


@pytest.mark.parametrize("slot", PADDING)
def test_a_wrong_padding_policy(checkpoint: Path, slot: str) -> None:
    """The tail of a slot is filled with another value than what harms nobody."""
    value, said = PADDING[slot]
    executor = executor_of(checkpoint)
    spoil_fill(executor.parts.buffers, slot, value)
    found = failures(executor)
    assert all(f"slot {slot}, padding row" in sentence and said in sentence for sentence in found.values())
    assert PREFILL in found
    assert (DECODE in found) == (slot != "host_ids"), "decode does not read the host's tokens"
    assert ShapeKey(Phase.DECODE, 1) not in found, "a key of one row has no padding"


def spoil_fill(buffers: StaticBuffers, slot: str, value: int) -> None:
    fill = buffers.fill

    def wrong_fill(values: dict[str, object], real: int, padded: int, **unread: object) -> None:
        fill(values, real, padded, **unread)  # type: ignore[arg-type]
        if slot in values:
            buffers[slot][real:padded] = value

    buffers.fill = wrong_fill  # type: ignore[method-assign,assignment]


def test_a_tail_that_is_read_though_it_was_declared_stale(checkpoint: Path) -> None:
    executor = executor_of(checkpoint)
    slot = executor.parts.buffers.slots["kv_slots"]
    executor.parts.buffers.slots["kv_slots"] = type(slot)(
        slot.name, slot.shape, slot.dtype, Stale("it is said that nobody reads it")
    )
    found = failures(executor)
    assert found[DECODE].startswith("key decode:4: slot kv_slots, padding row 1: holds 9223372036854775807")


# Keys and breaks ----------------------------------------------------------------------------------------------------


def test_a_swapped_key(checkpoint: Path) -> None:
    executor = executor_of(checkpoint)
    recordings = executor.decode.backend._recordings
    recordings[DECODE] = recordings[ShapeKey(Phase.DECODE, 2)]
    found = failures(executor)
    assert list(found) == [DECODE]
    assert "key decode:4: replay differs from eager in row 0" in found[DECODE], "a graph of two rows sums otherwise"


def test_a_start_proves_keys_that_the_plan_does_not(checkpoint: Path) -> None:
    executor = executor_of(checkpoint)
    recordings, two = executor.decode.backend._recordings, ShapeKey(Phase.DECODE, 2)
    recordings[two] = recordings[ShapeKey(Phase.DECODE, 1)]
    keys = {str(key) for key in executor.keys}
    recheck_receipts(executor, VOCAB_SIZE, keys)
    with pytest.raises(VerificationError, match="decode:2"):
        recheck_receipts(executor, VOCAB_SIZE, keys - {"decode:2"})


def test_a_break_that_is_left_out_of_a_replay(checkpoint: Path) -> None:
    """One that is left out of the capture is refused there; see the tests of the command."""
    executor = executor_of(checkpoint)
    recording = executor.prefill.backend._recordings[PREFILL]
    breaks = [index for index, (name, _) in enumerate(recording._steps) if name.startswith("break")]
    recording._replays = tuple(replay for i, replay in enumerate(recording._replays) if i != breaks[1])
    found = failures(executor)
    assert list(found) == [PREFILL]
    assert "key prefill:16: replay differs from eager in row 0" in found[PREFILL]


# Inputs -------------------------------------------------------------------------------------------------------------


def test_a_stale_page_table_row(checkpoint: Path) -> None:
    """A row keeps the pages of the request that held it before."""
    executor = executor_of(checkpoint)
    table, update = executor.parts.page_table, executor.parts.page_table.update

    def forgetful(batch: object) -> object:
        counts = update(batch)  # type: ignore[arg-type]
        table._pages[2, 0] = 17
        return counts

    table.update = forgetful  # type: ignore[method-assign,assignment]
    found = failures(executor)
    assert set(found) == {key for key in executor.keys if key.phase is Phase.PREFILL or key.size > 1}
    assert "slot kv_slots, row 1: holds 143 instead of 23" in found[DECODE]


def test_a_stale_page_table_row_that_no_new_token_lies_in(checkpoint: Path) -> None:
    executor = executor_of(checkpoint)
    table, update = executor.parts.page_table, executor.parts.page_table.update

    def forgetful(batch: object) -> object:
        counts = update(batch)  # type: ignore[arg-type]
        if counts[0] > 1:
            table._pages[1, 0] = 17
        return counts

    table.update = forgetful  # type: ignore[method-assign,assignment]
    found = failures(executor)
    assert "key decode:1: page table, row 1: holds page 17 as number 0 instead of" in found[ShapeKey(Phase.DECODE, 1)]


@pytest.mark.parametrize(("phase", "backend"), [("decode", "full"), ("decode", "breakable"), ("prefill", "full")])
def test_metadata_planned_for_another_batch(checkpoint: Path, phase: str, backend: str) -> None:
    """Attention keeps what it was planned with as long as the number of requests is the same."""
    executor = executor_of(checkpoint, **{phase: backend})
    runner = executor.runner(Phase(phase))
    key = runner.setup.keys[-1]
    attention = runner.load_padding(key)
    prepare, last = attention.prepare, [-1]

    def lazy(batch: AttentionBatch) -> None:
        if batch.num_requests != last[0]:
            prepare(batch)
        last[0] = batch.num_requests

    attention.prepare = lazy  # type: ignore[method-assign]
    found = failures(executor)
    assert f"key {key}: attention metadata, row 0: planned with" in found[key]


def test_metadata_of_another_batch_is_seen_where_kernels_cannot_tell(checkpoint: Path) -> None:
    """A replay that plans nothing reads what was planned last, which is never its own batch."""
    executor = executor_of(checkpoint)
    attention = executor.decode.load_padding(DECODE)
    attention.planned = lambda: None  # type: ignore[method-assign]
    replay, prepare = executor.decode.backend.replay, attention.prepare
    last: list[AttentionBatch] = []

    def remembering(batch: AttentionBatch) -> None:
        last.append(batch)
        prepare(batch)

    def stale_replay(key: ShapeKey) -> tuple[torch.Tensor, ...]:
        if key == DECODE:
            prepare(last[-2])
        return replay(key)

    attention.prepare = remembering  # type: ignore[method-assign]
    executor.decode.backend.replay = stale_replay  # type: ignore[method-assign]
    assert "key decode:4: replay differs from eager in row 0" in failures(executor)[DECODE]


# Addresses ----------------------------------------------------------------------------------------------------------


def move_buffer(executor: Executor) -> None:
    buffers = executor.parts.buffers
    buffers._tensors["positions"] = buffers["positions"].clone()


def free_pool(executor: Executor) -> None:
    pool = executor.parts.kv_pool
    pool.data = torch.zeros_like(pool.data)
    pool.layers = tuple((pool.data[i, 0], pool.data[i, 1]) for i in range(len(pool.layers)))


def resize_tokens(executor: Executor) -> None:
    executor.sampler.last_tokens.resize_(4096)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (move_buffer, "buffer positions was rebound"),
        (free_pool, "kv_pool keys 0 was rebound"),
        (resize_tokens, "last_tokens was resized"),
    ],
)
def test_a_freed_or_moved_buffer(checkpoint: Path, change: Callable[[Executor], None], said: str) -> None:
    executor = executor_of(checkpoint)
    change(executor)
    found = failures(executor)
    assert set(found) == set(executor.keys)
    assert all(sentence.startswith(str(key)) and said in sentence for key, sentence in found.items())


def test_numbers_that_are_none(checkpoint: Path) -> None:
    """A graph whose result is not a number differs from eager; a model whose own is not is the checkpoint's fault."""
    executor = executor_of(checkpoint)
    replay = executor.decode.backend.replay

    def broken(key: ShapeKey) -> tuple[torch.Tensor, ...]:
        outputs = replay(key)
        outputs[0][-1] = np.nan
        return outputs

    executor.decode.backend.replay = broken  # type: ignore[method-assign]
    assert "replay differs from eager in row 3" in failures(executor)[DECODE]
