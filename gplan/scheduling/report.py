"""What a simulation found, as one value for people and for machines."""

from __future__ import annotations

from collections.abc import Iterable

from formats.plan import PhaseName
from formats.record import Record


class Distribution(Record, frozen=True):
    """Milliseconds of something that happened `count` times. A percentile is a value that occurred."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class PhaseReport(Record, frozen=True):
    """Steps of one phase.

    Attributes:
        steps: (size, steps) ascending by size.
        eager: of these steps, those that no bucket took.
        padding_rows: bucket minus size, over replayed steps.
        padding_ms: time of replayed steps beyond a replay at their exact size.
        busy_ms: time of all steps.
    """

    phase: PhaseName
    steps: tuple[tuple[int, int], ...]
    replayed: int
    eager: int
    padding_rows: int
    padding_ms: float
    busy_ms: float


class SimulationReport(Record, frozen=True):
    """A trace served by the scheduler with a plan's times.

    Attributes:
        duration_s: from the first arrival to the last token.
        busy_s: of these, with a step under way.
        ttft_ms: from arrival to first token, of each request.
        inter_token_ms: between tokens that follow one another in a request.
        latency_ms: from arrival to last token, of each request.
        kv_pages: pages of the KV pool, without the dummy page.
        kv_pages_mean: pages that requests use, over busy time.
        prefix_hits: requests that began with cached pages, those that came back after a preemption included.
        prefix_hit_tokens: of prompts, that were not computed for it.
    """

    num_requests: int
    input_tokens: int
    output_tokens: int
    num_steps: int
    duration_s: float
    busy_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution
    inter_token_ms: Distribution
    latency_ms: Distribution
    decode: PhaseReport
    prefill: PhaseReport
    preemptions: int
    kv_pages: int
    kv_pages_mean: float
    kv_pages_peak: int
    prefix_hits: int
    prefix_hit_tokens: int


def distribution(weighted_ps: Iterable[tuple[int, int]]) -> Distribution:
    """Of (picoseconds, how often)."""
    ordered = sorted(weighted_ps)
    count = sum(weight for _, weight in ordered)
    if not count:
        return Distribution(count=0, mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, max=0.0)
    total = sum(value * weight for value, weight in ordered)
    found = _percentiles(ordered, count, (50, 90, 95, 99))
    return Distribution(
        count=count,
        mean=milliseconds(total) / count,
        p50=found[0],
        p90=found[1],
        p95=found[2],
        p99=found[3],
        max=milliseconds(ordered[-1][0]),
    )


def milliseconds(picoseconds: int) -> float:
    return picoseconds / 1e9


def _percentiles(ordered: list[tuple[int, int]], count: int, ranks: tuple[int, ...]) -> list[float]:
    """By nearest rank."""
    found, seen, index = [], 0, -1
    for rank in ranks:
        while seen * 100 < rank * count:
            index += 1
            seen += ordered[index][1]
        found.append(milliseconds(ordered[index][0]))
    return found
