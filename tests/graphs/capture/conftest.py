"""Graph devices that the contract tests run on: the tape everywhere, CUDA where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gplan.graphs.capture import make_graph_device
from gplan.graphs.capture.base import GraphDevice
from gplan.graphs.capture.tape import TapeDevice


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", id="tape"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)],
)
def torch_device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def graph_device(torch_device: torch.device) -> Iterator[GraphDevice]:
    device = make_graph_device(torch_device)
    yield device
    device.close()


@pytest.fixture(scope="module")
def open_device(torch_device: torch.device) -> Iterator[GraphDevice]:
    """A device in a session that many tests share: opening one collects all garbage of the test run."""
    device = make_graph_device(torch_device)
    with device.session():
        yield device
    device.close()


@pytest.fixture(scope="module")
def open_tape() -> Iterator[TapeDevice]:
    """As `open_device`, a tape that poisons what is freed."""
    device = TapeDevice(debug=True)
    with device.session():
        yield device
    device.close()
