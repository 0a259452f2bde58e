"""Products with what is folded into them, against float64, at odd sizes too; rows are nothing to each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gplan.kernels.base import Kernels
from tests.gpu.operators import kernels_of, randn, relative_error

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 3, 8, 15, 16, 17, 32, 33, 63, 64, 65, 130, 256)
SHAPES = ((576, 320), (384, 1000), (1536, 576), (4096, 4096), (1544, 40))
"""Columns and results: of small models, of a large one, and no multiples of any tile."""

TOLERANCE = 6e-3
"""Inputs and results are rounded to 8 bits."""

EPS = 1e-5


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_of()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_products_equal_their_formula(kernels: Kernels, k: int, n: int, bias: bool) -> None:
    weight, gain = randn(2 * n, k, seed=1, scale=0.1), randn(k, seed=2).abs()
    offset = randn(2 * n, seed=3) if bias else None
    half = None if offset is None else offset[:n]
    for size in SIZES:
        x, residual = randn(size, k, seed=size), randn(size, n, seed=size + 1)
        shift = 0.0 if offset is None else offset.double()
        product = normed(x, gain) @ weight.double().T + shift
        found = kernels.norm_linear(x, gain, EPS, weight, offset)
        assert relative_error(found, product) < TOLERANCE, size
        found = kernels.norm_gate_up(x, gain, EPS, weight, offset)
        assert relative_error(found, functional.silu(product[:, :n]) * product[:, n:]) < TOLERANCE, size
        expected = residual.double() + x.double() @ weight[:n].double().T + (0.0 if half is None else half.double())
        kernels.linear_add(x, weight[:n], residual, half)
        assert relative_error(residual, expected) < TOLERANCE, size
        out = torch.full((size, n), float("nan"), dtype=x.dtype, device=x.device)
        plain = kernels.linear(x, weight[:n], half, out=out)
        assert plain is out
        assert torch.equal(plain, kernels.linear(x, weight[:n], half))
        assert relative_error(plain, expected - residual_of(size, n)) < TOLERANCE, size


def residual_of(size: int, n: int) -> Tensor:
    return randn(size, n, seed=size + 1).double()


@pytest.mark.parametrize("size", [2, 7, 16, 30, 64, 100])
def test_a_row_is_the_same_to_the_bit_whatever_others_hold(kernels: Kernels, size: int) -> None:
    x, weight, gain = randn(size, 1536), randn(640, 1536, seed=1, scale=0.1), randn(1536, seed=2).abs()
    clean = run_all(kernels, x, weight, gain)
    poisoned = x.clone()
    poisoned[1:] = float("nan")
    for one, other in zip(clean, run_all(kernels, poisoned, weight, gain), strict=True):
        assert torch.equal(one[0], other[0])
        assert other[1:].isnan().all()


@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_product_repeats_to_the_bit(kernels: Kernels, size: int) -> None:
    """Also where its parts arrive in another order each time."""
    x, weight, gain = randn(size, 8192), randn(1024, 8192, seed=1, scale=0.1), randn(8192, seed=2).abs()
    first = run_all(kernels, x, weight, gain)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run_all(kernels, x, weight, gain), strict=True))


def run_all(kernels: Kernels, x: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
    residual = torch.ones(len(x), len(weight), dtype=x.dtype, device=x.device)
    kernels.linear_add(x, weight, residual)
    return (
        kernels.norm_linear(x, gain, EPS, weight),
        kernels.norm_gate_up(x, gain, EPS, weight),
        residual,
    )


def test_norms_and_activation_equal_the_reference(kernels: Kernels) -> None:
    reference = kernels_of("reference")
    for size in (1, 5, 64, 200):
        for width in (384, 4096, 40):
            x, residual, gain = randn(size, width), randn(size, width, seed=1), randn(width, seed=2).abs()
            other = residual.clone()
            found = kernels.rms_norm(x, gain, EPS)
            assert relative_error(found, reference.rms_norm(x, gain, EPS)) < TOLERANCE
            added = kernels.add_rms_norm(x, residual, gain, EPS)
            assert relative_error(added, reference.add_rms_norm(x, other, gain, EPS)) < TOLERANCE
            assert relative_error(residual, other) < TOLERANCE
            assert relative_error(kernels.silu_mul(x), reference.silu_mul(x)) < TOLERANCE
    heads, gain = randn(7, 6, 64), randn(64, seed=2).abs()
    assert relative_error(kernels.rms_norm(heads, gain, EPS), reference.rms_norm(heads, gain, EPS)) < TOLERANCE
