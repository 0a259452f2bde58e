"""How many answers may be under way at once, queued or running; beyond that, clients are told when to come back."""

from __future__ import annotations

import math
import time
from collections import deque

from gplan.serving.http.errors import ApiError

_REMEMBERED = 64
_LONGEST_WAIT_S = 60


class Seats:
    """Counts the answers of requests that were let in, from before their prompts are read until they are complete.

    Args:
        limit: answers at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._freed: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)

    def take(self, count: int) -> Seat:
        """
        Raises:
            ApiError: 429 with the time to wait, or 400 where even an empty server has too few.
        """
        if count > self.limit:
            raise ApiError(400, f"{count} answers in one request; this server makes at most {self.limit} at once")
        if self.taken + count > self.limit:
            raise ApiError(
                429,
                f"{self.taken} answers are waiting or under way, and at most {self.limit} may be; try again later",
                code="queue_full",
                retry_after_s=self._wait_s(self.taken + count - self.limit),
            )
        self.taken += count
        return Seat(self, count)

    def free(self, count: int) -> None:
        self.taken -= count
        self._freed.append((time.monotonic(), count))

    def _wait_s(self, count: int) -> int:
        """Seconds until `count` seats are likely to be free, by how fast they came free lately."""
        if not self._freed:
            return 1
        elapsed = time.monotonic() - self._freed[0][0]
        rate = sum(freed for _, freed in self._freed) / max(elapsed, 1e-3)
        return min(_LONGEST_WAIT_S, max(1, math.ceil(count / rate)))


class Seat:
    """Places taken by one request. Given back once, however often it is asked."""

    def __init__(self, seats: Seats, count: int) -> None:
        self._seats, self._count = seats, count

    def give_back(self) -> None:
        count, self._count = self._count, 0
        if count:
            self._seats.free(count)
