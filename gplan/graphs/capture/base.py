"""The contracts of capture: what records and replays (graph device), and how a forward is cut (capture backend).

A backend knows no phase and no bucket; a runner knows no backend's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gplan.core import ShapeKey

CaptureFn = Callable[[], tuple[Tensor, ...]]
"""A forward over static buffers: no arguments, returns the tensors that hold its results."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device. `free` and `total` are the whole device's; the others this process's own.

    Attributes:
        allocated: held by live tensors.
        reserved: taken by the allocator from the device, graph pool included.
        non_torch: taken by this process outside the allocator (context, libraries, modules).
    """

    total: int
    free: int
    allocated: int
    reserved: int
    non_torch: int


class Segment(ABC):
    """A recorded stretch of device work that replays without Python of the model."""

    @abstractmethod
    def replay(self) -> None: ...

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors outside the graph pool that the segment is known to refer to (the tape knows them; CUDA does not)."""

    @abstractmethod
    def reset(self) -> None:
        """Gives back what the device holds for it. Replaying it again raises CaptureError."""


class Stopwatch(ABC):
    """Device time of what is launched between its making and `stop`."""

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def read_us(self) -> float | None:
        """Microseconds, once the work is done; None before. Never waits for the device."""


class GraphDevice(ABC):
    """Records segments into one graph pool and replays them. Segments of a pool never run concurrently.

    `measure_peak`, `time_us` and `stopwatch` are here because what a graph costs is known only to its device.
    """

    name: ClassVar[str]
    result_lag: ClassVar[int]
    """Steps whose results the host should leave unread while it launches the next: 0 where launching is running."""
    warmup_passes: ClassVar[int]
    """Eager passes over all keys before capture: first calls compile, autotune and load; 0 where nothing does."""

    @abstractmethod
    def session(self) -> AbstractContextManager[None]:
        """Around all captures of a plan: garbage collection is frozen, the capture stream is current. Not reentrant."""

    @abstractmethod
    def begin_segment(self) -> None:
        """Starts recording, inside a session and with gradients off. Until `end_segment`, reading a value on the host
        or synchronising raises CaptureError."""

    @abstractmethod
    def end_segment(self) -> Segment:
        """Stops recording. What the segment allocated and still holds stays in the graph pool."""

    @abstractmethod
    def abort_segment(self) -> None:
        """Leaves a recording that failed. On CUDA the process must not capture again."""

    @abstractmethod
    def pool_nbytes(self) -> int:
        """Bytes that the graph pool has reserved."""

    @abstractmethod
    def measure_peak(self, fn: Callable[[], object]) -> int:
        """Runs `fn` eagerly and returns the most bytes it had allocated at once beyond what was there before."""

    @abstractmethod
    def time_us(self, fn: Callable[[], object], repeats: int) -> list[float]:
        """Runs `fn` `repeats` times and returns each run's device time in microseconds."""

    @abstractmethod
    def stopwatch(self) -> Stopwatch:
        """Starts timing what is launched from now on; adds no wait to it."""

    @abstractmethod
    def read_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts copying `tensor` to the host and returns a call that waits for the copy and gives it. At most
        `result_lag` + 1 copies may be unread at once; the tensor may be overwritten by later work in stream order."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Bytes of the device as they are now."""

    def compilations(self) -> int:
        """Kernels that were compiled or loaded from a cache of compiled ones while this device existed."""
        return 0

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for everything launched. Raises inside a segment."""

    @abstractmethod
    def close(self) -> None:
        """Gives the graph pool back; segments are dead after it."""


class CaptureBackend(ABC):
    """Cuts a forward into segments and replays them in order."""

    name: ClassVar[str]
    cuts_at_breaks: bool
    """Whether calls decorated as breaks run eagerly between segments rather than inside one."""
    compiles: ClassVar[bool] = False
    """Whether every forward that it captures goes through a compiler first."""

    def __init__(self, device: GraphDevice) -> None:
        self.device = device
        self.frozen = False

    @abstractmethod
    def capture(self, key: ShapeKey, fn: CaptureFn, num_breaks: int) -> tuple[Tensor, ...]:
        """Records `fn` under `key` and returns its result tensors, which every replay returns again.

        Args:
            num_breaks: attention calls in the forward. A backend that cuts at breaks checks that it met as many.

        Raises:
            CaptureError: after `freeze`, for a key captured before, a wrong number of breaks, or an operation that
                cannot be recorded. Names the key.
        """

    @abstractmethod
    def replay(self, key: ShapeKey) -> tuple[Tensor, ...]:
        """Runs what `key` recorded on the present contents of the static buffers."""

    @abstractmethod
    def __contains__(self, key: ShapeKey) -> bool: ...

    @abstractmethod
    def keys(self) -> tuple[ShapeKey, ...]:
        """Captured keys, in capture order."""

    @abstractmethod
    def num_segments(self, key: ShapeKey) -> int:
        """Graph segments that a replay of `key` runs."""

    @abstractmethod
    def tensors(self, key: ShapeKey) -> Iterator[tuple[str, Tensor]]:
        """Named tensors that the graph of `key` is known to refer to: outputs, and what crosses breaks."""

    def freeze(self) -> None:
        """Ends capturing for good: serving has begun."""
        self.frozen = True

    @abstractmethod
    def close(self) -> None:
        """Drops every graph."""
