"""The row and the pages that each running request holds, and whether another request's would fit beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from formats.plan import Limits
from gplan.core import DUMMY_ROW
from gplan.scheduling.entry import Entry
from gplan.scheduling.pages import PageAccount


class Holdings:
    """Rows 1 to `max_batch` and all pages but the dummy, given to entries and taken back.

    Args:
        num_pages: pages of the KV pool, the dummy page included.
    """

    def __init__(self, limits: Limits, num_pages: int) -> None:
        self._max_batch, self._page_size = limits.max_batch, limits.page_size
        self._rows = list(range(limits.max_batch, DUMMY_ROW, -1))
        self._pages = PageAccount(num_pages)
        self._num_growing = 0

    @property
    def num_pages(self) -> int:
        return self._pages.capacity

    @property
    def num_free(self) -> int:
        return self._pages.num_free

    @property
    def num_held(self) -> int:
        return self._pages.num_held

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def fits(self, entry: Entry) -> bool:
        """Whether there is a row, and pages for all of the request's tokens beside one for each that has yet to grow,
        itself included."""
        if not self._rows:
            return False
        needed = self.pages_of(entry.request.num_tokens)
        growing = self._num_growing + (needed * self._page_size < entry.end - 1)
        return needed + growing <= self._pages.num_free

    def settle(self, entry: Entry) -> None:
        """Gives a request that fits its row and the pages of its tokens."""
        entry.request.row = self._rows.pop()
        self._give(entry, self._pages.take(self.pages_of(entry.request.num_tokens)))

    def grow(self, entries: Iterable[Entry]) -> None:
        """Gives each a page more; as many are free."""
        for entry in entries:
            self._give(entry, (self._pages.take_one(),))

    def release(self, entry: Entry) -> None:
        """Takes row and pages back."""
        request = entry.request
        self._pages.give_back(request.pages)
        self._rows.append(request.row)
        request.row = DUMMY_ROW
        request.pages.clear()
        entry.pages, entry.capacity = None, 0
        self._num_growing -= entry.grows
        entry.grows = False

    def check(self, holders: Sequence[Entry], others: Iterable[Entry]) -> None:
        """Nothing is lost or shared, and `others` hold nothing. Looks at all: for tests."""
        self._pages.check()
        pages = [page for entry in holders for page in entry.request.pages]
        assert len(pages) == len(set(pages)) == self._pages.num_held, "a page is shared or lost"
        rows = [entry.request.row for entry in holders]
        assert sorted(rows + self._rows) == list(range(1, self._max_batch + 1)), "a row is shared or lost"
        assert self._num_growing == sum(entry.capacity < entry.end - 1 for entry in holders)
        for entry in holders:
            assert entry.pages is None or list(entry.pages) == entry.request.pages
            assert entry.capacity == len(entry.request.pages) * self._page_size >= entry.request.cached_len
        for entry in others:
            assert (entry.request.pages, entry.request.row, entry.request.cached_len) == ([], DUMMY_ROW, 0)

    def _give(self, entry: Entry, pages: Sequence[int]) -> None:
        entry.request.pages += pages
        entry.pages = None
        entry.capacity += len(pages) * self._page_size
        grows = entry.capacity < entry.end - 1
        if grows != entry.grows:
            entry.grows = grows
            self._num_growing += 1 if grows else -1
