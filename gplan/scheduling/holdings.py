"""The row and the pages that each running request holds, and whether another request's would fit beside them.

Full pages go through the prefix cache: a request begins with the pages of tokens that are known, lends its own out once
a step that computes them is scheduled, and leaves them there when it ends. Pages that are cached and idle count as
free: they are evicted where too few others are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from formats.plan import Limits
from gplan.core import DUMMY_ROW
from gplan.errors import FitError, GplanError
from gplan.scheduling.entry import Entry
from gplan.scheduling.pages import PageAccount
from gplan.scheduling.prefix_cache import PrefixCache


class PrefixCounts(NamedTuple):
    """What sharing has come to so far.

    Attributes:
        lookups: requests that were given a row, again after a preemption.
        hits: of these, those that began with cached pages.
        hit_tokens: that were not computed for it.
        evicted_pages: that were forgotten to make room.
        cached_pages: pages that no request uses now and another could begin with.
    """

    lookups: int
    hits: int
    hit_tokens: int
    evicted_pages: int
    cached_pages: int


class Holdings:
    """Rows 1 to `max_batch` and all pages but the dummy, given to entries and taken back.

    Args:
        num_pages: pages of the KV pool, the dummy page included.
    """

    def __init__(self, limits: Limits, num_pages: int) -> None:
        self._max_batch, self._page_size = limits.max_batch, limits.page_size
        self._rows = list(range(limits.max_batch, DUMMY_ROW, -1))
        self._pages = PageAccount(num_pages)
        self._shares = limits.prefix_cache
        self._cache = PrefixCache(limits.page_size)
        self._num_growing = 0
        self._num_lookups = self._num_hits = self._num_hit_tokens = 0

    @property
    def num_pages(self) -> int:
        return self._pages.capacity

    @property
    def num_free(self) -> int:
        """Pages that can be given out."""
        return self._pages.num_free + self._cache.num_idle

    @property
    def num_held(self) -> int:
        """Pages that requests use, each counted once."""
        return self._pages.capacity - self.num_free

    @property
    def prefix_counts(self) -> PrefixCounts:
        return PrefixCounts(
            lookups=self._num_lookups,
            hits=self._num_hits,
            hit_tokens=self._num_hit_tokens,
            evicted_pages=self._cache.num_evicted,
            cached_pages=self._cache.num_idle,
        )

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def fits(self, entry: Entry) -> bool:
        """Whether there is a row, and pages for all of the request's tokens beside one for each that has yet to grow,
        itself included. Pages that it would share with running requests need not be there twice."""
        if not self._rows:
            return False
        needed = self.pages_of(entry.request.num_tokens)
        growing = self._num_growing + (needed * self._page_size < entry.end - 1)
        missing = needed + growing - self.num_free
        return missing <= 0 or (missing <= self._cache.num_in_use and missing <= self._num_shared(entry))

    def settle(self, entry: Entry) -> None:
        """Gives a request that fits its row and the pages of its tokens, from the prefix cache where it knows them."""
        request = entry.request
        request.row = self._rows.pop()
        entry.run, known = self._cache.find(request.tokens, self._most_shared(entry))
        entry.shared = len(known)
        request.cached_len = len(known) * self._page_size
        self._num_lookups += 1
        self._num_hits += bool(known)
        self._num_hit_tokens += request.cached_len
        self._give(entry, known)
        self._give(entry, self._take(self.pages_of(request.num_tokens) - len(known)))

    def grow(self, entries: Sequence[Entry]) -> None:
        """Gives each a page more; as many are free."""
        size = self._page_size
        for entry, page in zip(entries, self._take(len(entries)), strict=True):
            entry.request.pages.append(page)
            entry.pages = None
            entry.capacity += size
            if entry.capacity >= entry.end - 1:
                entry.grows = False
                self._num_growing -= 1

    def lend(self, entry: Entry, num_tokens: int) -> None:
        """Lets others begin with the full pages of a request's first `num_tokens` tokens. The steps that compute them
        are scheduled: on the device they run before, or as, any step that is scheduled after this call.

        Where another's pages of the next tokens are known by now, its own stay its own until it ends: a request uses
        no page that it does not read."""
        full = num_tokens // self._page_size
        if not self._shares or entry.request.is_unique or full <= entry.shared:
            return
        assert entry.run is not None
        if not self._cache.goes_on(entry.run, entry.request.tokens, entry.shared):
            self._hand_over(entry, full)

    def release(self, entry: Entry, num_cached: int, *, is_over: bool) -> None:
        """Takes row and pages back; the full ones stay in the prefix cache.

        Args:
            num_cached: of the request's tokens, those that were computed by steps that are scheduled.
            is_over: whether the request ended; otherwise it will come back.
        """
        request, first = entry.request, entry.shared
        full = min(num_cached, len(request.tokens)) // self._page_size
        if self._shares and full > first:
            if request.is_unique and is_over:
                self._put_aside(entry, full)
            else:
                known = self._hand_over(entry, full)
                self._pages.give_back(request.pages[first:known])
        self._pages.give_back(request.pages[entry.shared :])
        assert entry.run is not None
        self._cache.leave(entry.run)
        entry.run, entry.shared = None, 0
        self._rows.append(request.row)
        request.row = DUMMY_ROW
        request.pages.clear()
        entry.pages, entry.capacity = None, 0
        self._num_growing -= entry.grows
        entry.grows = False

    def forget_idle(self) -> None:
        """Forgets all cached pages that no request uses."""
        self._pages.drop(self._cache.evict(self._cache.num_idle))

    def check(self, holders: Sequence[Entry], others: Iterable[Entry]) -> None:
        """Nothing is lost, only what the prefix cache knows is shared, and `others` hold nothing. Looks at all: for
        tests."""
        cached = self._cache.check([entry.run for entry in holders if entry.run is not None])
        self._pages.check(cached)
        own = [page for entry in holders for page in entry.request.pages[entry.shared :]]
        assert len(own) == len(set(own)) == self._pages.num_held, "a page of one request is lost, or another's too"
        used = {page for entry in holders for page in entry.request.pages[: entry.shared]}
        assert used.issubset(cached)
        assert len(used) == self._cache.num_in_use, "a page is in use that nobody reads"
        rows = [entry.request.row for entry in holders]
        assert sorted(rows + self._rows) == list(range(1, self._max_batch + 1)), "a row is shared or lost"
        assert self._num_growing == sum(entry.capacity < entry.end - 1 for entry in holders)
        for entry in holders:
            assert entry.pages is None or list(entry.pages) == entry.request.pages
            assert entry.capacity == len(entry.request.pages) * self._page_size >= entry.request.cached_len
        for entry in others:
            assert (entry.request.pages, entry.request.row, entry.request.cached_len) == ([], DUMMY_ROW, 0)
            assert (entry.run, entry.shared) == (None, 0)

    def _hand_over(self, entry: Entry, full: int) -> int:
        """Makes a request's own pages before `full` the cache's, but for those whose tokens it knows by other pages.
        Returns the first that is."""
        assert entry.run is not None
        request = entry.request
        entry.run, taken = self._cache.extend(entry.run, entry.shared, request.tokens, request.pages[:full])
        self._pages.keep(request.pages[taken:full])
        entry.shared = full
        return taken

    def _put_aside(self, entry: Entry, full: int) -> None:
        """Does with pages that nobody will look for what `_hand_over` would do to the order of eviction: nothing,
        where there are no others."""
        if self._cache.num_idle:
            pages = entry.request.pages[entry.shared : full]
            self._cache.put_aside(pages)
            self._pages.keep(pages)
            entry.shared = full

    def _most_shared(self, entry: Entry) -> int:
        """How many pages a request may begin with: its last token is computed, for what follows it, and all of them
        where each is to be scored."""
        if not self._shares or entry.request.params.prompt_logprobs is not None:
            return 0
        return (entry.request.num_tokens - 1) // self._page_size

    def _num_shared(self, entry: Entry) -> int:
        """Pages that a request would share with running ones; looked up again only when their pages changed."""
        if entry.in_use[0] != self._cache.version:
            found = self._cache.count_in_use(entry.request.tokens, self._most_shared(entry))
            entry.in_use = (self._cache.version, found)
        return entry.in_use[1]

    def _take(self, count: int) -> list[int]:
        missing = count - self._pages.num_free
        if missing > 0:
            self._pages.drop(self._cache.evict(missing))
        return self._pages.take(count)

    def _give(self, entry: Entry, pages: Sequence[int]) -> None:
        entry.request.pages += pages
        entry.pages = None
        entry.capacity += len(pages) * self._page_size
        grows = entry.capacity < entry.end - 1
        if grows != entry.grows:
            entry.grows = grows
            self._num_growing += 1 if grows else -1


def check_limits(limits: Limits, capacity: int) -> None:
    """
    Args:
        capacity: pages that can be given out.

    Raises:
        FitError: they do not hold one request of `max_len`.
        GplanError: `chunk` is below `max_batch`, so that a step could not decode every request.
    """
    needed = -(-limits.max_len // limits.page_size)
    if capacity < needed:
        raise FitError(
            f"kv_pool: {capacity} pages of {limits.page_size} tokens do not hold a request of {limits.max_len} tokens",
            f"Give the KV pool at least {needed} pages beside the dummy page, or lower the maximum length.",
        )
    if limits.chunk < limits.max_batch:
        raise GplanError(
            f"a chunk of {limits.chunk} tokens is below the maximum batch of {limits.max_batch} requests",
            "Raise --chunk to at least --max-batch.",
        )
