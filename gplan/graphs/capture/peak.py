"""How much memory a computation on a CPU holds at once, counted operator by operator."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from gplan.graphs.capture.dispatch import DispatchMode, decompose, storage_of, tensors_in


class PeakMeter(DispatchMode):
    """Counts the bytes of tensors that were allocated under it and still live. `peak` is the most there were at once.

    Custom operators are looked into: their kernels are Python, and what those allocate would be memory of a GPU too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._nbytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = decompose(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        known = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        if func.namespace == "aten":
            result = func(*args, **kwargs)
        else:
            with self:
                result = func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        for tensor in tensors_in(result):
            if storage_of(tensor) not in known or storage_of(tensor) in self._nbytes:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage, identity = tensor.untyped_storage(), storage_of(tensor)
        if identity not in self._nbytes:
            weakref.finalize(storage, self._forget, identity).atexit = False
        self.live += storage.nbytes() - self._nbytes.get(identity, 0)
        self._nbytes[identity] = storage.nbytes()
        self.peak = max(self.peak, self.live)

    def _forget(self, identity: int) -> None:
        self.live -= self._nbytes.pop(identity)
