"""Static buffers: what a fill leaves in the real rows and in the tail, and what it refuses before it copies."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gplan.graphs.buffers import StaticBuffers
from gplan.graphs.padding import Sentinel, Stale, Zero
from gplan.graphs.slots import Slot

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOTS = (
    Slot("positions", (8,), torch.int64, Zero()),
    Slot("seq_lens", (8,), torch.int32, Sentinel(1)),
    Slot("hidden", (8, 2), torch.bfloat16, Stale("padded rows feed only padded rows")),
    Slot("rows", (8,), torch.int64, Zero()),
    Slot("scales", (8,), torch.float32, Sentinel(0.5)),
)


@pytest.fixture(params=DEVICES)
def buffers(request: pytest.FixtureRequest) -> StaticBuffers:
    return StaticBuffers(SLOTS, torch.device(request.param))


def values_of(real: int, first: int = 10) -> dict[str, np.ndarray]:
    """One value per slot that is filled, none of them a padding value."""
    return {
        "positions": np.arange(first, first + real),
        "seq_lens": np.arange(first, first + real, dtype=np.int32)[::-1],
        "rows": np.arange(first + 100, first + 100 + real),
        "scales": np.full(real, first, np.float32),
    }


def contents(buffers: StaticBuffers, name: str, size: int) -> list:
    return buffers.view(name, size).cpu().tolist()


def test_nbytes_is_what_the_constructor_allocates(buffers: StaticBuffers) -> None:
    storages = {
        storage.data_ptr(): storage.nbytes() for name in buffers for storage in [buffers[name].untyped_storage()]
    }
    assert StaticBuffers.nbytes(SLOTS) == sum(storages.values()) == 8 * 8 + 8 * 4 + 8 * 2 * 2 + 8 * 8 + 8 * 4


def test_fill_writes_real_rows_and_pads_by_policy(buffers: StaticBuffers) -> None:
    buffers.poison()
    buffers.fill(values_of(2), real=2, padded=4)
    assert contents(buffers, "positions", 4) == [10, 11, 0, 0]
    assert contents(buffers, "seq_lens", 4) == [11, 10, 1, 1]
    assert contents(buffers, "rows", 4) == [110, 111, 0, 0]
    assert contents(buffers, "scales", 4) == [10.0, 10.0, 0.5, 0.5]


def test_what_is_not_filled_keeps_its_poison(buffers: StaticBuffers) -> None:
    buffers.poison()
    buffers.fill(values_of(2), real=2, padded=4)
    assert buffers["hidden"].isnan().all()
    assert buffers["positions"][4] == torch.iinfo(torch.int64).max


def test_nobody_but_the_forward_writes_to_a_buffer_of_several_dimensions() -> None:
    with pytest.raises(AssertionError, match="only lists are filled"):
        Slot("hidden", (8, 2), torch.float32, Zero())


def test_values_may_change_after_the_call(buffers: StaticBuffers) -> None:
    for step in range(20):
        values = values_of(8, first=step)
        buffers.fill(values, real=8, padded=8)
        values["scales"].fill(-1.0)
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
    assert contents(buffers, "scales", 8) == [0.5] * 8


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
        assert contents(buffers, "scales", padded)[real:] == [0.5] * (padded - real)
        assert contents(buffers, "positions", real) == list(range(10, 10 + real))


def test_slots_not_read_need_no_value(buffers: StaticBuffers) -> None:
    values = values_of(2)
    del values["rows"], values["scales"]
    with pytest.raises(ValueError, match="no value for static buffer rows, scales"):
        buffers.fill(values, real=2, padded=2)
    buffers.fill(values, real=2, padded=2, unread=["rows", "scales"])
    assert contents(buffers, "positions", 2) == [10, 11]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.zeros(1, np.int64)}, r"positions: expected \[2\] int64, got \[1\] int64"),
        ({"positions": np.zeros((), np.int64)}, "positions: expected"),
        ({"positions": np.zeros(2, np.int32)}, "int32"),
        ({"scales": np.zeros((2, 1), np.float32)}, r"scales: expected \[2\]"),
        ({"hidden": np.zeros((2, 2), np.float32)}, "no slot to fill is named hidden"),
        ({"position": np.zeros(2, np.int64)}, "no slot to fill is named position; there are positions, seq_lens"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_copied(
    buffers: StaticBuffers, change: dict[str, np.ndarray], message: str
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
    slot = Slot("x", (1 << 20,), torch.int64, Zero())
    buffers = StaticBuffers([slot], torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    seen = []
    for step in range(12):
        for _ in range(8):
            busy = busy @ busy / 4096
        buffers.fill({"x": np.full(1 << 20, step)}, real=1 << 20, padded=1 << 20)
        seen.append((buffers["x"].min(), buffers["x"].max()))
    assert [(int(low), int(high)) for low, high in seen] == [(step, step) for step in range(12)]
