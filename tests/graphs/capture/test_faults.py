"""Negative controls: what the checks of replay are for, done on purpose, and caught each time."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from gplan.errors import GuardError
from gplan.graphs.capture import make_backend
from gplan.graphs.capture.base import CaptureBackend
from gplan.graphs.capture.tape import TapeDevice
from gplan.graphs.guard import AddressGuard
from gplan.graphs.padding import Padding, Sentinel, Stale
from tests.graphs.capture.toy import LENGTH, MAX, Step, Toy, capture_all, check_replay, key_of

GRAPH_BACKENDS = ["full", "breakable"]
SIZE = 4
STEP = Step(torch.tensor([5, 6]), torch.tensor([1, 2]), torch.tensor([3, 4], dtype=torch.int32))


@pytest.fixture(params=GRAPH_BACKENDS)
def backend(request: pytest.FixtureRequest, open_tape: TapeDevice) -> CaptureBackend:
    return make_backend(request.param, open_tape)


def guarded(toy: Toy, backend: CaptureBackend) -> AddressGuard:
    guard = AddressGuard()
    for name in toy.buffers_:
        guard.watch(f"buffer {name}", lambda name=name: toy.buffers_[name])
    for name in dict(toy.named_parameters()):
        guard.watch(f"weight {name}", lambda name=name: toy.get_parameter(name))
    guard.watch("cache", lambda: toy.cache)
    guard.snapshot(key_of(SIZE), backend.tensors(key_of(SIZE)))
    guard.check_all()
    return guard


def test_right_padding_passes(backend: CaptureBackend) -> None:
    toy = Toy(torch.device("cpu"))
    capture_all(toy, backend, [SIZE])
    check_replay(toy, backend, SIZE, STEP)


@pytest.mark.parametrize(
    ("slot", "padding"),
    [
        ("rows", Sentinel(MAX)),  # padded rows write into the cache of a request
        ("rows", Stale("nobody reads this, one might think")),  # a poisoned row id
        ("ids", Stale("nobody reads this, one might think")),  # a poisoned token id
        ("lengths", Sentinel(4 * LENGTH)),  # padded rows write past the dummy row
        ("lengths", Sentinel(0)),  # less than the kernel takes
        ("lengths", Stale("nobody reads this, one might think")),
    ],
    ids=str,
)
def test_a_wrong_padding_policy_is_caught(backend: CaptureBackend, slot: str, padding: Padding) -> None:
    toy = Toy(torch.device("cpu"))
    capture_all(toy, backend, [SIZE])
    toy.buffers_.slots[slot] = replace(toy.buffers_.slots[slot], padding=padding)
    with pytest.raises((AssertionError, IndexError)):
        check_replay(toy, backend, SIZE, STEP)


def test_a_rebound_buffer_is_caught(backend: CaptureBackend) -> None:
    """Replay would read the old memory and answer the last request again."""
    toy = Toy(torch.device("cpu"))
    capture_all(toy, backend, [SIZE])
    guard = guarded(toy, backend)
    toy.buffers_._tensors["ids"] = toy.buffers_["ids"].clone()
    with pytest.raises(AssertionError, match="differs from eager"):
        check_replay(toy, backend, SIZE, STEP)
    with pytest.raises(GuardError, match="decode:4: buffer ids was rebound"):
        guard.check(key_of(SIZE))


def test_a_reloaded_weight_is_caught(backend: CaptureBackend) -> None:
    toy = Toy(torch.device("cpu"))
    capture_all(toy, backend, [SIZE])
    guard = guarded(toy, backend)
    weight = toy.get_parameter("layers.1.down.weight")
    weight.data = weight.data * 2
    with pytest.raises(AssertionError, match="differs from eager"):
        check_replay(toy, backend, SIZE, STEP)
    with pytest.raises(GuardError, match=r"weight layers.1.down.weight was rebound"):
        guard.check(key_of(SIZE))


def test_a_freed_buffer_is_caught(backend: CaptureBackend) -> None:
    toy = Toy(torch.device("cpu"))
    capture_all(toy, backend, [SIZE])
    guard = guarded(toy, backend)
    toy.cache = None
    gc.collect()
    with pytest.raises(GuardError, match="decode:4: cache was"):
        guard.check(key_of(SIZE))


def test_a_moved_buffer_is_caught(backend: CaptureBackend) -> None:
    toy = Toy(torch.device("cpu"))
    capture_all(toy, backend, [SIZE])
    guard = guarded(toy, backend)
    toy.buffers_["logits"].resize_(MAX * 2, 50)
    with pytest.raises(GuardError, match="decode:4: buffer logits was resized"):
        guard.check(key_of(SIZE))
