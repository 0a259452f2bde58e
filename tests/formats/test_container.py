"""The bytes of a plan: round trip, determinism, and one named error for each way they can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from formats.container import HEADER, MAGIC, MAX_JSON_BYTES, decode, encode, read_plan, write_plan
from formats.errors import (
    CorruptError,
    EmptyFileError,
    FormatError,
    InconsistentError,
    MissingFieldError,
    NotAPlanError,
    NotCanonicalError,
    TooLargeError,
    TruncatedError,
    UnknownFieldError,
    WrongTypeError,
    WrongVersionError,
)
from formats.plan import Choice, Plan
from tests.formats.containers import DATA, PLAN, frame, pack, text_of
from tests.formats.plans import CUDA, make_plan


def with_json(change: Callable[[Any], object]) -> bytes:
    value = json.loads(text_of(DATA))
    change(value)
    return pack(json.dumps(value, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        make_plan(fingerprint=CUDA, decode_backend="breakable", prefill_backend="full"),
        make_plan(decode_backend="eager", prefill_backend="eager"),
        make_plan(max_batch=512, chunk=16384, max_len=2048, decode_sizes=range(1, 513), kv_bytes_per_page=16),
        make_plan(choices=(Choice(field="dtype", value="bfloat16", basis="rule", reason='größer 🙂\n\t"\\'),)),
    ],
)
def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    assert decode(encode(plan)) == plan
    write_plan(plan, tmp_path / "a.gplan")
    assert read_plan(tmp_path / "a.gplan") == plan
    assert encode(read_plan(tmp_path / "a.gplan")) == encode(plan)


def test_the_same_value_is_the_same_bytes_however_it_was_made() -> None:
    rounded = msgspec.structs.replace(PLAN.regrets[0], regret=0.0)
    as_integer = msgspec.structs.replace(rounded, regret=0)
    as_negative_zero = msgspec.structs.replace(rounded, regret=-0.0)
    values = [
        msgspec.structs.replace(PLAN, regrets=regrets) for regrets in ((rounded,), [as_integer], (as_negative_zero,))
    ]
    assert len({encode(value) for value in values}) == 1
    assert all(decode(encode(value)) == values[0] for value in values)


def test_the_same_value_is_the_same_bytes_in_another_process() -> None:
    code = "import sys; from tests.formats.plans import *; from formats.container import encode;"
    code += "sys.stdout.buffer.write(encode(make_plan()))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {DATA}


def test_the_file_holds_no_time_and_no_path(tmp_path: Path) -> None:
    for name in ("a.gplan", "b.gplan"):
        write_plan(PLAN, tmp_path / name)
    assert (tmp_path / "a.gplan").read_bytes() == (tmp_path / "b.gplan").read_bytes() == DATA
    assert str(tmp_path).encode() not in text_of(DATA)


def test_empty() -> None:
    with pytest.raises(EmptyFileError):
        decode(b"")


@pytest.mark.parametrize(
    "data", [b"{}", b"\x89PNG\r\n\x1a\n" + bytes(100), bytes(200), MAGIC[1:] + DATA, b"\x89gplan\n"]
)
def test_not_a_plan(data: bytes) -> None:
    with pytest.raises(NotAPlanError):
        decode(data)


def test_truncated_at_every_offset() -> None:
    for end in range(1, len(DATA)):
        with pytest.raises(TruncatedError):
            decode(DATA[:end])


def test_any_bit_flipped() -> None:
    for offset in range(len(DATA)):
        for bit in range(8):
            flipped = bytearray(DATA)
            flipped[offset] ^= 1 << bit
            with pytest.raises(
                (NotAPlanError, WrongVersionError, TooLargeError, TruncatedError, CorruptError)
            ) as caught:
                decode(bytes(flipped))
            if offset < len(MAGIC):
                assert caught.type is NotAPlanError
            elif offset < len(MAGIC) + 4:
                assert caught.type is WrongVersionError
            elif offset >= HEADER.size - 32:
                assert caught.type is CorruptError


@pytest.mark.parametrize("version", [0, 2, 3, 5, 2**32 - 1])
def test_another_version_is_refused_with_the_command_that_remakes_it(version: int) -> None:
    with pytest.raises(WrongVersionError, match=f"format {version}; this gplan reads format 4") as caught:
        decode(pack(b"what another version holds", version=version))
    assert "gplan plan CHECKPOINT -o FILE" in caught.value.hint


def test_bytes_after_the_end() -> None:
    with pytest.raises(CorruptError, match="1 bytes follow the end"):
        decode(DATA + b"\0")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda plan: plan.update(colour=1), "colour"),
        (lambda plan: plan["limits"].update(colour=1), "limits.colour"),
        (lambda plan: plan["decode"]["ladder"][1].update(colour=1), "decode.ladder[1].colour"),
        (lambda plan: plan["decode"]["ladder"][1]["eager"].update(colour=None), "decode.ladder[1].eager.colour"),
    ],
)
def test_unknown_field(change: Callable[[Any], object], path: str) -> None:
    with pytest.raises(UnknownFieldError, match=r"^unknown field") as caught:
        decode(with_json(change))
    assert caught.value.path == path
    assert path in caught.value.message


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda plan: plan.pop("model"), "model"),
        (lambda plan: plan["limits"].pop("chunk"), "limits.chunk"),
        (lambda plan: plan["ledger"][2].pop("planned_bytes"), "ledger[2].planned_bytes"),
    ],
)
def test_missing_field(change: Callable[[Any], object], path: str) -> None:
    with pytest.raises(MissingFieldError, match=r"^missing field") as caught:
        decode(with_json(change))
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("change", "path", "sentence"),
    [
        (lambda plan: plan["limits"].update(chunk="64"), "limits.chunk", "expected `int`, got `str`"),
        (lambda plan: plan["limits"].update(chunk=64.5), "limits.chunk", "expected `int`, got `float`"),
        (lambda plan: plan["limits"].update(chunk=True), "limits.chunk", "expected `int`, got `bool`"),
        (lambda plan: plan["limits"].update(chunk=None), "limits.chunk", "expected `int`, got `null`"),
        (lambda plan: plan["decode"].update(backend="magic"), "decode.backend", "invalid enum value 'magic'"),
        (lambda plan: plan["decode"].update(ladder={}), "decode.ladder", "expected `array`, got `object`"),
        (
            lambda plan: plan["workload"]["decode_steps"].append([1]),
            "workload.decode_steps[2]",
            "expected `array` of length 2",
        ),
        (
            lambda plan: plan["decode"]["ladder"][0].update(graph=3),
            "decode.ladder[0].graph",
            "expected `object | null`",
        ),
    ],
)
def test_wrong_type(change: Callable[[Any], object], path: str, sentence: str) -> None:
    with pytest.raises(WrongTypeError) as caught:
        decode(with_json(change))
    assert caught.value.path == path
    assert sentence in caught.value.message


@pytest.mark.parametrize("text", [b"[]", b"null", b"1", b'"plan"'])
def test_json_that_is_no_plan(text: bytes) -> None:
    with pytest.raises(WrongTypeError, match="the plan: expected `object`"):
        decode(pack(text))


def test_inconsistent_fields_in_a_file() -> None:
    with pytest.raises(InconsistentError) as caught:
        decode(with_json(lambda plan: plan["ledger"].pop()))
    assert caught.value.path == "ledger"


@pytest.mark.parametrize("text", [b"", b"{", b'{"model":', b"\xff\xfe", b'"\\ud800"', b"\0", b'{"num_kv_pages":NaN}'])
def test_invalid_json(text: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(pack(text))


def test_text_after_the_json() -> None:
    with pytest.raises(CorruptError):
        decode(pack(text_of(DATA) + b"x"))


def test_json_nested_beyond_reason() -> None:
    for text in (b"[" * 500_000, b'{"model":' * 100_000, b'{"decode":{"ladder":' + b"[" * 500_000):
        with pytest.raises(FormatError):
            decode(pack(text))


def test_only_the_one_form_of_json() -> None:
    text = text_of(DATA)
    assert decode(pack(text)) == PLAN
    value = json.loads(text)
    for other in (
        json.dumps(value).encode(),
        json.dumps(dict(reversed(value.items())), separators=(",", ":")).encode(),
        text.replace(b'"num_kv_pages":129', b'"num_kv_pages":1,"num_kv_pages":129'),
        text.replace(b'"kernels":"reference"', b'"kernels":"\\u0072eference"'),
        text + b" ",
        text.replace(b'"median_us":904.0', b'"median_us":904', 1),
    ):
        assert other != text
        with pytest.raises(NotCanonicalError):
            decode(pack(other))


SKIPPABLE = b"\x50\x2a\x4d\x18\x08\x00\x00\x00" + bytes(8)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"not zstd at all",
        frame(text_of(DATA), write_content_size=False),
        frame(text_of(DATA)[:-1]),
        frame(text_of(DATA)) * 2,
        frame(text_of(DATA)) + b"tail",
        frame(text_of(DATA)) + SKIPPABLE,
        SKIPPABLE + frame(text_of(DATA)),
        SKIPPABLE,
        frame(text_of(DATA))[:-1],
        frame(text_of(DATA))[:4],
    ],
    ids=[
        "nothing",
        "noise",
        "no size",
        "shorter",
        "two",
        "tail",
        "skip after",
        "skip before",
        "skip",
        "cut",
        "cut early",
    ],
)
def test_a_payload_that_is_not_one_whole_frame(payload: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(pack(text_of(DATA), payload=payload))


def test_a_plan_too_large_to_be_read_is_not_written() -> None:
    with pytest.raises(TooLargeError, match="the format allows 2097152"):
        encode(make_plan(choices=(Choice(field="dtype", value="bfloat16", basis="rule", reason="x" * MAX_JSON_BYTES),)))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": 3},
        {"dtype": None},
        {"num_kv_pages": 129.0},
        {"num_kv_pages": "129"},
        {"num_kv_pages": True},
        {"ledger": None},
        {"ledger": [{"name": "weights"}]},
        {"limits": {"max_batch": 8}},
        {"model": object()},
        {"num_kv_pages": 1 << 70},
        {"dtype": "\ud800"},
    ],
)
def test_a_value_that_has_no_place_in_a_file_is_not_written(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        write_plan(msgspec.structs.replace(PLAN, **change), tmp_path / "a.gplan")
    assert list(tmp_path.iterdir()) == []


def test_reading_imports_no_torch() -> None:
    code = """
import pkgutil, sys, importlib, formats
for module in pkgutil.iter_modules(formats.__path__):
    importlib.import_module(f"formats.{module.name}")
heavy = {"torch", "numpy", "transformers", "gplan", "starlette"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
