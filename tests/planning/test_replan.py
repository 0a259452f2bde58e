"""`plan --from`: new traffic on stored measurements, and a refusal of whatever would have to be measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cli.comparison import compare
from formats.container import decode, encode, write_plan
from formats.plan import Choice, Plan, bucket_key
from formats.plan_id import plan_id
from gplan.errors import GplanError
from gplan.planning.options import PlanOptions, format_buckets
from gplan.planning.replan import replan
from tests.cli.command import gplan
from tests.formats.plans import CUDA, make_phase, make_plan, make_product

OLD = make_plan(max_batch=16, chunk=128, max_len=256)
SMALL = "closed:2,in=5-12,out=20-40"


def for_traffic(workload: str | None = SMALL, old: Plan = OLD, **options: object) -> Plan:
    return replan(old, PlanOptions(checkpoint=old.model.source, workload=workload, **options))  # type: ignore[arg-type]


def sizes(plan: Plan, phase: str) -> list[int]:
    return [bucket.size for bucket in plan.phase(phase).ladder]


def test_ladders_follow_the_traffic_and_keep_their_maximum() -> None:
    new = for_traffic(startup_budget_s=0.1)
    assert sizes(new, "decode") == [2, 8, 16]
    assert sizes(new, "prefill")[-1] == 128
    assert set(sizes(new, "prefill")) < set(sizes(OLD, "prefill"))
    busy = for_traffic("closed:16,in=5-12,out=20-40", startup_budget_s=0.1)
    assert set(sizes(busy, "decode")) - {2, 8, 16}, "traffic of sixteen clients wants other sizes"


def test_only_what_follows_from_traffic_changes() -> None:
    new = for_traffic(startup_budget_s=0.1)
    assert decode(encode(new)) == new
    comparison = compare(OLD, new)
    assert {entry.field.partition(".")[2] for entry in comparison.decisions} <= {"ladder", "eager_sizes"}
    assert not comparison.machine
    kept = {bucket_key(phase.phase, bucket) for phase in (new.decode, new.prefill) for bucket in phase.ladder}
    assert {receipt.key for receipt in new.receipts} == kept
    assert all(bucket in OLD.decode.ladder for bucket in new.decode.ladder)
    assert (new.ledger, new.num_kv_pages) == (OLD.ledger, OLD.num_kv_pages)
    reasons = {choice.field: choice for choice in new.choices}
    assert plan_id(OLD) in reasons["decode.ladder"].reason
    assert reasons["decode.ladder"].value == "2,8,16"


def test_products_stay_with_the_times_that_were_measured_with_them() -> None:
    old = make_plan(max_batch=16, chunk=128, max_len=256, fingerprint=CUDA, products=(make_product(16),))
    new = for_traffic(old=old, startup_budget_s=0.1)
    assert decode(encode(new)).products == old.products


def test_requests_that_are_cut_are_told_of() -> None:
    cut = {choice.field: choice.reason for choice in for_traffic(f"uniform:{OLD.limits.max_len},n=30").choices}
    assert cut["decode.ladder"].endswith("; 30 of the workload's requests cut to the maximum length")
    assert not any("cut to" in choice.reason for choice in for_traffic().choices)


def test_the_same_traffic_gives_the_same_plan() -> None:
    assert encode(for_traffic()) == encode(for_traffic())
    again = for_traffic(old=for_traffic())
    assert sizes(again, "decode") == sizes(for_traffic(), "decode")


def test_ladders_that_the_user_fixed_stay() -> None:
    lock = Choice(field="decode.ladder", value="1,2,4,8,16", basis="locked", reason="--decode-buckets was given")
    new = for_traffic(old=msgspec.structs.replace(OLD, choices=(*OLD.choices, lock)))
    assert sizes(new, "decode") == sizes(OLD, "decode")
    assert lock in new.choices
    assert new.workload.num_requests


def test_a_startup_budget_is_kept_to() -> None:
    new = for_traffic("closed:16,in=5-60,out=20-40", startup_budget_s=0.06)
    assert sum(bucket.capture_ms for phase in (new.decode, new.prefill) for bucket in phase.ladder) <= 60
    with pytest.raises(GplanError, match="ms of the budget"):
        for_traffic(startup_budget_s=0.001)


@pytest.mark.parametrize(
    "option",
    [
        {"max_batch": 32},
        {"max_len": 512},
        {"chunk": 64},
        {"page_size": 32},
        {"memory": "2GiB"},
        {"device": "cuda"},
        {"dtype": "float32"},
        {"kernels": "flashinfer"},
        {"decode_backend": "breakable"},
        {"prefill_backend": "eager"},
        {"decode_buckets": (3,)},
        {"prefill_buckets": (1, 2)},
        {"hash_contents": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_has_to_be_measured_is_refused_by_name(option: dict[str, object]) -> None:
    (name,) = option
    with pytest.raises(GplanError, match=f"--{name.replace('_', '-')} with --from") as raised:
        for_traffic(**option)
    assert "gplan plan CHECKPOINT" in raised.value.hint


def test_options_that_are_as_planned_are_no_obstacle() -> None:
    same = {
        "max_batch": 16, "max_len": 256, "chunk": 128, "page_size": 16, "memory": "1GiB", "device": "cpu",
        "dtype": "bfloat16", "kernels": "reference", "decode_backend": "full", "prefill_backend": "breakable",
        "decode_buckets": (1, 2, 4, 8), "prefill_buckets": (1, 2, 4, 8, 16, 32, 64),
    }  # fmt: skip
    assert for_traffic(**same) == for_traffic()


def test_every_option_is_looked_at() -> None:
    """A new option of `gplan plan` must be refused or used; this fails until it is."""
    used = {"workload", "speedup", "startup_budget_s", "checkpoint"}
    checked = {
        "max_batch", "max_len", "chunk", "page_size", "memory", "device", "dtype", "kernels", "decode_backend",
        "prefill_backend", "decode_buckets", "prefill_buckets", "prefill_slots", "decode_variants",
        "try_compile",
        "hash_contents", "prefix_cache",
    }  # fmt: skip
    assert set(PlanOptions.__dataclass_fields__) == used | checked


def test_a_plan_without_times_of_a_phase_is_refused() -> None:
    eager = make_plan(decode_backend="eager")
    with pytest.raises(GplanError, match="holds no times of decode") as raised:
        for_traffic(old=eager)
    assert "gplan plan CHECKPOINT" in raised.value.hint


def test_traffic_must_be_given() -> None:
    with pytest.raises(GplanError, match="--from without --workload"):
        for_traffic(None)


def test_a_plan_for_a_gpu_needs_none(tmp_path: Path) -> None:
    write_plan(make_plan(fingerprint=CUDA, chunk=256), tmp_path / "old.gplan")
    arguments = ("--from", tmp_path / "old.gplan", "-o", tmp_path / "new.gplan", "--workload", SMALL)
    done = gplan("plan", *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert f"next: gplan diff {tmp_path / 'old.gplan'} {tmp_path / 'new.gplan'}" in done.stderr
    over = gplan("plan", *arguments[:2], "-o", tmp_path / "old.gplan", "--workload", SMALL)
    assert f"next: gplan show {tmp_path / 'old.gplan'}" in over.stderr, "there is nothing to compare it with"
    other = gplan("plan", "elsewhere", *arguments)
    assert other.returncode == 1
    assert "CHECKPOINT with --from" in other.stderr


def test_sizes_with_variants_go_and_come_together() -> None:
    plain = OLD.decode.ladder
    twins = tuple(msgspec.structs.replace(bucket, variant="lora") for bucket in plain)
    both = tuple(sorted((*plain, *twins), key=lambda bucket: (bucket.size, bucket.variant)))
    decoding = make_phase("decode", "full", (), 16, ladder=both)
    new = for_traffic(old=msgspec.structs.replace(OLD, decode=decoding))
    assert [bucket_key("decode", bucket) for bucket in new.decode.ladder] == [
        f"decode:{size}{variant}" for size in sorted({*sizes(new, "decode")}) for variant in ("", ":lora")
    ]


def test_sizes_that_were_measured_and_left_out_come_back() -> None:
    """A plan with little time for capturing, then one with all: what the first left out is known all the same."""
    few = for_traffic(startup_budget_s=0.1)
    assert len(sizes(few, "decode")) < len(sizes(OLD, "decode"))
    busy = "closed:16,in=5-12,out=20-40"
    again, direct = for_traffic(busy, old=few), for_traffic(busy)
    assert sizes(again, "decode") == sizes(direct, "decode")
    assert decode(encode(again)) == again
    new = set(sizes(again, "decode")) - set(sizes(few, "decode"))
    assert new
    assert not new & {int(receipt.key.split(":")[1]) for receipt in again.receipts if receipt.key.startswith("decode")}
    reason = next(choice.reason for choice in again.choices if choice.field == "decode.ladder")
    assert reason.endswith(f"; {format_buckets(tuple(sorted(new)))} not compared with eager yet")
    graph_us = {bucket.size: bucket.graph for bucket in OLD.decode.ladder}
    assert all(bucket.graph == graph_us[bucket.size] for bucket in again.decode.ladder)
