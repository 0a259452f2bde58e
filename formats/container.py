"""The bytes of a `.gplan` file, normative in GPLAN.md: a header of fixed size, then zstd over canonical JSON.

Reading never trusts a size before checking it, and never gives anything but a Plan that holds together, or a
`FormatError` that says what is wrong and where. What the fields mean belongs to `plan`, what they must say together to
`validation`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Any

import msgspec
import zstandard

from formats.errors import (
    CorruptError,
    EmptyFileError,
    FormatError,
    MissingFieldError,
    NotAPlanError,
    NotCanonicalError,
    TooLargeError,
    TruncatedError,
    UnknownFieldError,
    WrongTypeError,
    WrongVersionError,
)
from formats.explain import explain
from formats.files import read_bounded, write_atomic
from formats.plan import PLAN_FORMAT, Plan
from formats.validation import validate

MAGIC = b"\x89gplan\r\n"
"""Not text (first byte), and broken by anything that rewrites line ends."""

HEADER = struct.Struct("<8sIII32s")
"""magic, version, bytes of JSON, bytes of payload, sha256 of all before the digest and of the payload."""

MAX_JSON_BYTES = 2 << 20
MAX_PAYLOAD_BYTES = MAX_JSON_BYTES + (64 << 10)
MAX_FILE_BYTES = HEADER.size + MAX_PAYLOAD_BYTES

_DIGEST_BYTES = 32
_LEVEL = 9
_REMAKE = "Make the plan again: gplan plan CHECKPOINT -o FILE"
_RESTORE = f"Restore the file from where it was kept. {_REMAKE}"
_KINDS = {"unknown": UnknownFieldError, "missing": MissingFieldError, "type": WrongTypeError}

_decoder = msgspec.json.Decoder(Plan)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan.

    Raises:
        FormatError: a subclass for each way the file can be wrong; the message begins with the path.
    """
    data = read_bounded(path, MAX_FILE_BYTES, "a plan")
    try:
        return decode(data)
    except FormatError as error:
        raise type(error)(f"{os.fspath(path)}: {error.message}", error.hint, error.path) from None


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan, whole or not at all: on any failure an older file at `path` is as it was.

    Raises:
        FormatError: the plan does not hold together, or the file cannot be written.
    """
    write_atomic(path, encode(plan))


def encode(plan: Plan) -> bytes:
    """The bytes of a plan; the same value gives the same bytes.

    Raises:
        FormatError: the plan could not be read back: a wrong type, an inconsistency, or too large.
    """
    plan = _normalised(plan)
    validate(plan)
    try:
        text = msgspec.json.encode(plan)
    except UnicodeEncodeError as error:
        raise WrongTypeError(f"the plan holds text that is not Unicode: {error}") from None
    if len(text) > MAX_JSON_BYTES:
        raise TooLargeError(f"the plan takes {len(text)} bytes of JSON; the format allows {MAX_JSON_BYTES}")
    payload = zstandard.ZstdCompressor(
        level=_LEVEL, write_checksum=False, write_content_size=True, write_dict_id=False
    ).compress(text)
    start = HEADER.pack(MAGIC, PLAN_FORMAT, len(text), len(payload), b"")[:-_DIGEST_BYTES]
    return start + hashlib.sha256(start + payload).digest() + payload


def decode(data: bytes) -> Plan:
    """Reads a plan from the bytes of a file. Checks magic, version, sizes and digest before it decompresses anything.

    Raises:
        FormatError: a subclass for each way the bytes can be wrong.
    """
    text = _unpack(data)
    try:
        plan = _decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _field_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the JSON inside is not valid: {error}", _RESTORE) from None
    validate(plan)
    if msgspec.json.encode(plan) != text:
        raise NotCanonicalError(
            "the JSON inside is not in the format's one form (spaces, order, repeated keys)", _REMAKE
        )
    return plan


def _unpack(data: bytes) -> bytes:
    """The JSON inside, once everything around it holds."""
    if not data:
        raise EmptyFileError("the file is empty", _RESTORE)
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise NotAPlanError("this is not a plan: it does not begin as one", "Give a file that gplan plan wrote.")
    version_end = len(MAGIC) + 4
    if len(data) >= version_end:
        version = int.from_bytes(data[len(MAGIC) : version_end], "little")
        if version != PLAN_FORMAT:
            raise WrongVersionError(f"the plan has format {version}; this gplan reads format {PLAN_FORMAT}", _REMAKE)
    if len(data) < HEADER.size:
        raise TruncatedError(f"the file ends after {len(data)} bytes, within its header of {HEADER.size}", _RESTORE)
    _, _, json_size, payload_size, digest = HEADER.unpack_from(data)
    for what, size, allowed in (("JSON", json_size, MAX_JSON_BYTES), ("payload", payload_size, MAX_PAYLOAD_BYTES)):
        if size > allowed:
            raise TooLargeError(f"the header states {size} bytes of {what}; the format allows {allowed}", _RESTORE)
    expected = HEADER.size + payload_size
    if len(data) < expected:
        raise TruncatedError(f"the file ends after {len(data)} of {expected} bytes", _RESTORE)
    if len(data) > expected:
        raise CorruptError(f"{len(data) - expected} bytes follow the end of the plan", _RESTORE)
    payload = data[HEADER.size :]
    if hashlib.sha256(data[: HEADER.size - _DIGEST_BYTES] + payload).digest() != digest:
        raise CorruptError("the checksum does not match: the file was changed after it was written", _RESTORE)
    return _decompress(payload, json_size)


def _decompress(payload: bytes, json_size: int) -> bytes:
    """Exactly one zstd frame of exactly `json_size` bytes: what the frame itself claims is checked first."""
    try:
        stated = zstandard.get_frame_parameters(payload).content_size
        if stated != json_size:
            raise CorruptError(f"the compressed part does not state the header's {json_size} bytes", _RESTORE)
        text = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"the compressed part is not valid: {error}", _RESTORE) from None
    if len(text) != json_size:
        raise CorruptError(f"the compressed part holds {len(text)} bytes instead of {json_size}", _RESTORE)
    return text


def _normalised(plan: Plan) -> Plan:
    """The plan as reading it back would give it: 1 in a float field becomes 1.0, -0.0 becomes 0.0, lists tuples."""
    try:
        return msgspec.convert(_plain(msgspec.to_builtins(plan)), Plan)
    except msgspec.ValidationError as error:
        raise _field_error(error) from None
    except (TypeError, OverflowError) as error:
        raise WrongTypeError(f"the plan holds a value that has no place in a file: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value + 0.0 if isinstance(value, float) else value


def _field_error(error: msgspec.ValidationError) -> FormatError:
    found = explain(error)
    sentences = {
        "unknown": f"unknown field {found.path}",
        "missing": f"missing field {found.path}",
        "type": f"{found.path or 'the plan'}: {found.problem}",
    }
    return _KINDS[found.kind](sentences[found.kind], _REMAKE, found.path)
