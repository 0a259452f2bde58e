"""What a plan id covers: every decision, and none of the evidence."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from formats.container import decode, encode
from formats.measurements import Costs, Prediction, SizeTiming, Timing
from formats.plan import Choice, LedgerRow, Plan, VariantNote
from formats.plan_id import plan_id
from tests.formats.plans import make_bucket, make_plan, make_product
from tests.formats.test_validation import put

PLAN = make_plan(products=(make_product(),))
OTHER_TIME = Timing(median_us=1.0, spread_us=2.0, runs=3)
LOCK = Choice(field="dtype", value="bfloat16", basis="locked", reason="--dtype was given")

DECISIONS: list[tuple[str, Any]] = [
    ("model.architecture", "Qwen2ForCausalLM"),
    ("model.dtype", "float32"),
    ("model.config_digest", "0" * 64),
    ("model.headers_digest", "0" * 64),
    ("model.content_digest", "0" * 64),
    ("model.tokenizer_digest", "0" * 64),
    ("model.chat_template_digest", "0" * 64),
    ("model.generation_digest", "0" * 64),
    ("model.num_parameters", 1),
    ("model.num_layers", 1),
    ("model.vocab_size", 1),
    ("kernels", "flashinfer"),
    ("dtype", "float32"),
    ("limits.max_batch", 7),
    ("limits.max_len", 255),
    ("limits.chunk", 63),
    ("limits.page_size", 8),
    ("limits.memory_bytes", 1),
    ("limits.prefix_cache", False),
    ("num_kv_pages", 130),
    ("decode.backend", "breakable"),
    ("decode.ladder", PLAN.decode.ladder[1:]),
    ("decode.ladder[0].size", 3),
    ("decode.ladder[0].width", 2),
    ("decode.ladder[0].variant", "greedy"),
    ("decode.request_slots", 1),
    ("decode.padding_cap", 0.5),
    ("decode.padding_cap", 0.0),
    ("decode.eager_sizes", ((1, 1),)),
    ("prefill.backend", "eager"),
    ("prefill.ladder", ()),
    ("prefill.request_slots", 8),
    ("prefill.padding_cap", 0.5),
    ("prefill.eager_sizes", ((1, 1),)),
    ("products", ()),
    ("products[0].m", 33),
    ("products[0].n", 1),
    ("products[0].k", 1),
    ("products[0].adds", True),
    ("products[0].algorithm", "00" * 64),
    ("choices[1].value", "full"),
    ("choices[1].basis", "measured"),
    ("choices", (*PLAN.choices, LOCK)),
]

EVIDENCE: list[tuple[str, Any]] = [
    ("model.source", "elsewhere"),
    ("decode.ladder[0].graph", OTHER_TIME),
    ("decode.ladder[0].graph", None),
    ("decode.ladder[0].eager", OTHER_TIME),
    ("decode.ladder[0].graph_bytes", 1),
    ("decode.ladder[0].capture_ms", 1.0),
    ("decode.ladder[0].num_segments", 31),
    ("decode.ladder[0].interpolated", True),
    ("decode.rejected", ()),
    ("decode.other_sizes", (SizeTiming(size=3, graph=OTHER_TIME),)),
    ("decode.predictions", (Prediction(size=3, predicted_us=1.0, measured_us=2.0),)),
    ("decode.costs", Costs(host_us=1.0)),
    ("decode.variants", (VariantNote(variant="greedy", sizes=(), reason="saves too little"),)),
    ("kv_bytes_per_page", 1),
    ("ledger", (LedgerRow(name="weights", planned_bytes=1, basis="measured"),)),
    ("choices[0].reason", "otherwise"),
    ("choices[0].value", "eager"),
    ("choices[1].reason", "otherwise"),
    ("choices", PLAN.choices[::-1]),
    ("workload.spec", "default"),
    ("workload.digest", ""),
    ("workload.num_requests", 1),
    ("workload.decode_steps", ()),
    ("workload.prefill_steps", ()),
    ("regrets", ()),
    ("receipts", ()),
    ("products[0].chosen", OTHER_TIME),
    ("products[0].default", OTHER_TIME),
]


@pytest.mark.parametrize(("path", "value"), DECISIONS)
def test_another_decision_is_another_id(path: str, value: Any) -> None:
    assert plan_id(put(path, value)(PLAN)) != plan_id(PLAN)


@pytest.mark.parametrize(("path", "value"), EVIDENCE)
def test_other_evidence_is_the_same_id(path: str, value: Any) -> None:
    changed = put(path, value)(PLAN)
    assert changed != PLAN
    assert plan_id(changed) == plan_id(PLAN)


def test_every_field_is_a_decision_or_evidence() -> None:
    reached = {path.split("[")[0].split(".")[0] for path, _ in DECISIONS + EVIDENCE} | {"fingerprint"}
    assert reached == set(Plan.__struct_fields__)
    for part in ("model", "limits", "decode", "workload"):
        fields = {re.split(r"[.\[]", path)[1] for path, _ in DECISIONS + EVIDENCE if path.startswith(f"{part}.")}
        assert fields | {"phase", "max_size"} >= set(getattr(PLAN, part).__struct_fields__)
    product = {path.rpartition(".")[2] for path, _ in DECISIONS + EVIDENCE if path.startswith("products[")}
    assert product == set(make_product().__struct_fields__)
    bucket = {path.rpartition(".")[2] for path, _ in DECISIONS + EVIDENCE if "ladder[" in path}
    assert bucket == set(make_bucket(1).__struct_fields__)


def test_an_id_is_short_and_readable() -> None:
    assert re.fullmatch(r"[0-9a-hjkmnp-tv-z]{4}(-[0-9a-hjkmnp-tv-z]{4}){2}", plan_id(PLAN))


def test_an_id_does_not_change_on_the_way_through_a_file() -> None:
    plan = put("decode.padding_cap", 1)(make_plan())
    assert plan_id(decode(encode(plan))) == plan_id(plan) == plan_id(msgspec.structs.replace(plan))


def test_an_id_is_the_same_for_ever() -> None:
    """Ids are compared across machines and versions: a change of this one is a change of the format."""
    assert plan_id(PLAN) == "0a4m-9ssw-hkqj"
