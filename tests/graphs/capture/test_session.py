"""Capture sessions: what they do to the garbage collector, and that they do not nest."""

from __future__ import annotations

import gc

import pytest

from gplan.errors import CaptureError
from gplan.graphs.capture.base import GraphDevice


def test_session_stops_garbage_collection_and_restores_it(graph_device: GraphDevice) -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with graph_device.session():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > frozen
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_session_does_not_enable_what_was_off(graph_device: GraphDevice) -> None:
    gc.disable()
    try:
        with pytest.raises(KeyError), graph_device.session():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_sessions_do_not_nest(graph_device: GraphDevice) -> None:
    with graph_device.session():
        with pytest.raises(CaptureError, match="session"), graph_device.session():
            pass
        assert not gc.isenabled()
    with graph_device.session():
        pass
