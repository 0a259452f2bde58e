"""Reads traffic traces: gplan's own and those that others publish. Which format a file has is seen from its first line.

| format | looks like | arrival |
|---|---|---|
| gplan JSONL | `{"gplan_trace":1,...}`, then one request a line | `arrival_s` |
| Azure LLM inference CSV | `TIMESTAMP,ContextTokens,GeneratedTokens` | date and time |
| BurstGPT CSV | columns `Timestamp`, `Request tokens`, `Response tokens` among others | seconds |
| Mooncake JSONL | `{"timestamp", "input_length", "output_length", "hash_ids"}`: blocks of 512 tokens | milliseconds |
| ShareGPT JSON | a list of `{"conversations": [{"from", "value"}]}`: texts; the caller counts tokens | together |

Arrivals of the foreign formats count from the first request; rows out of order are sorted. A request without an answer
(it failed) is left out and counted. Anything else that is not as the format says is an error that names file, line and
field. Facts: AzurePublicDataset, HPMLL/BurstGPT and kvcache-ai/Mooncake on GitHub.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import msgspec

from formats.errors import BadTraceRowError, NotATraceError
from formats.explain import explain, shorten
from formats.files import read_bounded
from formats.trace import MAX_ARRIVAL_S, MAX_TOKENS, TRACE_FORMAT, Trace, TraceHeader, TraceRequest

MAX_TRACE_BYTES = 1 << 30
MOONCAKE_BLOCK_TOKENS = 512

CountTokens = Callable[[str], int]
"""Tokens of a text, by the tokenizer of the model that the trace is read for."""

Raw = TypeVar("Raw")
Read = TypeVar("Read")

_HINT = (
    "Give gplan's own JSON lines, an Azure or BurstGPT CSV, Mooncake JSON lines, or a ShareGPT JSON with a tokenizer."
)

_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""What gzip and zstd files begin with."""


