"""Progress of long work on stderr: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cli.failure import say

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`; a stage is over when `done == total`."""

_LINE_EVERY_S = 10.0


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A `Progress` that shows what it is told for as long as the block lasts."""
    if sys.stderr.isatty():
        with _bars() as progress:
            yield progress
    else:
        yield _Lines()


class _Lines:
    """One line when a stage begins, when it ends, and every few seconds between."""

    def __init__(self) -> None:
        self._stage = ""
        self._began_at = 0.0
        self._said_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        begins = stage != self._stage
        if begins:
            self._stage, self._began_at = stage, now
        if done >= total:
            say(f"{stage}: done in {now - self._began_at:.1f} s")
            self._stage = ""
        elif begins or now - self._said_at >= _LINE_EVERY_S:
            say(f"{stage}: {done}/{total}")
        else:
            return
        self._said_at = now


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar for each stage, kept when it is over."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=Console(stderr=True)) as bars:

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield progress
