"""Which pages of the KV pool are free, held by a request, or cached. Owns page ids; holds no bytes, knows no request.

Page 0 is the dummy page: it is counted in `num_pages` and never given out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gplan.core import DUMMY_PAGE


class PageAccount:
    """Gives pages out and takes them back; pages that are held may become cached, and free again from there. Pages that
    became free last are given out first.

    Args:
        num_pages: pages of the KV pool, the dummy page included.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > DUMMY_PAGE
        self.capacity = num_pages - 1
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._held: set[int] = set()
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take(self, count: int) -> list[int]:
        """Gives out `count` pages; the caller has made sure that as many are free."""
        free, held = self._free, self._held
        first = len(free) - count
        assert 0 <= first <= len(free), f"{count} pages wanted, {len(free)} free"
        taken = free[first:]
        del free[first:]
        before = len(held)
        held.update(taken)
        assert len(held) == before + count, "a page was given out twice"
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Takes pages back, each of which must have been given out."""
        held = self._held
        before = len(held)
        held.difference_update(pages)
        assert len(held) == before - len(pages), "a page came back that was not given out"
        self._free.extend(reversed(pages))

    def keep(self, pages: Sequence[int]) -> None:
        """Pages that were given out become cached."""
        held = self._held
        before = len(held)
        held.difference_update(pages)
        assert len(held) == before - len(pages), "a page is kept that was not given out"
        self.num_cached += len(pages)

    def drop(self, pages: Sequence[int]) -> None:
        """Pages that were cached become free."""
        self.num_cached -= len(pages)
        assert self.num_cached >= 0, "a page is dropped that was not cached"
        self._free.extend(pages)

    def check(self, cached: Collection[int]) -> None:
        """Free, held and cached pages are all pages but the dummy, each once. Looks at every page: for tests.

        Args:
            cached: pages that the prefix cache knows.
        """
        assert self.num_free + self.num_held + self.num_cached == self.capacity, "pages do not add up"
        assert len(cached) == self.num_cached, "the prefix cache knows more or fewer pages"
        pages = [*self._free, *self._held, *cached]
        assert len(set(pages)) == len(pages), "a page is in two places"
        assert set(pages) == set(range(1, self.capacity + 1)), "a page is lost"
