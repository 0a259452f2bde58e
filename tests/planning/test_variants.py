"""Variants: what is worth a graph, under what budget, and plans that have them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.container import decode, encode
from formats.measurements import Timing
from formats.plan import Bucket, Plan, bucket_key
from gplan.core import Phase, ShapeKey
from gplan.errors import GplanError, UnsupportedError
from gplan.graphs.admission import PhaseSetup
from gplan.planning.options import PlanOptions
from gplan.planning.planner import make_plan
from gplan.planning.profiler import Patience
from gplan.planning.replan import replan
from gplan.planning.variants import (
    Candidate,
    Pairs,
    Saving,
    found,
    restricted,
    steps_by_bucket,
    with_pairs,
    worth_capturing,
)
from gplan.serving.startup import start_executor, verify_all
from tests.checkpoints import make_checkpoint


def saving(base: float, special: float, spread: float = 0.0, size: int = 1) -> Saving:
    return Saving(size, "greedy", *(Timing(median_us=us, spread_us=spread, runs=5) for us in (base, special)))


@pytest.mark.parametrize(
    ("base", "special", "spread", "is_worth_it"),
    [(100, 96, 0, True), (100, 98, 0, False), (100, 96, 3, False), (100, 120, 0, False), (100, 80, 50, True)],
)
def test_a_variant_must_save_enough_and_more_than_the_noise(
    base: float, special: float, spread: float, is_worth_it: bool
) -> None:
    assert saving(base, special, spread).is_worth_it is is_worth_it


def test_the_reason_has_the_figures_either_way() -> None:
    none = found("greedy", [saving(4150, 4130)], "a served step")
    assert none.saved_us == {}
    assert none.reasons["greedy"].startswith("a served step takes 4.13 ms, 0.5% less than 4.15, at 1; at least 3%")
    some = found("greedy", [saving(100, 90), saving(200, 199, size=8)], "a served step")
    assert some.saved_us == {(1, "greedy"): 10}


def test_the_reason_tells_why_a_saving_is_not_enough() -> None:
    """A larger saving whose times spread by more than it, and sizes that are left out beside others that are kept."""
    none = found("greedy", [saving(1000, 920, spread=100)], "a served step")
    assert none.reasons["greedy"].endswith(
        "8.0% less than 1.00, at 1; at least 3%, and more than the times spread (10.0%), is asked for"
    )
    savings = [saving(1000, 950), saving(1000, 920, spread=100, size=2), saving(1000, 990, size=4)]
    some = found("greedy", savings, "a served step")
    assert some.reasons["greedy"].endswith(
        "5.0% less than 1.00, at 1; at least 3%, and more than the times spread (0.0%), is asked for; "
        "not at 2, 4: it saves less than that there"
    )


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        size=st.integers(1, 64),
        part=st.just("greedy"),
        gain_us=st.integers(-5, 100).map(float),
        capture_ms=st.integers(1, 40).map(lambda tenths: tenths / 10),
    ),
    max_size=7,
)


@given(CANDIDATES, st.integers(0, 100))
def test_what_is_captured_under_a_budget_gains_most(candidates: list[Candidate], tenths: int) -> None:
    chosen = worth_capturing(candidates, tenths / 10)
    subsets = chain.from_iterable(combinations(candidates, n) for n in range(len(candidates) + 1))
    fitting = [subset for subset in subsets if sum(round(c.capture_ms * 10) for c in subset) <= tenths]
    assert sum(c.gain_us for c in chosen) == max(sum(c.gain_us for c in subset) for subset in fitting)
    assert sum(round(c.capture_ms * 10) for c in chosen) <= tenths


@given(CANDIDATES)
def test_without_a_budget_all_that_gain_are_captured(candidates: list[Candidate]) -> None:
    assert list(worth_capturing(candidates, None)) == [each for each in candidates if each.gain_us > 0]


def test_what_is_left_out_says_why() -> None:
    asked = [Candidate(1, "greedy", 5.0, 1.0), Candidate(2, "greedy", 0.0, 1.0), Candidate(4, "greedy", 9.0, 1.0)]
    pairs = Pairs({(each.size, "greedy"): 1.0 for each in asked}, {"greedy": "saves much"})
    left = restricted(pairs, worth_capturing(asked, 1.0), asked)
    assert left.saved_us == {(4, "greedy"): 1.0}
    assert left.reasons["greedy"] == (
        "saves much; not at 2: the traffic's steps do not pay for it; not at 1: no capture time is left"
    )


def test_steps_go_to_the_bucket_that_takes_them() -> None:
    keys = (ShapeKey(Phase.DECODE, 2), ShapeKey(Phase.DECODE, 2, variant="greedy"), ShapeKey(Phase.DECODE, 8))
    setup = PhaseSetup(phase=Phase.DECODE, backend="full", keys=keys, max_size=8, eager_sizes=((3, 3),))
    assert steps_by_bucket(setup, [(1, 10), (2, 5), (3, 100), (4, 1), (8, 2)]) == {2: 15, 8: 3}


def test_keys_of_pairs_follow_their_base() -> None:
    bases = (ShapeKey(Phase.DECODE, 1, variant="compiled"), ShapeKey(Phase.DECODE, 2))
    setup = PhaseSetup(phase=Phase.DECODE, backend="full", keys=bases, max_size=2)
    made = with_pairs(setup, Pairs({(1, "greedy"): 1.0, (2, "sampled"): 1.0, (4, "greedy"): 1.0}, {}), 0)
    assert [str(key) for key in made.keys] == [
        "decode:1:compiled",
        "decode:1:compiled+greedy",
        "decode:2",
        "decode:2:sampled",
    ]


# Plans --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("variants"))


def plan_of(checkpoint: Path, **options: object) -> Plan:
    values: dict[str, object] = {"max_batch": 4, "max_len": 96, "chunk": 24, "memory": "1GiB", "device": "cpu"}
    quick = Patience(min_runs=3, max_runs=3, seconds=0)
    return make_plan(PlanOptions(checkpoint=str(checkpoint), **{**values, **options}), lambda *_: None, quick)


@pytest.fixture(scope="module")
def plan(checkpoint: Path) -> Plan:
    return plan_of(
        checkpoint,
        decode_backend="full",
        decode_variants=("greedy", "sampled"),
        prefill_backend="breakable",
        prefill_slots=2,
    )


def test_variants_that_the_user_fixed_are_at_every_size_with_receipts(plan: Plan) -> None:
    assert decode(encode(plan)) == plan
    assert {bucket.variant for bucket in plan.decode.ladder} == {"", "greedy", "sampled"}
    assert len(plan.decode.ladder) == 3 * len(plan.decode.base_ladder)
    assert {bucket.variant for bucket in plan.prefill.ladder} == {"", "full"}
    assert plan.prefill.request_slots == 2
    keys = {bucket_key(phase.phase, bucket) for phase in (plan.decode, plan.prefill) for bucket in phase.ladder}
    assert {receipt.key for receipt in plan.receipts} == keys
    locks = {choice.field: choice.value for choice in plan.choices if choice.basis == "locked"}
    assert locks["decode.variants"] == "greedy,sampled"
    assert locks["prefill.request_slots"] == "2"


@pytest.mark.parametrize("prefill", [{"prefill_backend": "full"}, {"prefill_backend": "breakable", "prefill_slots": 2}])
def test_what_only_graphs_take_is_not_reserved_for_eager_steps(checkpoint: Path, prefill: dict[str, object]) -> None:
    """Graphs that cover the chunk hold its activations; what is left to reserve is sampling."""
    sizes = {"max_batch": 2, "max_len": 128, "chunk": 128, "decode_variants": ()}
    eager = plan_of(checkpoint, **sizes, decode_backend="eager", prefill_backend="eager")
    covered = plan_of(checkpoint, **sizes, decode_backend="full", **prefill)
    assert covered.planned_bytes("activation_reserve") < eager.planned_bytes("activation_reserve") / 2
    assert covered.planned_bytes("graph_pool_prefill") > 0
    assert "if every size ran eagerly" in next(row.basis for row in covered.ledger if row.name == "activation_reserve")
    few_slots = plan_of(checkpoint, **sizes, decode_backend="full", prefill_backend="full", prefill_slots=1)
    assert few_slots.planned_bytes("activation_reserve") == eager.planned_bytes("activation_reserve")


def test_a_plan_with_variants_is_served_as_planned(plan: Plan, checkpoint: Path) -> None:
    ready = start_executor(plan, str(checkpoint), lambda stage, done, total: None)
    verified = verify_all(ready.executor, plan.model.vocab_size, lambda stage, done, total: None)
    assert not verified.failures
    assert len(verified.receipts) == len(plan.decode.ladder) + len(plan.prefill.ladder)
    ready.executor.close()


def test_variants_that_nobody_fixed_are_measured_and_explained(checkpoint: Path) -> None:
    plan = plan_of(checkpoint, decode_backend="full", prefill_backend="eager", max_batch=2)
    assert {note.variant for note in plan.decode.variants} == {"greedy", "sampled"}
    for note in plan.decode.variants:
        assert "a served step takes" in note.reason
        assert "at least 3%" in note.reason


def test_other_traffic_keeps_the_variants_of_the_buckets_that_stay(plan: Plan) -> None:
    new = replan(plan, PlanOptions(checkpoint=plan.model.source, workload="closed:1,in=5-12,out=20-40"))
    before, after = (variants_by_size(each.decode.ladder) for each in (plan, new))
    stayed = before.keys() & after.keys()
    assert {size: after[size] for size in stayed} == {size: before[size] for size in stayed}
    assert {bucket.variant for bucket in new.decode.ladder} == {"", "greedy", "sampled"}
    assert decode(encode(new)) == new


def variants_by_size(ladder: Sequence[Bucket]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for bucket in ladder:
        found.setdefault(bucket.size, set()).add(bucket.variant)
    return found


def test_a_budget_for_capturing_goes_to_variants_last(checkpoint: Path) -> None:
    plan = plan_of(checkpoint, decode_backend="full", prefill_backend="eager", startup_budget_s=10, max_batch=2)
    assert plan.decode.ladder[-1].size == 2
    assert decode(encode(plan)) == plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_variants": ("greedy",), "decode_backend": "breakable"}, "only a whole graph can draw"),
        ({"decode_variants": ("greedy",), "decode_backend": "eager"}, "only a whole graph can draw"),
        ({"prefill_slots": 5}, "a step has 1 to 4 requests"),
        ({"prefill_slots": 2, "prefill_backend": "eager"}, "captures nothing"),
    ],
)
def test_variants_that_cannot_be_are_refused(checkpoint: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(GplanError, match=message) as raised:
        plan_of(checkpoint, **options)
    assert raised.value.hint
    assert isinstance(raised.value, GplanError | UnsupportedError)
