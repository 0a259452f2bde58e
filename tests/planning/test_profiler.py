"""Figures that are compared are taken over the same stretch of time."""

from __future__ import annotations

from functools import partial

from gplan.graphs.capture.tape import TapeDevice
from gplan.planning.profiler import Patience, time_in_turns


def test_what_is_compared_is_timed_in_turns() -> None:
    log: list[str] = []
    calls = [partial(log.append, name) for name in "ab"]
    timings = time_in_turns(TapeDevice(), calls, Patience(min_runs=3, max_runs=3, seconds=0, turns=3))
    assert "".join(log) == "ababab"
    assert [timing.runs for timing in timings] == [3, 3]


def test_without_turns_each_is_timed_by_itself() -> None:
    log: list[str] = []
    calls = [partial(log.append, name) for name in "ab"]
    time_in_turns(TapeDevice(), calls, Patience(min_runs=3, max_runs=3, seconds=0))
    assert "".join(log) == "aaabbb"


def test_runs_of_all_turns_are_as_many_as_were_asked_for() -> None:
    (timing,) = time_in_turns(TapeDevice(), [lambda: None], Patience(min_runs=4, max_runs=10, seconds=60, turns=3))
    assert timing.runs == 12, "rounded up in each"
