"""What no capture may hold: host reads, shapes that depend on data, draws, moving memory. The tape's rules.

They are CUDA's rules, kept on a CPU where nothing else would enforce them. Two modes are needed because a dispatch mode
never sees what a CPU tensor answers without an operator (`tolist`, `cpu`, `numpy`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from gplan.errors import CaptureError

aten = torch.ops.aten

_HOST_READS: frozenset[object] = frozenset(
    getattr(Tensor, name)
    for name in (
        *("cpu", "numpy", "tolist", "item", "__array__", "__dlpack__", "__repr__", "__format__"),
        *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
    )
)
_HOST_VALUES: frozenset[object] = frozenset((torch.tensor, torch.as_tensor))
_MOVES = frozenset(("resize_", "resize_as_", "set_"))


class HostAccess(TorchFunctionMode):
    """Refuses calls that take a value to the host, or bring one from it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOST_READS:
            raise CaptureError(
                f"{_name_of(func)} reads a tensor on the host inside a capture",
                "Replay runs no Python: what depends on the value would stay as captured. Read it outside.",
            )
        if func in _HOST_VALUES:
            raise CaptureError(
                f"{_name_of(func)} makes a tensor from host values inside a capture",
                "Make it before the capture, or fill a static buffer with it.",
            )
        return func(*args, **(kwargs or {}))


def check_recordable(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses an operator that cannot be replayed.

    Draws are refused with or without a generator: replay could only repeat them or leave the order in which generators
    are used. Sampling here is a function of seed and position instead.

    Raises:
        CaptureError: names the operator and what is wrong with it.
    """
    if torch.Tag.data_dependent_output in func.tags:
        raise CaptureError(f"{func} reads a tensor on the host inside a capture", "Keep the value on the device.")
    if _has_dynamic_shape(func, args, kwargs):
        raise CaptureError(
            f"{func} gives a shape that depends on data inside a capture",
            "Keep shapes fixed: mask with where or masked_fill instead of selecting.",
        )
    if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, "dropout_p", args, kwargs) != 0:
        raise CaptureError(
            f"{func} draws random numbers inside a capture", "Draw outside, or hash a seed and position."
        )
    if func._schema.name.removeprefix("aten::") in _MOVES:
        raise CaptureError(
            f"{func} moves a tensor to other memory inside a capture", "Allocate at the maximum instead."
        )


def _has_dynamic_shape(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet in (aten.index_put_, aten.index_put, aten._index_put_impl_):
        # A mask with one value is filled in place; anything else looks for the places first.
        indices, values, *rest = args[1:]
        is_fill = len([i for i in indices if i is not None]) == 1 and values.numel() == 1 and not any(rest[:1])
        return _has_mask(indices) and not is_fill
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if packet is aten.index:
        return _has_mask(args[1])
    if packet is aten.repeat_interleave:
        return _argument(func, "output_size", args, kwargs) is None
    return True


def _has_mask(indices: list[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _argument(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of an operator's argument, given or by default; None where it has no such argument."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def _name_of(func: Callable[..., Any]) -> str:
    return (
        str(getattr(func, "__qualname__", func))
        .replace("TensorBase", "Tensor")
        .replace("_VariableFunctionsClass", "torch")
    )
