"""Variants on a GPU: graphs that draw, graphs with request slots, compiled forwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gplan.core import Phase, Request, SamplingParams
from gplan.errors import UnsupportedError
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import check_key, compositions
from gplan.graphs.runner import BY_TOKEN
from gplan.graphs.synthetic import BatchMaker
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.gpu.operators import CUDA
from tests.gpu.test_graphs import WIDE, executor_of
from tests.graphs.drive import limits_of, serve

pytestmark = pytest.mark.gpu

LIMITS = limits_of(page_size=16, max_len=768, chunk=128)
PREFIXES = (0, 1, 2, 4)
"""In chunks."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("variants"), "LlamaForCausalLM", **WIDE)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Executor]:
    executor = executor_of(checkpoint, limits=LIMITS, num_pages=1 + 16 * 48)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def special(checkpoint: Path) -> Iterator[Executor]:
    variants = {"decode_variants": ("greedy", "sampled"), "prefill_variants": ("full",)}
    executor = executor_of(checkpoint, limits=LIMITS, num_pages=1 + 16 * 48, **variants)
    yield executor
    executor.close()


def check_every_key(executor: Executor) -> None:
    batches = BatchMaker(executor.parts.limits, executor.parts.kv_pool.num_pages, VOCAB_SIZE)
    for key in (*executor.keys, *executor.keys[::-1]):
        check_key(executor, key, compositions(executor, key, batches))


def test_every_key_of_every_variant_equals_eager_to_the_bit(special: Executor) -> None:
    assert {key.variant for key in special.keys} == {"", "greedy", "sampled", "full"}
    check_every_key(special)


def requests() -> list[Request]:
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.2, "top_k": 30, "min_p": 0.02}]
    return [_request(number, **kind) for number, kind in enumerate(kinds * 2)]


def _request(number: int, **kind: float) -> Request:
    length = 5 + 9 * number
    prompt = [(7 * number + at) % 256 for at in range(length)]
    return Request(str(number), length, prompt, SamplingParams(max_tokens=40, seed=number, **kind))


def test_tokens_do_not_depend_on_batch_mates_nor_on_where_they_are_drawn(plain: Executor, special: Executor) -> None:
    """One request at a time, so that both executors run the same shapes."""
    for number in range(3):
        expected = serve(plain, [requests()[number]]).answers
        assert serve(special, [requests()[number]]).answers == expected


def test_steps_that_go_on_take_nothing_from_the_host(special: Executor) -> None:
    before = special.decode.num_steps_without_input
    serve(special, [Request("a", 1, [3], SamplingParams(max_tokens=65, temperature=0.0))])
    assert special.decode.num_steps_without_input - before >= 64 - 64 // 16 - 2


def test_one_graph_serves_every_cached_prefix(special: Executor) -> None:
    batches = BatchMaker(LIMITS, special.parts.kv_pool.num_pages, VOCAB_SIZE)
    for key in (key for key in special.keys if key.variant == "full"):
        cases = [batches.prefill(size, prefix * key.size) for prefix in PREFIXES for size in (1, key.size)]
        assert check_key(special, key, cases).bitwise


def test_freezing_what_the_host_lays_out_is_refused(special: Executor) -> None:
    """FlashInfer's plan holds values that the host decides at each step."""
    attention = special.parts.kernels.prefill_attention(16, 4, in_graph=True)
    nothing = torch.zeros(4, dtype=torch.int64, device=CUDA)
    with pytest.raises(UnsupportedError, match="decided on the host"):
        attention.advance(nothing, nothing, nothing)


def test_advanced_lists_are_those_of_the_next_step(special: Executor) -> None:
    """To the element, for lengths on both sides of a cut, with padding that stands still."""
    kernels, size = special.parts.kernels, 8
    attention = kernels.decode_attention(size, in_graph=True)
    batches = BatchMaker(LIMITS, special.parts.kv_pool.num_pages, VOCAB_SIZE)
    runner = special.decode
    for context in (0, 14, 62, 300, 700):
        one, other = batches.decode_run(5, context, 2)
        if (context + 1) % attention.advance_tokens == 0:
            continue
        runner._load(one, size, attention, by=BY_TOKEN)
        views = [special.parts.buffers.view(name, size) for name in ("rows", "positions", "kv_slots")]
        attention.advance(*views)
        advanced = [sorted_items(attention), *(view.clone() for view in views)]
        runner._load(other, size, attention, by=BY_TOKEN)
        expected = [sorted_items(attention), *(view.clone() for view in views)]
        assert all(torch.equal(a, b) for a, b in zip(advanced, expected, strict=True)), context


def sorted_items(attention: object) -> torch.Tensor:
    """By request and part: their order says only which program takes which."""
    items = attention._lists.items.view(-1, 4)[: attention._num_items].clone()
    work = items[items[:, 0] >= 0]
    return work[(work[:, 0] * 100_000 + work[:, 3]).argsort()]


@pytest.fixture(scope="module")
def compiled(checkpoint: Path) -> Iterator[Executor]:
    executor = executor_of(
        checkpoint,
        prefill="piecewise",
        limits=limits_of(page_size=16, max_batch=8, chunk=64),
        decode_ladder=(8,),
        prefill_ladder=(8, 64),
        decode_base="compiled",
        decode_variants=("compiled+greedy",),
    )
    yield executor
    executor.close()


def test_compiled_keys_replay_to_the_bit_and_round_like_their_operators(compiled: Executor) -> None:
    check_every_key(compiled)
    assert all(compiled.runner(key.phase).is_compiled(key) for key in compiled.keys)
    assert compiled.decode.backend.num_segments(next(k for k in compiled.keys if k.phase is Phase.DECODE)) == 1