class _RowError(Exception):
    """What is wrong in a row, before the row's file and line are known."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field
        self.problem = problem


class _Row(NamedTuple):
    """A request of a foreign format: its arrival counts from anywhere, and without an answer it has no output."""

    arrival_us: int
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _Turn(msgspec.Struct, frozen=True):
    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[_Turn]


_MOONCAKE_FIELDS = {"input_length", "output_length", "hash_ids"}

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_header_decoder = msgspec.json.Decoder(TraceHeader)
_request_decoder = msgspec.json.Decoder(TraceRequest)
_mooncake_decoder = msgspec.json.Decoder(_MooncakeRow)
_sharegpt_decoder = msgspec.json.Decoder(list[_Conversation])


def read_trace(path: str | os.PathLike[str], count_tokens: CountTokens | None = None) -> Trace:
    """Reads a trace in any of the formats above.

    Args:
        count_tokens: needed for ShareGPT alone, which holds texts.

    Raises:
        NotATraceError: none of the formats, no request in it, or texts and nothing to count their tokens with.
        BadTraceRowError: a row is malformed.
        FileAccessError, TooLargeError: the file cannot be read, or has more than 1 GiB.
    """
    return decode_trace(read_bounded(path, MAX_TRACE_BYTES, "a trace"), os.fspath(path), count_tokens)


def decode_trace(data: bytes, name: str, count_tokens: CountTokens | None = None) -> Trace:
    """Reads a trace from the bytes of a file; `name` is what errors call it. See `read_trace`."""
    if data.startswith(_COMPRESSED):
        raise NotATraceError(f"{name}: is compressed", "Unpack it first, with gunzip or unzstd.")
    data = data.removeprefix(b"\xef\xbb\xbf")
    start = data.lstrip()[:1]
    if start == b"[":
        trace = _read_sharegpt(data, name, count_tokens)
    elif start == b"{":
        trace = _read_json_lines(data, name)
    else:
        trace = _read_csv(data, name)
    if not trace.requests:
        raise NotATraceError(f"{name}: there is no request in it", _HINT)
    return trace


def _read_json_lines(data: bytes, name: str) -> Trace:
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    (first,) = _located(lines[:1], name, lambda line: _decode(_fields_decoder, line))
    if "gplan_trace" in first:
        return _read_own(lines, name)
    if first.keys() & _MOONCAKE_FIELDS:
        rows = _located(lines, name, lambda line: _mooncake_row(_decode(_mooncake_decoder, line)))
        return _arranged(rows, name, MOONCAKE_BLOCK_TOKENS)
    raise NotATraceError(f"{name}: its first line is of no known trace format", _HINT)


def _read_own(lines: list[tuple[int, bytes]], name: str) -> Trace:
    (header,) = _located(lines[:1], name, lambda line: _decode(_header_decoder, line))
    if header.gplan_trace != TRACE_FORMAT:
        raise NotATraceError(
            f"{name}: trace format {header.gplan_trace}; this gplan reads format {TRACE_FORMAT}", _HINT
        )

    def read(line: bytes) -> TraceRequest:
        request = _decode(_request_decoder, line)
        _check_prefix("prefix_ids", request.prefix_ids, request.input_tokens, header.prefix_block_tokens)
        return request

    return Trace(
        requests=tuple(sorted(_located(lines[1:], name, read), key=lambda request: request.arrival_s)),
        concurrency=header.concurrency,
        prefix_block_tokens=header.prefix_block_tokens,
        num_skipped=header.num_skipped,
    )


def _mooncake_row(row: _MooncakeRow) -> _Row:
    arrival_us = _microseconds("timestamp", row.timestamp, 1_000)
    _check_tokens("input_length", row.input_length, 1)
    _check_tokens("output_length", row.output_length, 0)
    _check_prefix("hash_ids", row.hash_ids, row.input_length, MOONCAKE_BLOCK_TOKENS)
    return _Row(arrival_us, row.input_length, row.output_length, row.hash_ids)


def _read_csv(data: bytes, name: str) -> Trace:
    reader = csv.reader(io.StringIO(_text(data, name), newline=""), strict=True)
    header = [column.strip() for column in _next_row(reader, name)]
    read = _csv_format(header)
    if read is None:
        raise NotATraceError(f"{name}: its first line is of no known trace format", _HINT)
    return _arranged(_located(_csv_rows(reader, name), name, lambda row: read(_named(header, row))), name)


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _bad_row(name, data.count(b"\n", 0, error.start) + 1, "row", "is not UTF-8 text") from None


def _csv_format(header: list[str]) -> Callable[[Mapping[str, str]], _Row] | None:
    for columns, read in (
        (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_row),
        (("Timestamp", "Request tokens", "Response tokens"), _burstgpt_row),
    ):
        if all(header.count(column) == 1 for column in columns):
            return read
    return None


def _csv_rows(reader: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    while row := _next_row(reader, name):
        yield reader.line_num, row


def _next_row(reader: Any, name: str) -> list[str]:
    """The next row that is not blank; empty at the end."""
    try:
        for row in reader:
            if row:
                return list(row)
    except csv.Error as error:
        raise _bad_row(name, reader.line_num, "row", str(error)) from None
    return []


def _named(header: list[str], row: list[str]) -> Mapping[str, str]:
    if len(row) != len(header):
        raise _RowError("row", f"has {len(row)} fields; the header has {len(header)}")
    return dict(zip(header, row, strict=True))


def _azure_row(row: Mapping[str, str]) -> _Row:
    text = row["TIMESTAMP"].strip()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _RowError("TIMESTAMP", f"{shorten(text)!r} is not a date and time") from None
    since = moment.replace(tzinfo=None) - datetime.min - (moment.utcoffset() or timedelta())
    return _Row(
        since // timedelta(microseconds=1), _tokens(row, "ContextTokens", 1), _tokens(row, "GeneratedTokens", 0)
    )


def _burstgpt_row(row: Mapping[str, str]) -> _Row:
    text = row["Timestamp"].strip()
    try:
        seconds = float(text)
    except ValueError:
        raise _RowError("Timestamp", f"{shorten(text)!r} is not a time in seconds") from None
    arrival_us = _microseconds("Timestamp", seconds, 1_000_000)
    return _Row(arrival_us, _tokens(row, "Request tokens", 1), _tokens(row, "Response tokens", 0))


def _read_sharegpt(data: bytes, name: str, count_tokens: CountTokens | None) -> Trace:
    """One request per conversation, as serving benchmarks have it: the first turn is the prompt, the second its answer.
    A conversation that does not begin with a person's turn and a reply has no answer."""
    if count_tokens is None:
        raise NotATraceError(
            f"{name}: holds texts, not token counts", "Give a checkpoint, whose tokenizer counts them."
        )
    try:
        conversations = _sharegpt_decoder.decode(data)
    except msgspec.ValidationError as error:
        found = explain(error)
        raise BadTraceRowError(f"{name}: {found.path}: {found.problem or found.kind}", _HINT, found.path) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotATraceError(f"{name}: the JSON is not valid: {error}", _HINT) from None
    return _arranged([_sharegpt_row(item.conversations, count_tokens) for item in conversations], name)


