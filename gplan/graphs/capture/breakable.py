"""Captures a forward in segments around declared breaks, which run eagerly at capture and at every replay.

A break is a call whose kernels vary from step to step, attention in practice. The forward declares it by decorating the
callable; nobody but this backend takes notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

from gplan.errors import CaptureError
from gplan.graphs.capture.base import CaptureFn, GraphDevice
from gplan.graphs.capture.keyed import KeyedBackend, Recording, Step, checked_outputs, copy_results

P = ParamSpec("P")
R = TypeVar("R")


def graph_break(fn: Callable[P, R]) -> Callable[P, R]:
    """Declares `fn` a break. It returns nothing, a tensor or a tuple of tensors, and what it reads besides its tensors
    must be the same at every replay, or be read anew by `fn`.

    Inside a breakable capture a call ends the segment, runs, is kept with its arguments and results, and begins the
    next segment. Anywhere else, in a full capture too, it is an ordinary call; so is a break inside a break.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        cutter = _cutter.get()
        return fn(*args, **kwargs) if cutter is None else cutter.cut(fn, args, kwargs)

    return call


class BreakableBackend(KeyedBackend):
    """As many segments as breaks, and one more."""

    name = "breakable"
    cuts_at_breaks = True

    def _record(self, fn: CaptureFn, num_breaks: int) -> Recording:
        cutter = _Cutter(self.device)
        token = _cutter.set(cutter)
        try:
            cutter.begin()
            outputs = fn()
            cutter.end()
        except BaseException:
            cutter.abort()
            raise
        finally:
            _cutter.reset(token)
        if cutter.num_breaks != num_breaks:
            raise CaptureError(
                f"expected {num_breaks} breaks, met {cutter.num_breaks}",
                "Every attention call of the forward, and nothing else, must be declared with graph_break.",
            )
        return Recording(tuple(cutter.steps), checked_outputs(outputs))


class _Cutter:
    """The capture in progress: steps so far, and whether a segment is open."""

    def __init__(self, device: GraphDevice) -> None:
        self._device, self._is_open = device, False
        self.steps: list[tuple[str, Step]] = []
        self.num_breaks = 0

    def begin(self) -> None:
        self._device.begin_segment()
        self._is_open = True

    def end(self) -> None:
        self._is_open = False
        self.steps.append((f"segment {self.num_breaks}", self._device.end_segment()))

    def abort(self) -> None:
        if self._is_open:
            self._device.abort_segment()

    def cut(self, fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        self.end()
        token = _cutter.set(None)
        try:
            result = fn(*args, **kwargs)
        finally:
            _cutter.reset(token)
        self.steps.append((f"break {self.num_breaks}", _Break(fn, args, kwargs, _tensors_of(result))))
        self.num_breaks += 1
        self.begin()
        return result


_cutter: ContextVar[_Cutter | None] = ContextVar("cutter", default=None)


class _Break:
    """An eager call between two segments. Holds every tensor that crosses it: the segments around it read and write
    those very addresses."""

    def __init__(
        self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        self._fn, self._args, self._kwargs, self._results = fn, args, kwargs, results

    def replay(self) -> None:
        result = self._fn(*self._args, **self._kwargs)
        if self._results:
            copy_results(_tensors_of(result), self._results)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for index, leaf in enumerate(tree_leaves((self._args, self._kwargs))):
            if isinstance(leaf, Tensor):
                yield f"argument {index}", leaf
        for index, result in enumerate(self._results):
            yield f"result {index}", result


def _tensors_of(result: object) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, tuple) and all(isinstance(item, Tensor) for item in result):
        return result
    raise CaptureError(
        f"a break returned {type(result).__name__}",
        "A break returns nothing, a tensor or a tuple of tensors: a host value would be frozen at its captured value.",
    )
