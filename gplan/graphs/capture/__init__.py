"""Capture and replay of forwards: backends by name and graph devices by machine, imported when asked for."""

from __future__ import annotations

from importlib import import_module

import torch

from gplan.errors import UnsupportedError
from gplan.graphs.capture.base import CaptureBackend, GraphDevice

_BACKENDS = {
    "full": ("gplan.graphs.capture.full", "FullBackend"),
    "breakable": ("gplan.graphs.capture.breakable", "BreakableBackend"),
    "piecewise": ("gplan.graphs.capture.piecewise", "PiecewiseBackend"),
    "eager": ("gplan.graphs.capture.eager", "EagerBackend"),
}

_DEVICES = {
    "cpu": ("gplan.graphs.capture.tape", "TapeDevice"),
    "cuda": ("gplan.graphs.capture.device", "CudaGraphDevice"),
}


def make_graph_device(device: torch.device) -> GraphDevice:
    """What records and replays on a device.

    Raises:
        UnsupportedError: neither a CPU nor a CUDA device.
    """
    if device.type not in _DEVICES:
        raise UnsupportedError(f"no graphs on a {device.type} device", f"Choose from {', '.join(_DEVICES)}.")
    module, cls = _DEVICES[device.type]
    make = getattr(import_module(module), cls)
    graphs: GraphDevice = make() if device.type == "cpu" else make(device)
    return graphs


def make_backend(name: str, device: GraphDevice, *, debug: bool = False) -> CaptureBackend:
    """The capture backend of that name, on a graph device.

    Args:
        debug: one that looks the same to a runner, but runs the forward again where that one replays.

    Raises:
        UnsupportedError: no such backend in this build.
    """
    if name not in _BACKENDS:
        raise UnsupportedError(f"capture backend {name!r} is not available", f"Choose from {', '.join(_BACKENDS)}.")
    module, cls = _BACKENDS[name]
    kind: type[CaptureBackend] = getattr(import_module(module), cls)
    if debug:
        from gplan.graphs.capture.eager import EagerBackend

        return EagerBackend(device, cuts_at_breaks=getattr(kind, "cuts_at_breaks", False))
    return kind(device)
