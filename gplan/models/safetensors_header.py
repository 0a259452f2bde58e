"""The header of one safetensors file, read without its data and checked against the file's size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.plan import TensorHeader
from gplan.errors import GplanError

MAX_HEADER = 100_000_000
"""Bytes of a header at most: the format's own limit."""

DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that can be run, by their names in a file."""

_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_LENGTH_BYTES = 8


def read_header(path: Path) -> Iterator[TensorHeader]:
    """Reads every tensor's dtype, shape and place.

    Yields:
        Headers whose `offset` counts from the start of the file.

    Raises:
        GplanError: truncated, not safetensors, or a header that does not fit the file.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(_LENGTH_BYTES)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH_BYTES or length > min(MAX_HEADER, size - _LENGTH_BYTES):
            raise _malformed(path, f"its header would be {length} bytes of {size}: truncated, or not safetensors")
        text = stream.read(length)
    try:
        entries: Any = json.loads(text)
    except ValueError as error:
        raise _malformed(path, f"its header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _malformed(path, "its header is not a JSON object")
    data_start = _LENGTH_BYTES + length
    for name, entry in entries.items():
        if name != "__metadata__":
            yield _tensor(path, name, entry, data_start, size)


def _tensor(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        well_formed = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise _malformed(path, f"the header of tensor {name} is malformed")
    if end < begin or data_start + end > size:
        raise _malformed(path, f"tensor {name} ends at byte {data_start + end} of {size}: truncated")
    if dtype in _ITEM_SIZES and math.prod(shape) * _ITEM_SIZES[dtype] != end - begin:
        raise _malformed(path, f"tensor {name} has {end - begin} bytes, not those of {dtype} {list(shape)}")
    return TensorHeader(
        name=name, dtype=dtype, shape=shape, file=path.name, offset=data_start + begin, nbytes=end - begin
    )


def _malformed(path: Path, reason: str) -> GplanError:
    return GplanError(f"{path}: {reason}", "Get the file again.")
