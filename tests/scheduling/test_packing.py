"""Cuts of prompts that land on buckets, and that nobody waits longer for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Phase
from gplan.scheduling.packing import Packer
from gplan.scheduling.scheduler import Scheduler
from tests.scheduling.serve import Device, Server, answer, limits, request


def packer_to(bucket_us: dict[int, float]) -> Packer:
    buckets = sorted(bucket_us)
    steps = [bucket_us[next(bucket for bucket in buckets if bucket >= size)] for size in range(buckets[-1] + 1)]
    return Packer(steps, buckets)


def linear(*buckets: int) -> Packer:
    return packer_to({size: 1.0 + size for size in buckets})


@pytest.mark.parametrize(
    ("size", "last", "decodes", "left"),
    [
        (13, 13, 0, 0),  # 16 rows are less than 12 and 8
        (32, 32, 0, 0),  # no padding
        (19, 19, 0, 7),  # 32 rows without, 12 and 8 with
        (19, 19, 4, 3),  # 12 and 12 are as many as 16 and 8, which computes more now
        (19, 3, 0, 0),  # the chunk would be gone
        (19, 19, 13, 0),  # the next step would have 16 tokens at least
    ],
)
def test_cuts_by_hand(size: int, last: int, decodes: int, left: int) -> None:
    assert linear(8, 12, 16, 32).tokens_to_leave(size, last, decodes) == left


@given(st.data())
def test_a_cut_saves_time_and_leaves_something(data: st.DataObject) -> None:
    largest = data.draw(st.integers(1, 40))
    sizes = sorted({*data.draw(st.sets(st.integers(1, largest))), largest})
    times = {size: data.draw(st.floats(1, 100)) for size in sizes}
    size = data.draw(st.integers(1, largest))
    last, decodes = data.draw(st.integers(1, size)), data.draw(st.integers(0, 20))

    def time(size: int) -> float:
        return next(times[bucket] for bucket in sizes if bucket >= size)

    left = packer_to(times).tokens_to_leave(size, last, decodes)
    assert 0 <= left < last
    if left:
        assert time(size - left) + time(decodes + left) < time(size)
        assert size - left in sizes


def steps(packer: Packer | None, *lengths: int) -> list[list[int]]:
    bounds = limits(max_batch=4, max_len=64, chunk=16)
    server = Server(Scheduler(bounds, 65, packer), Device(bounds, 65), lag=0)
    for index, length in enumerate(lengths):
        server.scheduler.add(request(f"r{index}", range(1 + 40 * index, 1 + 40 * index + length), 2, stops=False))
    server.run()
    return [[chunk.length for chunk in batch.chunks] for batch in server.batches if batch.phase is Phase.PREFILL]


def test_the_scheduler_cuts_the_last_prompt_where_a_step_would_be_padded_far() -> None:
    packer = packer_to({2: 2.0, 8: 9.0, 16: 17.0})
    assert steps(None, 9) == [[9]]
    assert steps(packer, 9) == [[8], [1]]
    assert steps(packer, 5, 4) == [[5, 3], [1, 1]], "the second step decodes the first, and computes the rest"
    assert steps(packer, 25) == [[16], [8], [1]]
    assert steps(packer_to({1: 8.5, 8: 9.0, 16: 17.0}), 9) == [[9]], "two steps would take longer"
    assert steps(packer, 8, 1) == [[8, 1]], "a chunk of which nothing would be left stays"


def test_who_comes_meanwhile_waits_for_the_rest_of_a_cut_prompt() -> None:
    """And no longer: without the cut, it would have waited for the longer step."""
    bounds = limits(max_batch=4, max_len=64, chunk=16)
    server = Server(Scheduler(bounds, 65, packer_to({1: 2.0, 8: 9.0, 16: 17.0})), Device(bounds, 65), lag=0)
    server.scheduler.add(request("cut", range(1, 10), 2, stops=False))
    server.step()
    server.scheduler.add(request("later", range(50, 54), 2, stops=False))
    server.run()
    chunks = [[(chunk.request.id, chunk.length) for chunk in batch.chunks] for batch in server.batches[:3]]
    assert chunks == [[("cut", 8)], [("cut", 1)], [("cut", 1), ("later", 4)]]


def test_cut_prompts_share_their_pages_when_they_are_computed() -> None:
    bounds = limits(max_batch=4, max_len=64, chunk=16)
    packer = packer_to({1: 2.0, 8: 9.0, 16: 17.0})
    server = Server(Scheduler(bounds, 65, packer), Device(bounds, 65), lag=0)
    for name in ("a", "b"):
        server.scheduler.add(request(name, range(1, 10), 2, stops=False))
        while server.scheduler.has_work and not (name == "a" and len(server.batches) == 1):
            server.step()
    server.run()
    server.scheduler.check()
    assert {tuple(done.tokens[9:]) for done in server.finished} == {tuple(answer(range(1, 10), 2, 64, stops=False))}


def test_nothing_is_cut_for_it_while_others_wait() -> None:
    packer = packer_to({1: 2.0, 8: 9.0, 16: 17.0})
    bounds = limits(max_batch=1, max_len=64, chunk=16)
    server = Server(Scheduler(bounds, 65, packer), Device(bounds, 65), lag=0)
    for name in ("first", "waits"):
        server.scheduler.add(request(name, range(1, 10), 2, stops=False))
    server.step()
    assert [chunk.length for chunk in server.batches[0].chunks] == [9]
