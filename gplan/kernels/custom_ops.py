"""Definition of gplan's own torch operators: one call each to whatever records or traces them."""

from __future__ import annotations

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("gplan", "FRAGMENT")


def define_operator(name: str, arguments: str, function: Callable[..., None]) -> None:
    """Makes `function` the operator `gplan::name`, on every device.

    Args:
        arguments: in torch's schema language, the written ones marked `Tensor(a!)`. The operator returns nothing.
    """
    _LIBRARY.define(f"{name}({arguments}) -> ()")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gplan::{name}", _does_nothing)


def _does_nothing(*_: object) -> None:
    """What an operator that returns nothing does to tensors without data."""
