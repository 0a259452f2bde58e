"""What every graph device and every backend on it must do. Nothing here aborts a capture, so that all of it can run on
CUDA, where a process must not capture again after that; refusals are tested on the tape."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gplan.errors import CaptureError
from gplan.graphs.capture import make_backend, make_graph_device
from gplan.graphs.capture.base import CaptureBackend, GraphDevice
from gplan.graphs.capture.breakable import graph_break
from tests.graphs.capture.toy import LAYERS, MAX, Toy, capture_all, check_replay, key_of, make_step

SIZES = (16, 8, 4, 2, 1)
BACKENDS = ["full", "breakable", "eager"]
GRAPH_BACKENDS = ["full", "breakable"]


@pytest.fixture(scope="module", params=BACKENDS)
def captured(request: pytest.FixtureRequest, torch_device: torch.device) -> Iterator[tuple[Toy, CaptureBackend]]:
    """A toy with every size captured, largest first."""
    device = make_graph_device(torch_device)
    toy, backend = Toy(torch_device), make_backend(request.param, device)
    with device.session():
        capture_all(toy, backend, SIZES)
    backend.freeze()
    yield toy, backend
    backend.close()
    device.close()


def capture_one(
    device: GraphDevice, name: str, fn: object, num_breaks: int = 0
) -> tuple[CaptureBackend, tuple[Tensor, ...]]:
    backend = make_backend(name, device)
    with torch.no_grad():
        outputs = backend.capture(key_of(1), fn, num_breaks)
    return backend, outputs


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_replay_equals_eager_in_order(captured: tuple[Toy, CaptureBackend], order: str) -> None:
    toy, backend = captured
    for size in sorted(SIZES, reverse=order == "descending"):
        for real in {1, size, (size + 1) // 2}:
            check_replay(toy, backend, size, make_step(size, real))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=8))
def test_replay_equals_eager_in_any_order(captured: tuple[Toy, CaptureBackend], seed: int, sizes: list[int]) -> None:
    toy, backend = captured
    chance = random.Random(seed)
    for size in sizes:
        check_replay(toy, backend, size, make_step(chance.randrange(2**32), chance.randint(0, size)))


def test_replay_returns_the_tensors_of_capture(open_device: GraphDevice, torch_device: torch.device) -> None:
    x = torch.ones(4, device=torch_device)
    for name in BACKENDS:
        backend, outputs = capture_one(open_device, name, lambda: (x + 1, x * 2))
        addresses = [output.data_ptr() for output in outputs]
        x.fill_(5)
        again = backend.replay(key_of(1))
        assert all(one is other for one, other in zip(again, outputs, strict=True))
        assert [output.data_ptr() for output in again] == addresses
        assert [output[0].item() for output in again] == [6, 10]
        x.fill_(1)


@pytest.mark.parametrize("captured", GRAPH_BACKENDS, indirect=True)
def test_replay_runs_no_python_of_the_model(
    captured: tuple[Toy, CaptureBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, backend = captured
    step = make_step(3, 3)
    toy.load(step, 4)
    before, attends = toy.cache.clone(), toy.num_attends
    expected = toy.result(backend.replay(key_of(4)), 3)
    toy.cache.copy_(before)

    def fail(*_: object) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(Toy, "forward", fail)
    num_forwards = toy.num_forwards
    toy.load(step, 4)
    found = toy.result(backend.replay(key_of(4)), 3)
    assert toy.num_forwards == num_forwards
    assert toy.num_attends - attends == (2 * LAYERS if backend.cuts_at_breaks else 0)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_eager_backend_does_run_the_model(open_device: GraphDevice, torch_device: torch.device) -> None:
    toy, backend = Toy(torch_device), make_backend("eager", open_device)
    capture_all(toy, backend, [2])
    before = toy.num_forwards
    backend.replay(key_of(2))
    assert toy.num_forwards == before + 1


@pytest.mark.parametrize("name", GRAPH_BACKENDS)
def test_smaller_keys_after_the_largest_need_no_more_memory(
    graph_device: GraphDevice, torch_device: torch.device, name: str
) -> None:
    toy, backend = Toy(torch_device), make_backend(name, graph_device)
    with graph_device.session():
        capture_all(toy, backend, [MAX])
        largest = graph_device.pool_nbytes()
        capture_all(toy, backend, range(MAX - 1, 0, -1))
    assert 0 < largest == graph_device.pool_nbytes()
    backend.close()


@pytest.mark.parametrize("name", GRAPH_BACKENDS)
def test_a_rebound_input_is_not_seen(open_device: GraphDevice, torch_device: torch.device, name: str) -> None:
    """Why the guard exists: a replay reads the address, whatever the Python object says by then."""
    x = torch.ones(4, device=torch_device)
    old = x.data
    backend, (output,) = capture_one(open_device, name, lambda: (x + 1,))
    x.data = torch.full((4,), 100.0, device=torch_device)
    old.fill_(7)
    backend.replay(key_of(1))
    assert output.tolist() == [8.0] * 4


def test_full_records_declared_breaks_inside(open_device: GraphDevice, torch_device: torch.device) -> None:
    x, calls = torch.ones(4, device=torch_device), []

    @graph_break
    def double(value: Tensor) -> Tensor:
        calls.append(value)
        return value * 2

    backend, (output,) = capture_one(open_device, "full", lambda: (double(x + 1) + 1,), num_breaks=7)
    assert len(calls) == 1
    x.fill_(2)
    backend.replay(key_of(1))
    assert len(calls) == 1
    assert output.tolist() == [7.0] * 4


def test_what_crosses_a_break_is_kept(open_device: GraphDevice, torch_device: torch.device) -> None:
    """Arguments and results of a break stay at their addresses, though the forward has dropped them."""
    x, factor = torch.ones(4, device=torch_device), [2.0]

    @graph_break
    def scale(value: Tensor, *, offset: Tensor) -> tuple[Tensor, Tensor]:
        return value * factor[0], offset + factor[0]

    def forward() -> tuple[Tensor, ...]:
        scaled, moved = scale(x + 1, offset=x - 1)
        return (scaled * 10 + moved,)

    backend, (output,) = capture_one(open_device, "breakable", forward, num_breaks=1)
    gc.collect()
    clutter = [torch.full((4,), float("nan"), device=torch_device) for _ in range(64)]
    for value, factor[0] in ((3.0, 2.0), (5.0, 4.0)):
        x.fill_(value)
        backend.replay(key_of(1))
        assert output.tolist() == [(value + 1) * factor[0] * 10 + value - 1 + factor[0]] * 4
    assert len(clutter) == 64
    names = [name for name, _ in backend.tensors(key_of(1))]
    assert {"output 0", "break 0 argument 0", "break 0 argument 1", "break 0 result 1"} <= set(names)


def test_a_break_inside_a_break_is_a_call(open_device: GraphDevice, torch_device: torch.device) -> None:
    x = torch.ones(4, device=torch_device)
    inner = graph_break(lambda value: value + 1)
    outer = graph_break(lambda value: inner(value) * 2)
    backend, (output,) = capture_one(open_device, "breakable", lambda: (outer(x) + 1,), num_breaks=1)
    x.fill_(2)
    backend.replay(key_of(1))
    assert output.tolist() == [7.0] * 4


@pytest.mark.parametrize("expected", [0, LAYERS - 1, LAYERS + 1])
def test_a_wrong_number_of_breaks_is_refused(
    open_device: GraphDevice, torch_device: torch.device, expected: int
) -> None:
    toy, backend = Toy(torch_device), make_backend("breakable", open_device)
    with pytest.raises(CaptureError, match=rf"decode:4: expected {expected} breaks, met {LAYERS}"):
        capture_all(toy, backend, [4], num_breaks=expected)
    assert key_of(4) not in backend
    capture_all(toy, backend, [4])
    check_replay(toy, backend, 4, make_step(1, 3))


@pytest.mark.parametrize("name", BACKENDS)
def test_results_that_are_no_tensors_are_refused(
    open_device: GraphDevice, torch_device: torch.device, name: str
) -> None:
    x = torch.ones(4, device=torch_device)
    for result in (x, [x], (x, 1), None):
        with pytest.raises(CaptureError, match="decode:1: the forward returned"):
            capture_one(open_device, name, lambda result=result: (x.add_(1), result)[1])


@pytest.mark.parametrize("captured", BACKENDS, indirect=True)
def test_no_key_is_captured_after_freeze(captured: tuple[Toy, CaptureBackend]) -> None:
    toy, backend = captured
    with pytest.raises(CaptureError, match="decode:3: captured after the keys were frozen"):
        capture_all(toy, backend, [3])
    assert key_of(3) not in backend
    assert backend.keys() == tuple(key_of(size) for size in SIZES)


def test_a_key_is_captured_once(open_device: GraphDevice, torch_device: torch.device) -> None:
    toy, backend = Toy(torch_device), make_backend("full", open_device)
    capture_all(toy, backend, [2])
    with pytest.raises(CaptureError, match="decode:2: captured before"):
        capture_all(toy, backend, [2])


def test_measure_peak_counts_what_lives_at_once(open_device: GraphDevice, torch_device: torch.device) -> None:
    x = torch.ones(1 << 20, device=torch_device)  # 4 MiB

    def chain() -> Tensor:
        y = x
        for _ in range(5):
            y = y + 1  # the sum and what it was made from live together
        return y

    with torch.no_grad():
        chain()
        assert open_device.measure_peak(chain) == pytest.approx(2 * x.nbytes, rel=0.05)
        assert open_device.measure_peak(lambda: [x + i for i in range(5)]) == pytest.approx(5 * x.nbytes, rel=0.05)
        assert open_device.measure_peak(lambda: x.add_(1)) < x.nbytes / 10
        assert open_device.measure_peak(lambda: x.view(2, -1).t()) < x.nbytes / 10


def test_time_is_measured_per_run(open_device: GraphDevice, torch_device: torch.device) -> None:
    x, runs = torch.ones(1 << 16, device=torch_device), []
    times = open_device.time_us(lambda: runs.append(x.sum()), 5)
    assert len(times) == 5 == len(runs)
    assert all(time > 0 for time in times)


def test_read_later_gives_the_value_of_its_time(open_device: GraphDevice, torch_device: torch.device) -> None:
    x = torch.arange(4, device=torch_device)
    read = open_device.read_later(x)
    x.fill_(-1)
    assert read().tolist() == [0, 1, 2, 3]
    assert read().device.type == "cpu"


def test_memory_is_consistent(open_device: GraphDevice) -> None:
    memory = open_device.memory()
    assert 0 < memory.free <= memory.total
    assert 0 <= memory.allocated <= memory.reserved <= memory.total
    assert memory.non_torch >= 0
