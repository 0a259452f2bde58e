"""Counts the kernels that Triton compiles in this process: none may be once a server is ready."""

from __future__ import annotations

from functools import cache
from typing import Any


class Compilations:
    """A number that only grows."""

    def __init__(self) -> None:
        self.number = 0

    def note(self, **_: Any) -> None:
        self.number += 1


@cache
def count_compilations() -> Compilations:
    """The count of this process, which begins with the first call. Without Triton it stays at 0."""
    compilations = Compilations()
    try:
        from triton import knobs
    except ImportError:
        return compilations
    knobs.runtime.jit_post_compile_hook = compilations.note
    return compilations
