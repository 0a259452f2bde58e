"""Ladders that need no measurement, what can be recorded at all, and what a ladder costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.plan import Limits
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.planning.ladders import (
    NAMED_LADDERS,
    check_sizes,
    default_ladder,
    ladder_cost,
    largest_size,
    named_ladder,
    regret,
)


def limits(max_batch: int, max_len: int, chunk: int) -> Limits:
    return Limits(max_batch=max_batch, max_len=max_len, chunk=chunk, page_size=16, memory_bytes=0)


@pytest.mark.parametrize("phase", Phase)
def test_the_exact_maximum_is_always_in_the_default_ladder(phase: Phase) -> None:
    for maximum in range(1, 601):
        ladder = default_ladder(phase, maximum)
        assert ladder[-1] == maximum
        assert list(ladder) == sorted(set(ladder))
        assert ladder[0] >= 1


def test_default_ladders_pad_little_beyond_the_smallest_steps() -> None:
    assert default_ladder(Phase.DECODE, 64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    ladder = default_ladder(Phase.PREFILL, 8192)
    assert len(ladder) == 33
    assert {512, 1024, 2048, 4096} <= set(ladder)
    assert all(above <= below * 1.25 for below, above in itertools.pairwise(ladder) if below >= 64)


def test_named_ladders_are_those_of_their_engines() -> None:
    assert named_ladder("sglang", Phase.DECODE, 50) == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 50)
    assert len(named_ladder("sglang", Phase.DECODE, 512)) == 52
    assert named_ladder("sglang", Phase.PREFILL, 8192)[-9:] == (4096, 4608, 5120, 5632, 6144, 6656, 7168, 7680, 8192)
    assert len(named_ladder("sglang", Phase.PREFILL, 8192)) == 58
    assert named_ladder("sglang", Phase.PREFILL, 600)[-2:] == (512, 576)
    assert named_ladder("vllm", Phase.PREFILL, 8192)[-3:] == (480, 496, 512)
    assert len(named_ladder("vllm", Phase.DECODE, 512)) == 51
    assert named_ladder("tensorrt-llm", Phase.DECODE, 600)[-4:] == (128, 256, 512, 600)
    assert named_ladder("tensorrt-llm-64", Phase.PREFILL, 2048)[-3:] == (1920, 1984, 2048)


@given(st.sampled_from(NAMED_LADDERS), st.sampled_from(list(Phase)), st.integers(1, 600))
def test_named_ladders_end_at_the_maximum(name: str, phase: Phase, maximum: int) -> None:
    ladder = named_ladder(name, phase, maximum)
    assert list(ladder) == sorted(set(ladder))
    assert all(1 <= size <= maximum for size in ladder)
    if phase is Phase.DECODE and (maximum <= 512 or name != "vllm"):
        assert ladder[-1] == maximum


def test_the_largest_step_follows_from_the_limits() -> None:
    assert largest_size(Phase.DECODE, limits(64, 4096, 2048)) == 64
    assert largest_size(Phase.DECODE, limits(64, 4096, 128), width=4) == 32
    assert largest_size(Phase.PREFILL, limits(64, 4096, 2048)) == 2048
    assert largest_size(Phase.PREFILL, limits(4, 100, 2048)) == 4 * 99


def test_a_size_that_no_step_has_is_refused_by_name() -> None:
    check_sizes([1, 64], Phase.DECODE, limits(64, 4096, 2048))
    with pytest.raises(GplanError, match=r"--decode-buckets: no step has 0, 65 requests \(--max-batch 64"):
        check_sizes([1, 65, 0], Phase.DECODE, limits(64, 4096, 2048))
    with pytest.raises(GplanError, match=r"--prefill-buckets: no step has 400 tokens .*--max-len 100"):
        check_sizes([400], Phase.PREFILL, limits(4, 100, 2048))


def test_what_a_ladder_costs() -> None:
    graph = np.array([0.0, 10, 11, 12, 13, 14, 15, 16, 17])
    eager = np.array([0.0, 20, 20, 12.5, 20, 20, 20, 20, 25])
    cost = ladder_cost((2, 6), [(1, 3), (3, 2), (6, 1), (8, 4)], graph, eager)
    assert cost.total_us == 3 * 11 + 2 * 15 + 15 + 4 * 25
    assert cost.dense_us == 3 * 10 + 2 * 12 + 15 + 4 * 17
    assert cost.padding_us == 3 * 1 + 2 * 3
    assert (cost.padding_rows, cost.replayed_steps, cost.eager_steps) == (3 + 6, 6, 4)
    assert cost.regret == pytest.approx(178 / 137 - 1)


def test_a_padding_cap_and_eager_sizes_keep_steps_off_a_bucket() -> None:
    graph, eager = np.arange(9.0), np.full(9, 100.0)
    assert ladder_cost((8,), [(4, 1), (3, 1)], graph, eager, padding_cap=1.0).total_us == 8 + 100
    assert ladder_cost((8,), [(4, 1), (3, 1)], graph, eager, eager_sizes=((3, 3),)).total_us == 8 + 100


def test_no_ladder_at_all_runs_eagerly() -> None:
    graph, eager = np.arange(9.0), np.full(9, 100.0)
    cost = ladder_cost((), [(4, 2)], graph, eager)
    assert (cost.total_us, cost.eager_steps) == (200, 2)


def test_no_steps_cost_nothing() -> None:
    assert regret((8,), [], np.arange(9.0), np.arange(9.0)) == 0


@given(st.data())
def test_regret_is_never_negative(data: st.DataObject) -> None:
    maximum = data.draw(st.integers(1, 20))
    times = st.lists(st.floats(1, 100), min_size=maximum + 1, max_size=maximum + 1)
    graph, eager = np.array(data.draw(times)), np.array(data.draw(times))
    ladder = sorted(data.draw(st.sets(st.integers(1, maximum))))
    steps = data.draw(st.lists(st.tuples(st.integers(1, maximum), st.integers(1, 9)), min_size=1))
    cap = data.draw(st.none() | st.floats(0, 3))
    assert regret(ladder, steps, graph, eager, cap) >= -1e-12
