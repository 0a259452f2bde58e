"""Sharing out contexts among the programs of decode attention."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gplan.kernels.flashinfer.work_items import CUT_STEP, CUT_TOKENS, work_items

lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=300)


def shared(lengths: list[int], lanes: int) -> tuple[np.ndarray, np.ndarray]:
    return work_items(np.array(lengths, np.int32), lanes)


def busiest_lane(items: np.ndarray, lanes: int) -> int:
    """Tokens of the lane that ends last, each taking the next item when it is done."""
    loads = [0] * lanes
    for _, first, end, _ in items.tolist():
        lane = loads.index(min(loads))
        loads[lane] += end - first
    return max(loads)


@given(lengths, st.integers(1, 64))
def test_every_token_is_read_once_by_few_items(lengths: list[int], lanes: int) -> None:
    items, indptr = shared(lengths, lanes)
    assert len(items) == indptr[-1] <= len(lengths) + lanes
    assert sorted(items[:, 3].tolist()) == list(range(len(items)))
    by_part = items[np.argsort(items[:, 3])]
    for request, length in enumerate(lengths):
        parts = by_part[indptr[request] : indptr[request + 1]]
        assert set(parts[:, 0].tolist()) == {request}
        assert [0, *parts[:, 2].tolist()] == [*parts[:, 1].tolist(), length]
        assert all(first % CUT_STEP == 0 for first in parts[:, 1].tolist())


@given(lengths, st.integers(1, 64))
def test_the_longest_items_come_first(lengths: list[int], lanes: int) -> None:
    items, _ = shared(lengths, lanes)
    sizes = (items[:, 2] - items[:, 1]).tolist()
    assert sizes == sorted(sizes, reverse=True)


@given(lengths, st.integers(1, 64))
def test_cuts_never_make_the_busiest_lane_much_longer(lengths: list[int], lanes: int) -> None:
    whole = np.array([(r, 0, n, r) for r, n in enumerate(lengths)])
    whole = whole[np.argsort(-whole[:, 2], kind="stable")]
    items, _ = shared(lengths, lanes)
    assert busiest_lane(items, lanes) <= busiest_lane(whole, lanes) + CUT_STEP + CUT_TOKENS


def test_one_long_context_uses_every_lane() -> None:
    items, _ = shared([33 * 640], 33)
    assert len(items) == 33
    assert busiest_lane(items, 33) == 640


def test_contexts_that_fill_the_lanes_are_left_whole() -> None:
    items, _ = shared([1024] * 66, 33)
    assert len(items) == 66


def test_a_last_round_that_is_not_full_is_cut() -> None:
    items, _ = shared([1024] * 80, 33)
    assert len(items) > 80
    assert busiest_lane(items, 33) < 2700


def test_short_contexts_do_not_hide_that_the_last_round_of_long_ones_is_not_full() -> None:
    items, _ = shared([1024] * 72 + [1] * 48, 33)
    assert len(items) > 72 + 48
    assert busiest_lane(items, 33) < 2700


@given(st.lists(st.integers(1, 5000), max_size=300), st.integers(1, 64), st.integers(0, 300))
def test_rows_of_padding_read_nothing_and_change_nothing(lengths: list[int], lanes: int, padding: int) -> None:
    items, indptr = work_items(np.array(lengths, np.int32), lanes, padding)
    real, real_indptr = work_items(np.array(lengths, np.int32), lanes)
    assert items[: len(real)].tolist() == real.tolist()
    assert indptr[: len(lengths) + 1].tolist() == real_indptr.tolist()
    unread = [[len(lengths) + row, 0, 0, len(real) + row] for row in range(padding)]
    assert items[len(real) :].tolist() == unread
    assert indptr[len(lengths) :].tolist() == list(range(len(real), len(real) + padding + 1))
