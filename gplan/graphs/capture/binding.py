"""Turns a recorded operator into the cheapest call that does the same: no copy, little parsing of arguments.

`torch.add` and `torch.ops.aten.add.Tensor` reach one kernel; the first takes half as long to get there. A binding is
used only if it dispatches to the very operator that was recorded, which is found out without running anything; one
that writes into memory of ours also has to give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from gplan.graphs.capture.dispatch import DispatchMode, tensors_in

aten = torch.ops.aten
Call = Callable[[], Any]
Targets = list[tuple[Tensor, Tensor]]

_INT_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLACES = (torch, torch._C._nn, torch._C.TensorBase)
_ALLOCATION = frozenset(("dtype", "layout", "device", "pin_memory"))


class Binder:
    """Binds calls. What was found out about an operator holds for all its calls with tensors of the same layout and the
    same other arguments: the layers of a model are alike."""

    def __init__(self) -> None:
        self._plain: dict[Hashable, Callable[..., Any]] = {}
        self._direct: dict[Hashable, _Direct | None] = {}

    def bind(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call of `func` with these arguments."""
        signature = (func, _signature(args), _signature(kwargs))
        if signature not in self._plain:
            exact = (b for b in _bindings(func) if _first_dispatched(b, args, kwargs) is func)
            self._plain[signature] = next(exact, func._op)
        return functools.partial(self._plain[signature], *args, **kwargs)

    def bind_into(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, targets: Targets
    ) -> Call:
        """A call of `func` that leaves the tensors it allocates in memory of ours.

        Args:
            result: what `func` just returned for these arguments.
            targets: of each tensor that it allocated, the tensor as it is in `result` and ours, which holds the same
                values afterwards.
        """
        outs = tuple(out for _, out in targets)
        signature = (func, _signature(args), _signature(kwargs), _signature(outs))
        if signature not in self._direct:
            forms = _direct_forms(func, args, kwargs, outs)
            self._direct[signature] = next((f for f in forms if _gives(f.call(args, kwargs, outs), targets)), None)
        direct = self._direct[signature]
        for source, out in targets:
            out.copy_(source)
        if direct is not None:
            return direct.call(args, kwargs, outs)
        call = self.bind(func, args, kwargs)
        if isinstance(result, Tensor):
            return functools.partial(_run_and_copy, call, outs[0])
        positions = [i for i, leaf in enumerate(tensors_in(result)) if any(leaf is source for source, _ in targets)]
        return functools.partial(_run_and_copy_all, call, tuple(zip(positions, outs, strict=True)))


@dataclass(frozen=True, slots=True)
class _Direct:
    """A function that takes an operator's arguments and writes its results into given tensors.

    Attributes:
        dropped: keyword arguments of the operator that the function does not take: the given tensors imply them.
        out_names: keywords of the given tensors; empty where all go into `out`, as Python's functions have it.
    """

    function: Callable[..., Any]
    dropped: frozenset[str] = frozenset()
    out_names: tuple[str, ...] = ()

    def keywords(self, kwargs: dict[str, Any], outs: tuple[Tensor, ...]) -> dict[str, Any]:
        kept = {name: value for name, value in kwargs.items() if name not in self.dropped}
        if self.out_names:
            return {**kept, **dict(zip(self.out_names, outs, strict=True))}
        return {**kept, "out": outs[0] if len(outs) == 1 else outs}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Tensor, ...]) -> Call:
        if self.function is torch.Tensor.copy_:
            return functools.partial(self.function, outs[0], args[0])
        return functools.partial(self.function, *args, **self.keywords(kwargs, outs))


def _direct_forms(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Tensor, ...]
) -> list[_Direct]:
    """Ways to have `func` write into `outs`, cheapest first; they still have to be tried."""
    if func in (aten.clone.default, aten._to_copy.default):
        return [_Direct(torch.Tensor.copy_)]
    variant = _out_variant(func)
    if variant is None or len(outs) != len(func._schema.returns):
        return []
    dropped = frozenset(kwargs) - {argument.name for argument in variant._schema.arguments}
    if not dropped <= _ALLOCATION:
        return []
    forms = []
    for binding in _bindings(func):
        form = _Direct(binding, dropped)
        reached = _first_dispatched(binding, args, form.keywords(kwargs, outs))
        if reached is not None and reached.overloadpacket is func.overloadpacket:
            forms.append(form)
    out_names = tuple(argument.name for argument in variant._schema.arguments if argument.is_out)
    return [*forms, _Direct(variant._op, dropped, out_names)]


def _run_and_copy(call: Call, out: Tensor) -> None:
    out.copy_(call())


def _run_and_copy_all(call: Call, targets: tuple[tuple[int, Tensor], ...]) -> None:
    results = tensors_in(call())
    for position, out in targets:
        out.copy_(results[position])


def _gives(call: Call, targets: Targets) -> bool:
    """Whether the call runs, leaves our tensors where and as they are, and the right bits in them."""
    before = [(out.data_ptr(), out.shape, out.stride()) for _, out in targets]
    try:
        call()
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    if [(out.data_ptr(), out.shape, out.stride()) for _, out in targets] != before:
        return False
    return all(torch.equal(_bits(source), _bits(out)) for source, out in targets)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: equal bits are equal, NaN too."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INT_OF_WIDTH[tensor.itemsize])


def _signature(tree: Any) -> Hashable:
    """What decides how arguments are parsed and kernels chosen: layouts of tensors, values of everything else."""
    if isinstance(tree, Tensor):
        return tree.dtype, tree.shape, tree.stride()
    if isinstance(tree, tuple | list):
        return tuple(_signature(item) for item in tree)
    if isinstance(tree, dict):
        return tuple((name, _signature(item)) for name, item in tree.items())
    return type(tree), tree


@functools.cache
def _bindings(func: OpOverload) -> tuple[Callable[..., Any], ...]:
    """Python's own functions and methods of an ATen operator's name."""
    if func.namespace != "aten":
        return ()
    name = func._schema.name.removeprefix("aten::")
    return tuple(getattr(place, name) for place in _PLACES if callable(getattr(place, name, None)))


@functools.cache
def _out_variant(func: OpOverload) -> OpOverload | None:
    """The overload with the same arguments and an `out` for every result."""
    if func._schema.is_mutable:
        return None
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in _ALLOCATION]
    for name in func.overloadpacket.overloads():
        variant: OpOverload = getattr(func.overloadpacket, name)
        arguments = variant._schema.arguments
        inputs = [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in _ALLOCATION]
        num_outs = sum(a.is_out and str(a.type) == "Tensor" for a in arguments)
        if inputs == wanted and num_outs == len(func._schema.returns) > 0:
            return variant
    return None


class _Seen(Exception):  # noqa: N818
    def __init__(self, func: OpOverload) -> None:
        self.func = func


class _Probe(DispatchMode):
    """Stops at the first operator that is dispatched."""

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Seen(func)


def _first_dispatched(binding: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
    """The operator that a call would reach, without reaching it; None for arguments that are not taken."""
    try:
        with _Probe():
            binding(*args, **kwargs)
    except _Seen as seen:
        return seen.func
    except (TypeError, RuntimeError):
        return None
    return None
