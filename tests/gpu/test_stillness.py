"""Memory of the device that moves while it is measured, taken past torch's allocator as another process would."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from gplan.errors import GplanError
from gplan.graphs.capture import make_graph_device
from gplan.planning.stillness import TOLERANCE, still

pytestmark = pytest.mark.gpu


def take(num_bytes: int) -> Callable[[], None]:
    """Takes device memory; returns what gives it back."""
    runtime, pointer = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(num_bytes)) == 0

    def give_back() -> None:
        assert runtime.cudaFree(pointer) == 0

    return give_back


def test_memory_taken_meanwhile_is_an_error() -> None:
    device = make_graph_device(torch.device("cuda"))
    with pytest.raises(GplanError, match="another process took"), still(device, "while figures were read"):
        give_back = take(2 * TOLERANCE)
    with pytest.raises(GplanError, match="another process gave back"), still(device, "while figures were read"):
        give_back()


def test_memory_of_torch_is_no_error() -> None:
    device = make_graph_device(torch.device("cuda"))
    with still(device, "while figures were read"):
        assert torch.empty(2 * TOLERANCE, dtype=torch.uint8, device="cuda").is_cuda
