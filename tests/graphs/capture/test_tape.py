"""The tape: which operators it replays, what it refuses, and what is left after a refusal."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gplan.errors import CaptureError
from gplan.graphs.capture import make_backend
from gplan.graphs.capture.base import CaptureFn, Segment
from gplan.graphs.capture.breakable import graph_break
from gplan.graphs.capture.tape import TapeDevice
from tests.graphs.capture.toy import LAYERS, Toy, capture_all, check_replay, key_of, make_step

MODES = [pytest.param(torch.no_grad, id="no_grad"), pytest.param(torch.inference_mode, id="inference_mode")]
Mode = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def tape() -> Iterator[TapeDevice]:
    device = TapeDevice(debug=True)
    yield device
    device.close()


def record(tape: TapeDevice, fn: CaptureFn, mode: Mode = torch.no_grad) -> tuple[Segment, tuple[Tensor, ...]]:
    with mode():
        tape.begin_segment()
        try:
            outputs = fn()
        except BaseException:
            tape.abort_segment()
            raise
        return tape.end_segment(), outputs


# Operators ----------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "linear": lambda x, w, i: F.linear(x, w, w[0]),
    "linear of three dimensions": lambda x, w, i: F.linear(x.view(2, 2, 8), w, w[0]),
    "matmul": lambda x, w, i: x @ w.t(),
    "mm out": lambda x, w, i: torch.mm(x, w, out=torch.empty(4, 8)),
    "softmax": lambda x, w, i: torch.softmax(x, -1),
    "rms_norm": lambda x, w, i: F.rms_norm(x, (8,), w[0], 1e-5),
    "layer_norm": lambda x, w, i: F.layer_norm(x, (8,), w[0], w[1]),
    "silu": lambda x, w, i: F.silu(x) * x,
    "gelu": lambda x, w, i: F.gelu(x),
    "embedding": lambda x, w, i: F.embedding(i, w),
    "index_select": lambda x, w, i: w.index_select(0, i),
    "index": lambda x, w, i: w[i, :4],
    "gather": lambda x, w, i: x.gather(1, i[:, None]),
    "index_put": lambda x, w, i: w.clone().index_put_((i,), x, accumulate=True),
    "index_copy": lambda x, w, i: w.clone().index_copy_(0, torch.arange(4), x),
    "scatter": lambda x, w, i: x.scatter(1, i[:, None], 7.0),
    "slice assignment": lambda x, w, i: x.clone().__setitem__((slice(None), i[:2]), 1.0),
    "mask filled": lambda x, w, i: x.masked_fill(x > 0, float("-inf")),
    "mask assigned": lambda x, w, i: _assigned(x.clone(), x > 0),
    "where": lambda x, w, i: torch.where(x > 0, x, -1.0),
    "cat": lambda x, w, i: torch.cat([x, w], 0),
    "stack": lambda x, w, i: torch.stack([x, x + 1]),
    "split": lambda x, w, i: (x + 1).split(3, dim=1),
    "reshape that copies": lambda x, w, i: x.view(2, 2, 8).transpose(0, 1).reshape(4, 8),
    "expand and reduce": lambda x, w, i: x.expand(3, 4, 8).mean(0),
    "topk": lambda x, w, i: x.topk(3),
    "sort": lambda x, w, i: x.sort(dim=-1),
    "max": lambda x, w, i: x.max(dim=-1),
    "argmax": lambda x, w, i: x.argmax(dim=-1),
    "cumsum": lambda x, w, i: x.cumsum(0),
    "variance": lambda x, w, i: x.var(0),
    "norm of squares": lambda x, w, i: x.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt(),
    "bfloat16": lambda x, w, i: (x.to(torch.bfloat16) @ w.to(torch.bfloat16)).float(),
    "to int": lambda x, w, i: (x * 10).to(torch.int32),
    "factories": lambda x, w, i: (torch.zeros(2, 3), torch.arange(5), torch.full((2,), 3.0), torch.ones_like(x) + x),
    "scalars": lambda x, w, i: (2 - x) / 3 + (i[:, None] + 1) * 2,
    "in place": lambda x, w, i: (x + 0).add_(1).mul_(w[0]).clamp_(-1, 1).sub_(0.5),
    "in place on a view": lambda x, w, i: _scaled_half(x + 0),
    "in place by list": lambda x, w, i: _added_together([x + 0, w + 0]),
    "by list": lambda x, w, i: torch._foreach_add([x, w], 1.0),
    "attention": lambda x, w, i: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "attention with a mask": lambda x, w, i: F.scaled_dot_product_attention(w[None], w[None], w[None], w > 0),
    "einsum": lambda x, w, i: torch.einsum("ab,cb->ac", x, w),
    "no elements": lambda x, w, i: (x[:0] + 1, x),
    "native_batch_norm": lambda x, w, i: F.batch_norm(x, w[0].clone(), w[1].abs(), training=True),
    "dropout that is off": lambda x, w, i: F.dropout(x, 0.5, training=False) + 1,
    "repeat_interleave": lambda x, w, i: x.repeat_interleave(i.remainder(1) + 2, dim=0, output_size=8),
    "fft": lambda x, w, i: torch.fft.rfft(x),
}


def _assigned(x: Tensor, mask: Tensor) -> Tensor:
    x[mask] = 3.0
    return x


def _scaled_half(x: Tensor) -> Tensor:
    x[:, :4] *= 2
    x.t()[0].fill_(1)
    return x


def _added_together(tensors: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(tensors, 1.0)
    return tensors


def flat(result: object) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    return tuple(result) if result is not None else ()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_replays_to_the_bit(open_tape: TapeDevice, name: str, mode: Mode) -> None:
    fn = OPERATORS[name]
    x, w, i = torch.randn(4, 8), torch.nn.Parameter(torch.randn(8, 8)), torch.randint(0, 8, (4,))
    segment, outputs = record(open_tape, lambda: flat(fn(x, w, i)), mode)
    for seed in range(3):
        torch.manual_seed(seed)
        with mode():
            x.normal_()
            w.detach().normal_()
            i.random_(0, 8)
            segment.replay()
            expected = flat(fn(x, w, i))
        assert len(outputs) == len(expected)
        for output, value in zip(outputs, expected, strict=True):
            assert output.dtype == value.dtype
            assert torch.equal(output.nan_to_num(7), value.nan_to_num(7))


@pytest.mark.parametrize(
    "name",
    ["linear", "matmul", "softmax", "rms_norm", "silu", "index_select", "cat", "topk", "in place", "bfloat16", "where"],
)
def test_replay_writes_where_it_belongs_without_a_copy(open_tape: TapeDevice, name: str) -> None:
    """An operator that were run and then copied would allocate its result."""
    x, w, i = torch.randn(4, 8), torch.randn(8, 8), torch.randint(0, 8, (4,))
    segment, _ = record(open_tape, lambda: flat(OPERATORS[name](x, w, i)))
    assert open_tape.measure_peak(segment.replay) == 0


def test_views_are_not_calls(open_tape: TapeDevice) -> None:
    x = torch.randn(4, 8)
    segment, (output,) = record(open_tape, lambda: (x.t()[1:].unsqueeze(0).view(7, 4).split(2)[0].detach(),))
    assert len(segment) == 0
    assert output.data_ptr() == x.t()[1:].data_ptr()


def test_metadata_changed_in_place_is_no_call(open_tape: TapeDevice) -> None:
    x = torch.randn(4, 8)
    segment, (output,) = record(open_tape, lambda: ((x + 1).t_(),))
    x.fill_(2)
    segment.replay()
    assert output.shape == (8, 4)
    assert output.eq(3).all()


def test_memory_from_outside_is_known_by_name(open_tape: TapeDevice) -> None:
    x, w, out = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(4, 8)
    segment, _ = record(open_tape, lambda: (out.copy_((x + 1) @ w[:, :8] + w[0]),))
    found = {tensor.untyped_storage().data_ptr(): name for name, tensor in segment.tensors()}
    assert set(found) == {tensor.data_ptr() for tensor in (x, w, out)}
    assert found[w.data_ptr()] == "operand of aten.mm.default"


# Debug --------------------------------------------------------------------------------------------------------------


def _dangling(tensor: Tensor) -> Tensor:
    """What a kernel has that kept a raw address."""
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.float32)


@pytest.mark.parametrize(("debug", "is_nan"), [(True, True), (False, False)])
def test_use_after_free_shows_in_debug_only(debug: bool, is_nan: bool) -> None:
    tape, x = TapeDevice(debug=debug), torch.ones(4)

    def forward() -> tuple[Tensor, ...]:
        dead = _dangling(x + 1)
        return (dead * 1,)

    with tape.session():
        segment, (output,) = record(tape, forward)
    assert output.isnan().all() == is_nan
    segment.replay()
    assert output.isnan().all() == is_nan


def test_a_model_is_replayed_right_with_dead_memory_poisoned(open_tape: TapeDevice) -> None:
    for name in ("full", "breakable"):
        toy, backend = Toy(torch.device("cpu")), make_backend(name, open_tape)
        capture_all(toy, backend, [8, 3])
        for size in (3, 8, 3):
            check_replay(toy, backend, size, make_step(size, 2))


# Refusals -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "reads a tensor on the host"),
    "tolist": (lambda x: x.tolist(), "reads a tensor on the host"),
    "cpu": (lambda x: x.cpu(), "reads a tensor on the host"),
    "numpy": (lambda x: x.numpy(), "reads a tensor on the host"),
    "asarray": (lambda x: np.asarray(x), "reads a tensor on the host"),
    "bool": (lambda x: bool((x > 0).any()), "reads a tensor on the host"),
    "if": (lambda x: 1 if x.sum() > 0 else 2, "reads a tensor on the host"),
    "int": (lambda x: int(x[0, 0]), "reads a tensor on the host"),
    "float": (lambda x: float(x[0, 0]), "reads a tensor on the host"),
    "index": (lambda x: [1, 2][x[0, 0].long()], "reads a tensor on the host"),
    "range": (lambda x: range(x[0, 0].long()), "reads a tensor on the host"),
    "equal": (lambda x: torch.equal(x, x), "reads a tensor on the host"),
    "allclose": (lambda x: torch.allclose(x, x), "reads a tensor on the host"),
    "print": (lambda x: f"{x}", "reads a tensor on the host"),
    "tensor": (lambda x: x + torch.tensor([1.0]), "from host values"),
    "as_tensor": (lambda x: x + torch.as_tensor(np.ones(1)), "from host values"),
    "nonzero": (lambda x: x.nonzero(), "depends on data"),
    "mask": (lambda x: x[x > 0], "depends on data"),
    "mask assigned": (lambda x: x.__setitem__(x > 0, x[0, :1].expand(32).clone()), "depends on data"),
    "masked_select": (lambda x: x.masked_select(x > 0), "depends on data"),
    "unique": (lambda x: x.unique(), "depends on data"),
    "repeat_interleave": (lambda x: x.repeat_interleave(torch.arange(4), dim=0), "depends on data"),
    "rand": (lambda x: x + torch.rand(1), "draws random numbers"),
    "rand with a generator": (lambda x: torch.rand(1, generator=torch.Generator()), "draws random numbers"),
    "multinomial": (lambda x: x.abs().multinomial(1), "draws random numbers"),
    "normal_": (lambda x: x.normal_(), "draws random numbers"),
    "dropout": (lambda x: F.dropout(x, 0.5), "draws random numbers"),
    "attention with dropout": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
        "random|dropout",
    ),
    "resize_": (lambda x: (x + 1).resize_(100), "moves a tensor"),
    "set_": (lambda x: (x + 1).set_(x), "moves a tensor"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused_and_leaves_the_tape_usable(
    open_tape: TapeDevice, name: str, mode: Mode
) -> None:
    fn, message = REFUSED[name]
    x = torch.ones(4, 8)
    backend = make_backend("full", open_tape)
    with mode():
        with pytest.raises(CaptureError, match=message) as caught:
            backend.capture(key_of(2), lambda: (x + 1, fn(x)), 0)
        assert str(caught.value).startswith("decode:2: ")
        assert key_of(2) not in backend
        (output,) = backend.capture(key_of(2), lambda: (x + 1,), 0)
    x.fill_(2)
    backend.replay(key_of(2))
    assert output.eq(3).all()


def test_host_reads_are_free_outside_a_segment(open_tape: TapeDevice) -> None:
    x = torch.ones(4)
    with torch.no_grad():
        open_tape.begin_segment()
        y = x + 1
        open_tape.end_segment()
        assert y.tolist() == [2.0] * 4
        open_tape.synchronize()


def test_synchronize_inside_a_segment_is_refused(open_tape: TapeDevice) -> None:
    with pytest.raises(CaptureError, match="synchronize inside a capture"):
        record(open_tape, lambda: (open_tape.synchronize(),))
    open_tape.synchronize()


def test_a_capture_needs_a_session(tape: TapeDevice) -> None:
    with torch.no_grad(), pytest.raises(CaptureError, match="decode:1: a capture outside a session"):
        make_backend("full", tape).capture(key_of(1), lambda: (torch.ones(1),), 0)


def test_a_capture_needs_gradients_off(open_tape: TapeDevice) -> None:
    with pytest.raises(CaptureError, match="decode:1: a capture with gradients on"):
        make_backend("full", open_tape).capture(key_of(1), lambda: (torch.ones(1),), 0)


@pytest.mark.parametrize("name", ["full", "breakable"])
def test_a_capture_inside_a_capture_is_refused(open_tape: TapeDevice, name: str) -> None:
    x, backend = torch.ones(4), make_backend(name, open_tape)
    with torch.no_grad():
        with pytest.raises(CaptureError, match="decode:1: decode:2: a segment inside another"):
            backend.capture(key_of(1), lambda: backend.capture(key_of(2), lambda: (x + 1,), 0), 0)
        assert backend.keys() == ()
        backend.capture(key_of(1), lambda: (x + 1,), 0)


def test_a_closed_tape_neither_records_nor_replays() -> None:
    tape, x = TapeDevice(), torch.ones(4)
    with tape.session():
        segment, _ = record(tape, lambda: (x + 1,))
    tape.close()
    assert tape.pool_nbytes() == 0
    with pytest.raises(CaptureError, match="closed"):
        segment.replay()
    with pytest.raises(CaptureError, match="closed"):
        record(tape, lambda: (x + 1,))


@pytest.mark.parametrize("name", ["full", "breakable"])
@pytest.mark.parametrize("where", ["before", "break", "after"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_nothing(
    open_tape: TapeDevice, name: str, where: str, error: type[BaseException]
) -> None:
    x, faults = torch.ones(4), [where]

    @graph_break
    def double(value: Tensor) -> Tensor:
        if faults == ["break"]:
            raise error("no luck")
        return value * 2

    def forward() -> tuple[Tensor, ...]:
        y = x + 1
        if faults == ["before"]:
            raise error("no luck")
        y = double(y)
        if faults == ["after"]:
            raise error("no luck")
        return (y + 1,)

    backend = make_backend(name, open_tape)
    expected = pytest.raises(CaptureError, match="decode:4: ValueError: no luck")
    for _ in range(3):
        with (
            torch.no_grad(),
            expected if error is ValueError else pytest.raises(KeyboardInterrupt),
        ):
            backend.capture(key_of(4), forward, 1)
        assert backend.keys() == ()
    faults.clear()
    with torch.no_grad():
        (output,) = backend.capture(key_of(4), forward, 1)
    x.fill_(2)
    backend.replay(key_of(4))
    assert output.tolist() == [7.0] * 4


# Memory -------------------------------------------------------------------------------------------------------------

WIDTH = 4096
LADDER = (64, 48, 32, 16, 8)


def pool_after(order: tuple[int, ...], *, own_outputs: bool) -> int:
    """Pool bytes after capturing a two-layer perceptron at these sizes, in this order."""
    tape = TapeDevice()
    x, out, w = torch.randn(max(order), 16), torch.empty(max(order), 16), torch.randn(16, WIDTH)
    backend = make_backend("full", tape)

    def forward_of(size: int) -> CaptureFn:
        def forward() -> tuple[Tensor, ...]:
            y = F.gelu(F.silu(x[:size] @ w)) @ w.t()
            return (y,) if own_outputs else (out[:size].copy_(y),)

        return forward

    with torch.no_grad(), tape.session():
        for size in order:
            backend.capture(key_of(size), forward_of(size), 0)
    return tape.pool_nbytes()


def test_largest_first_needs_no_more_than_the_largest_graph() -> None:
    assert pool_after(LADDER, own_outputs=False) == pool_after(LADDER[:1], own_outputs=False)


def test_largest_first_needs_the_largest_graph_and_the_outputs() -> None:
    outputs = sum(size * 16 * 4 for size in LADDER[1:])
    largest = pool_after(LADDER[:1], own_outputs=True)
    assert pool_after(LADDER, own_outputs=True) <= largest + outputs + (64 << 10)


def test_smallest_first_needs_measurably_more() -> None:
    largest = pool_after(LADDER, own_outputs=False)
    assert pool_after(LADDER[::-1], own_outputs=False) > 1.5 * largest


@pytest.mark.parametrize("mode", MODES)
def test_peak_looks_into_composites_and_custom_operators(tape: TapeDevice, mode: Mode) -> None:
    x, rows = torch.randn(3, 1 << 14), torch.zeros(1 << 14, dtype=torch.int64)
    with mode():
        # x.t() has to be copied before it can be seen flat; nothing else is allocated.
        assert tape.measure_peak(lambda: x.t().reshape(-1)[:1]) == x.nbytes
        toy = Toy(torch.device("cpu"))
        cache, out = toy.cache[0], torch.empty(1 << 14, 32)
        queries, lengths = torch.randn(1 << 14, 32), torch.ones(1 << 14, dtype=torch.int32)
        peak = tape.measure_peak(lambda: torch.ops.toy.attend(queries, cache, rows, lengths, out))
    assert peak >= (1 << 14) * cache[0].nbytes  # the keys that its kernel gathers


def test_breakable_makes_a_segment_more_than_breaks(open_tape: TapeDevice) -> None:
    toy, backend = Toy(torch.device("cpu")), make_backend("breakable", open_tape)
    capture_all(toy, backend, [2])
    names = [name for name, _ in backend.tensors(key_of(2))]
    assert {name.rsplit(" ", 2)[0] for name in names if name.startswith("break")} == {
        f"break {index}" for index in range(LAYERS)
    }
    assert {" ".join(name.split()[:2]) for name in names if name.startswith("segment")} == {
        f"segment {index}" for index in range(LAYERS + 1)
    }
