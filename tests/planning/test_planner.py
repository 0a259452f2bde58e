"""Plans of tiny checkpoints: what is measured, what is decided, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.container import decode, encode
from formats.plan import Plan
from formats.plan_id import plan_id
from gplan.errors import FitError, GplanError, UnsupportedError
from gplan.planning.options import PlanOptions
from gplan.planning.planner import make_plan
from gplan.planning.profiler import Patience
from gplan.scheduling.times import pairs_timed, times_of_plan
from tests.checkpoints import make_checkpoint

QUICK = Patience(min_runs=3, max_runs=3, seconds=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("planned"))


def plan_of(checkpoint: Path, **options: object) -> Plan:
    values: dict[str, object] = {"max_batch": 4, "max_len": 96, "chunk": 24, "memory": "1GiB", "device": "cpu"}
    values["decode_variants"] = ()
    return make_plan(PlanOptions(checkpoint=str(checkpoint), **{**values, **options}), _silent, QUICK)


def _silent(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def plan(checkpoint: Path) -> Plan:
    return plan_of(checkpoint, decode_backend="full", prefill_backend="breakable")


def test_a_plan_is_valid_and_survives_its_bytes(plan: Plan) -> None:
    assert decode(encode(plan)) == plan


def test_the_ledger_spends_the_memory_to_the_byte(plan: Plan) -> None:
    assert sum(row.planned_bytes for row in plan.ledger) == plan.limits.memory_bytes
    assert plan.planned_bytes("weights") > 0
    assert plan.planned_bytes("activation_reserve") > 0
    assert plan.planned_bytes("graph_pool_prefill") > 0


def test_every_bucket_is_measured_replayed_and_eager(plan: Plan) -> None:
    for phase in (plan.decode, plan.prefill):
        assert phase.ladder[-1].size == phase.max_size
        assert all(bucket.graph is not None and bucket.graph.median_us > 0 for bucket in phase.ladder)
        assert all(bucket.eager.median_us > 0 for bucket in phase.ladder)
    layers = plan.model.num_layers
    assert {bucket.num_segments for bucket in plan.decode.ladder} == {1}
    assert {bucket.num_segments for bucket in plan.prefill.ladder} == {layers + 1}


def test_what_steps_take_beside_their_size_is_measured(plan: Plan) -> None:
    decode, prefill = plan.decode.costs, plan.prefill.costs
    assert (decode.context, prefill.context) == (95, 0)
    assert {timed.context for timed in decode.contexts} == {23, 95}, "95 is the longest there is"
    assert {timed.decodes for timed in prefill.contexts} == {0, 3}
    assert [requests for requests, _ in decode.cached_us] == [1, 4]
    assert all(us >= 0 for _, us in decode.cached_us)
    assert [requests for requests, _ in decode.rows_us] == [1, 4]
    assert not prefill.rows_us, "prompts are short: padding spares all that they compare"
    largest = plan.prefill.max_size
    assert 0 <= prefill.pair_us * pairs_timed(largest, 96) <= plan.prefill.graph_us[largest] * (1 + 1e-9)
    for costs in (decode, prefill):
        assert {requests for requests, _ in costs.beyond_us} == {1, 4}
        assert costs.host_us > 0


def test_times_between_buckets_are_foretold_and_measured(plan: Plan) -> None:
    for phase in (plan.decode, plan.prefill):
        replayed = {entry.size for entry in phase.other_sizes if entry.graph}
        assert replayed >= {prediction.size for prediction in phase.predictions}, "and buckets that were dropped"
        assert phase.predictions
        assert all(prediction.measured_us > 0 for prediction in phase.predictions)
        assert set(phase.graph_us) > {bucket.size for bucket in phase.ladder}


def test_every_key_has_a_receipt(plan: Plan) -> None:
    keys = {f"decode:{b.size}" for b in plan.decode.ladder} | {f"prefill:{b.size}" for b in plan.prefill.ladder}
    assert {receipt.key for receipt in plan.receipts} == keys
    assert all(receipt.bitwise for receipt in plan.receipts)


def test_backends_that_the_user_fixed_are_locks(plan: Plan) -> None:
    locks = {choice.field: choice.value for choice in plan.choices if choice.basis == "locked"}
    assert locks["decode.backend"] == "full"
    assert locks["prefill.backend"] == "breakable"


def test_two_plans_that_decide_alike_share_an_id(checkpoint: Path) -> None:
    fixed = {"decode_backend": "full", "decode_buckets": (1, 2, 3, 4), "prefill_backend": "eager"}
    one, again, other = (
        plan_of(checkpoint, **fixed),
        plan_of(checkpoint, **fixed),
        plan_of(checkpoint, **fixed, chunk=20),
    )
    assert one.decode.ladder != again.decode.ladder, "measured evidence differs"
    assert plan_id(one) == plan_id(again)
    assert plan_id(one) != plan_id(other)


def test_an_unlocked_backend_is_chosen_by_its_times(checkpoint: Path) -> None:
    plan = plan_of(checkpoint)
    for phase in (plan.decode, plan.prefill):
        choice = next(c for c in plan.choices if c.field == f"{phase.phase}.backend")
        assert choice.basis == "measured"
        assert choice.value == phase.backend
        assert phase.backend not in {rejection.backend for rejection in phase.rejected}
        assert (phase.ladder == ()) == (phase.backend == "eager")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("backend", ["full", "breakable", "eager"])
def test_every_backend_can_be_forced_in_each_phase(checkpoint: Path, phase: str, backend: str) -> None:
    plan = plan_of(checkpoint, **{"decode_backend": "eager", "prefill_backend": "eager", f"{phase}_backend": backend})
    assert all(len(each.eager_us) >= 2 for each in (plan.decode, plan.prefill)), "an eager phase has times too"
    assert times_of_plan(plan).decode.step_ps(1, 1, 0) > 0
    assert plan.phase(phase).backend == backend
    assert plan.phase(phase).request_slots == (4 if (phase, backend) == ("prefill", "full") else 0)


def test_buckets_that_the_user_fixed_get_the_exact_maximum(checkpoint: Path) -> None:
    plan = plan_of(
        checkpoint, decode_buckets=(1, 3), prefill_buckets=(5, 10), decode_backend="full", prefill_backend="full"
    )
    assert [bucket.size for bucket in plan.decode.ladder] == [1, 3, 4]
    assert [bucket.size for bucket in plan.prefill.ladder] == [5, 10, 24]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_buckets": (1, 5)}, "no step has 5 requests"),
        ({"prefill_buckets": (25,)}, "no step has 25 tokens"),
        ({"chunk": 3}, "--chunk 3"),
        ({"max_len": 100000}, "100000 tokens"),
        ({"max_len": 1}, "--max-len 1"),
        ({"max_batch": 0}, "--max-batch 0"),
        ({"memory": "7 apples"}, "7 apples"),
        ({"memory": "4000TiB"}, "--memory 4000TiB"),
        ({"device": "tpu"}, "--device tpu"),
        ({"dtype": "int4"}, "--dtype int4"),
        ({"kernels": "flashinfer"}, "flashinfer needs a GPU"),
        ({"kernels": "mine"}, "--kernels mine"),
        ({"decode_backend": "fast"}, "--decode-backend fast"),
        ({"decode_backend": "eager", "decode_buckets": (1,)}, "--decode-backend eager captures nothing"),
    ],
)
def test_what_cannot_be_is_refused_by_name(checkpoint: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(GplanError, match=message) as raised:
        plan_of(checkpoint, **options)
    assert raised.value.hint


def test_a_rule_against_a_lock_is_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnsupportedError, match="rule no-compiler"):
        plan_of(checkpoint, prefill_backend="piecewise")


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(checkpoint: Path) -> None:
    with pytest.raises(FitError, match="ledger row weights"):
        plan_of(checkpoint, memory="10KiB")


@pytest.mark.parametrize(
    ("fixed", "row"),
    [
        ({"page_size": 10**20}, "kv_pool"),
        ({"page_size": 10**8}, "kv_pool"),
        ({"max_batch": 10**12}, "workspace|static"),
    ],
)
def test_what_cannot_fit_is_refused_before_memory_is_taken(checkpoint: Path, fixed: dict[str, int], row: str) -> None:
    with pytest.raises(FitError, match=f"ledger row ({row})[a-z_]*: .* needs|ledger row ({row})[a-z_]*: needs"):
        plan_of(checkpoint, **{"max_batch": 4, "chunk": None, **fixed})


def test_ladders_are_solved_for_a_workload(checkpoint: Path) -> None:
    plan = plan_of(
        checkpoint,
        decode_backend="full",
        prefill_backend="breakable",
        max_batch=16,
        chunk=64,
        workload="poisson:rate=50,in=20-60,out=10-30,n=60",
    )
    assert plan.workload.num_requests == 30, "the other half is held out"
    assert sum(steps for _, steps in plan.workload.decode_steps) > 0
    for phase in (plan.decode, plan.prefill):
        choice = next(choice for choice in plan.choices if choice.field == f"{phase.phase}.ladder")
        assert choice.basis == "measured"
        assert phase.ladder[-1].size == phase.max_size
        own = [r for r in plan.regrets if r.phase == phase.phase and r.ladder == "gplan"]
        others = {r.ladder for r in plan.regrets if r.phase == phase.phase} - {"gplan"}
        assert len(own) == 2
        assert {"sglang", "vllm", "tensorrt-llm"} <= others
    assert decode(encode(plan)) == plan


def test_a_capture_budget_drops_buckets_but_never_the_maximum(checkpoint: Path) -> None:
    fixed = {"decode_backend": "full", "prefill_backend": "eager", "max_batch": 16, "chunk": 32}
    free = plan_of(checkpoint, **fixed)
    slowest = max(bucket.capture_ms for bucket in free.decode.ladder)
    bound = plan_of(checkpoint, **fixed, startup_budget_s=5 * slowest / 1e3)
    assert bound.decode.ladder[-1].size == 16
    assert len(bound.decode.ladder) <= len(free.decode.ladder)


def test_a_capture_budget_that_nothing_fits_is_refused(checkpoint: Path) -> None:
    with pytest.raises(GplanError, match="ms of the budget"):
        plan_of(checkpoint, decode_backend="full", prefill_backend="eager", startup_budget_s=1e-6)
