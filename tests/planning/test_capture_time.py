"""What has to be captured comes out of the budget first; what is left is divided."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.plan import Bucket, Choice
from gplan.core import Phase
from gplan.errors import GplanError
from gplan.planning.capture_time import capture_limits
from gplan.planning.options import PlanOptions
from gplan.planning.replan import replan
from tests.formats.plans import make_bucket, make_plan


def buckets(*capture_ms: float) -> tuple[Bucket, ...]:
    made = [msgspec.structs.replace(make_bucket(2**i), capture_ms=ms) for i, ms in enumerate(capture_ms)]
    return tuple(made)


def test_the_largest_buckets_may_take_all_of_the_budget() -> None:
    free = {Phase.DECODE: buckets(50, 50, 50, 20), Phase.PREFILL: buckets(40, 80)}
    assert capture_limits(0.1, free, {}) == {Phase.DECODE: pytest.approx(20), Phase.PREFILL: pytest.approx(80)}
    with pytest.raises(GplanError, match=r"decode at 8 and prefill at 2, takes 100.0 ms; there are 99.0 ms"):
        capture_limits(0.099, free, {})
    assert capture_limits(None, free, {}) == {Phase.DECODE: None, Phase.PREFILL: None}


def test_what_the_user_fixed_is_not_there_for_the_other_phase() -> None:
    free, fixed = {Phase.PREFILL: buckets(40, 40)}, {Phase.DECODE: buckets(30, 30)}
    assert capture_limits(0.11, free, fixed)[Phase.PREFILL] == pytest.approx(50)
    with pytest.raises(GplanError, match="decode at 1, 2 and prefill at 2"):
        capture_limits(0.09, free, fixed)


@given(
    decode=st.lists(st.floats(0.01, 1e4), max_size=5),
    prefill=st.lists(st.floats(0.01, 1e4), max_size=5),
    is_fixed=st.booleans(),
    budgets=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)),
)
def test_the_whole_budget_is_kept_to_and_more_of_it_takes_nothing_away(
    decode: list[float], prefill: list[float], is_fixed: bool, budgets: tuple[float, float]
) -> None:
    free, fixed = {Phase.PREFILL: buckets(*prefill)}, {Phase.DECODE: buckets(*decode)}
    if not is_fixed:
        free, fixed = free | fixed, {}
    least = sum(decode if is_fixed else decode[-1:]) + sum(prefill[-1:])
    found = [capture_limits(s, free, fixed) for s in sorted(budgets) if s * 1e3 >= least]
    for limits, budget_s in zip(found, sorted(budgets)[-len(found) :], strict=False):
        spent = [limit or 0.0 for limit in limits.values()]
        assert sum(spent) <= budget_s * 1e3 * (1 + 1e-6)
        assert all(limit >= sum(has[-1:]) * (1 - 1e-6) for limit, has in zip(spent, (decode, prefill), strict=True))
    for phase in Phase if len(found) == 2 else ():
        assert (found[0][phase] or 0.0) <= (found[1][phase] or 0.0) * (1 + 1e-6)


def test_a_plan_for_other_traffic_keeps_to_the_budget_beside_a_ladder_that_is_fixed() -> None:
    old = make_plan(max_batch=16, chunk=128, max_len=256)
    lock = Choice(field="decode.ladder", value="1,2,4,8,16", basis="locked", reason="--decode-buckets was given")
    old = msgspec.structs.replace(old, choices=(*old.choices, lock))
    fixed_ms = sum(bucket.capture_ms for bucket in old.decode.ladder)
    budget_ms = fixed_ms + 2 * old.prefill.ladder[-1].capture_ms
    options = PlanOptions(checkpoint=old.model.source, workload="closed:16,in=5-60,out=20-40")
    bound = replan(old, dataclasses.replace(options, startup_budget_s=budget_ms / 1e3))
    assert bound.decode.ladder == old.decode.ladder
    assert 1 <= len(bound.prefill.ladder) < len(replan(old, options).prefill.ladder)
    assert fixed_ms + sum(bucket.capture_ms for bucket in bound.prefill.ladder) <= budget_ms
    with pytest.raises(GplanError, match="decode at 1, 2, 4, 8, 16 and prefill at 128"):
        replan(old, dataclasses.replace(options, startup_budget_s=fixed_ms / 1e3))
