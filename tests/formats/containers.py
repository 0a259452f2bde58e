"""Containers made by hand: the checksum holds, whatever is inside."""

from __future__ import annotations

import hashlib
from typing import Any

import zstandard

from formats.container import HEADER, MAGIC, encode
from formats.plan import PLAN_FORMAT
from tests.formats.plans import make_plan

PLAN = make_plan()
DATA = encode(PLAN)


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


def frame(text: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(text)
