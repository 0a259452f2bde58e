"""A ladder drawn against the step sizes it was solved for, in characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_BARS = " ▁▂▃▄▅▆▇█"
_MARK = "╵"


def draw_ladder(
    steps: Sequence[tuple[int, int]], buckets: Iterable[int], max_size: int, width: int = 64
) -> tuple[str, str, str]:
    """Three lines over one axis of sizes 1 to `max_size`: how many steps ran at each size, where buckets stand, and
    as many of their sizes as fit; without buckets, of the axis' ends.

    Args:
        steps: (size, steps) ascending by size.
        width: columns; where there are more sizes than columns, neighbours share one and its bar is their sum.
    """
    width = min(width, max_size)

    def column(size: int) -> int:
        return (size - 1) * width // max_size

    counts = [0] * width
    for size, number in steps:
        counts[column(size)] += number
    most = max(counts, default=0) or 1
    bars = "".join(_BARS[-(-number * (len(_BARS) - 1) // most)] for number in counts)
    marks, labels = [" "] * width, [" "] * (width + len(str(max_size)))
    ladder = tuple(buckets)
    for size in _last_first(ladder or (1, max_size)):
        at = column(size)
        marks[at] = _MARK if ladder else " "
        text = str(size)
        if all(character == " " for character in labels[max(0, at - 1) : at + len(text) + 1]):
            labels[at : at + len(text)] = text
    return bars.rstrip(), "".join(marks).rstrip(), "".join(labels).rstrip()


def drawn(steps: Sequence[tuple[int, int]], buckets: Iterable[int], max_size: int, unit: str) -> Iterator[str]:
    """The lines of `draw_ladder` with their names: none where there are no steps, no marks where there are no
    buckets."""
    if steps:
        bars, marks, labels = draw_ladder(steps, buckets, max_size)
        yield f"steps    {bars}"
        if marks:
            yield f"buckets  {marks}"
        yield f"{unit:8} {labels}"


def _last_first(buckets: Iterable[int]) -> list[int]:
    """The largest bucket is labelled before the others, which then take what room is left."""
    ordered = sorted(buckets)
    return [*ordered[-1:], *ordered[:-1]]
