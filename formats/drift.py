"""What differs between the machine and model that were planned for and those found here, graded field by field.

Compares structs that others fill in; reads no machine. Whether to go on is the caller's decision: `refusals` says which
differences stand against it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

import msgspec

from formats.errors import UnknownFieldError
from formats.plan import Fingerprint, ModelIdentity, Plan
from formats.plan_id import MATCHED_FIELDS, MATCHED_VERSIONS, matched_part

Value = str | int
Part = TypeVar("Part", Fingerprint, ModelIdentity)


class Grade(enum.StrEnum):
    """How much of a field must be as planned."""

    MUST_MATCH = "must match"
    AT_LEAST = "at least"
    ADVISORY = "advisory"
    IGNORED = "ignored"


class Drift(msgspec.Struct, frozen=True):
    """One field that differs.

    Attributes:
        refuses: whether it stands against serving: what must match does not, or what is needed is not there.
        sentence: field, planned and found value, and what they should be.
    """

    field: str
    grade: Grade
    planned: Value
    found: Value
    refuses: bool
    sentence: str


FINGERPRINT_GRADES: dict[str, Grade] = {
    **dict.fromkeys((*MATCHED_FIELDS, *MATCHED_VERSIONS), Grade.MUST_MATCH),
    "device_count": Grade.AT_LEAST,
    "device_memory": Grade.AT_LEAST,
    "free_memory": Grade.AT_LEAST,
    "driver": Grade.AT_LEAST,
    "num_threads": Grade.ADVISORY,
    "triton": Grade.ADVISORY,
    "transformers": Grade.ADVISORY,
    "python": Grade.ADVISORY,
    "os": Grade.ADVISORY,
    "clocks_mhz": Grade.ADVISORY,
}
"""Versions that must match in major and minor are advisory in what follows."""

MODEL_GRADES: dict[str, Grade] = {
    "source": Grade.IGNORED,
    "architecture": Grade.MUST_MATCH,
    "dtype": Grade.MUST_MATCH,
    "config_digest": Grade.MUST_MATCH,
    "headers_digest": Grade.MUST_MATCH,
    "content_digest": Grade.MUST_MATCH,
    "tokenizer_digest": Grade.MUST_MATCH,
    "chat_template_digest": Grade.MUST_MATCH,
    "generation_digest": Grade.MUST_MATCH,
    "num_parameters": Grade.MUST_MATCH,
    "num_layers": Grade.MUST_MATCH,
    "vocab_size": Grade.MUST_MATCH,
}

DIGITS_SHOWN = 12
"""Of a digest, where people read."""

MEMORY_SLACK = 0.01
"""By how much of it the device's memory may be less: the share a kernel keeps for itself varies a little."""

_SPEED = "may change speed, not results"
_ADVICE: Mapping[str, str] = {
    "num_threads": _SPEED,
    "clocks_mhz": _SPEED,
    "triton": "may change the speed of compiled segments",
    "transformers": "may change tokens or the chat template",
    "python": "not known to matter",
    "os": "not known to matter",
}

_TEXT: Mapping[str, str] = {
    "tokenizer_digest": "must match: texts become other tokens",
    "chat_template_digest": "must match: conversations become other prompts",
    "generation_digest": "must match: answers may end elsewhere",
}
"""Parts of a checkpoint that change answers, and neither a graph nor a byte."""

NEVER_ACCEPTED = frozenset({"device", "tp_size", "blas_version", *MODEL_GRADES}) - {"source", *_TEXT}
"""Another model, another kind of device or another split is another plan, whatever the user accepts; and what one
version of a library calls an algorithm means nothing to another."""

ACCEPTABLE = tuple(
    name
    for name, grade in (FINGERPRINT_GRADES | MODEL_GRADES).items()
    if grade in (Grade.MUST_MATCH, Grade.AT_LEAST) and name not in NEVER_ACCEPTED
)
"""Fields whose drift a user may accept by name."""


def diff_plan(plan: Plan, model: ModelIdentity, machine: Fingerprint) -> tuple[Drift, ...]:
    """Everything in which model and machine differ from the plan's. Of free memory as much is needed as the plan
    spends, however much there was when it was made."""
    return diff(plan.model, model) + diff(plan.fingerprint, machine, needed_bytes=plan.limits.memory_bytes)


def diff(planned: Part, found: Part, *, needed_bytes: int | None = None) -> tuple[Drift, ...]:
    """Fields that differ and are not ignored, in the order of the struct. More than is needed of a field graded
    `at least` is no difference.

    Args:
        needed_bytes: free device memory needed; None: what was free when the plan was made.
    """
    if isinstance(planned, ModelIdentity):
        assert isinstance(found, ModelIdentity)
        return tuple(_diff_model(planned, found))
    assert isinstance(found, Fingerprint)
    return tuple(_diff_machine(planned, found, planned.free_memory if needed_bytes is None else needed_bytes))


