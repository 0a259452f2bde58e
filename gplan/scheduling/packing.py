"""Where to cut a prompt so that the steps that compute it land on buckets: a chunk boundary is free, padding is not.

Only the chunk that a full step would cut anyway is moved, and only when that prompt is the last there is and its rest
fits the next step: so nobody's prompt ends in a later step than without, and the two steps together take less time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping


class Packer:
    """Cuts prompts to buckets.

    Args:
        bucket_us: what a prefill step of each bucket takes, in any unit; the largest step is a bucket.
    """

    def __init__(self, bucket_us: Mapping[int, float]) -> None:
        self._buckets = sorted(bucket_us)
        self._times = [bucket_us[size] for size in self._buckets]

    def tokens_to_leave(self, last: int, rest: int, decodes: int) -> int:
        """How many tokens of its last chunk a step of the largest size leaves to the next one, which finishes the
        prompt. Of all cuts, the one with which both steps take the least time; of equals, the one that computes most
        now. 0 where nothing is gained.

        Args:
            last: tokens of the step that belong to a prompt that does not end in it.
            rest: tokens of that prompt beyond the step; no other prompt is there.
            decodes: requests that will decode in the next step.
        """
        largest = self._buckets[-1]
        if rest + decodes > largest:
            return 0
        best, leave = self._times[-1] + self._time(rest + decodes), 0
        for index in range(len(self._buckets) - 2, -1, -1):
            left = largest - self._buckets[index]
            if left >= last or rest + decodes + left > largest:
                break
            time = self._times[index] + self._time(rest + decodes + left)
            if time < best:
                best, leave = time, left
        return leave

    def _time(self, size: int) -> float:
        return self._times[bisect_left(self._buckets, size)]
