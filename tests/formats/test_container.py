"""The bytes of a plan: round trip, determinism, and one named error for each way they can be wrong."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

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
from formats.plan import PLAN_FORMAT, Choice, Plan
from tests.formats.plans import CUDA, make_plan

PLAN = make_plan()
DATA = encode(PLAN)
MAX_SECONDS = 1.0
MAX_ALLOCATED = 64 << 20


def text_of(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data[HEADER.size :])


def pack(
    text: bytes, *, payload: bytes | None = None, json_size: int | None = None, version: int = PLAN_FORMAT
) -> bytes:
    """A container whose checksum holds, around any text, or around any payload."""
    payload = zstandard.ZstdCompressor().compress(text) if payload is None else payload
    json_size = len(text) if json_size is None else json_size
    start = HEADER.pack(MAGIC, version, json_size, len(payload), b"")[:-32]
    return start + hashlib.sha256(start + payload).digest() + payload


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


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_refused_with_the_command_that_remakes_it(version: int) -> None:
    with pytest.raises(WrongVersionError, match=f"format {version}; this gplan reads format 1") as caught:
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


def frame(text: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(text)


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


def traced(data: bytes) -> FormatError | None:
    """Decodes, and holds it to the promise of what hostile bytes may allocate."""
    tracemalloc.start()
    try:
        decode(data)
    except FormatError as error:
        return error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_ALLOCATED, f"{peak} bytes"
    return None


MEASURE = """
import resource, sys, time
from formats.container import decode
from formats.errors import FormatError
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        decode(data)
        name = "valid"
    except FormatError as error:
        name = type(error).__name__
    print(name, time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def measured(files: list[bytes], folder: Path) -> list[tuple[str, float, int]]:
    """What decoding each of the files gives, in one process of its own: name of the error, seconds of processor time,
    and bytes by which the process grew, whoever allocated them."""
    paths = [folder / f"{index}.gplan" for index in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, paths)], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(name, float(seconds), int(kibibytes) << 10) for name, seconds, kibibytes in rows]


BOMB = zstandard.ZstdCompressor().compress(bytes(256 << 20))


@pytest.mark.parametrize("stated", [4096, MAX_JSON_BYTES, 256 << 20])
def test_a_zstd_bomb_is_refused_before_it_grows(stated: int) -> None:
    assert len(BOMB) < MAX_JSON_BYTES
    error = traced(pack(b"", payload=BOMB, json_size=stated))
    assert isinstance(error, TooLargeError if stated > MAX_JSON_BYTES else CorruptError)


def test_a_bomb_that_lies_about_its_size_is_refused() -> None:
    bomb = bytearray(BOMB)
    descriptor = bomb[4]
    assert descriptor >> 6 == 2, "a content size of 4 bytes"
    at = 5 + (0 if descriptor & 32 else 1)
    bomb[at : at + 4] = (1 << 20).to_bytes(4, "little")
    error = traced(pack(b"", payload=bytes(bomb), json_size=1 << 20))
    assert isinstance(error, CorruptError)


def wide(entries: bytes, where: str) -> bytes:
    """A plan with one list blown up to the largest JSON that the format allows."""
    text = text_of(DATA)
    old = {
        "workload.prefill_steps": b'"prefill_steps":[[64,120]]',
        "decode.eager_sizes": b'"eager_sizes":[]',
        "choices": b'"choices":[',
        "receipts": b'"receipts":[',
    }[where]
    assert old in text
    count = (MAX_JSON_BYTES - len(text)) // (len(entries) + 1)
    body = b",".join([entries] * count)
    new = old + body + b"," if old.endswith(b"[") else old[: old.index(b"[") + 1] + body + b"]"
    return pack(text.replace(old, new, 1))


def widest_plan() -> Plan:
    steps = tuple((size, 100_000 + size) for size in range(1, 65_537))
    plan = make_plan(chunk=65_536, max_batch=1024, decode_sizes=range(1, 1025), kv_bytes_per_page=16)
    return msgspec.structs.replace(plan, workload=msgspec.structs.replace(plan.workload, prefill_steps=steps))


