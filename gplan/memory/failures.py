"""What an error says about the device: that its memory ran out, and for what; or that it failed for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gplan.errors import FitError
from gplan.units import format_size

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""How libraries say it that have no exception of their own for it: CUDA, torch's CPU allocator, cuBLAS."""

_FAILURE_SIGNS = (
    "CUDA error",
    "CUDA driver error",
    "[CUDA]",
    "an illegal memory access",
    "CUBLAS_STATUS_EXECUTION_FAILED",
)


def is_shortage(error: BaseException) -> bool:
    """Whether an error, or the one it was raised for, says that memory ran out, of the device or of the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return True
    return error.__cause__ is not None and is_shortage(error.__cause__)


def is_device_failure(error: BaseException) -> bool:
    """Whether an error says that the device failed, after which nothing that it computes can be believed."""
    if isinstance(error, torch.AcceleratorError):
        return not is_shortage(error)
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _FAILURE_SIGNS)


@contextmanager
def taking(row: str, nbytes: int = 0, what: str = "") -> Iterator[None]:
    """Around what takes memory for a ledger row: if it runs out, the error says which row.

    Args:
        nbytes: what the row is to have in all; 0 where that is not known here.
        what: the part of the row that is being taken, for people.

    Raises:
        FitError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        planned = f" ({format_size(nbytes)})" if nbytes else ""
        part = f", {what}" if what else ""
        raise FitError(
            f"out of memory while taking ledger row {row}{planned}{part}",
            "Something else uses this memory: free it, or make the plan again here, or with a lower --memory.",
        ) from error
