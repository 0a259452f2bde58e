"""Both kernel sets on a GPU, and random operands, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gplan.kernels import make_kernels
from gplan.kernels.base import Kernels, SamplingInputs
from tests.kernels.shapes import make_shape

CUDA = torch.device("cuda")


def kernels_of(name: str = "flashinfer", **shape: Any) -> Kernels:
    defaults = {"dtype": torch.bfloat16, "device": CUDA, "head_dim": 64, "hidden_size": 384}
    return make_kernels(name, make_shape(**{**defaults, **shape}))


def both(**shape: Any) -> tuple[Kernels, Kernels]:
    """The CUDA kernels and the reference, of one shape."""
    return kernels_of("flashinfer", **shape), kernels_of("reference", **shape)


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=CUDA) * scale).to(dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; NaN where either holds one."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def sampling_inputs(n: int, vocab: int, **values: Any) -> SamplingInputs:
    """Per-row parameters, each a number for all rows or a list."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        value = values.get(name, default)
        return torch.tensor(value if isinstance(value, list) else [value] * n, dtype=dtype, device=CUDA)

    return SamplingInputs(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", vocab, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=column("seed", 0, torch.int64),
        position=column("position", 0, torch.int64),
    )
