"""Norms, rotations and projections against their formulas in float64, and composites against their parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gplan.errors import GplanError
from gplan.kernels import KERNEL_SETS, make_kernels
from gplan.kernels.base import Kernels, QKNorm
from tests.kernels.shapes import make_shape

KERNELS = make_kernels("reference", make_shape())
D, QO, KV = KERNELS.shape.head_dim, KERNELS.shape.num_qo_heads, KERNELS.shape.num_kv_heads
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if actual.dtype is torch.float32 else 0.02
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = table[positions].double().chunk(2, dim=-1)
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, weight, residual = (
        _random(5, 32, dtype=dtype),
        _random(32, dtype=dtype, seed=1),
        _random(5, 32, dtype=dtype, seed=2),
    )
    _close(KERNELS.rms_norm(x, weight, 1e-3), _norm(x, weight, 1e-3))
    total = x + residual
    _close(KERNELS.add_rms_norm(x, residual, weight, 1e-3), _norm(total, weight, 1e-3))
    assert torch.equal(residual, total)


def test_norms_do_not_overflow_half_precision() -> None:
    x = torch.full((1, 32), 1000.0, dtype=torch.float16)
    assert torch.equal(KERNELS.rms_norm(x, torch.ones(32, dtype=torch.float16), 1e-6), torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_projections(dtype: torch.dtype) -> None:
    x, weight, bias = _random(5, 32, dtype=dtype), _random(8, 32, dtype=dtype, seed=1), _random(8, dtype=dtype, seed=2)
    weight = weight / 8
    plain = x.double() @ weight.double().T
    out, residual = torch.empty(5, 8, dtype=dtype), _random(5, 8, dtype=dtype, seed=3)
    _close(KERNELS.linear(x, weight), plain)
    _close(KERNELS.linear(x, weight, bias), plain + bias.double())
    assert KERNELS.linear(x, weight, out=out) is out
    _close(out, plain)
    KERNELS.linear(x, weight, bias, out=out)
    _close(out, plain + bias.double())
    for added in (None, bias):
        total = residual.double() + plain + (0 if added is None else added.double())
        KERNELS.linear_add(x, weight, residual, added)
        _close(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = _random(5, 24, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    _close(KERNELS.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(dtype: torch.dtype) -> None:
    q, k, table = _random(4, QO, D, dtype=dtype), _random(4, KV, D, dtype=dtype, seed=1), _random(20, D, seed=2)
    positions = torch.tensor([3, 0, 19, 3])
    expected = _rotate(q, positions, table), _rotate(k, positions, table)
    KERNELS.rope(q, k, positions, table)
    _close(q, expected[0])
    _close(k, expected[1])


def test_append_kv_writes_its_slots_and_no_other() -> None:
    shape = KERNELS.shape
    k_cache = torch.full((shape.num_pages, shape.page_size, KV, D), 5.0)
    v_cache = k_cache.clone()
    k, v, slots = _random(3, KV, D), _random(3, KV, D, seed=1), torch.tensor([6, 101, 0])
    KERNELS.append_kv(k, v, k_cache, v_cache, slots)
    for cache, written in ((k_cache, k), (v_cache, v)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[slots], written)
        flat[slots] = 5.0
        assert (flat == 5.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_append_is_its_composite(normed: bool, dtype: torch.dtype) -> None:
    kernels = make_kernels("reference", make_shape(dtype=dtype))
    shape, n = kernels.shape, 5
    qkv, table = _random(n, (QO + 2 * KV) * D, dtype=dtype), _random(64, D, seed=1)
    norm = QKNorm(_random(D, dtype=dtype, seed=2), _random(D, dtype=dtype, seed=3), 1e-5) if normed else None
    positions, slots = torch.tensor([9, 1, 63, 0, 4]), torch.tensor([44, 8, 9, 70, 4])
    results = []
    for method in (kernels.rope_append, lambda *args: Kernels.rope_append(kernels, *args)):
        cache = torch.zeros(2, shape.num_pages, shape.page_size, KV, D, dtype=dtype)
        q, given_qkv = torch.zeros(n, QO, D, dtype=dtype), qkv.clone()
        method(given_qkv, q, positions, table, cache[0], cache[1], slots, norm)
        results.append((q, cache))
    (q, cache), (expected_q, expected_cache) = results
    _close(q, expected_q.double())
    _close(cache, expected_cache.double())
    heads = qkv.view(n, -1, D)
    queries = heads[:, :QO] if norm is None else _norm(heads[:, :QO], norm.q_weight, 1e-5)
    _close(q, _rotate(queries, positions, table))
    assert torch.equal(cache[1].flatten(0, 1)[slots], heads[:, QO + KV :])


def test_norm_composites_are_their_parts() -> None:
    x, norm, weight, bias = _random(5, 32), _random(32, seed=1), _random(16, 32, seed=2), _random(16, seed=3)
    normed = KERNELS.rms_norm(x, norm, 1e-6)
    for given_bias in (None, bias):
        projected = KERNELS.linear(normed, weight, given_bias)
        torch.testing.assert_close(KERNELS.norm_linear(x, norm, 1e-6, weight, given_bias), projected)
        gated = KERNELS.norm_gate_up(x, norm, 1e-6, weight, given_bias)
        torch.testing.assert_close(gated, KERNELS.silu_mul(projected))


@given(st.integers(1, 12), st.integers(0, 11))
def test_rows_are_the_same_to_the_bit_whatever_other_rows_hold(rows: int, kept: int) -> None:
    kept %= rows
    x, norm, weight = _random(rows, 32), _random(32, seed=1), _random(16, 32, seed=2)

    def outputs(x: torch.Tensor) -> list[torch.Tensor]:
        residual = x[:, :8].clone()
        gated = KERNELS.norm_gate_up(x, norm, 1e-6, weight)
        KERNELS.linear_add(gated, weight[:8, :8], residual)
        return [KERNELS.norm_linear(x, norm, 1e-6, weight), gated, residual]

    poisoned = torch.full_like(x, float("nan"))
    poisoned[kept] = x[kept]
    for clean, dirty in zip(outputs(x), outputs(poisoned), strict=True):
        assert torch.equal(clean[kept], dirty[kept])


def test_kernel_sets_are_made_by_name() -> None:
    assert make_kernels("reference", make_shape()).name == "reference"
    with pytest.raises(GplanError, match="unknown kernels 'triton'") as refusal:
        make_kernels("triton", make_shape())
    assert all(name in refusal.value.hint for name in KERNEL_SETS)


def test_flashinfer_is_refused_where_it_is_not_installed() -> None:
    pytest.importorskip("gplan.kernels")
    try:
        import flashinfer  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(GplanError, match="not installed") as refusal:
            make_kernels("flashinfer", make_shape())
        assert "gplan[cuda]" in refusal.value.hint
    else:
        pytest.skip("flashinfer is installed")
