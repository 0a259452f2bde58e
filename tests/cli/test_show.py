"""`gplan show`: the page tells what the plan holds, and JSON is the same struct."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from cli.drawing import draw_ladder
from cli.page import plan_page
from cli.views import PlanView, view_plan
from formats.container import write_plan
from formats.measurements import Costs
from formats.plan import Choice, Receipt, Workload
from formats.plan_id import plan_id
from gplan.units import format_size
from tests.cli.command import gplan
from tests.formats.plans import CUDA, make_bucket, make_phase, make_plan, make_product


def page(why: bool = False, **fields: object) -> str:
    made = make_plan(**fields)  # type: ignore[arg-type]
    return re.sub(r"\x1b\[\d+m", "", plan_page(view_plan(made), why))


def test_the_page_names_what_was_decided() -> None:
    text = page()
    plan = make_plan()
    for expected in (
        plan_id(plan),
        plan.model.source,
        "AMD EPYC 9R14",
        "8 requests at once, 256 tokens each, 64 tokens a step",
        "full: fastest at most sizes (measured)",
        "breakable: --prefill-backend (locked)",
        "not eager: slower at every size",
        "KV pool: 2,048 tokens",
        "11 of 11 keys equal eager to the bit",
    ):
        assert expected in text


def test_a_page_of_the_pool_is_one_request_s() -> None:
    made = make_plan(max_len=9, num_kv_pages=8)
    assert "KV pool: 112 tokens (7 pages of 16 tokens" in plan_page(view_plan(made))
    assert "7 requests at full length" in plan_page(view_plan(made))
    assert "1 page of 16 tokens" in plan_page(view_plan(make_plan(max_len=9, num_kv_pages=2)))


def test_costs_are_told_of_as_many_tokens_as_a_request_may_have() -> None:
    def told(max_len: int) -> str:
        made = make_plan(max_len=max_len)
        costs = Costs(cached_us=((2, 0.5),), pair_us=0.001)
        prefill = msgspec.structs.replace(made.prefill, costs=costs)
        return plan_page(view_plan(msgspec.structs.replace(made, prefill=prefill)))

    assert "1,000 cached tokens more for a request that decodes: 500 µs at 2 requests" in told(4096)
    assert "1,000 tokens of a prompt after 1,000 others: 1000 µs more than alone" in told(4096)
    assert "8 cached tokens more for a request that decodes: 4.00 µs at 2 requests" in told(9)
    assert "4 tokens of a prompt after 4 others: 0.016 µs more than alone" in told(9)


def test_every_bucket_has_a_line_with_both_times() -> None:
    lines = page(max_batch=12).splitlines()
    for bucket in make_plan(max_batch=12).decode.ladder:
        graph, eager = f"{bucket.graph.median_us:.0f}", f"{bucket.eager.median_us:.0f}"  # type: ignore[union-attr]
        assert any(line.split()[:1] == [str(bucket.size)] and graph in line and eager in line for line in lines)


def test_the_ledger_adds_up_to_the_memory() -> None:
    view = view_plan(make_plan(memory_bytes=3 << 30))
    assert view.ledger_total == view.plan.limits.memory_bytes
    assert f"adds up to 3 GiB ({3 << 30:,} bytes)" in plan_page(view)
    for row in view.plan.ledger:
        assert re.search(rf"{row.name} +{re.escape(format_size(row.planned_bytes))} ", plan_page(view))


def test_why_gives_the_reason_of_every_choice() -> None:
    reasons = [f"{choice.field} = {choice.value} ({choice.basis}): {choice.reason}" for choice in make_plan().choices]
    assert all(reason in page(why=True) for reason in reasons)
    assert not any(reason in page() for reason in reasons)


def test_an_eager_phase_has_no_ladder_to_show() -> None:
    text = page(decode_backend="eager")
    decode = text[text.index("decode ") : text.index("prefill ")]
    assert "graph µs" not in decode
    assert "buckets" not in decode


def test_what_is_not_plain_is_said() -> None:
    ladder = (make_bucket(1), msgspec.structs.replace(make_bucket(8), interpolated=True))
    decode = make_phase("decode", "full", (), 8, ladder=ladder, padding_cap=0.5, eager_sizes=((2, 2), (4, 5)))
    receipts = (Receipt(key="decode:8", cases=3, max_abs_diff=0.25, bitwise=False),)
    text = page(decode=decode, receipts=receipts, workload=Workload(spec="default"), fingerprint=CUDA)
    for expected in (
        "~ read off its neighbours, not measured",
        "padding adds at most 50% of the rows",
        "eager although covered: 2, 4-5 requests",
        "decode:8: differs by at most 0.25",
        "driver 570.133.20",
    ):
        assert expected in text
    assert "steps" not in text.replace("a step", "")


def test_products_are_told_in_a_line_and_with_why_one_by_one() -> None:
    reason = "1 of 12 shapes by another algorithm"
    choice = Choice(field="products", value="1", basis="measured", reason=reason)
    fields = {"products": (make_product(adds=True),), "choices": (choice,)}
    assert re.search(rf"products +{reason}", page(**fields))
    assert "4096 x 4096, added" not in page(**fields)
    assert re.search(r"32 +4096 x 4096, added +20\.0 +0\.100 +18\.0 +0\.100 +-10\.0%", page(why=True, **fields))
    assert "products" not in page()


def test_json_is_the_same_struct(tmp_path: Path) -> None:
    plan = make_plan()
    write_plan(plan, tmp_path / "p.gplan")
    done = gplan("show", tmp_path / "p.gplan", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    assert msgspec.json.decode(done.stdout, type=PlanView) == view_plan(plan)


def test_the_page_goes_to_stdout_without_colour_codes(tmp_path: Path) -> None:
    write_plan(make_plan(), tmp_path / "p.gplan")
    done = gplan("show", tmp_path / "p.gplan", "--why")
    assert done.stdout == page(why=True) + "\n"
    assert done.stderr == ""


@pytest.mark.parametrize("max_size", [1, 7, 64, 65, 1000, 8192])
def test_bars_and_marks_share_an_axis(max_size: int) -> None:
    bars, marks, labels = draw_ladder([(1, 1), (max_size, 9)], [1, max_size], max_size)
    assert len(bars) == len(marks) == min(max_size, 64)
    assert bars[-1] == "█"
    assert marks[0] == marks[-1] == "╵"
    assert labels.split()[-1] == str(max_size)


def test_without_buckets_the_axis_has_its_ends() -> None:
    assert draw_ladder([(1, 1), (9, 1)], [], 9) == ("█       █", "", "1       9")
    eager = page(decode_backend="eager")
    assert re.search(r"requests +1 +8\n", eager)


def test_a_bar_is_as_high_as_its_share_and_never_lost() -> None:
    bars, _, _ = draw_ladder([(1, 1), (2, 1000), (3, 500)], [4], 4)
    assert bars == "▁█▄"


def test_labels_never_run_into_each_other() -> None:
    _, marks, labels = draw_ladder([(1, 1)], range(1, 65), 64)
    assert marks == "╵" * 64
    assert set(labels.split()) <= {str(size) for size in range(1, 65)}
    assert labels.split()[-1] == "64"
