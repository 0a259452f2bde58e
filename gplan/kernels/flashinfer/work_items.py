"""How a decode step's contexts are shared out among the programs that attend to them. No device is needed here."""

from __future__ import annotations

import numpy as np

from gplan.kernels.base import IntArray

CUT_STEP = 64
"""Contexts are cut at multiples of so many tokens."""
CUT_TOKENS = 450
"""What cutting costs every lane, in programs that start and results that are merged, as tokens that could be read
meanwhile. Measured on an H200."""
NO_WORK = -1
"""Request of an item that a program finds nothing to do for."""


def work_items(lengths: IntArray, lanes: int) -> tuple[IntArray, IntArray]:
    """Cuts contexts into items for `lanes` programs that run at once and each take the next item when they are done.

    Contexts are either left whole, or laid end to end and cut where a lane is full (McNaughton's rule): all lanes then
    end together, for one cut more per lane. Fewer contexts than lanes are always cut; for others it is estimated which
    of the two ends first. The longest items come first, so that none of them runs alone at the end.

    Args:
        lengths: [n] tokens of each request, at least 1.

    Returns:
        items: [m, 4] int32: request, first token, end, number of the part; m is at most n + lanes.
        item_indptr: [n + 1] int32: part numbers of each request.
    """
    lengths = lengths.astype(np.int64)
    padded = -(-lengths // CUT_STEP) * CUT_STEP
    ends = np.cumsum(padded)
    starts = ends - padded
    full = -(-int(ends[-1]) // (lanes * CUT_STEP)) * CUT_STEP
    cuts = starts
    if len(lengths) < lanes or full + CUT_TOKENS < _time_whole(padded, lanes):
        cuts = np.union1d(starts, np.arange(full, ends[-1], full))
    request = np.searchsorted(ends, cuts, side="right")
    first = cuts - starts[request]
    end = np.minimum(np.append(cuts[1:], ends[-1]) - starts[request], lengths[request])
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.bincount(request, minlength=len(lengths)), out=indptr[1:])
    order = np.argsort(first - end, kind="stable")
    items = np.stack([request, first, end, np.arange(len(cuts))], axis=1)[order].astype(np.int32)
    return items, indptr


def _time_whole(lengths: IntArray, lanes: int) -> float:
    """Tokens that the busiest lane takes when no context is cut: each round by its longest, or all lanes full but for
    half of the longest in the last round, whichever is less; but at least k + 1 times the (k * lanes + 1)th longest,
    since so many as long share some lane. Rows of padding fill gaps: a last round of them tells nothing of the others.
    """
    ordered = np.sort(lengths)[::-1]
    firsts = ordered[::lanes]
    by_lanes = float(ordered.sum()) / lanes + float(ordered[-min(lanes, len(ordered))]) / 2
    least = float((firsts * np.arange(1, len(firsts) + 1)).max())
    return max(least, min(float(firsts.sum()), by_lanes))
