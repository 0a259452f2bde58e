"""Who waits, and whose turn it is: fair among clients, first come first served within one. No clock, no thresholds.

A client is charged the tokens of each of its requests when it is let in, output at most, and given back what was not
generated when the request ends. The next to be let in is of the client that was charged least so far; of several, the
one that came first. Who comes to the queue with nothing waiting starts no lower than whoever was let in last, so that
nobody saves up turns. This is start-time fair queueing (Goyal, Vin and Cheng, 1996) with tokens for bytes, as "Fairness
in Serving Large Language Models" (Sheng and others, 2024) proposes.

However many clients there are, one admission in `OLDEST_EVERY` goes to the request that has waited longest, so none
waits for ever: one with `n` older ones before it is let in after at most `(n + 1) * OLDEST_EVERY` admissions. Once
chosen, a request stays the next until it is let in or given up, so that a large one is not passed over by small ones.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator

from gplan.scheduling.entry import Entry

OLDEST_EVERY = 16


class _Line:
    """One client: its requests that wait, with their numbers in order of arrival; what it was charged."""

    __slots__ = ("charged", "entries", "num_unfinished")

    def __init__(self) -> None:
        self.entries: OrderedDict[Entry, int] = OrderedDict()
        self.charged = 0
        self.num_unfinished = 0

    @property
    def first(self) -> Entry:
        return next(iter(self.entries))

    @property
    def first_number(self) -> int:
        return self.entries[self.first]


class WaitingQueue:
    """Requests that wait, those that gave their pages back before all others. An admission costs as the logarithm of
    the clients that wait; looking at the next costs nothing while it stays the same."""

    def __init__(self) -> None:
        self._returned: deque[Entry] = deque()
        self._arrivals: OrderedDict[Entry, _Line] = OrderedDict()
        self._lines: dict[str, _Line] = {}
        self._turns: list[tuple[int, int, str]] = []
        """Heap of (charged, number of the first request, client); an item that is out of date has a newer beside it."""
        self._num_arrived = 0
        self._level = 0
        """The highest charge at which anyone was let in."""
        self._since_oldest = 0
        self._next: Entry | None = None

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrivals)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._returned
        yield from self._arrivals

    def join(self, entry: Entry) -> None:
        """Takes a new request in."""
        client = entry.request.client
        line = self._lines.setdefault(client, _Line())
        line.num_unfinished += 1
        if not line.entries:
            line.charged = max(line.charged, self._level)
        self._num_arrived += 1
        line.entries[entry] = self._num_arrived
        self._arrivals[entry] = line
        if len(line.entries) == 1:
            self._enter(client, line)

    def put_back(self, entry: Entry) -> None:
        """Takes a request in that was let in before: it is the next."""
        self._returned.appendleft(entry)

    @property
    def next(self) -> Entry | None:
        """The request to be let in next."""
        if self._returned:
            return self._returned[0]
        if self._next is None and self._arrivals:
            self._next = self._choose()
        return self._next

    def let_in(self) -> Entry:
        """Takes the next request out and charges its client for it, once."""
        entry = self.next
        assert entry is not None, "nobody waits"
        if self._returned:
            return self._returned.popleft()
        line = self._arrivals[entry]
        is_oldest = entry is next(iter(self._arrivals))
        self._since_oldest = 0 if is_oldest else self._since_oldest + 1
        self._level = max(self._level, line.charged)
        entry.charge = entry.end
        line.charged += entry.charge
        self._leave(entry, line)
        return entry

    def give_up(self, entry: Entry) -> None:
        """Takes a request out that nobody wants any more; `settle` is still to be called."""
        if entry in self._arrivals:
            self._leave(entry, self._arrivals[entry])
        else:
            self._returned.remove(entry)

    def settle(self, entry: Entry, num_tokens: int) -> None:
        """A request ended with `num_tokens`, wherever it was: its client gets back what it was charged beyond them."""
        client = entry.request.client
        line = self._lines[client]
        line.num_unfinished -= 1
        if not line.num_unfinished:
            del self._lines[client]
        elif entry.charge:
            line.charged -= entry.charge - num_tokens
            if line.entries:
                self._enter(client, line)

    def check(self) -> None:
        """What is kept twice agrees. Looks at all: for tests."""
        waiting = sum(len(line.entries) for line in self._lines.values())
        assert waiting == len(self._arrivals)
        assert all(entry.request.client in self._lines for entry in self)
        for client, line in self._lines.items():
            assert line.num_unfinished >= len(line.entries)
            assert not line.entries or (line.charged, line.first_number, client) in self._turns

    def _choose(self) -> Entry:
        if self._since_oldest >= OLDEST_EVERY - 1:
            return next(iter(self._arrivals))
        while True:
            charged, number, client = self._turns[0]
            line = self._lines.get(client)
            if line is not None and line.entries and (line.charged, line.first_number) == (charged, number):
                return line.first
            heapq.heappop(self._turns)

    def _enter(self, client: str, line: _Line) -> None:
        heapq.heappush(self._turns, (line.charged, line.first_number, client))

    def _leave(self, entry: Entry, line: _Line) -> None:
        del self._arrivals[entry]
        del line.entries[entry]
        if self._next is entry:
            self._next = None
        if line.entries:
            self._enter(entry.request.client, line)
        elif not self._arrivals:
            self._turns.clear()
