"""Which pages of the KV pool are free and which are given out. Owns page ids; holds no bytes and knows no request.

Page 0 is the dummy page: it is counted in `num_pages` and never given out.
"""

from __future__ import annotations

from collections.abc import Sequence

from gplan.core import DUMMY_PAGE


class PageAccount:
    """Gives pages out and takes them back. Pages given back last are given out first.

    Args:
        num_pages: pages of the KV pool, the dummy page included.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > DUMMY_PAGE
        self.capacity = num_pages - 1
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._held: set[int] = set()

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

    def take_one(self) -> int:
        """As `take(1)[0]`."""
        page = self._free.pop()
        assert page not in self._held, "a page was given out twice"
        self._held.add(page)
        return page

    def give_back(self, pages: Sequence[int]) -> None:
        """Takes pages back, each of which must have been given out."""
        held = self._held
        before = len(held)
        held.difference_update(pages)
        assert len(held) == before - len(pages), "a page came back that was not given out"
        self._free.extend(reversed(pages))

    def check(self) -> None:
        """Every page but the dummy is free or given out, never both. Looks at every page: for tests."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free.isdisjoint(self._held), "a page is free and given out"
        assert free | self._held == set(range(1, self.capacity + 1)), "a page is lost"
