"""Sampling against enumerated distributions, and the independence of a draw from everything but its own row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gplan.kernels import make_kernels
from gplan.kernels.base import SamplingInputs
from gplan.kernels.sampling import uniform
from tests.kernels.shapes import make_shape

VOCAB = 50
KERNELS = make_kernels("reference", make_shape(vocab_size=VOCAB))


def _inputs(n: int, **values: float) -> SamplingInputs:
    def full(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((n,), values.get(name, default), dtype=dtype)

    return SamplingInputs(
        temperature=full("temperature", 1.0, torch.float32),
        top_k=full("top_k", VOCAB, torch.int32),
        top_p=full("top_p", 1.0, torch.float32),
        min_p=full("min_p", 0.0, torch.float32),
        seed=full("seed", 0, torch.int64),
        position=torch.arange(n),
    )


def _logits(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def _distribution(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Filtered probabilities one token at a time, in float64."""
    probabilities = (logits.double() / temperature).softmax(0)
    order = sorted(range(len(logits)), key=lambda t: (-float(logits[t]), t))[:top_k]
    mass = sum(float(probabilities[t]) for t in order)
    kept, before = [], 0.0
    for token in order:
        likely = float(probabilities[token]) >= min_p * float(probabilities[order[0]])
        if not kept or (before < top_p * mass and likely):
            kept.append(token)
        before += float(probabilities[token])
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[kept] = probabilities[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.6},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_follow_the_filtered_distribution(params: dict[str, float]) -> None:
    draws, logits = 20000, _logits()
    tokens = KERNELS.sample(logits.expand(draws, VOCAB), _inputs(draws, seed=11, **params))
    expected = _distribution(logits, **{"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0, **params})  # type: ignore[arg-type]
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert (counts[expected == 0] == 0).all()
    spread = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() <= 5 * spread + 1e-12).all()


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    n, logits = 300, _logits(3)
    inputs = _inputs(n, seed=5)
    tokens = KERNELS.sample(logits.expand(n, VOCAB), inputs)
    order = logits.argsort(descending=True, stable=True)
    cumulative = logits.double()[order].softmax(0).cumsum(0)
    numbers = uniform(inputs.seed, inputs.position)
    clear = [i for i in range(n) if (cumulative - numbers[i]).abs().min() > 1e-6]
    assert len(clear) > 250
    assert all(int(tokens[i]) == int(order[int((cumulative <= numbers[i]).sum())]) for i in clear)


@given(st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 10**6))
def test_a_draw_depends_on_its_own_row_alone(batch: int, seed: int, position: int) -> None:
    logits, row = torch.stack([_logits(i) for i in range(batch)]), batch // 2
    mixed = SamplingInputs(
        temperature=torch.linspace(0.0, 2.0, batch),
        top_k=torch.arange(1, batch + 1, dtype=torch.int32) * 5,
        top_p=torch.linspace(0.5, 1.0, batch),
        min_p=torch.linspace(0.0, 0.1, batch),
        seed=torch.arange(batch) + seed,
        position=torch.arange(batch) * 3 + position,
    )
    alone = SamplingInputs(*(getattr(mixed, name)[row : row + 1] for name in mixed.__dataclass_fields__))
    together = KERNELS.sample(logits, mixed)
    assert KERNELS.sample(logits[row : row + 1], alone)[0] == together[row]
    poisoned = torch.full_like(logits, float("nan"))
    poisoned[row] = logits[row]
    assert KERNELS.sample(poisoned, mixed)[row] == together[row]


def test_seed_and_position_both_count() -> None:
    logits = torch.zeros(200, VOCAB)
    by_position = KERNELS.sample(logits, _inputs(200, seed=1))
    assert torch.equal(by_position, KERNELS.sample(logits, _inputs(200, seed=1)))
    assert (by_position == KERNELS.sample(logits, _inputs(200, seed=2))).float().mean() < 0.1
    assert len(by_position.unique()) > VOCAB // 2


