"""Decode graphs that choose the tokens themselves: those of sampling outside, for every request, at every replay."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gplan.core import Phase, Request, SamplingParams, ShapeKey
from gplan.errors import UnsupportedError, VerificationError
from gplan.graphs.admission import Admission, PhaseSetup
from gplan.graphs.executor import Executor
from gplan.graphs.receipts import RUN_STEPS, check_key, compositions
from gplan.graphs.synthetic import BatchMaker
from gplan.kernels.base import SamplingInputs
from tests.checkpoints import make_checkpoint
from tests.graphs.drive import Served, limits_of, make_executor, serve

VOCAB = 256
LADDER = (1, 2, 4, 8)
LIMITS = limits_of(max_batch=8, max_len=192, chunk=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("variants"), "Qwen3ForCausalLM")


def new_executor(checkpoint: Path, *variants: str, num_pages: int = 300) -> Executor:
    return make_executor(
        checkpoint,
        limits=LIMITS,
        num_pages=num_pages,
        decode_ladder=LADDER,
        prefill_ladder=(16, 64),
        decode_variants=variants,
    )


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Executor]:
    executor = new_executor(checkpoint)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def drawing(checkpoint: Path) -> Iterator[Executor]:
    executor = new_executor(checkpoint, "greedy", "sampled")
    yield executor
    executor.close()


def requests_of(seed: int, kinds: list[dict[str, object]], max_tokens: int = 30) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for index, kind in enumerate(kinds):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 7, 8, 20, 70)))]
        params = SamplingParams(max_tokens=max_tokens - index, **{"seed": 100 + index, **kind})
        requests.append(Request(str(index), len(prompt), prompt, params))
    return requests


GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.9}
FILTERED = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02}
PENALISED = {"temperature": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.2}
BIASED = {"temperature": 0.0, "logit_bias": ((5, 4.0),)}


def steps_by_variant(served: Served) -> Counter[str]:
    decodes = Counter()
    for name, count in served.steps.items():
        if name.startswith("decode:"):
            decodes[name.partition(":")[2].partition(":")[2]] += count
    return decodes


@pytest.mark.parametrize(
    ("kinds", "variants"),
    [
        ([GREEDY] * 5, {"greedy"}),
        ([DRAWN, FILTERED, DRAWN], {"sampled"}),
        ([FILTERED, GREEDY, GREEDY, DRAWN], {"sampled"}),
        ([PENALISED, BIASED], {""}),
        ([GREEDY, {**GREEDY, "logprobs": 2}], {"", "greedy"}),
        ([GREEDY, PENALISED, FILTERED, BIASED, DRAWN, GREEDY, GREEDY], None),
    ],
    ids=["greedy", "sampled", "mixed", "uncaptured", "logprobs", "everything"],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_tokens_are_those_of_sampling_outside(
    plain: Executor, drawing: Executor, kinds: list[dict[str, object]], variants: set[str] | None, lag: int
) -> None:
    expected = serve(plain, requests_of(1, kinds), lag=lag)
    found = serve(drawing, requests_of(1, kinds), lag=lag)
    assert found.answers == expected.answers
    assert set(steps_by_variant(expected)) == {""}
    if variants is not None:
        assert set(steps_by_variant(found)) == variants


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go(plain: Executor, drawing: Executor, seed: int) -> None:
    rng = random.Random(seed)
    kinds = [rng.choice((GREEDY, GREEDY, DRAWN, FILTERED, PENALISED)) for _ in range(20)]
    arrivals = [rng.randrange(60) for _ in kinds]
    served = [serve(e, requests_of(seed, kinds), arrivals=arrivals, lag=seed % 2).answers for e in (plain, drawing)]
    assert served[0] == served[1]


def test_requests_that_are_preempted(checkpoint: Path) -> None:
    answers = []
    for variants in ((), ("greedy", "sampled")):
        executor = new_executor(checkpoint, *variants, num_pages=1 + 30)
        served = serve(executor, requests_of(4, [GREEDY, FILTERED] * 6, max_tokens=40), lag=1)
        assert served.num_preemptions > 0
        answers.append(served.answers)
        executor.close()
    assert answers[0] == answers[1]


def test_a_draw_is_its_seeds_whatever_the_batch_mates(drawing: Executor) -> None:
    together = serve(drawing, requests_of(2, [FILTERED, DRAWN, GREEDY, FILTERED])).answers
    for index in range(4):
        alone = serve(drawing, [requests_of(2, [FILTERED, DRAWN, GREEDY, FILTERED])[index]]).answers
        assert alone[str(index)] == together[str(index)]


def test_steps_that_go_on_take_nothing_from_the_host_within_a_page(drawing: Executor) -> None:
    decode, before = drawing.decode, drawing.decode.num_steps_without_input
    request = Request("a", 1, [3], SamplingParams(max_tokens=65, temperature=0.0))
    serve(drawing, [request], lag=1)
    # 64 decode steps at positions 1 to 64, in pages of 8 tokens; the first step of each page is prepared by the host,
    # and the very first.
    assert decode.num_steps_without_input - before == 64 - 8 - 1


def test_every_key_of_every_variant_has_a_receipt(drawing: Executor) -> None:
    batches = BatchMaker(LIMITS, drawing.parts.kv_pool.num_pages, VOCAB)
    keys = [key for key in drawing.keys if key.phase is Phase.DECODE]
    assert {key.variant for key in keys} == {"", "greedy", "sampled"}
    for key in (*keys, *keys[::-1]):
        receipt = check_key(drawing, key, compositions(drawing, key, batches))
        assert receipt.bitwise
        assert receipt.cases >= (RUN_STEPS if key.variant else 1)


# What must be caught ------------------------------------------------------------------------------------------------


def test_a_captured_draw_that_repeats_itself_is_caught(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a generator does whose state was captured: every replay draws from the same number."""
    from gplan.kernels.reference import ReferenceKernels

    sample, frozen = ReferenceKernels.sample, torch.full((8,), 1, dtype=torch.int64)

    def sample_by_captured_state(self: ReferenceKernels, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        return sample(self, logits, replace(inputs, position=frozen[: len(inputs.position)]))

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceKernels, "sample", sample_by_captured_state)
        executor = new_executor(checkpoint, "sampled")
    key = ShapeKey(Phase.DECODE, 4, variant="sampled")
    batches = BatchMaker(LIMITS, executor.parts.kv_pool.num_pages, VOCAB)
    with pytest.raises(VerificationError, match="decode:4:sampled"):
        check_key(executor, key, compositions(executor, key, batches))
    executor.close()