def test_hostile_bytes_cost_less_than_a_second_and_64_mib(tmp_path: Path) -> None:
    valid = encode(widest_plan())
    assert len(text_of(valid)) > MAX_JSON_BYTES // 2
    files = {
        "bomb": (pack(b"", payload=BOMB, json_size=MAX_JSON_BYTES), "CorruptError"),
        "nested": (pack(b"[" * MAX_JSON_BYTES), "WrongTypeError"),
        "large numbers": (wide(b"[257,257]", "workload.prefill_steps"), "InconsistentError"),
        "small numbers": (wide(b"[1,1]", "workload.prefill_steps"), "InconsistentError"),
        "negative numbers": (wide(b"[1,-1]", "workload.prefill_steps"), "InconsistentError"),
        "empty lists": (wide(b"[]", "workload.prefill_steps"), "WrongTypeError"),
        "ranges": (wide(b"[1,1]", "decode.eager_sizes"), "InconsistentError"),
        "choices": (
            wide(b'{"field":"dtype","value":"bfloat16","basis":"rule","reason":""}', "choices"),
            "InconsistentError",
        ),
        "receipts": (
            wide(b'{"key":"decode:1","cases":1,"max_abs_diff":0.0,"bitwise":true}', "receipts"),
            "InconsistentError",
        ),
        "empty objects": (wide(b"{}", "receipts"), "MissingFieldError"),
        "valid": (valid, "valid"),
    }
    results = measured([data for data, _ in files.values()], tmp_path)
    for (case, (_, expected)), (name, seconds, nbytes) in zip(files.items(), results, strict=True):
        assert name == expected, case
        assert seconds < MAX_SECONDS, case
        assert nbytes < MAX_ALLOCATED, case


def test_what_costs_too_much_is_noticed(tmp_path: Path) -> None:
    """The measurement itself: decompressing the bomb would not pass."""
    code = MEASURE.replace("decode(data)", "import zstandard; zstandard.ZstdDecompressor().decompress(data)")
    (tmp_path / "bomb").write_bytes(BOMB)
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "bomb"], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[2]) << 10 > MAX_ALLOCATED


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


@settings(max_examples=200)
@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for candidate in (data, MAGIC + data, DATA[: HEADER.size] + data, pack(b"", payload=data, json_size=len(data))):
        with pytest.raises(FormatError):
            decode(candidate)


@settings(max_examples=200)
@given(cut=st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))), filler=st.binary(max_size=16))
def test_any_splice(cut: tuple[int, int], filler: bytes) -> None:
    data = DATA[: min(cut)] + filler + DATA[max(cut) :]
    if data != DATA:
        with pytest.raises(FormatError):
            decode(data)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in paths_in(item, (*path, key)))]


PATHS = paths_in(json.loads(text_of(DATA)))[1:]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400)
@given(where=st.sampled_from(PATHS), action=st.sampled_from(["replace", "remove", "repeat", "add"]), value=VALUES)
def test_any_mutation_of_the_json(where: tuple[Any, ...], action: str, value: Any) -> None:
    root = json.loads(text_of(DATA))
    parent = root
    for key in where[:-1]:
        parent = parent[key]
    if action == "replace":
        parent[where[-1]] = value
    elif action == "remove":
        del parent[where[-1]]
    elif isinstance(parent, list):
        parent.append(parent[where[-1]] if action == "repeat" else value)
    else:
        parent[str(where[-1]) + ("_" if action == "repeat" else str(value))] = value
    data = pack(json.dumps(root, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass"))
    try:
        plan = decode(data)
    except FormatError:
        return
    assert text_of(encode(plan)) == text_of(data)


@settings(max_examples=200)
@given(cut=st.integers(0, 4000), length=st.integers(0, 30), filler=st.binary(max_size=8))
def test_any_mutation_of_the_json_text(cut: int, length: int, filler: bytes) -> None:
    text = text_of(DATA)
    data = pack(text[:cut] + filler + text[cut + length :])
    try:
        plan = decode(data)
    except FormatError:
        return
    assert text_of(encode(plan)) == text_of(data)


def test_reading_imports_no_torch() -> None:
    code = """
import pkgutil, sys, importlib, formats
for module in pkgutil.iter_modules(formats.__path__):
    importlib.import_module(f"formats.{module.name}")
heavy = {"torch", "numpy", "transformers", "gplan", "starlette"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
