"""A forward through a compiler: traced whole by torch.compile, split at its attention calls, its pieces compiled.

Attention is an operator that the compiler cannot see into, so nothing is lost by splitting there; and the pieces of a
model's layers are alike, so few are compiled. What comes out is a row of calls over the same static buffers, without
Dynamo and its guards: addresses are fixed. To whatever records it, a piece is one operator. Graphs are ours: the
compiler makes none.

Compiled code is kept in a folder (`compiler.cache_folder`), from which a later start takes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from gplan.errors import CaptureError
from gplan.graphs.capture.breakable import graph_break
from gplan.graphs.compiler import compiling
from gplan.kernels.base import Attention, Kernels
from gplan.kernels.custom_ops import define_operator
from gplan.models.base import ForwardInputs, Model

Call = Callable[[], object]

SETTINGS = {"triton.cudagraphs": False, "compile_threads": 1, "cpp.dynamic_threads": True}
"""Of Inductor: no graphs of its own, no processes of its own, and as many threads as the process has."""

_numbers = itertools.count()
_called: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""What operators find their attention and their piece by: an operator's arguments are tensors and numbers."""


class CompiledForward:
    """A model's forward over static buffers, compiled at its first call, which must not be recorded."""

    def __init__(self, model: Model, kernels: Kernels, inputs: ForwardInputs, attention: Attention) -> None:
        self._model, self._kernels, self._inputs, self._attention = model, kernels.traceable(), inputs, attention
        self._pieces: list[Callable[..., object]] = []
        self._calls: tuple[Call, ...] = ()

    def __call__(self) -> None:
        if not self._calls:
            with compiling():
                self._calls = tuple(self._compile())
        for call in self._calls:
            call()

    def _compile(self) -> list[Call]:
        number = _numbered(self._attention)
        attend = partial(_attend_by_number, number)
        inputs = replace(self._inputs, attend=attend)
        graph, operands = _traced(lambda: self._model.forward(self._kernels, inputs))
        compiled: dict[Hashable, int] = {}
        calls: list[Call] = []
        for module, tensors in _split(graph, operands):
            attended = _attention_call(module)
            if attended is not None:
                calls.append(partial(graph_break(self._attention.run), *(tensors[index] for index in attended)))
                continue
            shape = _shape_of(module, tensors)
            if shape not in compiled:
                piece = _compiled(module, tensors)
                self._pieces.append(piece)
                compiled[shape] = _numbered(piece)
            calls.append(partial(torch.ops.gplan.run_piece.default, compiled[shape], tensors))
        return calls


def _attend_by_number(number: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
    torch.ops.gplan.attend.default(q, k_cache, v_cache, out, number)


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, number: int) -> None:
    _called[number].run(q, k_cache, v_cache, out)


def _run_piece(number: int, tensors: list[Tensor]) -> None:
    _called[number](*tensors)


define_operator("attend", "Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) out, int number", _attend)
define_operator("run_piece", "int number, Tensor(a!)[] tensors", _run_piece)


def _numbered(called: object) -> int:
    number = next(_numbers)
    _called[number] = called
    return number


def _traced(forward: Callable[[], None]) -> tuple[fx.GraphModule, list[Tensor]]:
    """The operators of a forward, and the tensors that it reaches: weights and static buffers."""
    found: list[tuple[fx.GraphModule, list[Tensor]]] = []

    def keep(graph: fx.GraphModule, operands: list[Tensor]) -> Callable[..., Any]:
        found.append((graph, list(operands)))
        return graph.forward

    with torch.no_grad():
        torch.compile(forward, backend=keep, fullgraph=True, dynamic=False)()
    torch._dynamo.reset()  # its guards hold the tensors, and are not asked any more
    return found[0]


def _split(graph: fx.GraphModule, operands: Sequence[Tensor]) -> list[tuple[fx.GraphModule, list[Tensor]]]:
    """The graph's pieces and attention calls in order, each with its operands.

    Raises:
        CaptureError: a tensor that is no static buffer crosses an attention call.
    """
    from torch.fx.passes.split_module import split_module

    part, parts = 0, {}
    for node in graph.graph.nodes:
        is_attention = node.target is torch.ops.gplan.attend.default
        part += is_attention
        parts[node] = part
        part += is_attention
    whole = split_module(graph, None, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    by_name = dict(zip((n.name for n in whole.graph.nodes if n.op == "placeholder"), operands, strict=True))
    pieces = []
    for node in whole.graph.nodes:
        if node.op != "call_module":
            continue
        if any(argument.name not in by_name for argument in node.args):
            raise CaptureError(
                "a tensor that is no static buffer crosses an attention call",
                "A model keeps nothing across attention but what lies in its caller's buffers.",
            )
        pieces.append((getattr(whole, node.target), [by_name[argument.name] for argument in node.args]))
    return pieces


def _attention_call(module: fx.GraphModule) -> list[int] | None:
    """Of an attention call, which operands are q, k_cache, v_cache and out; None for any other piece."""
    nodes = list(module.graph.nodes)
    names = [node.name for node in nodes if node.op == "placeholder"]
    call = next((node for node in nodes if node.target is torch.ops.gplan.attend.default), None)
    return None if call is None else [names.index(argument.name) for argument in call.args[:4]]


def _shape_of(module: fx.GraphModule, tensors: Sequence[Tensor]) -> Hashable:
    """Equal for pieces that differ in their operands' addresses and names alone."""
    numbers = {node: index for index, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        name = "" if node.op == "placeholder" else str(node.target)
        arguments = fx.map_arg((node.args, node.kwargs), lambda argument: f"%{numbers[argument]}")
        lines.append(f"{node.op} {name} {arguments}")
    return "\n".join(lines), tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def _compiled(module: fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., object]:
    import torch._inductor.config as config
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), config.patch(SETTINGS):
        return _Piece(compile_fx(module, list(tensors)))


class _Piece:
    """Compiled code, as an object that can be referred to weakly."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, *tensors: Tensor) -> None:
        with torch.no_grad():
            self._run(*tensors)