def test_an_input_that_is_not_advanced_is_caught(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gplan.kernels.reference_attention import ReferenceAttention

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceAttention, "advance", lambda self, rows, positions, kv_slots: positions.add_(1))
        executor = new_executor(checkpoint, "greedy")
    key = ShapeKey(Phase.DECODE, 2, variant="greedy")
    batches = BatchMaker(LIMITS, executor.parts.kv_pool.num_pages, VOCAB)
    with pytest.raises(VerificationError, match="decode:2:greedy"):
        check_key(executor, key, compositions(executor, key, batches))
    executor.close()


def test_metadata_that_the_host_decides_cannot_be_advanced_in_a_graph(drawing: Executor) -> None:
    attention = drawing.parts.kernels.prefill_attention(16, 4, in_graph=True)
    assert attention.advance_tokens == 0
    nothing = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="decided on the host"):
        attention.advance(nothing, nothing, nothing)


# Admission ----------------------------------------------------------------------------------------------------------


def admission(*variants: str, **changes: object) -> Admission:
    keys = tuple(ShapeKey(Phase.DECODE, size, variant=v) for size in (2, 4) for v in sorted(variants))
    values = {"phase": Phase.DECODE, "backend": "full", "keys": keys, "max_size": 4}
    return Admission(PhaseSetup(**{**values, **changes}))


def test_a_bucket_without_the_variant_runs_from_its_base() -> None:
    maker = BatchMaker(LIMITS, 100, VOCAB)
    only_small = PhaseSetup(
        phase=Phase.DECODE,
        backend="full",
        keys=(
            ShapeKey(Phase.DECODE, 2),
            ShapeKey(Phase.DECODE, 2, variant="greedy"),
            ShapeKey(Phase.DECODE, 4, variant="compiled"),
            ShapeKey(Phase.DECODE, 4, variant="compiled+sampled"),
        ),
        max_size=4,
    )
    table = Admission(only_small)
    drawn = SamplingParams(max_tokens=1, temperature=0.5)
    assert str(table.verdict(maker.decode(1, 0)).key) == "decode:2:greedy"
    assert str(table.verdict(maker.decode(1, 0, drawn)).key) == "decode:2"
    assert str(table.verdict(maker.decode(3, 0)).key) == "decode:4:compiled"
    assert str(table.verdict(maker.decode(3, 0, drawn)).key) == "decode:4:compiled+sampled"
    assert str(table.at(2).key) == "decode:2"


def test_a_size_that_runs_eagerly_does_so_in_every_variant() -> None:
    table = admission("", "greedy", eager_sizes=((3, 3),))
    assert table.verdict(BatchMaker(LIMITS, 100, VOCAB).decode(3, 0)).reason == "eager_cheaper"
