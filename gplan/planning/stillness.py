"""Whether a device's memory keeps still while it is measured: what others take or give back would be booked as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gplan.errors import GplanError
from gplan.graphs.capture.base import GraphDevice
from gplan.units import format_size

TOLERANCE = 256 << 20
"""Bytes outside the allocator that libraries may still take for kernels that are first used while measuring."""


@contextmanager
def still(device: GraphDevice, what: str) -> Iterator[None]:
    """Watches over a stretch in which this process takes no memory outside its allocator.

    Only on a device with memory of its own: on a CPU the whole machine shares it, and own bytes are told apart.

    Raises:
        GplanError: the memory outside the allocator moved by more than `TOLERANCE`.
    """
    if device.name != "cuda":
        yield
        return
    before = device.memory().non_torch
    yield
    after = device.memory().non_torch
    moved = after - before
    if abs(moved) > TOLERANCE:
        verb = "took" if moved > 0 else "gave back"
        raise GplanError(
            f"another process {verb} {format_size(abs(moved))} of the device's memory {what}",
            "Figures measured meanwhile would be wrong. Keep the GPU to this command, and plan again.",
        )
