"""How many answers may be under way at once, queued or running, in all and of one client; beyond that, clients are told
when to come back."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque

from gplan.serving.http.errors import ApiError

CROWD_SHARE = 3
"""A client that has seats may have at most this many times the seats that are free. So one alone fills three quarters
of the server and two three sevenths each: something is always left for whoever comes next."""

_REMEMBERED, _ENOUGH = 64, 8
_LONGEST_WAIT_S = 60


class Seats:
    """Counts the answers of requests that were let in, from before their prompts are read until they are complete.

    The bound by client is that of shared packet buffers with dynamic thresholds (Choudhury and Hahne, 1998). A request
    whose time would be over before its turn came is refused at once: to begin it late would keep those behind it
    waiting for nothing, and under overload no answer would be complete in time.

    Args:
        limit: answers at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._held: Counter[str] = Counter()
        self._freed: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        self._empty = asyncio.Event()
        self._empty.set()

    def take(self, count: int, client: str = "", deadline: float = math.inf) -> Seat:
        """
        Args:
            deadline: when the request's time is over, of the monotonic clock.

        Raises:
            ApiError: 429 with the time to wait, or 400 where even an empty server has too few.
        """
        if count > self.limit:
            raise ApiError(400, f"{count} answers in one request; this server makes at most {self.limit} at once")
        self.check(count, client, deadline)
        self.taken += count
        self._held[client] += count
        self._empty.clear()
        return Seat(self, count, client, deadline)

    def check(self, count: int, client: str, deadline: float = math.inf) -> None:
        """Whether as many could be taken.

        Raises:
            ApiError: 429 with the time to wait.
        """
        free, held = self.limit - self.taken, self._held[client]
        if count > free:
            raise self._full(f"{self.taken} answers are waiting or under way, and at most {self.limit} may be", count)
        if held and held + count > CROWD_SHARE * free:
            what = f"{held} of your answers are waiting or under way, and what is left is kept for others"
            raise self._full(what, count)
        before = min(self.taken, (held + count) * max(1, len(self._held)))  # turns go round among clients
        if self._seconds_for(before) > deadline - time.monotonic():
            raise self._full("the time that this request has would be over before it is answered", count)

    def free(self, count: int, client: str, *, is_complete: bool) -> None:
        self.taken -= count
        self._held[client] -= count
        if not self._held[client]:
            del self._held[client]
        if is_complete:
            self._freed.append((time.monotonic(), count))
        if not self.taken:
            self._freed.clear()  # how fast seats come free is known of busy times alone
            self._empty.set()

    async def wait_until_empty(self, within_s: float) -> None:
        """Returns when no answer is under way, or time is up."""
        try:
            await asyncio.wait_for(self._empty.wait(), within_s)
        except TimeoutError:
            return

    def _full(self, what: str, count: int) -> ApiError:
        wait = self._wait_s(max(1, self.taken + count - self.limit))
        return ApiError(429, f"{what}; try again later", code="queue_full", retry_after_s=wait)

    def _wait_s(self, count: int) -> int:
        """When to come back for `count` seats."""
        return min(_LONGEST_WAIT_S, max(1, math.ceil(self._seconds_for(count))))

    def _seconds_for(self, count: int) -> float:
        """Seconds until `count` answers are likely to be complete, by those of late; 0 where too few were."""
        if len(self._freed) < _ENOUGH:
            return 0.0
        elapsed = time.monotonic() - self._freed[0][0]
        return count * elapsed / sum(freed for _, freed in self._freed)


class Seat:
    """Places taken by one request. Given back once, however often it is asked.

    Attributes:
        client: whom the request is from.
        deadline: when its time is over, of the monotonic clock.
    """

    def __init__(self, seats: Seats, count: int, client: str, deadline: float) -> None:
        self.client, self.deadline = client, deadline
        self._seats, self._count = seats, count

    def give_back(self, *, is_complete: bool = False) -> None:
        count, self._count = self._count, 0
        if count:
            self._seats.free(count, self.client, is_complete=is_complete)
