"""The contract of a library that multiplies what a kernel set has no kernel of its own for, by one of many algorithms.

Which algorithm is a decision of the plan, by shape: the library's own first choice is seldom the fastest at every size.
Measuring and choosing belong to the planner; here is what it asks, and what a kernel set is then given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class ProductShape(NamedTuple):
    """y [m, n] = x [m, k] @ w [n, k].T, or y += where it adds."""

    m: int
    n: int
    k: int
    adds: bool


Algorithms = Mapping[ProductShape, str]
"""By shape the library's description of the algorithm to use, as hexadecimal; other shapes are left to the library."""


class LibraryProduct(ABC):
    """A product of one shape by one algorithm, ready to run."""

    shape: ProductShape
    num_runs: int = 0
    """How often the host has started it; replays of graphs do not count."""

    @abstractmethod
    def run(self, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor) -> None:
        """Multiplies on the current stream, and may be captured: it allocates nothing and waits for nothing.

        Args:
            x: [m, k], weight: [n, k], out: [m, n], all contiguous and aligned to `ProductLibrary.alignment` bytes.
            workspace: `ProductLibrary.workspace_bytes` bytes that nothing else uses at the same time.
        """


class ProductLibrary(ABC):
    """Algorithms for products of one dtype on one device. Accumulates in float32."""

    workspace_bytes: ClassVar[int]
    """What an algorithm may ask for at most."""
    alignment: ClassVar[int]
    """Bytes that operands are taken to be aligned to."""
    dtype: torch.dtype

    @abstractmethod
    def algorithms(self, shape: ProductShape, most: int) -> tuple[str, ...]:
        """Up to `most` algorithms that multiply this shape within the workspace, as hexadecimal, those first that the
        library thinks fastest. `product` takes each of them."""

    @abstractmethod
    def product(self, shape: ProductShape, algorithm: str) -> LibraryProduct:
        """
        Raises:
            GplanError: the library does not know the algorithm, or it does not fit the shape, device or workspace.
        """
