"""Ladders that need no measurement: the default one, and those of other engines; and what any ladder costs.

Owns no decision: `buckets` solves for a ladder, `curves` gives times of sizes that were not measured. Arrays of times
are indexed by size: `graph_us[n]` is a replay of bucket n, `eager_us[n]` an eager step of n, in microseconds, both
[maximum + 1] float64 with an unused first entry. `rows_us[n]` is the part of both that n real rows take by what they
read of the KV pool: padding rows read nothing, so a step of n replayed from bucket b takes
`graph_us[b] - rows_us[b] + rows_us[n]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from formats.plan import Limits
from gplan.core import Phase
from gplan.errors import GplanError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Steps = Sequence[tuple[int, float]]
"""(size, number of steps that ran at it, or are expected)."""

_GRANULE = {Phase.DECODE: 8, Phase.PREFILL: 16}
_FIRST = {Phase.DECODE: (1, 2, 4, 8), Phase.PREFILL: (8, 16)}


def largest_size(phase: Phase, limits: Limits, width: int = 1) -> int:
    """The largest step that can happen: requests in decode, tokens in prefill.

    Args:
        width: tokens per request in decode.
    """
    if phase is Phase.DECODE:
        return min(limits.max_batch, limits.chunk // width)
    return min(limits.chunk, limits.max_batch * (limits.max_len - 1))


def check_sizes(sizes: Iterable[int], phase: Phase, limits: Limits, width: int = 1) -> None:
    """Refuses sizes that no step can have.

    Raises:
        GplanError: names the sizes, and the limits that bound them.
    """
    largest = largest_size(phase, limits, width)
    wrong = sorted(size for size in sizes if not 1 <= size <= largest)
    if not wrong:
        return
    unit = "requests" if phase is Phase.DECODE else "tokens"
    bounds = f"--max-batch {limits.max_batch}, --chunk {limits.chunk}"
    if phase is Phase.PREFILL:
        bounds += f", --max-len {limits.max_len}"
    elif width > 1:
        bounds += f", {width} tokens per request"
    raise GplanError(
        f"--{phase}-buckets: no step has {', '.join(map(str, wrong))} {unit} ({bounds})",
        f"Leave out sizes outside 1 to {largest}, or raise the limit.",
    )


def default_ladder(phase: Phase, maximum: int, padding: float = 0.25) -> tuple[int, ...]:
    """A ladder to begin with: a few small sizes, then steps in proportion, and the exact maximum.

    Steps are powers of two, so that sizes are multiples of the tiles that matrix products are cut into: a size just
    above a tile's end costs as much as the next.

    Args:
        padding: how much larger than the bucket below a bucket may be, beyond the smallest steps.
    """
    granule = _GRANULE[phase]
    sizes = [size for size in _FIRST[phase] if size < maximum]
    size = _FIRST[phase][-1]
    while size < maximum:
        size += max(granule, 1 << int(size * padding).bit_length() - 1)
        sizes.append(min(size, maximum))
    return tuple(sizes) if sizes and sizes[-1] == maximum else (*sizes, maximum)


# Other engines ------------------------------------------------------------------------------------------------------


def _sglang(phase: Phase, maximum: int) -> tuple[list[int], bool]:
    if phase is Phase.DECODE:
        tail = [*range(512, maximum + 1, 32)]
        return [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *tail], True
    parts = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    return [*parts, *range(1280, 4097, 256), *range(4608, maximum + 1, 512)], False


def _vllm(phase: Phase, maximum: int) -> tuple[list[int], bool]:
    # Its sizes go to twice the batch, so the size above the largest batch is there; taken as that batch itself.
    return [1, 2, 4, *range(8, 249, 8), *range(256, 513, 16)], phase is Phase.DECODE and maximum <= 512


def _tensorrt_llm(phase: Phase, maximum: int) -> tuple[list[int], bool]:
    powers = [1 << exponent for exponent in range(8, maximum.bit_length())]
    return [1, 2, 4, *range(8, 129, 8), *powers], True


def _tensorrt_llm_64(phase: Phase, maximum: int) -> tuple[list[int], bool]:
    return [1, 2, 4, *range(8, 129, 8), *range(192, maximum + 1, 64)], True


_NAMED: dict[str, Callable[[Phase, int], tuple[list[int], bool]]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "tensorrt-llm": _tensorrt_llm,
    "tensorrt-llm-64": _tensorrt_llm_64,
}
NAMED_LADDERS = tuple(_NAMED)


def named_ladder(name: str, phase: Phase, maximum: int) -> tuple[int, ...]:
    """The fixed ladder of another engine, cut at `maximum`, which is added where that engine adds it.

    SGLang's from its `server_args.py` (decode with the maximum, prefill without), vLLM's from its `config/vllm.py`
    (the same sizes for both phases, up to 512), TensorRT-LLM's from its `llm_args.py` (with the maximum; above 128 in
    powers of two, or in steps of 64).
    """
    sizes, adds_maximum = _NAMED[name](phase, maximum)
    kept = {size for size in sizes if size <= maximum}
    return tuple(sorted(kept | {maximum} if adds_maximum else kept))


# What a ladder costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LadderCost:
    """What the steps of a workload take with a ladder.

    Attributes:
        total_us: of all steps.
        dense_us: of all steps, each at the cheapest that any bucket or eager execution would give it.
        padding_us: of replayed steps, beyond a replay at their exact size.
        padding_rows: bucket minus size, over replayed steps.
        eager_steps: steps that no bucket took.
    """

    total_us: float
    dense_us: float
    padding_us: float
    padding_rows: int
    replayed_steps: int
    eager_steps: int

    @property
    def regret(self) -> float:
        """Expected step time over that of a ladder with every size, minus 1; never negative."""
        return self.total_us / self.dense_us - 1 if self.dense_us else 0.0


def ladder_cost(
    ladder: Sequence[int],
    steps: Steps,
    graph_us: FloatArray,
    eager_us: FloatArray,
    padding_cap: float | None = None,
    eager_sizes: Sequence[tuple[int, int]] = (),
    rows_us: FloatArray | None = None,
) -> LadderCost:
    """Runs every step at the smallest bucket that holds it, or eagerly: above the ladder, where the bucket is more than
    `padding_cap` above the size, and at `eager_sizes` ([first, last] ranges). Steps are within the arrays."""
    sizes, counts = split_steps(steps)
    rows_us = np.zeros_like(graph_us) if rows_us is None else rows_us
    buckets = np.asarray([*ladder, 0], dtype=np.int64)
    bucket = buckets[np.searchsorted(buckets[:-1], sizes)]
    replayed = (bucket > 0) & may_take(bucket, sizes, padding_cap)
    for first, last in eager_sizes:
        replayed &= (sizes < first) | (sizes > last)
    replay_us = graph_us[bucket] - rows_us[bucket] + rows_us[sizes]
    taken = np.where(replayed, replay_us, eager_us[sizes])
    padded = counts * replayed
    return LadderCost(
        total_us=float(counts @ taken),
        dense_us=float(counts @ dense_us(sizes, graph_us, eager_us, padding_cap, rows_us)),
        padding_us=float(padded @ (replay_us - graph_us[sizes])),
        padding_rows=int(padded @ (bucket - sizes)),
        replayed_steps=int(padded.sum()),
        eager_steps=int(counts.sum() - padded.sum()),
    )


def regret(
    ladder: Sequence[int],
    steps: Steps,
    graph_us: FloatArray,
    eager_us: FloatArray,
    padding_cap: float | None = None,
    eager_sizes: Sequence[tuple[int, int]] = (),
    rows_us: FloatArray | None = None,
) -> float:
    """The regret alone; see `ladder_cost`."""
    return ladder_cost(ladder, steps, graph_us, eager_us, padding_cap, eager_sizes, rows_us).regret


def dense_us(
    sizes: IntArray, graph_us: FloatArray, eager_us: FloatArray, padding_cap: float | None, rows_us: FloatArray
) -> FloatArray:
    """The cheapest that a step of each size could be: eager, or replayed from any bucket that may take it."""
    padding_us = graph_us - rows_us
    if padding_cap is None:
        best = np.minimum.accumulate(padding_us[::-1])[::-1][sizes]
    else:
        highest = np.minimum(sizes * (1 + padding_cap), len(graph_us) - 1).astype(np.int64)
        best = np.array([padding_us[size : last + 1].min() for size, last in zip(sizes, highest, strict=True)])
    return np.minimum(best + rows_us[sizes], eager_us[sizes])


def may_take(bucket: IntArray, sizes: IntArray, padding_cap: float | None) -> npt.NDArray[np.bool_]:
    """Whether each bucket is at most `padding_cap` above its size: `bucket <= size * (1 + padding_cap)`."""
    if padding_cap is None:
        return np.ones(len(sizes), dtype=np.bool_)
    return bucket <= sizes * (1 + padding_cap)


def split_steps(steps: Steps) -> tuple[IntArray, FloatArray]:
    """Sizes ascending, and how many steps each ran."""
    ordered = sorted((size, count) for size, count in steps if count)
    sizes = np.array([size for size, _ in ordered], dtype=np.int64)
    return sizes, np.array([count for _, count in ordered], dtype=np.float64)
