"""Every field of a realistic fingerprint and model identity, changed one at a time: its grade, and what is said."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from formats.drift import (
    ACCEPTABLE,
    FINGERPRINT_GRADES,
    MODEL_GRADES,
    NEVER_ACCEPTED,
    Drift,
    Grade,
    diff,
    diff_plan,
    refusals,
)
from formats.errors import UnknownFieldError
from formats.plan import Fingerprint, ModelIdentity, Plan
from formats.plan_id import plan_id
from tests.formats.plans import CPU, CUDA, MODEL, make_plan

MUST, LEAST, ADVICE = Grade.MUST_MATCH, Grade.AT_LEAST, Grade.ADVISORY

# field, value found instead of the one in CUDA, grade, refused, the whole sentence
MACHINE: list[tuple[str, Any, Grade, bool, str]] = [
    ("device", "cpu", MUST, True, "device: planned for cuda, found cpu; must match"),
    ("device_name", "NVIDIA L4", MUST, True, "device_name: planned for NVIDIA H200, found NVIDIA L4; must match"),
    ("capability", "8.9", MUST, True, "capability: planned for 9.0, found 8.9; must match"),
    ("tp_size", 2, MUST, True, "tp_size: planned for 1, found 2; must match"),
    (
        "torch",
        "2.11.0+cu130",
        MUST,
        True,
        "torch: planned for 2.13.0+cu130, found 2.11.0+cu130; must match in major and minor version",
    ),
    (
        "torch",
        "2.13.1+cu130",
        ADVICE,
        False,
        "torch: planned for 2.13.0+cu130, found 2.13.1+cu130; the same major and minor version, which is enough",
    ),
    ("cuda", "12.8", MUST, True, "cuda: planned for 13.0, found 12.8; must match in major and minor version"),
    (
        "kernels_version",
        "0.7.0",
        MUST,
        True,
        "kernels_version: planned for 0.6.18, found 0.7.0; must match in major and minor version",
    ),
    (
        "kernels_version",
        "",
        MUST,
        True,
        "kernels_version: planned for 0.6.18, found none; must match in major and minor version",
    ),
    (
        "kernels_version",
        "0.6.19",
        ADVICE,
        False,
        "kernels_version: planned for 0.6.18, found 0.6.19; the same major and minor version, which is enough",
    ),
    ("prefill_kernel", "fa2", MUST, True, "prefill_kernel: planned for fa3, found fa2; must match"),
    ("blas_version", "130102", MUST, True, "blas_version: planned for 130101, found 130102; must match"),
    ("device_count", 0, LEAST, True, "device_count: planned for 1, found 0; at least 1 are needed"),
    (
        "device_memory",
        80 << 30,
        LEAST,
        True,
        "device_memory: planned for 139.00 GiB, found 80.00 GiB; must be as much, within 1%",
    ),
    (
        "free_memory",
        512 << 20,
        LEAST,
        True,
        "free_memory: planned for 138.00 GiB, found 512.00 MiB; at least 138.00 GiB must be free at the start",
    ),
    ("driver", "570.86.10", LEAST, True, "driver: planned for 570.133.20, found 570.86.10; must be at least as new"),
    ("driver", "", LEAST, True, "driver: planned for 570.133.20, found none; must be at least as new"),
    ("num_threads", 8, ADVICE, False, "num_threads: planned for 0, found 8; may change speed, not results"),
    ("clocks_mhz", 1200, ADVICE, False, "clocks_mhz: planned for 1980, found 1200; may change speed, not results"),
    (
        "triton",
        "3.8.0",
        ADVICE,
        False,
        "triton: planned for 3.7.0, found 3.8.0; may change the speed of compiled segments",
    ),
    (
        "transformers",
        "5.17.0",
        ADVICE,
        False,
        "transformers: planned for 5.24.0, found 5.17.0; may change tokens or the chat template",
    ),
    ("python", "3.12.1", ADVICE, False, "python: planned for 3.11.7, found 3.12.1; not known to matter"),
    ("os", "Linux 6.9.0", ADVICE, False, "os: planned for Linux 6.8.0, found Linux 6.9.0; not known to matter"),
]

ANOTHER = "this is another checkpoint"

# field, found, what is said to follow
CHECKPOINT: list[tuple[str, Any, str]] = [
    ("architecture", "Qwen3ForCausalLM", ANOTHER),
    ("dtype", "float16", ANOTHER),
    ("config_digest", "0" * 64, ANOTHER),
    ("headers_digest", "0" * 64, ANOTHER),
    ("content_digest", "0" * 64, ANOTHER),
    ("tokenizer_digest", "0" * 64, "texts become other tokens"),
    ("chat_template_digest", "0" * 64, "conversations become other prompts"),
    ("generation_digest", "0" * 64, "answers may end elsewhere"),
    ("num_parameters", 1, ANOTHER),
    ("num_layers", 1, ANOTHER),
    ("vocab_size", 1, ANOTHER),
]

# what may be otherwise without being a difference at all
FINE: list[tuple[str, Any]] = [
    ("device_count", 8),
    ("device_memory", 141 << 30),
    ("device_memory", int(139 * 0.995 * (1 << 30))),
    ("free_memory", 139 << 30),
    ("driver", "570.133.20"),
    ("driver", "571.1"),
    ("driver", "570.200.1"),
]


def replaced(value: Any, field: str, found: Any) -> Any:
    return msgspec.structs.replace(value, **{field: found})


@pytest.mark.parametrize(("field", "found", "grade", "refused", "sentence"), MACHINE)
def test_each_field_of_the_machine(field: str, found: Any, grade: Grade, refused: bool, sentence: str) -> None:
    drifts = diff(CUDA, replaced(CUDA, field, found))
    assert drifts == (Drift(field, grade, getattr(CUDA, field), found, refused, sentence),)
    assert refusals(drifts) == (drifts if refused else ())


@pytest.mark.parametrize(("field", "found", "consequence"), CHECKPOINT)
def test_each_field_of_the_model(field: str, found: Any, consequence: str) -> None:
    planned = replaced(replaced(MODEL, "content_digest", "f" * 64), "generation_digest", "f" * 64)
    (drift,) = diff(planned, replaced(planned, field, found))
    assert (drift.field, drift.grade, drift.found, drift.refuses) == (field, MUST, found, True)
    shown = 12 if field.endswith("digest") else None
    before, after = str(getattr(planned, field))[:shown], str(found)[:shown]
    assert drift.sentence == f"{field}: planned for {before}, found {after}; must match: {consequence}"
    assert refusals([drift]) == (drift,)


@pytest.mark.parametrize(("field", "found"), FINE)
def test_more_than_is_needed_is_no_drift(field: str, found: Any) -> None:
    assert diff(CUDA, replaced(CUDA, field, found)) == ()


def test_where_the_checkpoint_lies_is_no_drift() -> None:
    assert diff(MODEL, replaced(MODEL, "source", "elsewhere")) == ()


def test_contents_are_compared_only_where_the_plan_has_their_digest() -> None:
    assert diff(MODEL, replaced(MODEL, "content_digest", "0" * 64)) == ()
    (drift,) = diff(replaced(MODEL, "content_digest", "0" * 64), MODEL)
    assert drift.sentence.endswith("found none; must match: this is another checkpoint")


def test_the_tables_of_this_test_reach_every_field() -> None:
    assert {field for field, *_ in MACHINE} == set(Fingerprint.__struct_fields__)
    assert {field for field, *_ in CHECKPOINT} | {"source"} == set(ModelIdentity.__struct_fields__)


def ungraded(part: type[msgspec.Struct], grades: Any) -> set[str]:
    return set(part.__struct_fields__) ^ set(grades)


def test_every_field_has_a_grade() -> None:
    assert ungraded(Fingerprint, FINGERPRINT_GRADES) == set()
    assert ungraded(ModelIdentity, MODEL_GRADES) == set()


def test_a_new_field_without_a_grade_is_noticed() -> None:
    class Larger(Fingerprint, frozen=True, kw_only=True):
        moon_phase: str = "full"

    assert ungraded(Larger, FINGERPRINT_GRADES) == {"moon_phase"}


def test_every_advisory_field_says_why() -> None:
    for field, grade in FINGERPRINT_GRADES.items():
        if grade is ADVICE:
            changed = replaced(CUDA, field, 1 if isinstance(getattr(CUDA, field), int) else "other")
            assert len(diff(CUDA, changed)) == 1


def test_names_of_both_parts_are_distinct() -> None:
    assert not set(FINGERPRINT_GRADES) & set(MODEL_GRADES)


def test_a_plan_needs_as_much_free_memory_as_it_spends() -> None:
    plan = make_plan()
    machine = replaced(CPU, "free_memory", plan.limits.memory_bytes)
    assert machine.free_memory < CPU.free_memory
    assert diff_plan(plan, MODEL, machine) == ()
    (drift,) = diff_plan(plan, MODEL, replaced(CPU, "free_memory", plan.limits.memory_bytes - 1))
    assert drift.field == "free_memory"


def test_all_differences_are_reported_at_once() -> None:
    drifts = diff_plan(make_plan(), replaced(MODEL, "num_layers", 1), CUDA)
    assert [drift.field for drift in drifts][:4] == ["num_layers", "device", "device_name", "capability"]
    assert {drift.field for drift in refusals(drifts)} == {
        "num_layers",
        "device",
        "device_name",
        "capability",
        "cuda",
        "kernels_version",
        "prefill_kernel",
        "blas_version",
    }


def test_accepting_a_field_lets_it_pass_and_no_other() -> None:
    found = replaced(replaced(CUDA, "torch", "2.11.0"), "driver", "1.0")
    drifts = diff(CUDA, found)
    assert {drift.field for drift in refusals(drifts)} == {"torch", "driver"}
    assert {drift.field for drift in refusals(drifts, ["torch"])} == {"driver"}
    assert refusals(drifts, ["torch", "driver"]) == ()


@pytest.mark.parametrize("field", ACCEPTABLE)
def test_what_may_be_accepted(field: str) -> None:
    assert refusals([Drift(field, MUST, "a", "b", True, "")], [field]) == ()


def test_what_may_be_accepted_is_a_short_list() -> None:
    assert set(ACCEPTABLE) == {
        "device_name",
        "capability",
        "torch",
        "cuda",
        "kernels_version",
        "prefill_kernel",
        "device_count",
        "device_memory",
        "free_memory",
        "driver",
        "tokenizer_digest",
        "chat_template_digest",
        "generation_digest",
    }


@pytest.mark.parametrize("field", sorted(NEVER_ACCEPTED))
def test_what_is_never_accepted(field: str) -> None:
    with pytest.raises(UnknownFieldError, match=f"drift of {field} is never accepted") as caught:
        refusals((), [field])
    assert caught.value.path == field


def test_another_model_is_never_accepted() -> None:
    text = {"tokenizer_digest", "chat_template_digest", "generation_digest"}
    assert set(MODEL_GRADES) - {"source"} - text | {"device", "tp_size", "blas_version"} == NEVER_ACCEPTED


@pytest.mark.parametrize("field", ["num_threads", "python", "source"])
def test_what_needs_no_accepting(field: str) -> None:
    with pytest.raises(UnknownFieldError, match="is never refused"):
        refusals((), [field])


def test_a_field_that_does_not_exist() -> None:
    with pytest.raises(UnknownFieldError, match="no field 'moon'") as caught:
        refusals((), ["moon"])
    assert "device_name" in caught.value.hint


@pytest.mark.parametrize(("field", "found", "grade"), [row[:3] for row in MACHINE])
def test_a_plan_id_covers_what_must_match_and_nothing_else_of_the_machine(field: str, found: Any, grade: Grade) -> None:
    plan: Plan = make_plan(fingerprint=CUDA)
    other = msgspec.structs.replace(plan, fingerprint=replaced(CUDA, field, found))
    assert (plan_id(plan) != plan_id(other)) == (grade is MUST)
