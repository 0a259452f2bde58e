"""What the scheduler knows of a request beside the request itself, and the group of those that decode together."""

from __future__ import annotations

from collections.abc import Sequence

from gplan.core import Request
from gplan.scheduling.prefix_cache import Run


class Entry:
    """One request in the scheduler.

    Attributes:
        end: the request's length when it has all its tokens.
        pages: `request.pages` as a tuple, shared by the chunks of all steps until a page is added; None until wanted.
        capacity: tokens that the request's pages hold.
        waiting: in the waiting queue.
        grows: running, and `capacity` is below what it will need.
        base: while it decodes: its cached tokens are `base` plus the group's step count.
        charge: tokens that its client was charged for it; 0 until it is first let in.
        run: the last run of the prefix cache that it uses, which ends at page `shared` of the request.
        in_use: version of the prefix cache, and how many pages that are in use it could share then.
    """

    __slots__ = (
        "base",
        "capacity",
        "charge",
        "end",
        "grows",
        "in_use",
        "pages",
        "request",
        "run",
        "shared",
        "waiting",
    )

    def __init__(self, request: Request, end: int) -> None:
        self.request = request
        self.end = end
        self.pages: tuple[int, ...] | None = None
        self.capacity = 0
        self.grows = False
        self.base: int | None = None
        self.charge = 0
        self.run: Run | None = None
        self.shared = 0
        self.in_use = (-1, 0)
        self.waiting = True

    @property
    def num_uncomputed(self) -> int:
        """Of its tokens, those that no step has computed yet."""
        return self.request.num_tokens - self.request.cached_len


class Decoders:
    """Requests past their prompts, oldest first. All take one token at every step, so what happens to each is known
    when it joins: a step costs as much as the pages it needs and the requests it completes, not as its requests."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._steps = 0
        self._short: list[list[Entry]] = [[] for _ in range(page_size)]
        """By step count modulo page size: whose pages are full then."""
        self._complete: dict[int, list[Entry]] = {}
        """By step count: who has its last token under way then."""
        self.entries: list[Entry] = []
        self.cached_tokens = 0

    def __len__(self) -> int:
        return len(self.entries)

    def cached_len(self, entry: Entry) -> int:
        assert entry.base is not None
        return entry.base + self._steps

    def short(self) -> Sequence[Entry]:
        """Those that need a page for the next step, oldest first."""
        return self._short[self._steps % self._page_size]

    def join(self, entry: Entry) -> None:
        """Adds a request, younger than all here, that has more than one token to go."""
        cached = entry.request.cached_len
        entry.base = cached - self._steps
        self.entries.append(entry)
        self.cached_tokens += cached
        self._short[-entry.base % self._page_size].append(entry)
        self._complete.setdefault(entry.end - 1 - entry.base, []).append(entry)

    def step(self) -> list[Entry]:
        """Takes everyone one token further. Returns, oldest first, those whose last token is then under way; they are
        members no more."""
        self._steps += 1
        self.cached_tokens += len(self.entries)
        complete = self._complete.pop(self._steps, None)
        if complete is None:
            return []
        for entry in complete:
            self._forget(entry)
        return complete

    def leave(self, entry: Entry) -> None:
        """Takes one out that has tokens to go."""
        assert entry.base is not None
        at = entry.end - 1 - entry.base
        companions = self._complete[at]
        companions.remove(entry)
        if not companions:
            del self._complete[at]
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        assert entry.base is not None
        self.entries.remove(entry)
        self.cached_tokens -= entry.base + self._steps
        self._short[-entry.base % self._page_size].remove(entry)
        entry.base = None
