"""Plain-text layout shared by the human views: sections, columns and short numbers. No colour where none is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

MARGIN = 12
"""Columns that the names of sections take."""


def section(name: str, lines: Iterable[str]) -> list[str]:
    """Lines under a name that stands in the margin of the first."""
    body = list(lines) or ["none"]
    head = click.style(name, bold=True) + " " * max(1, MARGIN - len(name))
    return [head + body[0], *(" " * MARGIN + line if line else "" for line in body[1:])]


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A table: the first `left` columns are flush left, numbers after them flush right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def short(value: float) -> str:
    """Three significant digits, never in powers of ten: 0.0523, 9.5, 412, 18300."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def count(number: int, word: str) -> str:
    """`1 layer`, `30 layers`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def quantity(number: int) -> str:
    """`135 M`, `8.03 B`."""
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return str(number)
