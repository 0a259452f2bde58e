"""The normative page agrees with the code: its names, its numbers, and a reader written from the page alone."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

import formats
from formats import container, measurements, plan
from formats.container import decode, encode
from formats.drift import FINGERPRINT_GRADES, NEVER_ACCEPTED, Grade
from formats.plan_id import plan_id
from formats.record import Record
from tests.formats.plans import CUDA, make_plan, make_product

PAGE = (Path(formats.__path__[0]) / "GPLAN.md").read_text()
PARTS = [
    part
    for part in {**vars(measurements), **vars(plan)}.values()
    if isinstance(part, type) and issubclass(part, Record) and part not in (Record, plan.TensorHeader)
]


@pytest.mark.parametrize("part", PARTS)
def test_every_field_is_on_the_page(part: type[msgspec.Struct]) -> None:
    assert [name for name in part.__struct_fields__ if f"`{name}`" not in PAGE] == []


def test_fields_stand_in_the_order_of_the_json() -> None:
    for part in (plan.Plan, plan.ModelIdentity, plan.Fingerprint, plan.Limits, plan.PhasePlan):
        start = PAGE.index(f"### {part.__name__}\n")
        section = PAGE[start : PAGE.index("\n### ", start + 1)]
        cells = [cell for row in section.splitlines() if row.startswith("| `") for cell in [row.split("|")[1]]]
        assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == list(part.__struct_fields__)


def test_numbers_of_the_page() -> None:
    assert container.MAGIC.hex(" ") in PAGE
    for number in (container.MAX_JSON_BYTES, container.MAX_PAYLOAD_BYTES):
        assert f"{number:,}".replace(",", " ") in PAGE
    assert f"| {container.HEADER.size} | P | payload" in PAGE
    assert ", ".join(f"`{row}`" for row in plan.LEDGER_ROWS) in PAGE


def test_grades_of_the_page() -> None:
    words = {Grade.MUST_MATCH: "must match", Grade.AT_LEAST: "at least", Grade.ADVISORY: "advisory"}
    for field, grade in FINGERPRINT_GRADES.items():
        (row,) = (
            line for line in PAGE.splitlines() if re.match(rf"\| [^|]*`{field}`[^|]*\|.*\|.*\|.*\| ?D? ?\|$", line)
        )
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[4].startswith(words[grade])
        assert ("never accepted" in cells[4]) == (field in NEVER_ACCEPTED)
        assert (cells[5] == "D") == (grade is Grade.MUST_MATCH)


def test_errors_of_the_page() -> None:
    from formats import errors

    for name in re.findall(r"`(\w+Error)`", PAGE):
        assert issubclass(getattr(errors, name), errors.FormatError)


@pytest.mark.parametrize(
    "value", [make_plan(), make_plan(fingerprint=CUDA, prefill_backend="full", products=(make_product(),))]
)
def test_a_reader_written_from_the_page(value: plan.Plan) -> None:
    data = encode(value)
    assert data[:8] == bytes.fromhex("89 67 70 6c 61 6e 0d 0a")
    version, json_size, payload_size = (int.from_bytes(data[at : at + 4], "little") for at in (8, 12, 16))
    payload = data[52:]
    assert (version, payload_size) == (4, len(payload))
    assert data[20:52] == hashlib.sha256(data[:20] + payload).digest()
    text = zstandard.ZstdDecompressor().decompress(payload)
    assert len(text) == json_size
    found = json.loads(text)
    assert json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode() == text
    assert identify(found) == plan_id(decode(data))


MATCHED = ("device", "device_name", "capability", "tp_size", "prefill_kernel", "blas_version")


def identify(found: dict[str, Any]) -> str:
    """A plan id as the page states it, from the JSON alone."""
    machine = {name: found["fingerprint"][name] for name in MATCHED}
    for name in ("torch", "cuda", "kernels_version"):
        machine[name] = ".".join(found["fingerprint"][name].split(".")[:2])
    decisions = {
        "format": 4,
        "model": {name: value for name, value in found["model"].items() if name != "source"},
        "machine": machine,
        **{name: found[name] for name in ("kernels", "dtype", "limits", "num_kv_pages")},
        "phases": [
            {
                "backend": phase["backend"],
                "ladder": [[bucket[name] for name in ("size", "width", "variant")] for bucket in phase["ladder"]],
                **{name: phase[name] for name in ("request_slots", "padding_cap", "eager_sizes")},
            }
            for phase in (found["decode"], found["prefill"])
        ],
        "products": [[each[name] for name in ("m", "n", "k", "adds", "algorithm")] for each in found["products"]],
        "locks": sorted([each["field"], each["value"]] for each in found["choices"] if each["basis"] == "locked"),
    }
    text = json.dumps(decisions, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    bits = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    digits = "".join("0123456789abcdefghjkmnpqrstvwxyz"[bits >> 5 * place & 31] for place in reversed(range(12)))
    return f"{digits[:4]}-{digits[4:8]}-{digits[8:]}"
