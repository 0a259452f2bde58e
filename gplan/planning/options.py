"""What a user asks `gplan plan` for, as the flags name it, and how lists of buckets are written.

Nothing here is resolved: `None` means that the planner decides, and says so in the plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from gplan.errors import GplanError

MAX_BUCKETS = 1024
"""Buckets of one phase at most: far above any useful ladder, and a bound on what a typing error can ask for."""

MAX_SIZE = 1 << 20

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`: how far a stage has come. A stage is over when `done == total`."""

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_HINT = "Write sizes as 1,2,4,8, ranges as 8-64:8 (first, multiples of the step, last), or both: 1,2,4,8-64:8."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The flags of `gplan plan`. `None` leaves the decision to the planner; anything else is a lock.

    Attributes:
        checkpoint: a folder of safetensors with its config, or a hub name, as the user wrote it.
        workload: a trace file or traffic stated in words, to solve the ladders for; None for the default ladders.
        speedup: how many times as fast the workload's requests arrive; None for as fast as it says.
        max_len: tokens of one request at most, prompt and output together.
        chunk: tokens of one step at most.
        prefix_cache: keep full pages of keys and values for requests that begin with the same tokens.
        memory: a size as `gplan.units` reads it; a percentage is of the device's memory.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: `float32`, `bfloat16` or `float16`.
        try_compile: have forwards compiled, and choose compiled graphs where they win.
        prefill_slots: requests of a prefill graph that holds its attention; such graphs are captured if it is given.
        decode_variants: of `greedy` and `sampled`, to be captured at every size; empty for none.
        startup_budget_s: seconds that capturing may take when the plan is served.
        hash_contents: digest the tensor files' bytes, not only their headers.
    """

    checkpoint: str
    workload: str | None = None
    speedup: float | None = None
    max_batch: int | None = None
    max_len: int | None = None
    chunk: int | None = None
    page_size: int | None = None
    prefix_cache: bool | None = None
    memory: str | None = None
    device: str | None = None
    dtype: str | None = None
    kernels: str | None = None
    decode_backend: str | None = None
    prefill_backend: str | None = None
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    try_compile: bool = False
    prefill_slots: int | None = None
    decode_variants: tuple[str, ...] | None = None
    startup_budget_s: float | None = None
    hash_contents: bool = False


def parse_buckets(text: str) -> tuple[int, ...]:
    """Reads a list of bucket sizes: `1,2,4,8`, ranges, or both, in any order.

    `FIRST-LAST:STEP` is FIRST, every multiple of STEP between, and LAST: `1-24:8` is 1, 8, 16, 24. Without a step it
    is every size.

    Returns:
        The sizes, ascending, each once.

    Raises:
        GplanError: not such a list, a size of 0 or above `MAX_SIZE`, or more than `MAX_BUCKETS` sizes.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        sizes.update(_parse_part(part.strip(), text))
        if len(sizes) > MAX_BUCKETS:
            raise GplanError(f"{text!r} names more than {MAX_BUCKETS} buckets", "Give the range a larger step.")
    return tuple(sorted(sizes))


def format_buckets(sizes: tuple[int, ...]) -> str:
    """Writes sizes as `parse_buckets` reads them back."""
    return ",".join(str(size) for size in sizes)


def _parse_part(part: str, text: str) -> set[int]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise GplanError(f"{text!r} is not a list of bucket sizes: {part!r} is not a size", _HINT)
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    step = int(match[3]) if match[3] else 1
    if not 1 <= first <= last <= MAX_SIZE:
        raise GplanError(f"{part!r}: sizes run from 1 to {MAX_SIZE}, the first not above the last", _HINT)
    if step == 0:
        raise GplanError(f"{part!r}: the step is 0", _HINT)
    if (last - first) // step > MAX_BUCKETS:
        raise GplanError(f"{part!r} names more than {MAX_BUCKETS} buckets", "Give the range a larger step.")
    return {first, *range(-(-first // step) * step, last + 1, step), last}
