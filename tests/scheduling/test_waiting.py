"""Turns among clients: fair by tokens, in order of arrival within one, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import Request
from gplan.scheduling.entry import Entry
from gplan.scheduling.scheduler import Scheduler
from gplan.scheduling.waiting import OLDEST_EVERY, WaitingQueue
from tests.scheduling.serve import Device, Server, answer, limits, request


def entry(client: str, name: str, tokens: int = 10) -> Entry:
    asked = request(name, [1] * (tokens // 2), tokens - tokens // 2)
    asked.client = client
    return Entry(asked, tokens)


def queue_of(entries: Sequence[Entry]) -> WaitingQueue:
    queue = WaitingQueue()
    for each in entries:
        queue.join(each)
    return queue


def let_in(queue: WaitingQueue, count: int) -> list[Entry]:
    return [queue.let_in() for _ in range(count)]


def names(entries: Sequence[Entry]) -> str:
    return " ".join(each.request.id for each in entries)


def test_one_client_is_served_in_order_of_arrival() -> None:
    queue = queue_of([entry("a", f"a{i}", tokens=2 + 3 * (i % 4)) for i in range(100)])
    assert names(let_in(queue, 100)) == " ".join(f"a{i}" for i in range(100))
    assert len(queue) == 0
    assert queue.next is None


def test_who_comes_to_a_crowd_of_one_client_is_next_but_one() -> None:
    queue = queue_of([entry("crowd", f"c{i}") for i in range(200)])
    let_in(queue, 20)
    queue.join(entry("single", "s0"))
    assert "s0" in names(let_in(queue, 2)), "by arrival alone it would be the 181st"


def test_clients_with_enough_to_do_get_equal_tokens() -> None:
    sizes = {"small": 4, "large": 60, "middle": 17}
    queue = queue_of([entry(client, f"{client}{i}", size) for client, size in sizes.items() for i in range(500)])
    got: Counter[str] = Counter()
    for _ in range(500):
        got[queue.next.request.client] += queue.next.end if queue.next else 0
        queue.let_in()
    assert max(got.values()) - min(got.values()) <= 2 * max(sizes.values())


def test_tokens_that_were_not_generated_are_given_back() -> None:
    """Both clients ask for as much, but answers to one end after a tenth of it: it is let in ten times as often."""
    queue = queue_of([entry(client, f"{client}{i}", 100) for client in ("short", "long") for i in range(400)])
    got: Counter[str] = Counter()
    for _ in range(220):
        each = queue.let_in()
        queue.settle(each, 10 if each.request.client == "short" else 100)
        got[each.request.client] += 1
    assert 7 <= got["short"] / got["long"] <= 11


def test_idle_clients_save_up_no_turns() -> None:
    queue = queue_of([entry("idle", "i0"), *(entry("busy", f"b{i}") for i in range(300))])
    let_in(queue, 150)
    for index in range(20):
        queue.join(entry("idle", f"late{index}"))
    clients = Counter(each.request.client for each in let_in(queue, 20))
    assert clients["busy"] >= 8


def test_who_gave_its_pages_back_is_the_next() -> None:
    queue = queue_of([entry("a", "a0"), entry("b", "b0"), entry("a", "a1")])
    first, second = let_in(queue, 2)
    queue.put_back(second)
    queue.put_back(first)
    assert names(list(queue)) == "a0 b0 a1"
    assert let_in(queue, 3)[:2] == [first, second]


def test_a_large_request_is_not_passed_over_once_it_is_the_next() -> None:
    queue = queue_of([entry("large", "large", 1000)])
    assert queue.next is not None
    for index in range(50):
        queue.join(entry(f"c{index}", f"small{index}", 2))
        assert queue.next.request.id == "large"
    queue.give_up(queue.next)
    queue.check()
    assert queue.next.request.id == "small0"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(2, 50), st.integers(0, 4)), min_size=1, max_size=150))
def test_nobody_waits_for_ever(events: list[tuple[int, int, int]]) -> None:
    """Any arrivals, admissions, ends and withdrawals, with ever new clients: whoever has `n` older ones before it is
    let in within `(n + 1) * OLDEST_EVERY` admissions, and no client's requests overtake each other."""
    queue, admitted, last = WaitingQueue(), 0, Counter[str]()
    waiting: dict[str, tuple[Entry, int]] = {}
    for number, (client, tokens, action) in enumerate(events):
        name = f"new{number}" if client == 5 else f"c{client}"
        each = entry(name, str(number), tokens)
        queue.join(each)
        waiting[each.request.id] = (each, admitted + (len(waiting) + 1) * OLDEST_EVERY)
        if action == 4:
            gone, _ = waiting.pop(next(iter(waiting)))
            queue.give_up(gone)
            queue.settle(gone, gone.request.num_tokens)
        for _ in range(min(action // 2, len(queue))):
            each = queue.let_in()
            admitted += 1
            _, by = waiting.pop(each.request.id)
            assert admitted <= by
            assert int(each.request.id) >= last[each.request.client], "it overtook one of its client's own"
            last[each.request.client] = int(each.request.id)
            queue.settle(each, max(1, tokens // 2))
        queue.check()
    while len(queue):
        admitted += 1
        assert admitted <= waiting.pop(queue.let_in().request.id)[1]
    assert not waiting


@pytest.mark.parametrize("lag", [0, 1])
def test_a_crowd_does_not_keep_a_single_client_waiting(lag: int) -> None:
    bounds = limits(max_batch=2, max_len=32)
    scheduler = Scheduler(bounds, 17)
    server = Server(scheduler, Device(bounds, 17), lag)

    def ask(client: str, name: str) -> Request:
        asked = request(name, [5, 6, 7], 8, stops=False)
        asked.client = client
        scheduler.add(asked)
        return asked

    for index in range(50):
        ask("crowd", f"c{index}")
    for _ in range(5):
        server.step()
    single = ask("single", "s")
    server.run()
    order = [finished.id for finished in server.finished]
    assert order.index("s") <= 5
    assert single.tokens[3:] == answer([5, 6, 7], 8, 32, stops=False)
    assert sorted(order) == sorted([*(f"c{index}" for index in range(50)), "s"])
    scheduler.check()
