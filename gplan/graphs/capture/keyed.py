"""What every backend does alike: bookkeeping of keys, and the recording that a key stands for.

A recording is a row of steps: segments of the device, and between them calls that run eagerly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from gplan.core import ShapeKey
from gplan.errors import CaptureError
from gplan.graphs.capture.base import CaptureBackend, CaptureFn, GraphDevice, Segment


class Step(Protocol):
    """A segment, or a call between two segments."""

    def replay(self) -> None: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...


class Recording:
    """The steps of one key, and the results that every replay leaves in the same tensors."""

    def __init__(self, steps: tuple[tuple[str, Step], ...], outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs
        self._steps = steps
        self._replays = tuple(step.replay for _, step in steps)

    @property
    def num_segments(self) -> int:
        return sum(isinstance(step, Segment) for _, step in self._steps)

    def replay(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            for replay in self._replays:
                replay()
        return self.outputs

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for index, output in enumerate(self.outputs):
            yield f"output {index}", output
        for step_name, step in self._steps:
            for name, tensor in step.tensors():
                yield f"{step_name} {name}", tensor


class KeyedBackend(CaptureBackend):
    """Holds one recording per key. A subclass says how a forward becomes one."""

    def __init__(self, device: GraphDevice) -> None:
        super().__init__(device)
        self._recordings: dict[ShapeKey, Recording] = {}

    @abstractmethod
    def _record(self, fn: CaptureFn, num_breaks: int) -> Recording:
        """Runs and records `fn`. Leaves no segment open when it raises."""

    def capture(self, key: ShapeKey, fn: CaptureFn, num_breaks: int) -> tuple[Tensor, ...]:
        if self.frozen:
            raise CaptureError(f"{key}: captured after the keys were frozen", "Run what is no key eagerly.")
        if key in self._recordings:
            raise CaptureError(f"{key}: captured before", "A key is captured once; close the backend to start over.")
        try:
            recording = self._record(fn, num_breaks)
        except CaptureError as error:
            raise CaptureError(f"{key}: {error.message}", error.hint) from error
        except Exception as error:
            hint = "The forward failed while it was recorded; run it eagerly to see whether it works there."
            raise CaptureError(f"{key}: {type(error).__name__}: {error}", hint) from error
        self._recordings[key] = recording
        return recording.outputs

    def replay(self, key: ShapeKey) -> tuple[Tensor, ...]:
        return self._recordings[key].replay()

    def __contains__(self, key: ShapeKey) -> bool:
        return key in self._recordings

    def keys(self) -> tuple[ShapeKey, ...]:
        return tuple(self._recordings)

    def num_segments(self, key: ShapeKey) -> int:
        return self._recordings[key].num_segments

    def tensors(self, key: ShapeKey) -> Iterator[tuple[str, Tensor]]:
        return self._recordings[key].tensors()

    def close(self) -> None:
        self._recordings.clear()


def checked_outputs(outputs: object) -> tuple[Tensor, ...]:
    """The results of a forward, which must be a tuple of tensors: nothing else has an address to read later."""
    if not isinstance(outputs, tuple) or not all(isinstance(output, Tensor) for output in outputs):
        raise CaptureError(
            f"the forward returned {type(outputs).__name__}, not a tuple of tensors",
            "Return the tensors that hold the results; a host value would be frozen at its captured value.",
        )
    return outputs


def copy_results(found: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> None:
    """Brings the results of an eager call into the tensors that a recording promised, where they are not there yet.

    Raises:
        CaptureError: another number of results, or another shape or dtype (copying would broadcast or convert).
    """
    if len(found) != len(kept):
        raise CaptureError(f"an eager call returned {len(found)} tensors, and {len(kept)} when it was captured")
    for index, (source, target) in enumerate(zip(found, kept, strict=True)):
        if source is target:
            continue
        if source.shape != target.shape or source.dtype != target.dtype:
            expected, got = f"{list(target.shape)} {target.dtype}", f"{list(source.shape)} {source.dtype}"
            raise CaptureError(f"result {index} of an eager call: expected {expected}, got {got}")
        if source.data_ptr() != target.data_ptr() or source.stride() != target.stride():
            target.copy_(source)
