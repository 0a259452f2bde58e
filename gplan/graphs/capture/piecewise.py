"""Captures a compiled forward in segments around attention: the pieces are the compiler's, the graphs ours."""

from __future__ import annotations

from gplan.graphs.capture.breakable import BreakableBackend


class PiecewiseBackend(BreakableBackend):
    """As breakable; that the forward between the breaks was compiled is its runner's doing."""

    name = "piecewise"
    compiles = True
