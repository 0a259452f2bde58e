"""Full pages whose tokens are known, kept for requests that begin with the same tokens: a radix tree over page ids.

Owns which pages can be found by their tokens, who uses them, and which of them go first when pages run short. Holds no
bytes, and gives no page out for writing: a page is here once every token of it is computed by a step that was
scheduled, and nobody writes to it again.

Each `Run` holds the pages of consecutive tokens. Runs are cut where requests part, so a request uses whole runs, from
the root to its last. What nobody uses is idle and can be evicted, least recently used first and from its end: a run
becomes idle after those under it, so the first of the order never has any under it. An operation costs as the pages it
looks at; a page that is evicted costs the same whatever the size of the tree.

The tree over tokens with eviction of its leaves is RadixAttention's ("SGLang: Efficient Execution of Structured
Language Model Programs", Zheng and others, 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class Run:
    """Pages of consecutive tokens, which follow those of `parent`.

    Attributes:
        tokens: of the pages; some may follow whose pages were evicted.
        children: by the tokens of their first page.
        users: requests that use this run, each of which uses all above it.
    """

    __slots__ = ("children", "pages", "parent", "tokens", "users")

    def __init__(self, parent: Run | None, tokens: tuple[int, ...], pages: list[int], users: int) -> None:
        self.parent, self.tokens, self.pages, self.users = parent, tokens, pages, users
        self.children: dict[tuple[int, ...], Run] = {}


class PrefixCache:
    """The tree. A request enters it with `find`, goes on with `extend`, and ends with `leave`.

    Attributes:
        root: the run of no tokens, at which every request begins.
        num_pages: in the tree; `num_idle` of them nobody uses.
        version: another whenever pages came into use or went out of it.
        num_evicted: pages so far.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._idle: OrderedDict[Run, None] = OrderedDict()
        self.root = Run(None, (), [], users=1)
        self.num_pages = self.num_idle = self.num_evicted = self.version = 0

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_idle

    def count_in_use(self, tokens: Sequence[int], most: int) -> int:
        """Of the pages that `find` would give, those that somebody uses already."""
        run, inside, found = self._descend(self.root, tokens, 0, most)
        while not run.users:
            assert run.parent is not None
            run, found = run.parent, found - inside
            inside = len(run.pages)
        return found

    def find(self, tokens: Sequence[int], most: int) -> tuple[Run, list[int]]:
        """Uses the longest known beginning of `tokens`, of at most `most` pages: its last run, and its pages."""
        end, inside, found = self._descend(self.root, tokens, 0, most)
        if not found:
            return self.root, []
        end = self._cut(end, inside)
        self._use(end, self.root)
        parts = [run.pages for run in self._path(end)]
        return end, [page for part in reversed(parts) for page in part]

    def goes_on(self, run: Run, tokens: Sequence[int], start: int) -> bool:
        """Whether the page of `tokens` after `run`, which ends at page `start`, is known."""
        return self._tokens_of(tokens, start) in run.children

    def extend(self, run: Run, start: int, tokens: Sequence[int], pages: Sequence[int]) -> tuple[Run, int]:
        """Takes pages of a request in, and uses them for it.

        Args:
            run: the request's last, which ends at page `start`.
            tokens: of the request, enough for all pages.
            pages: of the request, from its first on. Those past `start` that the tree knows already stay with the
                request; the others are the tree's from now on.

        Returns:
            The request's last run, and the number of the first page that was taken.
        """
        end, inside, found = self._descend(run, tokens, start, len(pages))
        end = self._cut(end, inside)
        if end is not run:
            self._use(end, run)
        if found < len(pages):
            end = self._append(end, tokens, found, pages[found:])
        return end, found

    def leave(self, run: Run) -> None:
        """Ends the use of a request whose last run this is."""
        idle = self._idle
        while run.parent is not None:
            run.users -= 1
            if not run.users:
                idle[run] = None
                self.num_idle += len(run.pages)
            run = run.parent
        self.version += 1

    def put_aside(self, pages: Sequence[int]) -> None:
        """Takes idle pages in whose tokens nobody will look for: they wait for their turn to be evicted."""
        self._idle[Run(self.root, (), list(pages), users=0)] = None
        self.num_idle += len(pages)
        self.num_pages += len(pages)

    def evict(self, count: int) -> list[int]:
        """Forgets so many idle pages, least recently used first, and returns them."""
        assert count <= self.num_idle, f"{count} pages wanted, {self.num_idle} idle"
        evicted: list[int] = []
        while len(evicted) < count:
            run = next(iter(self._idle))
            assert not run.children, "a page would go before one that follows it"
            kept = len(run.pages) - (count - len(evicted))
            if kept > 0:
                evicted += run.pages[kept:]
                del run.pages[kept:]
            else:
                evicted += run.pages
                self._remove(run)
        self.num_pages -= count
        self.num_idle -= count
        self.num_evicted += count
        return evicted

    def check(self, last_runs: Sequence[Run]) -> list[int]:
        """Counts agree with the tree, uses with the requests whose last runs are given. Looks at all: for tests.

        Returns:
            All pages of the tree.
        """
        users = dict.fromkeys(self._all(), 0)
        for last in last_runs:
            for run in self._path(last):
                users[run] += 1
        for run, count in users.items():
            assert run.users == count, "a run is used by another number of requests"
            assert (run in self._idle) == (count == 0)
            assert run.pages
            if run.tokens:
                assert len(run.tokens) >= len(run.pages) * self._page_size
                assert run.parent is not None
                assert run.parent.children[run.tokens[: self._page_size]] is run
        order = {run: index for index, run in enumerate(self._idle)}
        assert all(order[run] < order[run.parent] for run in order if run.parent in order), "the order breaks the tree"
        pages = [page for run in users for page in run.pages]
        assert len(pages) == self.num_pages
        assert sum(len(run.pages) for run in self._idle) == self.num_idle
        return pages

    # Within the tree --------------------------------------------------------------------------------------------

    def _descend(self, run: Run, tokens: Sequence[int], found: int, most: int) -> tuple[Run, int, int]:
        """Follows `tokens` from the end of a run at page `found` up to page `most`: the last run that agrees, how many
        of its pages do, and the page reached."""
        inside = len(run.pages)
        while found < most:
            child = run.children.get(self._tokens_of(tokens, found))
            if child is None:
                break
            run, inside = child, self._agreeing(child, tokens, found, min(len(child.pages), most - found))
            found += inside
            if inside < len(child.pages):
                break
        return run, inside, found

    def _tokens_of(self, tokens: Sequence[int], page: int) -> tuple[int, ...]:
        """The tokens of that page."""
        return tuple(tokens[page * self._page_size : (page + 1) * self._page_size])

    def _agreeing(self, run: Run, tokens: Sequence[int], start: int, most: int) -> int:
        """How many of a run's pages, up to `most`, hold the tokens from page `start` on. The first one does."""
        size = self._page_size

        def agree(first: int, end: int) -> bool:
            return run.tokens[first * size : end * size] == tuple(tokens[(start + first) * size : (start + end) * size])

        if agree(1, most):
            return most
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if agree(low, middle) else (low, middle)
        return low

    def _cut(self, run: Run, count: int) -> Run:
        """Makes a run end after its first `count` pages; what follows is a run under it. Returns the first of both."""
        if count == len(run.pages):
            return run
        assert run.parent is not None
        size, tokens = self._page_size, run.tokens
        first = Run(run.parent, tokens[: count * size], run.pages[:count], run.users)
        run.parent.children[tokens[:size]] = first
        run.parent, run.tokens = first, tokens[count * size :]
        del run.pages[:count]
        first.children[run.tokens[:size]] = run
        if not first.users:
            self._idle[first] = None
        return first

    def _append(self, run: Run, tokens: Sequence[int], start: int, pages: Sequence[int]) -> Run:
        """Adds pages under a run, with one user."""
        size = self._page_size
        added = Run(run, tuple(tokens[start * size : (start + len(pages)) * size]), list(pages), users=1)
        run.children[added.tokens[:size]] = added
        self.num_pages += len(pages)
        self.version += 1
        return added

    def _use(self, run: Run, above: Run) -> None:
        """Adds a user to a run and those over it, below `above`."""
        while run is not above:
            if not run.users:
                del self._idle[run]
                self.num_idle -= len(run.pages)
            run.users += 1
            assert run.parent is not None
            run = run.parent
        self.version += 1

    def _remove(self, run: Run) -> None:
        assert run.parent is not None
        del self._idle[run]
        if run.tokens:
            del run.parent.children[run.tokens[: self._page_size]]

    def _path(self, run: Run) -> Iterator[Run]:
        """The run and those over it, without the root."""
        while run.parent is not None:
            yield run
            run = run.parent

    def _all(self) -> Iterator[Run]:
        yield from (run for run in self._idle if not run.tokens)
        waiting = list(self.root.children.values())
        while waiting:
            run = waiting.pop()
            yield run
            waiting += run.children.values()
