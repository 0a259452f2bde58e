"""Cuts of prompts that land on buckets, and that nobody waits longer for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Phase
from gplan.scheduling.packing import Packer
from gplan.scheduling.scheduler import Scheduler
from tests.scheduling.serve import Device, Server, limits, request


def linear(*buckets: int) -> Packer:
    return Packer({size: 1.0 + size for size in buckets})


@pytest.mark.parametrize(
    ("last", "rest", "decodes", "left"),
    [
        (16, 5, 0, 0),  # 16 and 8 rows; 12 and 12 are as many, and 16 computes more now
        (16, 1, 0, 4),  # 16 and 8 rows without, 12 and 8 with
        (16, 8, 0, 0),  # no padding to save
        (3, 1, 0, 0),  # the chunk would be gone
        (16, 17, 0, 0),  # the rest does not fit the next step
        (16, 1, 4, 0),  # the next step would have 9 tokens, and pad to 12
        (16, 1, 3, 4),
    ],
)
def test_cuts_by_hand(last: int, rest: int, decodes: int, left: int) -> None:
    assert linear(8, 12, 16).tokens_to_leave(last, rest, decodes) == left


@given(st.data())
def test_a_cut_saves_time_and_leaves_something(data: st.DataObject) -> None:
    largest = data.draw(st.integers(1, 40))
    sizes = sorted({*data.draw(st.sets(st.integers(1, largest))), largest})
    times = {size: data.draw(st.floats(1, 100)) for size in sizes}
    last, rest = data.draw(st.integers(1, largest)), data.draw(st.integers(1, 60))
    decodes = data.draw(st.integers(0, 20))

    def time(size: int) -> float:
        return next(times[bucket] for bucket in sizes if bucket >= size)

    left = Packer(times).tokens_to_leave(last, rest, decodes)
    assert 0 <= left < last
    if left:
        assert time(largest - left) + time(rest + decodes + left) < time(largest) + time(rest + decodes)
        assert largest - left in sizes


def steps(packer: Packer | None, *lengths: int) -> list[list[int]]:
    bounds = limits(max_batch=4, max_len=64, chunk=16)
    server = Server(Scheduler(bounds, 65, packer), Device(bounds, 65), lag=0)
    for index, length in enumerate(lengths):
        server.scheduler.add(request(f"r{index}", range(1 + 40 * index, 1 + 40 * index + length), 2, stops=False))
    server.run()
    return [[chunk.length for chunk in batch.chunks] for batch in server.batches if batch.phase is Phase.PREFILL]


def test_the_scheduler_moves_the_last_cut_of_the_last_prompt() -> None:
    packer = linear(8, 12, 16)
    assert steps(None, 33) == [[16], [16], [1]]
    assert steps(packer, 33) == [[16], [12], [5]]
    assert steps(packer, 5, 12) == [[5, 7], [1, 5]]
    assert steps(packer, 5, 15) == [[5, 11], [1, 4]], "the decode of the first counts in the second step"
    assert steps(packer, 12, 6) == [[12, 4], [1, 2]], "a chunk of which nothing would be left stays"


def test_nothing_is_cut_for_it_while_others_wait() -> None:
    packer = linear(8, 12, 16)
    assert steps(packer, 17, 20) == steps(None, 17, 20)
