"""How a decode step's contexts are shared out among the programs that attend to them. No device is needed here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gplan.kernels.base import IntArray

CUT_STEP = 64
"""Contexts are cut at multiples of so many tokens."""
CUT_TOKENS = 450
"""What cutting costs every lane, in programs that start and results that are merged, as tokens that could be read
meanwhile. Measured on an H200."""
NO_WORK = -1
"""Request of an item that a program finds nothing to do for."""

Offsets = npt.NDArray[np.int64]


def work_items(lengths: IntArray, lanes: int, padding: int = 0) -> tuple[IntArray, IntArray]:
    """Cuts contexts into items for `lanes` programs that run at once and each take the next item when they are done.

    Contexts are either left whole, or laid end to end and cut where a lane is full (McNaughton's rule): all lanes then
    end together, for one cut more per lane. Fewer contexts than lanes are always cut; for others it is estimated which
    of the two ends first. The longest items come first, so that none of them runs alone at the end.

    Args:
        lengths: [n] tokens of each request, at least 1.
        padding: requests after these that read nothing: each has an item of no tokens, after all others.

    Returns:
        items: [m, 4] int32: request, first token, end, number of the part; m is at most n + padding + lanes.
        item_indptr: [n + padding + 1] int32: part numbers of each request.
    """
    request, first, end = _cut(lengths.astype(np.int64), lanes)
    num_real, part = len(lengths), np.arange(len(request))
    order = np.argsort(first - end, kind="stable")
    items = np.stack([request, first, end, part], axis=1)[order]
    counts = np.bincount(request, minlength=num_real)
    if padding:
        nothing, unread = np.zeros(padding, np.int64), np.arange(padding)
        items = np.concatenate([items, np.stack([num_real + unread, nothing, nothing, len(part) + unread], axis=1)])
        counts = np.concatenate([counts, np.ones(padding, np.int64)])
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return items.astype(np.int32), indptr


def _cut(lengths: Offsets, lanes: int) -> tuple[Offsets, Offsets, Offsets]:
    """Request, first token and end of each part, in order."""
    if not len(lengths):
        return lengths, lengths, lengths
    padded = -(-lengths // CUT_STEP) * CUT_STEP
    ends = np.cumsum(padded)
    starts = ends - padded
    full = -(-int(ends[-1]) // (lanes * CUT_STEP)) * CUT_STEP
    cuts = starts
    if len(lengths) < lanes or full + CUT_TOKENS < _time_whole(padded, lanes):
        cuts = np.union1d(starts, np.arange(full, ends[-1], full))
    request = np.searchsorted(ends, cuts, side="right")
    end = np.minimum(np.append(cuts[1:], ends[-1]) - starts[request], lengths[request])
    return request, cuts - starts[request], end


def _time_whole(lengths: Offsets, lanes: int) -> float:
    """Tokens that the busiest lane takes when no context is cut: each round by its longest, or all lanes full but for
    half of the longest in the last round, whichever is less; but at least k + 1 times the (k * lanes + 1)th longest,
    since so many as long share some lane. Short contexts fill gaps: a last round of them tells nothing of the others.
    """
    ordered = np.sort(lengths)[::-1]
    firsts = ordered[::lanes]
    by_lanes = float(ordered.sum()) / lanes + float(ordered[-min(lanes, len(ordered))]) / 2
    least = float((firsts * np.arange(1, len(firsts) + 1)).max())
    return max(least, min(float(firsts.sum()), by_lanes))