def test_numbers_are_uniform_and_uncorrelated() -> None:
    n = 100_000
    for numbers in (
        uniform(torch.zeros(n, dtype=torch.int64), torch.arange(n)),
        uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64)),
        uniform(torch.arange(n) * -7919, torch.arange(n)),
    ):
        assert 0 <= float(numbers.min()) < 1e-3
        assert 1 - 1e-3 < float(numbers.max()) < 1
        counts = torch.histc(numbers.float(), bins=100, min=0, max=1).double()
        chi_square = float(((counts - n / 100) ** 2 / (n / 100)).sum())
        assert chi_square < 170  # 99 degrees of freedom: above it once in 10^5
        pair = torch.stack([numbers[:-1], numbers[1:]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.02


def test_extreme_seeds_and_positions() -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    numbers = uniform(seeds, torch.tensor([0, 2**31, 2**62, 1]))
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(numbers.unique()) == 4


def test_temperature_zero_takes_the_first_of_the_likeliest() -> None:
    logits = torch.stack([_logits(i) for i in range(6)])
    logits[0, [7, 30, 44]] = 99.0
    inputs = _inputs(6, temperature=0.0, seed=3)
    tokens = KERNELS.sample(logits, inputs)
    assert tokens[0] == 7
    assert torch.equal(tokens, logits.argmax(1))


def test_a_greedy_row_among_others_is_greedy() -> None:
    logits = torch.zeros(200, VOCAB)
    inputs = _inputs(200)
    inputs.temperature[::2] = 0
    tokens = KERNELS.sample(logits, inputs)
    assert (tokens[::2] == 0).all()
    assert len(tokens[1::2].unique()) > 20


def test_equal_logits_are_ordered_by_id() -> None:
    logits = torch.zeros(500, VOCAB)
    assert int(KERNELS.sample(logits, _inputs(500, top_k=4)).max()) == 3
    signed = torch.zeros(500, VOCAB)
    signed[:, 1::2] = -0.0
    assert set(KERNELS.sample(signed, _inputs(500, top_k=2)).tolist()) == {0, 1}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e6])
def test_extreme_logits_and_temperatures_stay_in_range(scale: float, temperature: float) -> None:
    logits = _logits(scale=scale).expand(100, VOCAB).clone()
    logits[:, 10:40] = float("-inf")
    tokens = KERNELS.sample(logits, _inputs(100, temperature=temperature))
    assert ((tokens < 10) | (tokens >= 40)).all()
    assert (tokens < VOCAB).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_not_changed(dtype: torch.dtype) -> None:
    logits = torch.stack([_logits(i) for i in range(20)]).to(dtype)
    before = logits.clone()
    tokens = KERNELS.sample(logits, _inputs(20))
    assert torch.equal(tokens, KERNELS.sample(logits.float(), _inputs(20)))
    assert torch.equal(logits, before)


def test_no_rows_are_no_tokens() -> None:
    assert KERNELS.sample(torch.empty(0, VOCAB), _inputs(0)).shape == (0,)


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0], [2.0, -2.0, 2.0, -2.0, 1.0]])
    counts = torch.tensor([[3, 1, 0, 0, 0], [3, 1, 0, 0, 0]], dtype=torch.int32)
    in_prompt = torch.tensor([[False, False, True, True, False]] * 2)
    repetition, presence, frequency = torch.tensor([2.0, 1.0]), torch.tensor([0.0, 0.5]), torch.tensor([0.0, 0.25])
    KERNELS.apply_penalties(logits, counts, in_prompt, repetition, presence, frequency)
    expected = [[1.0, -4.0, 1.0, -4.0, 1.0], [2.0 - 0.5 - 0.75, -2.0 - 0.5 - 0.25, 2.0, -2.0, 1.0]]
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_penalties_of_impossible_tokens_leave_them_impossible() -> None:
    logits = torch.full((1, 3), float("-inf"))
    ones = torch.ones(1)
    KERNELS.apply_penalties(
        logits, torch.ones(1, 3, dtype=torch.int32), torch.ones(1, 3, dtype=torch.bool), ones, ones, ones
    )
    assert (logits == float("-inf")).all()