def _sharegpt_row(turns: list[_Turn], count_tokens: CountTokens) -> _Row:
    if len(turns) < 2 or turns[0].speaker not in ("human", "user"):
        return _Row(0, 1, 0)
    prompt = count_tokens(turns[0].value)
    return _Row(0, max(prompt, 1), count_tokens(turns[1].value) if prompt else 0)


def _arranged(rows: Sequence[_Row], name: str, prefix_block_tokens: int = 0) -> Trace:
    """Rows that have an answer in order of arrival, counted from the first of them."""
    answered = sorted((row for row in rows if row.output_tokens), key=lambda row: row.arrival_us)
    start, end = (answered[0].arrival_us, answered[-1].arrival_us) if answered else (0, 0)
    if end - start > MAX_ARRIVAL_S * 1_000_000:
        raise NotATraceError(f"{name}: its arrivals are more than {MAX_ARRIVAL_S} seconds apart", _HINT)
    requests = tuple(
        TraceRequest(
            arrival_s=(row.arrival_us - start) / 1_000_000,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            prefix_ids=row.prefix_ids,
        )
        for row in answered
    )
    return Trace(requests=requests, prefix_block_tokens=prefix_block_tokens, num_skipped=len(rows) - len(requests))


def _located(lines: Iterable[tuple[int, Raw]], name: str, read: Callable[[Raw], Read]) -> list[Read]:
    """Reads every row; what is wrong in one becomes an error with the file and the line."""
    rows = []
    for number, line in lines:
        try:
            rows.append(read(line))
        except _RowError as error:
            raise _bad_row(name, number, error.field, error.problem) from None
    return rows


def _bad_row(name: str, line: int, field: str, problem: str) -> BadTraceRowError:
    return BadTraceRowError(f"{name}:{line}: {field}: {problem}", "Correct the line, or leave it out.", field)


def _decode(decoder: msgspec.json.Decoder[Read], line: bytes) -> Read:
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        found = explain(error)
        problem = {"unknown": "is no field of this format", "missing": "is missing", "type": found.problem}[found.kind]
        raise _RowError(found.path or "row", problem) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _RowError("row", f"is not valid JSON: {error}") from None


def _tokens(row: Mapping[str, str], field: str, least: int) -> int:
    text = row[field].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _RowError(field, f"{shorten(text)!r} is not a number of tokens")
    tokens = int(text)
    _check_tokens(field, tokens, least)
    return tokens


def _check_tokens(field: str, tokens: int, least: int) -> None:
    if not least <= tokens <= MAX_TOKENS:
        raise _RowError(field, f"{shorten(str(tokens))} is outside {least} to {MAX_TOKENS} tokens")


def _microseconds(field: str, value: float, per_unit: int) -> int:
    if not 0 <= value <= MAX_ARRIVAL_S * 1_000_000 / per_unit:
        raise _RowError(field, f"{value} is outside 0 to {MAX_ARRIVAL_S} seconds")
    return round(value * per_unit)


def _check_prefix(field: str, ids: tuple[int, ...], input_tokens: int, block: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 63:
        raise _RowError(field, "holds a number that is negative or beyond 64 bits")
    blocks = -(-input_tokens // block) if block else 0
    if len(ids) > blocks:
        raise _RowError(field, f"has {len(ids)} entries; {input_tokens} tokens are {blocks} blocks of {block}")
