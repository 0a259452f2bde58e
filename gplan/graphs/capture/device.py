"""The CUDA graph device: segments are `torch.cuda.CUDAGraph`s over one private memory pool and one capture stream.

The pool is torch's: allocations of a capture come from it, stay private to its graphs, and freed ones are used again by
later captures of the same pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from gplan.errors import CaptureError
from gplan.graphs.capture.base import DeviceMemory, GraphDevice, Segment, Stopwatch
from gplan.graphs.capture.compilations import count_compilations
from gplan.graphs.capture.quiet import quiet_collector


class CudaGraphDevice(GraphDevice):
    """Records on one GPU. No other thread may use the GPU during a session.

    A capture that failed leaves CUDA's and torch's state undefined, so it is not tried again: the process should end.
    """

    name = "cuda"
    result_lag = 1
    warmup_passes = 2

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)
        self._recording: torch.cuda.CUDAGraph | None = None
        self._segments: list[CudaSegment] = []
        self._in_session = False
        self._has_failed = False
        self._compilations = count_compilations()

    @contextmanager
    def session(self) -> Iterator[None]:
        if self._in_session:
            raise CaptureError("a capture session inside another", "Capture every key of a plan in one session.")
        torch.cuda.synchronize(self._device)
        self._in_session = True
        try:
            with quiet_collector(), torch.cuda.stream(self._stream):
                self._take_library_memory()
                yield
                self._stream.synchronize()
        finally:
            self._in_session = False

    def _take_library_memory(self) -> None:
        """cuBLAS has a workspace per stream, which torch allocates at the first product and keeps: that is not to be
        in the graph pool, where the first graph would be charged with it."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.zeros((16, 16), dtype=dtype, device=self._device)
            torch.addmm(x[0], x, x)
            torch.mm(x, x)
        self._stream.synchronize()

    def begin_segment(self) -> None:
        if self._has_failed:
            raise CaptureError("an earlier capture failed in this process", "Start again in a new process.")
        if not self._in_session:
            raise CaptureError("a capture outside a session", "Open the device's session around all captures.")
        if self._recording is not None:
            raise CaptureError("a segment inside another", "Captures cannot be nested.")
        if torch.is_grad_enabled():
            raise CaptureError("a capture with gradients on", "Capture under torch.no_grad().")
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._recording = graph

    def end_segment(self) -> Segment:
        graph, self._recording = self._recording, None
        assert graph is not None, "no segment is being recorded"
        try:
            graph.capture_end()
        except RuntimeError as error:
            self._has_failed = True
            raise CaptureError(
                f"the capture is invalid: {error}", "Something in it waited for the GPU or left a stream unjoined."
            ) from error
        segment = CudaSegment(graph)
        self._segments.append(segment)
        return segment

    def abort_segment(self) -> None:
        graph, self._recording = self._recording, None
        self._has_failed = True
        if graph is not None:
            try:
                graph.capture_end()
            except RuntimeError:
                return

    def pool_nbytes(self) -> int:
        blocks = torch.cuda.memory_snapshot(self._pool)
        return sum(block["total_size"] for block in blocks if tuple(block["segment_pool_id"]) == tuple(self._pool))

    def measure_peak(self, fn: Callable[[], object]) -> int:
        """As the contract says, of memory that torch allocates."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        fn()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self._device) - before

    def time_us(self, fn: Callable[[], object], repeats: int) -> list[float]:
        """Runs follow each other without a wait, so what the host does between launches counts only where the GPU
        runs out of work."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            fn()
            event.record()
        self.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairwise(events)]

    def stopwatch(self) -> Stopwatch:
        return _EventStopwatch()

    def read_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> Tensor:
            copied.synchronize()
            return host

        return read

    def memory(self) -> DeviceMemory:
        """`non_torch` is everything on the device outside this process's allocator; with the GPU to ourselves, that is
        the CUDA context, libraries and modules."""
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        return DeviceMemory(total, free, allocated, reserved, non_torch=max(0, total - free - reserved))

    def compilations(self) -> int:
        return self._compilations.number

    def synchronize(self) -> None:
        if self._recording is not None:
            raise CaptureError("synchronize inside a capture", "Nothing in a graph may wait for the host.")
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.synchronize()
        for segment in self._segments:
            segment.reset()
        self._segments.clear()


class _EventStopwatch(Stopwatch):
    """Two events on the current stream."""

    def __init__(self) -> None:
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    def read_us(self) -> float | None:
        return self._start.elapsed_time(self._end) * 1e3 if self._end.query() else None


class CudaSegment(Segment):
    """One instantiated graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph

    def replay(self) -> None:
        if self._graph is None:
            raise CaptureError("a segment replayed after its device was closed", "Capture it on a new graph device.")
        self._graph.replay()

    def reset(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """CUDA does not tell."""
        return iter(())
