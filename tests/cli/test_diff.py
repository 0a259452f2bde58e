"""`gplan diff`: decisions agree with the plan's id, evidence counts beyond its spread only, exit codes as promised."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cli.comparison import Comparison, beyond_spread, compare
from cli.effects import Effect
from formats.container import write_plan
from formats.measurements import SizeTiming, Timing
from formats.plan import Choice, Plan, Receipt, Workload
from formats.plan_id import plan_id
from tests.cli.command import gplan
from tests.formats.plans import CPU, make_bucket, make_phase, make_plan, make_product

replace = msgspec.structs.replace


def timed(graph_us: float, spread_us: float = 10.0, runs: int = 20) -> Plan:
    """A plan whose largest decode bucket took so long."""
    bucket = replace(make_bucket(8), graph=Timing(median_us=graph_us, spread_us=spread_us, runs=runs))
    return make_plan(decode=make_phase("decode", "full", (), 8, ladder=(make_bucket(1), bucket)))


def fields(comparison: Comparison, part: str) -> list[str]:
    return [difference.field for difference in getattr(comparison, part)]


def test_a_plan_does_not_differ_from_itself() -> None:
    comparison = compare(make_plan(), make_plan())
    assert comparison.same
    assert comparison.a == comparison.b


DECISIONS = {
    "limits.max_len": make_plan(max_len=512, num_kv_pages=129),
    "limits.memory_bytes": make_plan(memory_bytes=2 << 30),
    "num_kv_pages": make_plan(num_kv_pages=100),
    "decode.backend": make_plan(decode_backend="breakable"),
    "decode.ladder": make_plan(decode_sizes=[1, 8]),
    "prefill.backend": make_plan(prefill_backend="full"),
    "prefill.ladder": make_plan(prefill_sizes=[64]),
    "decode.padding_cap": make_plan(decode=make_phase("decode", "full", [1, 2, 4, 8], 8, padding_cap=0.5)),
    "decode.eager_sizes": make_plan(decode=make_phase("decode", "full", [1, 2, 4, 8], 8, eager_sizes=((3, 3),))),
    "kernels": replace(make_plan(), kernels="flashinfer"),
    "dtype": replace(make_plan(), dtype="float32"),
    "model.config_digest": make_plan(model=replace(make_plan().model, config_digest="0" * 64)),
    "products": make_plan(products=(make_product(),)),
    "locks": make_plan(choices=(Choice(field="dtype", value="bfloat16", basis="locked", reason="--dtype"),)),
}


@pytest.mark.parametrize("field", DECISIONS)
def test_every_decision_that_changes_the_id_is_named(field: str) -> None:
    comparison = compare(make_plan(), DECISIONS[field])
    assert comparison.a != comparison.b
    assert field in fields(comparison, "decisions")


EVIDENCE = {
    "model.source": make_plan(model=replace(make_plan().model, source="elsewhere")),
    "workload": make_plan(workload=Workload(spec="other", digest=make_plan().workload.digest)),
    "receipt decode:8 max_abs_diff": make_plan(
        receipts=(Receipt(key="decode:8", cases=3, max_abs_diff=0.5, bitwise=False),)
    ),
    "decode.rejected": make_plan(decode=make_phase("decode", "full", [1, 2, 4, 8], 8, rejected=())),
}


@pytest.mark.parametrize("field", EVIDENCE)
def test_evidence_is_named_and_leaves_the_id_alone(field: str) -> None:
    comparison = compare(make_plan(), EVIDENCE[field])
    assert comparison.a == comparison.b
    assert fields(comparison, "decisions") == []
    assert fields(comparison, "evidence") == [field]


def test_a_time_counts_beyond_its_spread() -> None:
    assert compare(timed(500.0), timed(509.0)).same
    slower = compare(timed(500.0), timed(520.0))
    assert [(entry.field, entry.note) for entry in slower.evidence] == [("decode:8 graph_us", "+4.0%")]
    assert slower.decisions == ()


@pytest.mark.parametrize(("spread_a", "spread_b", "beyond"), [(5, 5, True), (20, 5, False), (5, 20, False)])
def test_the_wider_spread_decides(spread_a: float, spread_b: float, beyond: bool) -> None:
    a = Timing(median_us=100.0, spread_us=spread_a, runs=9)
    b = Timing(median_us=110.0, spread_us=spread_b, runs=9)
    assert beyond_spread(a, b) is beyond_spread(b, a) is beyond


def test_the_machine_is_compared_with_grades_and_free_memory_is_not() -> None:
    elsewhere = replace(CPU, torch="2.11.0+cpu", num_threads=64, free_memory=1 << 30)
    comparison = compare(make_plan(), make_plan(fingerprint=elsewhere))
    assert [(entry.field, entry.note) for entry in comparison.machine] == [
        ("num_threads", "advisory"),
        ("torch", "must match"),
    ]
    assert compare(make_plan(), make_plan(fingerprint=replace(CPU, free_memory=5))).same


def test_the_command(tmp_path: Path) -> None:
    for name, plan in (("a", make_plan()), ("b", make_plan(max_batch=12))):
        write_plan(plan, tmp_path / f"{name}.gplan")
    same = gplan("diff", tmp_path / "a.gplan", tmp_path / "a.gplan")
    assert same.returncode == 0
    assert same.stdout.count("the same") == 3
    different = gplan("diff", tmp_path / "a.gplan", tmp_path / "b.gplan")
    assert different.returncode == 1
    assert different.stderr == ""
    order = [different.stdout.index(word) for word in ("decisions", "decode.ladder", "evidence", "ledger", "machine")]
    assert order == sorted(order)
    assert "+12" in different.stdout


def test_json_is_the_same_struct(tmp_path: Path) -> None:
    a, b = make_plan(), make_plan(max_batch=12)
    write_plan(a, tmp_path / "a.gplan")
    write_plan(b, tmp_path / "b.gplan")
    done = gplan("diff", tmp_path / "a.gplan", tmp_path / "b.gplan", "--json")
    assert done.returncode == 1
    found = msgspec.json.decode(done.stdout, type=Comparison)
    assert found == compare(a, b)
    assert (found.a, found.b) == (plan_id(a), plan_id(b))


def effects_of(a: Plan, b: Plan) -> dict[str, Effect]:
    return {effect.what: effect for effect in compare(a, b).effects}


def test_a_change_says_what_it_costs_or_gains() -> None:
    a = make_plan(num_kv_pages=129)
    b = make_plan(num_kv_pages=97, decode_sizes=[8])
    found = effects_of(a, b)
    pool = found["KV pool"]
    assert (pool.a, pool.b, pool.unit, pool.change) == (2048, 1536, "tokens", -0.25)
    assert (found["requests at full length"].a, found["requests at full length"].b) == (8, 6)
    # 40 steps of 1 and 500 of 8: single requests are now padded to the bucket of 8.
    before, after = (40 * 404 + 500 * 432) / 540 / 1e3, 0.432
    step = found["decode step"]
    assert (step.a, step.b) == (pytest.approx(before), pytest.approx(after))
    assert step.change == pytest.approx(after / before - 1)
    assert step.note == "on average, for uniform:16-64"
    assert found["capture at start"].b < found["capture at start"].a


def test_the_second_plan_s_traffic_weighs_the_steps() -> None:
    workload = Workload(spec="closed:1", decode_steps=((1, 10),))
    found = effects_of(make_plan(), make_plan(decode_sizes=[8], workload=workload))
    assert (found["decode step"].a, found["decode step"].b) == (pytest.approx(0.404), pytest.approx(0.432))
    assert "closed:1" in found["decode step"].note


@pytest.mark.parametrize(
    "other",
    [
        make_plan(max_batch=4, workload=Workload(spec="default")),
        make_plan(decode_backend="eager", workload=Workload(spec="default")),
    ],
    ids=["smaller", "no times"],
)
def test_steps_that_a_plan_has_no_times_of_are_not_guessed(other: Plan) -> None:
    assert "decode step" not in effects_of(make_plan(max_batch=8), other)


def test_no_change_has_no_effect() -> None:
    assert compare(make_plan(), make_plan()).effects == ()


def test_effects_are_told_between_decisions_and_evidence(tmp_path: Path) -> None:
    write_plan(make_plan(), tmp_path / "a.gplan")
    write_plan(make_plan(num_kv_pages=97, decode_sizes=[8]), tmp_path / "b.gplan")
    told = gplan("diff", tmp_path / "a.gplan", tmp_path / "b.gplan").stdout
    assert "KV pool: 2,048 -> 1,536 tokens, -25.0%" in told
    assert told.index("decisions") < told.index("KV pool: ") < told.index("evidence")


def test_times_of_other_sizes_are_evidence() -> None:
    def with_time(us: float) -> Plan:
        timing = Timing(median_us=us, spread_us=5.0, runs=9)
        return make_plan(
            decode=make_phase("decode", "full", [1, 8], 8, other_sizes=(SizeTiming(size=5, graph=timing),))
        )

    (entry,) = compare(with_time(100), with_time(120)).evidence
    assert (entry.field, entry.note) == ("decode size 5 graph_us", "+20.0%")


def test_products_differ_in_one_line() -> None:
    a = make_plan(products=(make_product(8), make_product(16), make_product(32)))
    b = make_plan(products=(make_product(16), make_product(32, algorithm="1f" * 64), make_product(48)))
    (entry,) = compare(a, b).decisions
    assert (entry.field, entry.a, entry.b) == ("products", 3, 3)
    assert entry.note == "1 given back to the library, 1 new, 1 by another algorithm"


def test_times_of_a_product_are_evidence_where_the_algorithm_is_the_same() -> None:
    slower = Timing(median_us=19.0, spread_us=0.1, runs=6)
    a, b = (make_plan(products=(make_product(32, adds=True, **fields),)) for fields in ({}, {"chosen": slower}))
    comparison = compare(a, b)
    assert comparison.a == comparison.b
    assert [(entry.field, entry.note) for entry in comparison.evidence] == [
        ("product 32 x 4096 x 4096 added chosen_us", "+5.6%")
    ]
