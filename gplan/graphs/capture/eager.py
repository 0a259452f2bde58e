"""Records nothing: a replay calls the forward again. The oracle of the other backends, and how to debug them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gplan.graphs.capture.base import CaptureFn, GraphDevice
from gplan.graphs.capture.keyed import KeyedBackend, Recording, checked_outputs, copy_results


class EagerBackend(KeyedBackend):
    """Keeps the forward of each key, and its promise that results are always the same tensors.

    Args:
        cuts_at_breaks: of the backend that this one stands for, so that a runner prepares the same for both.
    """

    name = "eager"

    def __init__(self, device: GraphDevice, *, cuts_at_breaks: bool = False) -> None:
        super().__init__(device)
        self.cuts_at_breaks = cuts_at_breaks

    def _record(self, fn: CaptureFn, num_breaks: int) -> Recording:
        outputs = checked_outputs(fn())
        return Recording((("forward", _Call(fn, outputs)),), outputs)


class _Call:
    def __init__(self, fn: CaptureFn, outputs: tuple[Tensor, ...]) -> None:
        self._fn, self._outputs = fn, outputs

    def replay(self) -> None:
        copy_results(self._fn(), self._outputs)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())
