"""Where to cut a prompt so that the steps that compute it land on buckets: a chunk boundary is free, padding is not.

A step whose size is padded far is cut at a bucket below it, and the rest is left to a step of its own, where the two
take less time than the one. So the prompt that is cut ends sooner, those before it in the step sooner still, decodes
get a token more, and whoever comes meanwhile is let in sooner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from formats.plan import Plan
from gplan.scheduling.times import PhaseTimes, times_of_phase

GAIN = 0.03
"""Of the time of a step, what a cut has to save: less may be noise of the measurements."""


class Packer:
    """Cuts prompts to buckets.

    Args:
        step_us: [largest step + 1] what a prefill step of each size takes, in any unit; entry 0 is unused.
        buckets: sizes to end a step at, ascending.
    """

    def __init__(self, step_us: Sequence[float], buckets: Sequence[int]) -> None:
        self._step_us, self._buckets = step_us, buckets

    def tokens_to_leave(self, size: int, last: int, decodes: int) -> int:
        """How many tokens of its last prompt a step leaves to the next one, which takes nothing else in. Of all cuts,
        the one with which both steps take the least time; of equals, the one that computes most now. 0 where none saves
        anything.

        Args:
            size: tokens of the step, with which every prompt in it is complete.
            last: of these, tokens of the last prompt.
            decodes: requests that will decode in the next step.
        """
        step_us = self._step_us
        best, leave = step_us[size] * (1 - GAIN), 0
        for index in range(bisect_left(self._buckets, size) - 1, -1, -1):
            left = size - self._buckets[index]
            if left >= last or left + decodes >= len(step_us):
                break
            together = step_us[self._buckets[index]] + step_us[left + decodes]
            if together < best:
                best, leave = together, left
        return leave


def packer_of(times: PhaseTimes) -> Packer | None:
    """The packer for prefill steps that take these times; None where there are no buckets to land on."""
    buckets = sorted(set(times.bucket) - {0})
    if not buckets:
        return None
    steps = [times.padded_ps(size) + times.host_ps for size in range(times.max_size + 1)]
    return Packer(steps, buckets)


def packer_of_plan(plan: Plan) -> Packer | None:
    """The packer that serves a plan; None where prefill has no buckets, or a bucket no time."""
    times = plan.prefill.graph_us
    if not all(bucket.size in times for bucket in plan.prefill.base_ladder):
        return None
    return packer_of(times_of_phase(plan.prefill, plan.limits)) if times else None
