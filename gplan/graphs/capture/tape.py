"""The CPU graph device: records operators with their tensors, and replays them into the same memory.

It defines what a graph device means where no GPU is at hand, and keeps on purpose what makes CUDA graphs treacherous:
one pool whose freed memory is used again by later captures, results in the same memory every time, no host reads, no
shapes that depend on data, and the addresses of capture time whatever Python objects say later.

What runs inside a custom operator is one call, as a kernel is: it reads its tensors when it is replayed.
"""

from __future__ import annotations

import functools
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from gplan.errors import CaptureError
from gplan.graphs.capture.arena import POISON, Arena, Block
from gplan.graphs.capture.base import DeviceMemory, GraphDevice, Segment, Stopwatch
from gplan.graphs.capture.binding import Binder, Call
from gplan.graphs.capture.dispatch import DispatchMode, decompose, map_tensors, storage_of, tensors_in
from gplan.graphs.capture.forbidden import HostAccess, check_recordable
from gplan.graphs.capture.peak import PeakMeter
from gplan.graphs.capture.quiet import quiet_collector
from gplan.graphs.machine import host_memory

aten = torch.ops.aten

_UNINITIALISED = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.empty_permuted,
    aten.new_empty,
    aten.new_empty_strided,
)


class TapeDevice(GraphDevice):
    """Records on a CPU.

    Gradients must be off while a segment is recorded (`no_grad` or `inference_mode`), inside a session.

    Args:
        debug: fill arena memory with NaN when it is freed, at capture and at every replay, so that a read of a dead
            tensor shows.
    """

    name = "tape"
    result_lag = 0
    warmup_passes = 0

    def __init__(self, *, debug: bool = False) -> None:
        self._arena = Arena(on_free=self._poison if debug else None)
        self._binder = Binder()
        self._recorder: _Recorder | None = None
        self._modes = ExitStack()
        self._in_session = False
        self._closed = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around all captures: what lives now is left out of garbage collection, which is off meanwhile.

        Raises:
            CaptureError: inside another session.
        """
        if self._in_session:
            raise CaptureError("a capture session inside another", "Capture every key of a plan in one session.")
        self._in_session = True
        try:
            with quiet_collector():
                yield
        finally:
            self._in_session = False

    def begin_segment(self) -> None:
        if self._closed:
            raise CaptureError("the tape is closed", "Make a new graph device.")
        if not self._in_session:
            raise CaptureError("a capture outside a session", "Open the device's session around all captures.")
        if self._recorder is not None:
            raise CaptureError("a segment inside another", "Captures cannot be nested.")
        if torch.is_grad_enabled():
            raise CaptureError(
                "a capture with gradients on",
                "Capture under torch.no_grad() or torch.inference_mode(): autograd adds calls that replay cannot make.",
            )
        self._recorder = _Recorder(self._arena, self._binder)
        self._modes.enter_context(self._recorder)
        self._modes.enter_context(HostAccess())

    def end_segment(self) -> Segment:
        recorder = self._stop()
        return TapeSegment(self, recorder.calls, recorder.outside)

    def abort_segment(self) -> None:
        self._stop()

    def _stop(self) -> _Recorder:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "no segment is being recorded"
        self._modes.close()
        return recorder

    def _poison(self, block: Block) -> None:
        block.memory.fill(POISON)
        if self._recorder is not None:
            self._recorder.calls.append(functools.partial(block.memory.fill, POISON))

    def pool_nbytes(self) -> int:
        return self._arena.nbytes

    def measure_peak(self, fn: Callable[[], object]) -> int:
        """As the contract says, of memory that operators return. What a kernel uses inside itself is not seen, but for
        kernels in Python, whose own operators are."""
        meter = PeakMeter()
        with meter:
            fn()
        return meter.peak

    def time_us(self, fn: Callable[[], object], repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            start = time.perf_counter_ns()
            fn()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return times

    def stopwatch(self) -> Stopwatch:
        return _HostStopwatch()

    def read_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        copy = tensor.clone()
        return lambda: copy

    def memory(self) -> DeviceMemory:
        """Host memory. No allocator tells live from cached bytes here, so `allocated` equals `reserved`: what the
        process holds itself. `non_torch` is what it maps from files: code and libraries."""
        total, free = host_memory()
        private, mapped = _resident_nbytes()
        return DeviceMemory(total, free, allocated=private, reserved=private, non_torch=mapped)

    def synchronize(self) -> None:
        if self._recorder is not None:
            raise CaptureError("synchronize inside a capture", "Nothing in a graph may wait for the host.")

    def check_open(self) -> None:
        if self._closed:
            raise CaptureError("a segment replayed after its tape was closed", "Capture it on a new graph device.")

    def close(self) -> None:
        self._closed = True
        self._arena.close()


class _HostStopwatch(Stopwatch):
    """Launching is running here."""

    def __init__(self) -> None:
        self._started = self._stopped = time.perf_counter_ns()

    def stop(self) -> None:
        self._stopped = time.perf_counter_ns()

    def read_us(self) -> float | None:
        return (self._stopped - self._started) / 1e3


class TapeSegment(Segment):
    """Calls with their arguments bound, in order."""

    def __init__(self, device: TapeDevice, calls: list[Call], outside: dict[int, tuple[str, Tensor]]) -> None:
        self._device, self._calls, self._outside = device, tuple(calls), tuple(outside.values())
        self._is_reset = False

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        self._device.check_open()
        if self._is_reset:
            raise CaptureError("a segment replayed after it was reset", "Record it again.")
        with torch.inference_mode():
            for call in self._calls:
                call()

    def reset(self) -> None:
        self._calls, self._outside, self._is_reset = (), (), True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._outside)


class _Recorder(DispatchMode):
    """Runs each operator, moves what it allocated into the arena, and keeps a call that does it again.

    Kept calls refer to memory, never to the caller's tensors: those of the arena must be free to die, and the others'
    Python objects may be pointed elsewhere.
    """

    def __init__(self, arena: Arena, binder: Binder) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.outside: dict[int, tuple[str, Tensor]] = {}
        self._arena, self._binder = arena, binder

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = decompose(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        check_recordable(func, args, kwargs)
        result = func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return result  # changes how a tensor object looks at its memory, and no memory
        known = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        fresh = [t for t in tensors_in(result) if storage_of(t) not in known]
        if not fresh and not func._schema.is_mutable:
            return result  # a view, or no tensor at all
        moved = {id(tensor): self._arena.tensor_like(tensor) for tensor in fresh}
        if func.overloadpacket not in _UNINITIALISED:
            outs = [(tensor, self._alias(func, moved[id(tensor)])) for tensor in fresh]
            args, kwargs = map_tensors(functools.partial(self._alias, func), (args, kwargs))
            bind, bind_into = self._binder.bind, self._binder.bind_into
            self.calls.append(bind_into(func, args, kwargs, result, outs) if outs else bind(func, args, kwargs))
        return map_tensors(lambda tensor: moved.get(id(tensor), tensor), result)

    def _alias(self, func: OpOverload, tensor: Tensor) -> Tensor:
        """Another tensor over the same memory."""
        alias = self._arena.alias(tensor)
        if alias is None:
            alias = tensor.detach()
            self.outside.setdefault(storage_of(tensor), (f"operand of {func}", alias))
        return alias


def _resident_nbytes() -> tuple[int, int]:
    """Resident bytes of this process: its own, and those mapped from files; all its own where the system does not
    tell them apart."""
    try:
        _, resident, shared = (int(word) for word in Path("/proc/self/statm").read_text().split()[:3])
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return (resident - shared) * page, shared * page
