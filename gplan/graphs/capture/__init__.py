"""Capture and replay of forwards: backends by name, imported when asked for."""

from __future__ import annotations

from importlib import import_module

from gplan.errors import UnsupportedError
from gplan.graphs.capture.base import CaptureBackend, GraphDevice

_BACKENDS = {
    "full": ("gplan.graphs.capture.full", "FullBackend"),
    "breakable": ("gplan.graphs.capture.breakable", "BreakableBackend"),
    "eager": ("gplan.graphs.capture.eager", "EagerBackend"),
}


def make_backend(name: str, device: GraphDevice) -> CaptureBackend:
    """The capture backend of that name, on a graph device.

    Raises:
        UnsupportedError: no such backend in this build.
    """
    if name not in _BACKENDS:
        raise UnsupportedError(f"capture backend {name!r} is not available", f"Choose from {', '.join(_BACKENDS)}.")
    module, cls = _BACKENDS[name]
    backend: CaptureBackend = getattr(import_module(module), cls)(device)
    return backend
