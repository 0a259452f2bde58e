"""What the dispatch modes of this package share: seeing operators one level below composites, and their tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode without the wrapper that keeps the compiler out of it: that one imports the compiler when the
    first operator comes by, which takes seconds of start-up."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def decompose(mode: DispatchMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a composite operator under `mode` again, which then sees what it is made of; NotImplemented for any other.

    Under `no_grad` composites are taken apart before a dispatch mode is asked; under `inference_mode` they are not.
    """
    if not _is_composite(func):
        return NotImplemented
    with mode:
        # Not `func.decompose`: it prefers decompositions in Python, which may round otherwise than eager execution.
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def tensors_in(tree: Any) -> list[Tensor]:
    """Tensors in the arguments or results of an operator, in order; they nest lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, tuple | list):
        return []
    found = []
    for item in tree:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, tuple | list | dict):
            found += tensors_in(item)
    return found


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same arguments or results with `fn` of each tensor."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple | list):
        return type(tree)([map_tensors(fn, item) for item in tree])
    if isinstance(tree, dict):
        return {name: map_tensors(fn, item) for name, item in tree.items()}
    return tree


def storage_of(tensor: Tensor) -> int:
    """Identifies the memory that a tensor is a view of."""
    return int(tensor.untyped_storage()._cdata)


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")
