"""Captures a forward whole, in one segment: attention and everything else inside."""

from __future__ import annotations

from gplan.graphs.capture.base import CaptureFn
from gplan.graphs.capture.keyed import KeyedBackend, Recording, checked_outputs


class FullBackend(KeyedBackend):
    """One segment per key. Calls declared as breaks are recorded like any other."""

    name = "full"
    cuts_at_breaks = False

    def _record(self, fn: CaptureFn, num_breaks: int) -> Recording:
        self.device.begin_segment()
        try:
            outputs = fn()
        except BaseException:
            self.device.abort_segment()
            raise
        return Recording((("graph", self.device.end_segment()),), checked_outputs(outputs))
