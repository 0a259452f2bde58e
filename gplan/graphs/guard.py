"""Checks the invariant of replay: every address that a graph refers to still belongs to the same buffer.

Owns what was true of those buffers when a key was captured. It keeps no buffer alive and repairs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gplan.core import ShapeKey
from gplan.errors import GuardError

Getter = Callable[[], Tensor]

_GONE = (ReferenceError, LookupError, AttributeError)
"""What a getter raises whose owner, or whose owner's buffer, is no more."""


class AddressGuard:
    """Snapshots addresses per key, and refuses a replay when one changed.

    Example:
        >>> guard = AddressGuard()
        >>> guard.watch("input_ids", lambda: buffers["input_ids"])
        >>> guard.snapshot(key, backend.tensors(key))
        >>> guard.check(key)
    """

    def __init__(self) -> None:
        self._getters: dict[str, Getter] = {}
        self._facts: dict[str, _Fact] = {}
        self._snapshots: dict[ShapeKey, _Snapshot] = {}

    def watch(self, name: str, getter: Getter) -> None:
        """Adds a buffer to the snapshots taken from now on.

        Args:
            getter: finds the buffer where its owner keeps it, each time: only so is a rebinding seen. A getter that
                holds the tensor itself sees moves, but neither rebinding nor freeing.
        """
        assert name not in self._getters, f"{name} is watched already"
        self._getters[name] = getter

    def snapshot(self, key: ShapeKey, tensors: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Notes the addresses of everything watched, and of `tensors`, as what the graph of `key` refers to."""
        watched = tuple(self._fact_of(name, getter) for name, getter in self._getters.items())
        seen = {fact.storage_id for fact in watched}
        others = []
        for name, tensor in tensors:
            fact = _Fact.of(name, tensor, None)
            if fact.storage_id not in seen:
                seen.add(fact.storage_id)
                others.append(fact)
        self._snapshots[key] = _Snapshot(watched, tuple(others))

    def check(self, key: ShapeKey) -> None:
        """Compares with the snapshot of `key`, cheaply: where the same tensor is found at the same address, nothing
        more is asked, since a graph reads the address and not the tensor.

        Raises:
            GuardError: names key, buffer, and what happened to it: moved, resized, freed or rebound.
        """
        snapshot = self._snapshots[key]
        for getter, tensor, data_ptr, fact in snapshot.quick:
            try:
                now = getter()
            except _GONE:
                now = None
            if now is None or now is not tensor() or now.data_ptr() != data_ptr:
                fact.require(key)
        for fact in snapshot.others:
            fact.require(key)

    def check_all(self) -> None:
        """Compares everything noted, shapes too, for every key."""
        for key, snapshot in self._snapshots.items():
            for fact in (*snapshot.watched, *snapshot.others):
                fact.require(key)

    def _fact_of(self, name: str, getter: Getter) -> _Fact:
        """The fact of the last snapshot where it still holds: keys share most of what they refer to."""
        fact = self._facts.get(name)
        if fact is None or fact.change() is not None:
            fact = self._facts[name] = _Fact.of(name, getter(), getter)
        return fact


@dataclass(frozen=True, slots=True, eq=False)
class _Fact:
    """What was true of one buffer. References are weak; `getter` finds the buffer of that name as it is now."""

    name: str
    getter: Getter | None
    tensor: weakref.ref[Tensor]
    storage: weakref.ref[torch.UntypedStorage]
    storage_id: int
    storage_ptr: int
    storage_nbytes: int
    data_ptr: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(name: str, tensor: Tensor, getter: Getter | None) -> _Fact:
        storage = tensor.untyped_storage()
        return _Fact(
            name=name,
            getter=getter,
            tensor=weakref.ref(tensor),
            storage=weakref.ref(storage),
            storage_id=storage._cdata,
            storage_ptr=storage.data_ptr(),
            storage_nbytes=storage.nbytes(),
            data_ptr=tensor.data_ptr(),
            shape=tensor.shape,
            stride=tensor.stride(),
            dtype=tensor.dtype,
        )

    def require(self, key: ShapeKey) -> None:
        change = self.change()
        if change is not None:
            raise GuardError(
                f"{key}: {self.name} was {change} since capture",
                "A captured graph reads and writes fixed addresses: fill buffers in place and keep them.",
            )

    def change(self) -> str | None:
        """What happened to the buffer, in words; None for nothing."""
        storage = self.storage()
        if self.getter is None:
            return "freed" if storage is None else self._storage_change(storage)
        now = self._find()
        if now is None:
            return "freed"
        if now.untyped_storage() is not storage:
            return "rebound" if storage is not None else "rebound and its memory freed"
        return self._storage_change(storage) or self._layout_change(now)

    def _find(self) -> Tensor | None:
        """The buffer of this name now; None where its owner does not know it any more."""
        if self.getter is None:
            return None
        try:
            return self.getter()
        except _GONE:
            return None

    def _storage_change(self, storage: torch.UntypedStorage) -> str | None:
        if storage.nbytes() != self.storage_nbytes:
            return f"resized from {self.storage_nbytes} to {storage.nbytes()} bytes"
        if storage.data_ptr() != self.storage_ptr:
            return f"moved from {self.storage_ptr:#x} to {storage.data_ptr():#x}"
        return None

    def _layout_change(self, now: Tensor) -> str | None:
        if now.data_ptr() != self.data_ptr:
            return f"moved within its memory by {now.data_ptr() - self.data_ptr} bytes"
        if (now.shape, now.stride(), now.dtype) != (self.shape, self.stride, self.dtype):
            expected, got = f"{list(self.shape)} {self.dtype}", f"{list(now.shape)} {now.dtype}"
            return f"rebound to another shape: expected {expected}, got {got}"
        return None


class _Snapshot:
    """What one key refers to; `quick` is what the cheap check of watched buffers needs, side by side."""

    def __init__(self, watched: tuple[_Fact, ...], others: tuple[_Fact, ...]) -> None:
        self.watched, self.others = watched, others
        self.quick = tuple((f.getter, f.tensor, f.data_ptr, f) for f in watched if f.getter is not None)
