"""The ledger adds up, and the KV pool gets what remains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from formats.measurements import Timing
from formats.plan import LEDGER_ROWS, Bucket, Limits
from gplan.errors import FitError
from gplan.memory.kv_pool import KVLayout
from gplan.planning.backends import Trial, choose_backend
from gplan.planning.budget import Needs, fill_ledger, most_useful_pages, pages_of
from gplan.planning.eager import cheaper_eagerly

LAYOUT = KVLayout(num_layers=2, page_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32)
ROWS = [row for row in LEDGER_ROWS if row not in ("kv_pool", "headroom")]


def limits_of(memory: int, max_len: int = 256, max_batch: int = 8) -> Limits:
    return Limits(max_batch=max_batch, max_len=max_len, chunk=64, page_size=16, memory_bytes=memory)


@given(
    memory=st.integers(1 << 20, 1 << 32),
    sizes=st.lists(st.integers(0, 1 << 28), min_size=len(ROWS), max_size=len(ROWS)),
    max_len=st.integers(2, 5000),
    max_batch=st.integers(1, 64),
)
def test_rows_add_up_and_one_request_fits_or_a_row_is_named(
    memory: int, sizes: list[int], max_len: int, max_batch: int
) -> None:
    limits = limits_of(memory, max_len, max_batch)
    needs = Needs(rows={row: (size, "given") for row, size in zip(ROWS, sizes, strict=True)})
    try:
        budget = fill_ledger(memory, needs, LAYOUT, limits)
    except FitError as error:
        named = error.message
    else:
        named = ""
    if named:
        assert any(row in named for row in LEDGER_ROWS)
        return
    assert sum(row.planned_bytes for row in budget.ledger) == memory
    assert all(row.planned_bytes >= 0 for row in budget.ledger)
    assert 1 + pages_of(max_len, 16) <= budget.num_kv_pages <= most_useful_pages(limits)


def test_a_few_bytes_more_or_less_give_the_same_pool() -> None:
    def pages(activation: int) -> int:
        needs = Needs(rows={row: (activation if row == "activation_reserve" else 1000, "") for row in ROWS})
        return fill_ledger(64 << 20, needs, LAYOUT, limits_of(64 << 20, 4096, 512)).num_kv_pages

    assert len({pages(5_000_000 + offset) for offset in (0, 100, 4096, 20_000)}) == 1


def trial(backend: str, *medians: float, spread: float = 1.0) -> Trial:
    sizes = (1, 8, 64)
    return Trial(
        backend, {s: Timing(median_us=m, spread_us=spread, runs=3) for s, m in zip(sizes, medians, strict=True)}
    )


def test_the_fastest_backend_wins_and_the_others_say_why_not() -> None:
    verdict = choose_backend(
        [trial("full", 50, 90, 400), trial("breakable", 60, 95, 420)], trial("eager", 100, 110, 430)
    )
    assert verdict.backend == "full"
    assert [rejection.backend for rejection in verdict.rejected] == ["breakable", "eager"]


def test_eager_wins_only_beyond_the_noise() -> None:
    slower = [trial("full", 110, 110, 110)]
    assert choose_backend(slower, trial("eager", 100, 100, 100, spread=1)).backend == "eager"
    assert choose_backend(slower, trial("eager", 100, 100, 100, spread=20)).backend == "full"


def test_graphs_that_were_asked_for_are_captured_though_eager_is_faster() -> None:
    slower, eager = [trial("full", 130, 130, 130)], trial("eager", 100, 100, 100, spread=1)
    verdict = choose_backend(slower, eager, "--decode-buckets")
    assert verdict.backend == "full"
    (rejected,) = verdict.rejected
    assert rejected.reason == "1.30 times faster than full, but --decode-buckets asks for graphs"


def test_no_candidate_means_eager() -> None:
    assert choose_backend([], trial("eager", 1, 1, 1)).backend == "eager"


def test_the_error_names_the_first_row_that_does_not_fit() -> None:
    needs = Needs(rows=dict.fromkeys(ROWS, (40 << 20, "given")))
    with pytest.raises(FitError, match="ledger row workspace"):
        fill_ledger(100 << 20, needs, LAYOUT, limits_of(100 << 20))


def test_memory_for_less_than_one_request_names_the_kv_pool() -> None:
    needs = Needs(rows=dict.fromkeys(ROWS, (0, "given")))
    one_request = (1 + pages_of(100_000, 16)) * LAYOUT.bytes_per_page
    memory = one_request + (16 << 20)
    assert fill_ledger(memory, needs, LAYOUT, limits_of(memory, 100_000)).num_kv_pages == 1 + pages_of(100_000, 16)
    with pytest.raises(FitError, match="ledger row kv_pool") as raised:
        fill_ledger(memory - 1, needs, LAYOUT, limits_of(memory - 1, 100_000))
    assert raised.value.exit_code == 4


def bucket(size: int, graph: float, eager: float, spread: float = 0.0) -> Bucket:
    def timing(median: float) -> Timing:
        return Timing(median_us=median, spread_us=spread, runs=3)

    return Bucket(size=size, graph=timing(graph), eager=timing(eager))


def cheaper(*ladder: Bucket, row_us: float = 0.0) -> tuple[tuple[int, int], ...]:
    eager_us = {bucket.size: bucket.eager.median_us for bucket in ladder}
    return cheaper_eagerly(ladder, eager_us, [size * row_us for size in range(ladder[-1].size + 1)])


def test_sizes_far_below_a_costly_bucket_run_eagerly() -> None:
    assert cheaper(bucket(10, 10, 12), bucket(20, 100, 112)) == ((11, 18),)
    noisy = cheaper(bucket(10, 10, 12), bucket(20, 100, 112, spread=20))
    assert noisy == ((11, 17),), "noise counts up to a limit"


def test_eager_times_that_are_mostly_launching_do_not_count() -> None:
    assert cheaper(bucket(10, 10, 60), bucket(20, 100, 70)) == ()


def test_padding_rows_read_nothing() -> None:
    assert cheaper(bucket(10, 10, 12), bucket(20, 100, 112), row_us=4.0) == ((11, 17),)


def test_a_flat_cost_leaves_no_size_to_eager() -> None:
    assert cheaper(bucket(1, 50, 60), bucket(8, 51, 61), bucket(64, 55, 64)) == ()
