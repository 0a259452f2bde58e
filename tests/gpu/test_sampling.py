"""Drawing on a GPU: the reference's tokens, whatever else is in the batch, and new ones at every replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gplan.kernels.base import Kernels
from tests.gpu.operators import CUDA, both, kernels_of, randn, sampling_inputs

pytestmark = pytest.mark.gpu

N = 24
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_of()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 50, 32003, 128256])
def test_tokens_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    ours, reference = both()
    differing, drawn = 0, 0
    for trial in range(4):
        logits = randn(N, vocab, seed=trial, scale=3.0, dtype=dtype)
        logits[0, vocab // 3 + 1 :] = float("-inf")
        logits[1] = (logits[1] * 2).round() / 2  # many equal logits
        logits[2] = 1.5
        logits[3] = logits[3].bfloat16().to(dtype)
        logits[4] = 1.0 + logits[4] * 1e-3  # of one upper half
        inputs = sampling_inputs(
            N,
            vocab,
            temperature=[0.0, 1.0, 0.5, 2.0, 0.7, 1.0] * 4,
            top_k=[vocab, vocab, 50, 5, 1, 40, vocab, 7] * 3,
            top_p=[1.0, 0.9, 0.5, 0.95, 1.0, 0.1, 0.0, 0.999] * 3,
            min_p=[0.0, 0.0, 0.05, 0.0, 0.0, 0.2, 0.0, 0.0] * 3,
            seed=[trial * 7919 + row - 5 for row in range(N)],
            position=[row * 31 for row in range(N)],
        )
        before = logits.clone()
        found, expected = ours.sample(logits, inputs), reference.sample(logits, inputs)
        assert torch.equal(before, logits)
        differing += int((found != expected).sum())
        drawn += N
    assert differing <= drawn // 50, "sums differ in their last bits at most"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 50, 2048, 32003, 128256])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 300])
def test_the_first_of_the_largest_is_taken(kernels: Kernels, num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = randn(num_rows, vocab, seed=vocab, scale=3.0, dtype=dtype)
    logits[-1] = logits[-1].round()  # many equal logits
    logits[0] = float("-inf")
    logits[0, vocab // 2] = -1e30
    assert torch.equal(kernels.argmax(logits), logits.argmax(dim=-1))


def test_a_row_without_a_number_still_gives_a_token(kernels: Kernels) -> None:
    logits = torch.full((3, 5000), float("nan"), device=CUDA)
    logits[1] = float("-inf")
    tokens = kernels.argmax(logits)
    assert ((tokens >= 0) & (tokens < 5000)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"top_k": 40, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_what_is_no_number_is_not_drawn_and_harms_no_other_row(
    kernels: Kernels, values: dict[str, float], dtype: torch.dtype
) -> None:
    logits, vocab = randn(12, 5003, scale=3.0, dtype=dtype), 5003
    inputs = sampling_inputs(12, vocab, seed=list(range(12)), **values)
    expected = kernels.sample(logits, inputs)
    logits[0] = float("nan")
    logits[1] = float("-inf")
    logits[2] = -float("nan")
    logits[3, 7], logits[3, 9] = float("inf"), float("nan")
    logits[4, 1:] = float("nan")
    logits[5, :-1] = float("-inf")
    tokens = kernels.sample(logits, inputs)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert tokens[3:6].tolist() == [7, 0, vocab - 1]
    assert torch.equal(tokens[6:], expected[6:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_filter_leaves_out_is_never_drawn(kernels: Kernels, dtype: torch.dtype) -> None:
    """Whatever is drawn from many equal logits, and from logits that hardly differ."""
    n, vocab = 200, 32003
    logits = (randn(1, vocab, dtype=dtype).expand(n, vocab) * 1e-2).contiguous()
    logits[: n // 2] = logits[: n // 2].sign()
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    positions = list(range(n))
    for k in (1, 2, 100, 17000):
        tokens = kernels.sample(logits, sampling_inputs(n, vocab, top_k=k, position=positions, temperature=0.3))
        ranks = (order == tokens[:, None]).int().argmax(dim=-1)
        assert int(ranks.max()) < k
        assert k < 100 or len(ranks.unique()) > n // 4
    for least in ({"top_p": 0.0}, {"top_p": 1e-30}, {"top_k": 1, "min_p": 1.0}, {"top_k": 0}, {"temperature": 0.0}):
        tokens = kernels.sample(logits, sampling_inputs(n, vocab, position=positions, **least))
        assert torch.equal(tokens, order[:, 0])
    tokens = kernels.sample(logits, sampling_inputs(n, vocab, position=positions, min_p=1.0))
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.amax(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_are_each_drawn_as_if_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    n, vocab = 300, 32003
    logits = randn(n, vocab, scale=3.0, dtype=dtype)
    values = {
        "temperature": [0.0, 1.0, 0.5, 2.0, 0.7] * 60,
        "top_k": [vocab, 50, 5, 1, vocab, 7] * 50,
        "top_p": [1.0, 0.9, 0.5, 1.0] * 75,
        "min_p": [0.0, 0.05, 0.0] * 100,
        "seed": list(range(n)),
        "position": [row * 31 for row in range(n)],
    }
    together = kernels.sample(logits, sampling_inputs(n, vocab, **values))
    for row in (0, 1, 2, 31, 32, 63, 64, 127, 128, 256, 298, 299):
        one = sampling_inputs(1, vocab, **{name: of_rows[row] for name, of_rows in values.items()})
        assert kernels.sample(logits[row : row + 1].clone(), one).item() == together[row].item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draw_is_its_rows_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    logits = randn(N, 5000, scale=2.0, dtype=dtype)
    inputs = sampling_inputs(N, 5000, seed=list(range(N)), position=list(range(N)), top_p=0.9, top_k=100)
    together = kernels.sample(logits, inputs)
    for row in range(N):
        one = sampling_inputs(1, 5000, seed=row, position=row, top_p=0.9, top_k=100)
        assert kernels.sample(logits[row : row + 1], one).item() == together[row].item()


def test_draws_follow_the_distribution(kernels: Kernels) -> None:
    """Over many positions, frequencies are the probabilities, within five standard deviations."""
    count, vocab = 20000, 8
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, 2.0, 1.5, 0.0], device=CUDA)
    inputs = sampling_inputs(count, vocab, position=list(range(count)), temperature=1.3)
    tokens = kernels.sample(logits.expand(count, vocab).contiguous(), inputs)
    probability = (logits / 1.3).softmax(0)
    deviation = (probability * (1 - probability) / count).sqrt()
    frequency = torch.bincount(tokens, minlength=vocab) / count
    assert ((frequency - probability).abs() < 5 * deviation).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [4, 70])
def test_a_captured_draw_follows_its_position(kernels: Kernels, num_rows: int, dtype: torch.dtype) -> None:
    """Replays do not repeat a draw: positions are read from memory, and a position read again draws the same."""
    logits = torch.zeros(num_rows, 1000, device=CUDA, dtype=dtype)
    logits[1:] = randn(num_rows - 1, 1000, dtype=dtype)
    inputs = sampling_inputs(num_rows, 1000, top_k=[1000, 300] * (num_rows // 2), top_p=[1.0, 0.9] * (num_rows // 2))
    kernels.sample(logits, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = kernels.sample(logits, inputs)
    draws = []
    for position in (*range(50), *range(50)):
        inputs.position.fill_(position)
        graph.replay()
        draws.append(tuple(tokens.tolist()))
        eager = kernels.sample(logits, replace(inputs, position=inputs.position.clone()))
        assert draws[-1] == tuple(eager.tolist())
    assert draws[:50] == draws[50:]
    assert len({draw[0] for draw in draws}) > 40


def test_penalties_equal_the_reference() -> None:
    ours, reference = both()
    logits, counts = randn(5, 3000, dtype=torch.float32), (randn(5, 3000, seed=1).abs() * 2).int()
    in_prompt = randn(5, 3000, seed=2) > 1
    amounts = [randn(5, seed=3 + i, dtype=torch.float32).abs() + 0.5 for i in range(3)]
    other = logits.clone()
    ours.apply_penalties(logits, counts, in_prompt, *amounts)
    reference.apply_penalties(other, counts, in_prompt, *amounts)
    torch.testing.assert_close(logits, other)


@pytest.mark.parametrize("vocab", [33, 32000, 128256])
def test_masks_are_those_of_the_reference(vocab: int) -> None:
    ours, reference = both()
    found = randn(N, vocab, seed=1, dtype=torch.float32)
    expected = found.clone()
    rows = torch.arange(0, N, 3, device=CUDA)
    words = torch.randint(-(2**31), 2**31 - 1, (len(rows), -(-vocab // 32)), device=CUDA).to(torch.int32)
    ours.apply_token_mask(found, rows, words)
    reference.apply_token_mask(expected, rows, words)
    assert torch.equal(found, expected)
    assert torch.isinf(found[rows]).any()
