"""Static buffers: what a fill leaves in the real rows and in the tail, and what it refuses before it copies."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gplan.graphs.buffers import StaticBuffers
from gplan.graphs.padding import FILL_ONCE, SENTINEL, STALE, ZERO
from gplan.graphs.slots import Slot

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOTS = (
    Slot("positions", (8,), torch.int64, axis=0, padding=ZERO),
    Slot("seq_lens", (8,), torch.int32, axis=0, padding=SENTINEL(1)),
    Slot("scales", (8, 3), torch.float32, axis=0, padding=FILL_ONCE(0.5)),
    Slot("hidden", (8, 2), torch.bfloat16, axis=0, padding=STALE("padded rows feed only padded rows")),
    Slot("mrope", (3, 8), torch.int64, axis=1, padding=ZERO),
)


@pytest.fixture(params=DEVICES)
def buffers(request: pytest.FixtureRequest) -> StaticBuffers:
    return StaticBuffers(SLOTS, torch.device(request.param))


def values_of(real: int, first: int = 10) -> dict[str, torch.Tensor | np.ndarray]:
    """One value per slot, host tensors and arrays mixed, none of them a padding value."""
    return {
        "positions": np.arange(first, first + real),
        "seq_lens": np.arange(first, first + real, dtype=np.int32)[::-1],
        "scales": torch.full((real, 3), float(first)),
        "hidden": torch.full((real, 2), float(first), dtype=torch.bfloat16),
        "mrope": torch.arange(first, first + 3 * real).view(3, real),
    }


def contents(buffers: StaticBuffers, name: str, size: int) -> list:
    return buffers.view(name, size).cpu().tolist()


def test_nbytes_is_what_the_constructor_allocates(buffers: StaticBuffers) -> None:
    allocated = sum(buffers[name].untyped_storage().nbytes() for name in buffers)
    assert StaticBuffers.nbytes(SLOTS) == allocated == 8 * 8 + 8 * 4 + 8 * 3 * 4 + 8 * 2 * 2 + 3 * 8 * 8


def test_fill_writes_real_rows_and_pads_by_policy(buffers: StaticBuffers) -> None:
    buffers.poison()
    buffers.fill(values_of(2), real=2, padded=4)
    assert contents(buffers, "positions", 4) == [10, 11, 0, 0]
    assert contents(buffers, "seq_lens", 4) == [11, 10, 1, 1]
    assert contents(buffers, "scales", 8) == [[10.0] * 3] * 2 + [[0.5] * 3] * 6
    assert contents(buffers, "hidden", 2) == [[10.0] * 2] * 2
    assert contents(buffers, "mrope", 4) == [[10, 11, 0, 0], [12, 13, 0, 0], [14, 15, 0, 0]]


def test_stale_tail_keeps_its_poison(buffers: StaticBuffers) -> None:
    buffers.poison()
    buffers.fill(values_of(2), real=2, padded=4)
    assert buffers.view("hidden", 4)[2:].isnan().all()
    assert buffers["positions"][4] == torch.iinfo(torch.int64).max


def test_values_may_lie_on_the_device(buffers: StaticBuffers) -> None:
    device = buffers["positions"].device
    values = {
        name: torch.as_tensor(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v
        for name, v in values_of(3).items()
    }
    buffers.poison()
    buffers.fill({name: value.to(device) for name, value in values.items()}, real=3, padded=5)
    assert contents(buffers, "positions", 5) == [10, 11, 12, 0, 0]
    assert contents(buffers, "seq_lens", 5) == [12, 11, 10, 1, 1]
    assert contents(buffers, "mrope", 5)[2] == [16, 17, 18, 0, 0]


def test_values_may_change_after_the_call(buffers: StaticBuffers) -> None:
    for step in range(20):
        values = values_of(8, first=step)
        buffers.fill(values, real=8, padded=8)
        values["scales"].fill_(-1.0)
        seen = buffers["scales"].clone()
        assert seen.cpu().eq(step).all()


def test_read_only_arrays_are_taken(buffers: StaticBuffers) -> None:
    values = values_of(2)
    values["positions"].flags.writeable = False
    buffers.fill(values, real=2, padded=2)
    assert contents(buffers, "positions", 2) == [10, 11]


def test_no_real_rows_is_all_padding(buffers: StaticBuffers) -> None:
    buffers.poison()
    buffers.fill(values_of(0), real=0, padded=8)
    assert contents(buffers, "seq_lens", 8) == [1] * 8
    assert contents(buffers, "scales", 8) == [[0.5] * 3] * 8


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()), min_size=1, max_size=8))
def test_tail_follows_its_policy_after_any_history(steps: list[tuple[int, int, bool]]) -> None:
    buffers = StaticBuffers(SLOTS, torch.device("cpu"))
    for first, second, poison in steps:
        real, padded = sorted((first, second))
        if poison:
            buffers.poison()
        buffers.fill(values_of(real), real=real, padded=padded)
        assert contents(buffers, "positions", padded)[real:] == [0] * (padded - real)
        assert contents(buffers, "seq_lens", padded)[real:] == [1] * (padded - real)
        assert contents(buffers, "scales", padded)[real:] == [[0.5] * 3] * (padded - real)
        assert contents(buffers, "positions", real) == list(range(10, 10 + real))


def test_slots_not_read_need_no_value(buffers: StaticBuffers) -> None:
    values = values_of(2)
    del values["mrope"], values["scales"], values["hidden"]
    with pytest.raises(ValueError, match="no value for static buffer mrope"):
        buffers.fill(values, real=2, padded=2)
    buffers.fill(values, real=2, padded=2, unread=["mrope"])
    assert contents(buffers, "positions", 2) == [10, 11]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.zeros(1, np.int64)}, r"positions: expected \[2\] torch.int64, got \[1\] torch.int64"),
        ({"positions": np.zeros((), np.int64)}, "positions: expected"),
        ({"positions": np.zeros(2, np.int32)}, "torch.int32"),
        ({"hidden": torch.zeros(2, 1, dtype=torch.bfloat16)}, r"hidden: expected \[2, 2\]"),
        ({"mrope": torch.zeros(2, 3, dtype=torch.int64)}, r"mrope: expected \[3, 2\]"),
        ({"position": np.zeros(2, np.int64)}, "no static buffer named position; there are positions, seq_lens"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_copied(
    buffers: StaticBuffers, change: dict[str, torch.Tensor | np.ndarray], message: str
) -> None:
    buffers.fill(values_of(8, first=50), real=8, padded=8)
    before = {name: buffers[name].clone() for name in buffers}
    with pytest.raises(ValueError, match=message):
        buffers.fill({**values_of(2), **change}, real=2, padded=4)
    assert all(torch.equal(buffers[name], before[name]) for name in buffers)


@pytest.mark.parametrize(("real", "padded"), [(3, 2), (2, 9), (9, 9), (-1, 2)])
def test_sizes_outside_the_buffer_are_refused(buffers: StaticBuffers, real: int, padded: int) -> None:
    with pytest.raises(ValueError, match="rows: cannot pad"):
        buffers.fill(values_of(max(real, 0)), real=real, padded=padded)


def test_fill_never_moves_a_buffer(buffers: StaticBuffers) -> None:
    addresses = {name: buffers[name].data_ptr() for name in buffers}
    for size in (1, 8, 3):
        buffers.fill(values_of(size), real=size, padded=8)
        buffers.poison()
    assert {name: buffers[name].data_ptr() for name in buffers} == addresses
    assert buffers.view("positions", 3).data_ptr() == addresses["positions"]


def test_buffers_die_with_their_owner() -> None:
    buffers = StaticBuffers(SLOTS, torch.device("cpu"))
    storage = weakref.ref(buffers["positions"].untyped_storage())
    del buffers
    gc.collect()
    assert storage() is None


@pytest.mark.gpu
def test_staging_is_not_overwritten_before_its_copy_is_done() -> None:
    slot = Slot("x", (1 << 20,), torch.int64, axis=0, padding=ZERO)
    buffers = StaticBuffers([slot], torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    seen = []
    for step in range(12):
        for _ in range(8):
            busy = busy @ busy / 4096
        buffers.fill({"x": np.full(1 << 20, step)}, real=1 << 20, padded=1 << 20)
        seen.append((buffers["x"].min(), buffers["x"].max()))
    assert [(int(low), int(high)) for low, high in seen] == [(step, step) for step in range(12)]
