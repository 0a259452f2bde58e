"""The prefix cache: what it finds and whom it evicts; and the scheduler with it: what is shared when, and right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.plan import Limits
from gplan.core import Phase, Request
from gplan.scheduling.holdings import PrefixCounts
from gplan.scheduling.prefix_cache import PrefixCache, Run
from gplan.scheduling.scheduler import Scheduler
from tests.scheduling.serve import STOP_TOKEN, Device, Server, answer, draw, limits, request

PAGE = 2


def keep(cache: PrefixCache, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
    """What a request does that comes with tokens and pages for all of them, and ends: the pages that it got back."""
    end, taken = cache.extend(cache.root, 0, tokens, pages)
    cache.leave(end)
    return list(pages[:taken])


def known(cache: PrefixCache, tokens: Sequence[int]) -> list[int]:
    run, pages = cache.find(tokens, len(tokens) // PAGE)
    cache.leave(run)
    return pages


def test_the_longest_beginning_is_found_page_by_page() -> None:
    cache = PrefixCache(PAGE)
    keep(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert known(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == [10, 11, 12]
    assert known(cache, [1, 2, 3, 4, 9, 9]) == [10, 11]
    assert known(cache, [1, 2, 9, 9, 5, 6]) == [10]
    assert known(cache, [1, 9]) == known(cache, [3, 4]) == known(cache, [1]) == []
    assert keep(cache, [1, 2, 3, 4, 9, 9], [20, 21, 22]) == [20, 21], "the cache has these tokens already"
    assert known(cache, [1, 2, 3, 4, 9, 9]) == [10, 11, 22]
    assert known(cache, [1, 2, 3, 4, 5, 6]) == [10, 11, 12]
    assert sorted(cache.check([])) == [10, 11, 12, 22]


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache = PrefixCache(PAGE)
    keep(cache, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    keep(cache, [5, 5, 6, 6], [20, 21])
    keep(cache, [1, 1, 2, 2, 4, 4], [0, 0, 13])
    assert cache.evict(1) == [12]
    assert known(cache, [5, 5, 6, 6]) == [20, 21]
    assert [cache.evict(1)[0] for _ in range(3)] == [13, 11, 10]
    assert sorted(cache.evict(2)) == [20, 21]
    assert (cache.check([]), cache.num_pages, cache.num_evicted) == ([], 0, 6)


def test_what_is_used_is_never_evicted() -> None:
    cache = PrefixCache(PAGE)
    keep(cache, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    run, pages = cache.find([1, 1, 2, 2, 9, 9], 3)
    assert pages == [10, 11]
    assert (cache.num_idle, cache.num_in_use) == (1, 2)
    assert cache.count_in_use([1, 1, 2, 2, 3, 3], 3) == 2
    assert cache.evict(1) == [12]
    with pytest.raises(AssertionError, match="1 pages wanted, 0 idle"):
        cache.evict(1)
    cache.check([run])
    cache.leave(run)
    assert sorted(cache.evict(2)) == [10, 11]


def test_a_use_that_is_not_ended_is_noticed() -> None:
    cache = PrefixCache(PAGE)
    keep(cache, [1, 1], [10])
    cache.find([1, 1], 1)
    with pytest.raises(AssertionError, match="another number of requests"):
        cache.check([])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.booleans()), max_size=30), st.data())
def test_against_a_list_of_beginnings(requests: list[tuple[list[int], bool]], data: st.DataObject) -> None:
    """Without eviction, what is found is the longest beginning of anything that was kept."""
    cache, beginnings, next_page = PrefixCache(PAGE), dict[tuple[int, ...], int](), 1
    using: list[Run] = []
    for tokens, stays in requests:
        full = len(tokens) // PAGE
        run, pages = cache.find(tokens, full)
        expected = [beginnings.get(tuple(tokens[: PAGE * (i + 1)])) for i in range(full)]
        assert pages == [page for page in expected if page is not None]
        own = list(range(next_page, next_page + full - len(pages)))
        next_page += len(own)
        run, taken = cache.extend(run, len(pages), tokens, pages + own)
        assert taken == len(pages)
        beginnings |= {tuple(tokens[: PAGE * (i + 1)]): page for i, page in enumerate(pages + own)}
        using.append(run)
        if not stays:
            cache.leave(using.pop(data.draw(st.integers(0, len(using) - 1))))
        assert sorted(cache.check(using)) == sorted(beginnings.values())


# In the scheduler ---------------------------------------------------------------------------------------------------


def serve(
    requests: Sequence[Request], *, bounds: Limits | None = None, num_pages: int = 33, lag: int = 0
) -> tuple[Server, PrefixCounts]:
    """One after another, as far as each can begin when the one before has ended."""
    bounds = bounds or limits()
    server = Server(Scheduler(bounds, num_pages), Device(bounds, num_pages), lag)
    for each in requests:
        server.scheduler.add(each)
        server.run()
    server.scheduler.check()
    return server, server.scheduler.prefix_counts


def lengths(server: Server) -> list[list[int]]:
    return [[chunk.length for chunk in batch.chunks] for batch in server.batches if batch.phase is Phase.PREFILL]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_conversation_computes_only_what_is_new(lag: int) -> None:
    first = request("a", range(1, 11), 6, stops=False)
    server, _ = serve([first], lag=lag)
    second = request("b", [*first.tokens, 3, 4], 2, stops=False)
    server.scheduler.add(second)
    server.run()
    assert lengths(server) == [[8], [2], [6]], "12 of 18 tokens are on full pages whose last token was computed"
    assert second.tokens[18:] == answer(second.tokens[:18], 2, 32, stops=False)
    counts = server.scheduler.prefix_counts
    assert (counts.lookups, counts.hits, counts.hit_tokens, counts.evicted_pages) == (2, 1, 12, 0)
    server.scheduler.check()


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    server, counts = serve([request(name, range(1, 9), 1, stops=False) for name in "ab"])
    assert lengths(server) == [[8], [4]]
    assert counts.hit_tokens == 4
    assert [each.tokens for each in server.finished] == [[*range(1, 9), draw(range(1, 9))]] * 2


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_requests_of_one_prompt_share_its_pages_in_the_very_step_that_computes_them(lag: int) -> None:
    bounds = limits(max_batch=4, chunk=24)
    server = Server(Scheduler(bounds, 33), Device(bounds, 33), lag)
    for name in "abcd":
        server.scheduler.add(request(name, range(1, 11), 8, stops=False))
    server.step()
    assert lengths(server) == [[10, 2, 2, 2]]
    assert server.scheduler.num_held_pages == 2 + 4
    server.run()
    assert {tuple(each.tokens[10:]) for each in server.finished} == {tuple(answer(range(1, 11), 8, 32, stops=False))}
    server.scheduler.check()


def test_pages_are_not_shared_before_a_prompt_is_decided_on_to_its_end() -> None:
    bounds = limits(max_batch=2, chunk=6)
    server = Server(Scheduler(bounds, 33), Device(bounds, 33), 0)
    for name in "ab":
        server.scheduler.add(request(name, range(1, 14), 2, stops=False))
    server.run()
    assert lengths(server) == [[6], [6], [1, 1]]


def test_an_aborted_prompt_leaves_what_was_computed() -> None:
    bounds = limits(max_batch=2, chunk=6)
    server = Server(Scheduler(bounds, 33), Device(bounds, 33), 1)
    server.scheduler.add(request("a", range(1, 20), 2, stops=False))
    server.step()
    server.scheduler.abort("a")
    server.scheduler.check()
    server.scheduler.add(request("b", range(1, 20), 2, stops=False))
    server.run()
    assert server.scheduler.prefix_counts.hit_tokens == 4
    assert server.finished[0].tokens[19:] == answer(range(1, 20), 2, 32, stops=False)


@pytest.mark.parametrize("lag", [1, 2])
def test_tokens_after_a_late_stop_are_never_found(lag: int) -> None:
    prompt = next([n] for n in range(1, 2000) if draw([n]) != STOP_TOKEN and draw([n, draw([n])]) == STOP_TOKEN)
    bounds = limits(page_size=1)
    server = Server(Scheduler(bounds, 33), Device(bounds, 33), lag)
    server.scheduler.add(request("a", prompt, 20))
    server.run()
    while server.step():
        pass
    assert server.scheduler.prefix_counts.cached_pages == 2, "the prompt and the one token that counts"
    server.scheduler.check()


def test_a_preempted_request_comes_back_to_its_own_pages() -> None:
    bounds = limits(max_batch=2, chunk=32)
    server = Server(Scheduler(bounds, 11), Device(bounds, 11), 0)
    for name, first in (("a", 3), ("b", 30)):
        server.scheduler.add(request(name, [first, 4, 5], 24, stops=False))
    server.run()
    by_id = {each.id: each for each in server.finished}
    assert by_id["b"].num_preemptions > 0
    assert server.scheduler.prefix_counts.hits > 0
    for name, first in (("a", 3), ("b", 30)):
        assert by_id[name].tokens[3:] == answer([first, 4, 5], 24, 32, stops=False)


def test_a_request_fits_that_shares_what_others_hold() -> None:
    """8 pages: `a` holds 5 and grows by one, so 2 are left for others; `b` needs 5, of which it shares 4."""
    bounds = limits(max_batch=2, chunk=32)
    for shares, running in ((True, 2), (False, 1)):
        bounds = limits(max_batch=2, chunk=32, prefix_cache=shares)
        server = Server(Scheduler(bounds, 9), Device(bounds, 9), 0)
        server.scheduler.add(request("a", range(1, 18), 6, stops=False))
        server.step()
        server.scheduler.add(request("b", range(1, 19), 2, stops=False))
        server.step()
        assert server.scheduler.num_running == running
        server.run()
        server.scheduler.check()


def test_a_request_uses_no_page_that_it_does_not_read() -> None:
    """`b` computes the last page of its prompt, for what follows, though `a` lends it out; once alone, it takes all 8
    pages of the pool."""
    bounds = limits(max_batch=2, chunk=32)
    server = Server(Scheduler(bounds, 9), Device(bounds, 9), 0)
    for name, max_tokens in (("a", 1), ("b", 24)):
        server.scheduler.add(request(name, range(1, 9), max_tokens, stops=False))
    server.step()
    assert lengths(server) == [[8, 4]], "they run at once"
    server.run()
    assert server.scheduler.num_preemptions == 0
    assert server.scheduler.prefix_counts.cached_pages == 7, "all full pages of `b`, and none twice"
    server.scheduler.check()


def test_off_is_off() -> None:
    requests = [request(name, range(1, 13), 4, stops=False) for name in "ab"]
    server, counts = serve(requests, bounds=limits(prefix_cache=False))
    assert lengths(server) == [[8], [4]] * 2
    assert counts == PrefixCounts(lookups=2, hits=0, hit_tokens=0, evicted_pages=0, cached_pages=0)


def test_a_pool_that_was_ever_full_evicts_and_still_adds_up() -> None:
    requests = [request(f"r{i}", range(1 + 20 * (i % 5), 14 + 20 * (i % 5)), 5, stops=False) for i in range(40)]
    server, counts = serve(requests, num_pages=14)
    assert counts.evicted_pages > 0
    assert 0 < counts.cached_pages < server.scheduler.num_free_pages == 13
    for each in server.finished:
        assert each.tokens[13:] == answer(each.tokens[:13], 5, 32, stops=False)


CORRUPTIONS: dict[str, tuple[Callable[[Scheduler], object], str]] = {
    "a page that is lost": (lambda s: s._holdings._pages._free.pop(), "do not add up"),
    "a page that is free twice": (
        lambda s: s._holdings._pages._free.__setitem__(0, s._holdings._pages._free[1]),
        "in two places",
    ),
    "a cached page that is free too": (
        lambda s: next(iter(s._holdings._cache._idle)).pages.__setitem__(0, s._holdings._pages._free[0]),
        "in two places",
    ),
    "a cached page that is forgotten": (lambda s: s._holdings._cache.evict(1), "more or fewer"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_the_sums_find(what: str) -> None:
    server, _ = serve([request("a", range(1, 13), 4, stops=False)])
    corrupt, complaint = CORRUPTIONS[what]
    corrupt(server.scheduler)
    with pytest.raises(AssertionError, match=complaint):
        server.scheduler.check()