def refusals(drifts: Collection[Drift], accepted: Collection[str] = ()) -> tuple[Drift, ...]:
    """The drifts that stand against serving once the fields that the user named are accepted.

    Raises:
        UnknownFieldError: a name that is no field, or of a field whose drift is never accepted or needs no accepting.
    """
    for name in accepted:
        _check_acceptable(name)
    return tuple(drift for drift in drifts if drift.refuses and drift.field not in accepted)


def _check_acceptable(name: str) -> None:
    if name in ACCEPTABLE:
        return
    hint = f"Fields that may be accepted: {', '.join(ACCEPTABLE)}."
    if name in NEVER_ACCEPTED:
        raise UnknownFieldError(
            f"drift of {name} is never accepted: it makes another deployment", "Make a plan for what is here.", name
        )
    if name in FINGERPRINT_GRADES or name in MODEL_GRADES:
        raise UnknownFieldError(f"drift of {name} is never refused; there is nothing to accept", hint, name)
    raise UnknownFieldError(f"a plan's fingerprint has no field {name!r}", hint, name)


def _diff_model(planned: ModelIdentity, found: ModelIdentity) -> Iterator[Drift]:
    for name in ModelIdentity.__struct_fields__:
        grade = MODEL_GRADES[name]
        before, after = getattr(planned, name), getattr(found, name)
        unhashed = name == "content_digest" and not before
        if grade is Grade.MUST_MATCH and before != after and not unhashed:
            yield _drift(name, grade, before, after, True, _TEXT.get(name, "must match: this is another checkpoint"))


def _diff_machine(planned: Fingerprint, found: Fingerprint, needed_bytes: int) -> Iterator[Drift]:
    needed, there = matched_part(planned), matched_part(found)
    for name in Fingerprint.__struct_fields__:
        grade = FINGERPRINT_GRADES[name]
        before, after = getattr(planned, name), getattr(found, name)
        if grade is Grade.AT_LEAST:
            yield from _less(name, planned, found, needed_bytes)
        elif grade is Grade.ADVISORY and before != after:
            yield _drift(name, grade, before, after, False, _ADVICE[name])
        elif grade is Grade.MUST_MATCH and needed[name] != there[name]:
            rule = "must match in major and minor version" if name in MATCHED_VERSIONS else "must match"
            yield _drift(name, grade, before, after, True, rule)
        elif grade is Grade.MUST_MATCH and before != after:
            yield _drift(
                name, Grade.ADVISORY, before, after, False, "the same major and minor version, which is enough"
            )


def _less(name: str, planned: Fingerprint, found: Fingerprint, needed_bytes: int) -> Iterator[Drift]:
    after = getattr(found, name)
    if name == "driver":
        if _numbers(after) < _numbers(planned.driver):
            yield _drift(name, Grade.AT_LEAST, planned.driver, after, True, "must be at least as new")
    elif name == "device_count":
        if after < planned.tp_size:
            rule = f"at least {planned.tp_size} are needed"
            yield _drift(name, Grade.AT_LEAST, planned.device_count, after, True, rule)
    elif name == "free_memory":
        if after < needed_bytes:
            rule = f"at least {_bytes(needed_bytes)} must be free at the start"
            yield _drift(name, Grade.AT_LEAST, planned.free_memory, after, True, rule)
    elif after < getattr(planned, name) * (1 - MEMORY_SLACK):
        yield _drift(
            name, Grade.AT_LEAST, getattr(planned, name), after, True, f"must be as much, within {MEMORY_SLACK:.0%}"
        )


def _drift(name: str, grade: Grade, planned: Value, found: Value, refuses: bool, rule: str) -> Drift:
    sentence = f"{name}: planned for {field_text(name, planned)}, found {field_text(name, found)}; {rule}"
    return Drift(name, grade, planned, found, refuses, sentence)


def field_text(name: str, value: Value) -> str:
    """The value of a field as a person reads it: of a digest, its beginning."""
    if name.endswith("_memory"):
        return _bytes(value)
    text = str(value) if value != "" else "none"
    return text[:DIGITS_SHOWN] if name.endswith("digest") else text


def _bytes(value: Value) -> str:
    """Enough digits that two sizes which differ by a few MiB do not read alike."""
    return f"{int(value) / (1 << 30):.2f} GiB" if int(value) >= 1 << 30 else f"{int(value) / (1 << 20):.2f} MiB"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
