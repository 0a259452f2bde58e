"""Hostile bytes: what they may cost, and that any mutation gives a plan or a named error."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.container import HEADER, MAGIC, MAX_JSON_BYTES, decode, encode
from formats.errors import (
    CorruptError,
    FormatError,
    TooLargeError,
)
from formats.plan import Plan
from tests.formats.containers import DATA, pack, text_of
from tests.formats.plans import make_plan

MAX_SECONDS = 1.0
MAX_ALLOCATED = 64 << 20


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


# The peak is this program's own: getrusage would count what the process was before it became this program.
MEASURE = """
import re, sys, time
from formats.container import decode
from formats.errors import FormatError
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    before, started = peak(), time.process_time()
    try:
        decode(data)
        name = "valid"
    except FormatError as error:
        name = type(error).__name__
    print(name, time.process_time() - started, peak() - before)
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
