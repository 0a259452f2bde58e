"""The address guard: each way in which a buffer can stop being what a graph refers to is refused by name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gplan.core import Phase, ShapeKey
from gplan.errors import GuardError
from gplan.graphs.guard import AddressGuard

KEY, OTHER = ShapeKey(Phase.DECODE, 4), ShapeKey(Phase.PREFILL, 64)


@pytest.fixture
def owner() -> SimpleNamespace:
    return SimpleNamespace(ids=torch.zeros(8, dtype=torch.int64), weight=torch.ones(4, 4))


def watching(owner: SimpleNamespace) -> AddressGuard:
    guard = AddressGuard()
    guard.watch("ids", lambda: owner.ids)
    guard.watch("weight", lambda: owner.weight)
    guard.snapshot(KEY)
    guard.check(KEY)
    return guard


def test_what_a_step_does_to_buffers_is_allowed(owner: SimpleNamespace) -> None:
    guard = watching(owner)
    owner.ids.fill_(7)
    owner.ids[:3].copy_(torch.arange(3))
    owner.weight.mul_(2)
    gc.collect()
    guard.check(KEY)


def _rebind(owner: SimpleNamespace) -> object:
    old, owner.ids = owner.ids, torch.zeros(8, dtype=torch.int64)
    return old


def _rebind_and_free(owner: SimpleNamespace) -> None:
    owner.ids = owner.ids.clone()


def _rebind_data(owner: SimpleNamespace) -> object:
    old, owner.ids.data = owner.ids.data, torch.zeros(8, dtype=torch.int64)
    return old


def _move_within(owner: SimpleNamespace) -> None:
    owner.ids = owner.ids[1:]


def _shrink_view(owner: SimpleNamespace) -> None:
    owner.ids = owner.ids[:4]


def _retype(owner: SimpleNamespace) -> None:
    owner.ids = owner.ids.view(torch.float64)


def _resize(owner: SimpleNamespace) -> None:
    owner.ids.resize_(1000)


def _empty_storage(owner: SimpleNamespace) -> None:
    owner.ids.untyped_storage().resize_(0)


def _free(owner: SimpleNamespace) -> None:
    del owner.ids


CHANGES: dict[str, tuple[Callable[[SimpleNamespace], object], str]] = {
    "rebound": (_rebind, "ids was rebound since"),
    "rebound and freed": (_rebind_and_free, "ids was rebound and its memory freed since"),
    "data rebound": (_rebind_data, "ids was rebound since"),
    "moved within": (_move_within, "ids was moved within its memory by 8 bytes"),
    "smaller view": (_shrink_view, r"ids was rebound to another shape: expected \[8\] torch.int64, got \[4\]"),
    "another dtype": (_retype, "ids was rebound to another shape: expected .* torch.int64, got .* torch.float64"),
    "resized": (_resize, "ids was resized from 64 to 8000 bytes"),
    "emptied": (_empty_storage, "ids was resized from 64 to 0 bytes"),
    "freed": (_free, "ids was freed since"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_buffer_is_refused_by_name(owner: SimpleNamespace, name: str) -> None:
    change, message = CHANGES[name]
    guard = watching(owner)
    kept = change(owner)
    with pytest.raises(GuardError, match=f"decode:4: {message}") as caught:
        guard.check(KEY)
    assert "fill buffers in place" in caught.value.hint
    with pytest.raises(GuardError, match="decode:4"):
        guard.check_all()
    del kept


def test_a_moved_storage_is_refused(owner: SimpleNamespace) -> None:
    guard = watching(owner)
    before = owner.ids.data_ptr()
    owner.ids.untyped_storage().resize_(4096)
    owner.ids.untyped_storage().resize_(64)
    if owner.ids.data_ptr() == before:
        pytest.skip("the allocator gave the same memory again")
    with pytest.raises(GuardError, match="decode:4: ids was moved from 0x"):
        guard.check(KEY)


def test_a_tensor_seen_otherwise_at_the_same_address_is_found_by_the_thorough_check(owner: SimpleNamespace) -> None:
    guard = watching(owner)
    owner.weight.t_()
    guard.check(KEY)
    with pytest.raises(GuardError, match="decode:4: weight was rebound to another shape"):
        guard.check_all()


def test_a_new_view_of_the_same_memory_each_time_is_allowed(owner: SimpleNamespace) -> None:
    guard = AddressGuard()
    guard.watch("ids", lambda: owner.ids[2:6])
    guard.snapshot(KEY)
    for _ in range(3):
        guard.check(KEY)
    owner.ids = owner.ids.clone()
    with pytest.raises(GuardError, match="ids was rebound"):
        guard.check(KEY)


def test_tensors_without_an_owner_are_followed_by_their_memory(owner: SimpleNamespace) -> None:
    crossing = torch.ones(16)
    guard = AddressGuard()
    guard.watch("ids", lambda: owner.ids)
    guard.snapshot(KEY, [("break 0 argument 0", crossing[4:]), ("operand", owner.ids)])
    view = crossing[8:]
    del crossing
    gc.collect()
    guard.check(KEY)
    del view
    gc.collect()
    with pytest.raises(GuardError, match="decode:4: break 0 argument 0 was freed"):
        guard.check(KEY)


def test_a_resized_tensor_without_an_owner_is_refused() -> None:
    tensor, guard = torch.ones(16), AddressGuard()
    guard.snapshot(KEY, [("output 0", tensor)])
    tensor.resize_(1000)
    with pytest.raises(GuardError, match="output 0 was resized from 64 to 4000 bytes"):
        guard.check(KEY)


def test_the_guard_keeps_nothing_alive(owner: SimpleNamespace) -> None:
    guard = watching(owner)
    extra = torch.ones(4)
    guard.snapshot(OTHER, [("extra", extra)])
    dead = [weakref.ref(owner.ids), weakref.ref(extra.untyped_storage())]
    del owner.ids, extra
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


def test_each_key_has_its_own_snapshot(owner: SimpleNamespace) -> None:
    guard = watching(owner)
    old, owner.ids = owner.ids, torch.zeros(8, dtype=torch.int64)
    guard.snapshot(OTHER)
    guard.check(OTHER)
    with pytest.raises(GuardError, match="decode:4: ids was rebound"):
        guard.check(KEY)
    with pytest.raises(GuardError, match="decode:4"):
        guard.check_all()
    owner.ids = old
    guard.check(KEY)
    with pytest.raises(GuardError, match="prefill:64: ids was rebound"):
        guard.check(OTHER)


def test_an_owner_that_died_is_a_freed_buffer() -> None:
    class Owner:
        def __init__(self) -> None:
            self.ids = torch.zeros(8)

    owner, guard = Owner(), AddressGuard()
    proxy = weakref.proxy(owner)

    def find() -> Tensor:
        return proxy.ids

    guard.watch("ids", find)
    guard.snapshot(KEY)
    del owner
    with pytest.raises(GuardError, match="decode:4: ids was freed"):
        guard.check(KEY)
