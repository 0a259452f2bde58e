"""Traffic traces in every format that is read: what a well-formed one gives, and what a malformed row says."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import BadTraceRowError, BadWorkloadError, FileAccessError, FormatError, NotATraceError
from formats.trace import MAX_TOKENS, Trace, TraceRequest, encode_trace, write_trace
from formats.trace_readers import decode_trace, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [46, 47]}
{"timestamp": 27482, "input_length": 1024, "output_length": 52, "hash_ids": [46, 48]}
"""
OWN = """{"gplan_trace":1,"concurrency":0,"prefix_block_tokens":16,"num_skipped":2}
{"arrival_s":0.25,"input_tokens":20,"output_tokens":3,"prefix_ids":[1,2]}
{"arrival_s":1.5,"input_tokens":7,"output_tokens":1,"prefix_ids":[]}
"""
SHAREGPT = json.dumps(
    [
        {
            "id": "a",
            "conversations": [
                {"from": "human", "value": "one two three"},
                {"from": "gpt", "value": "four five"},
                {"from": "human", "value": "not counted"},
            ],
        },
        {"id": "b", "conversations": [{"from": "gpt", "value": "first"}, {"from": "human", "value": "no"}]},
        {"id": "c", "conversations": [{"from": "human", "value": "alone"}]},
        {"id": "d", "conversations": [{"from": "user", "value": ""}, {"from": "gpt", "value": "to nothing"}]},
        {"id": "e", "conversations": [{"from": "user", "value": "hello"}, {"from": "gpt", "value": ""}]},
    ]
)


def request(arrival_s: float, input_tokens: int, output_tokens: int, *prefix_ids: int) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, input_tokens=input_tokens, output_tokens=output_tokens, prefix_ids=prefix_ids
    )


def count_words(text: str) -> int:
    return len(text.split())


def read(text: str) -> Trace:
    return decode_trace(text.encode(), "trace")


def test_azure() -> None:
    assert read(AZURE) == Trace(
        requests=(request(0.0, 374, 44), request(4.314579, 396, 109), request(4.541877, 879, 55))
    )


def test_azure_with_time_zones() -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 02:00:01+02:00,2,2\n"
    assert read(text).requests == (request(0.0, 1, 1), request(0.5, 2, 2))


@pytest.mark.parametrize("first", ["0001-01-01 00:00:00+23:59", "9999-12-31 23:59:59-23:59"])
def test_azure_dates_at_the_ends_of_the_calendar(first: str) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    assert read(f"{header}{first},1,1\n").requests == (request(0.0, 1, 1),)
    with pytest.raises(NotATraceError, match="seconds apart"):
        read(f"{header}{first},1,1\n2024-05-10 00:00:00,1,1\n")


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_compressed_trace_is_told_as_such(compress: Callable[[bytes], bytes]) -> None:
    with pytest.raises(NotATraceError, match="is compressed"):
        decode_trace(compress(AZURE.encode()), "trace")


def test_a_trace_is_not_slowed_down_beyond_what_one_holds() -> None:
    with pytest.raises(BadWorkloadError, match="seconds apart"):
        read(AZURE).sped_up(1e-300)


def test_burstgpt_leaves_out_failures_and_counts_them() -> None:
    assert read(BURSTGPT) == Trace(requests=(request(0.0, 472, 18), request(113.5, 417, 276)), num_skipped=1)


def test_burstgpt_with_more_columns() -> None:
    text = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    assert read(text + "3,,0.5,GPT-4,10,20,30,API log\n").requests == (request(0.0, 10, 20),)


def test_mooncake() -> None:
    assert read(MOONCAKE) == Trace(
        requests=(request(0.0, 600, 10, 46, 47), request(27.482, 1024, 52, 46, 48)), prefix_block_tokens=512
    )


def test_own_format() -> None:
    trace = read(OWN)
    assert trace == Trace(
        requests=(request(0.25, 20, 3, 1, 2), request(1.5, 7, 1)), prefix_block_tokens=16, num_skipped=2
    )
    assert encode_trace(trace).decode() == OWN


def test_sharegpt_counts_the_first_exchange() -> None:
    trace = decode_trace(SHAREGPT.encode(), "trace", count_words)
    assert trace == Trace(requests=(request(0.0, 3, 2),), num_skipped=4)


def test_sharegpt_needs_something_that_counts() -> None:
    with pytest.raises(NotATraceError, match="holds texts, not token counts") as caught:
        read(SHAREGPT)
    assert "tokenizer" in caught.value.hint


def test_rows_out_of_order_are_sorted_and_ties_keep_their_order() -> None:
    text = MOONCAKE + '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
    assert [row.input_tokens for row in read(text).requests] == [600, 1, 1024]
    lines = OWN.splitlines()
    assert read("\n".join([lines[0], lines[2], lines[1]])) == read(OWN)


@pytest.mark.parametrize("text", [AZURE, BURSTGPT, MOONCAKE, OWN])
def test_line_ends_blank_lines_and_a_byte_order_mark_do_not_matter(text: str) -> None:
    assert read(text.replace("\n", "\r\n")) == read(text)
    assert read(text.replace("\n", "\n\n")) == read(text)
    assert read(text.rstrip("\n")) == read(text)
    assert read("\ufeff" + text) == read(text)


A, B, M, O = AZURE, BURSTGPT, MOONCAKE, OWN  # noqa: E741

# text, what is replaced in it, by what, line, field, a part of the sentence
MALFORMED: list[tuple[str, str, str, int, str, str]] = [
    (A, "396", "many", 3, "ContextTokens", "'many' is not a number of tokens"),
    (A, "396", "", 3, "ContextTokens", "'' is not a number"),
    (A, "396", "-1", 3, "ContextTokens", "'-1' is not a number"),
    (A, "396", "3.5", 3, "ContextTokens", "'3.5' is not a number"),
    (A, "396", "1_0", 3, "ContextTokens", "'1_0' is not a number"),
    (A, "396", "0", 3, "ContextTokens", "0 is outside 1 to"),
    (A, "109", "16777217", 3, "GeneratedTokens", "16777217 is outside 0 to 16777216 tokens"),
    (A, "109", "9" * 5000, 3, "GeneratedTokens", "is not a number of tokens"),
    (A, "2023-11-16 18:15:50.9951690", "yesterday", 3, "TIMESTAMP", "'yesterday' is not a date and time"),
    (A, ",109", "", 3, "row", "has 2 fields; the header has 3"),
    (A, ",109", ",109,1", 3, "row", "has 4 fields; the header has 3"),
    (A, "396,109", '396,"109', 4, "row", "unexpected end of data"),
    (B, "45", "-45", 3, "Timestamp", "-45.0 is outside 0 to"),
    (B, "45", "nan", 3, "Timestamp", "nan is outside 0 to"),
    (B, "45", "1e300", 3, "Timestamp", "1e+300 is outside 0 to"),
    (B, "45", "soon", 3, "Timestamp", "'soon' is not a time in seconds"),
    (B, "472", "x", 2, "Request tokens", "'x' is not"),
    (B, ",276,", ",x,", 4, "Response tokens", "'x' is not"),
    (M, '"input_length": 1024', '"input_length": 0', 2, "input_length", "0 is outside 1 to"),
    (M, '"input_length": 1024', '"input_length": "x"', 2, "input_length", "expected `int`, got `str`"),
    (M, '"input_length": 1024, ', "", 2, "input_length", "is missing"),
    (M, '"input_length": 1024', '"input_length": 1024, "type": 1', 2, "type", "is no field of this format"),
    (M, "27482", "-1", 2, "timestamp", "-1.0 is outside 0 to"),
    (M, "27482", "NaN", 2, "row", "is not valid JSON"),
    (M, "[46, 48]", "[46, 48, 49]", 2, "hash_ids", "has 3 entries; 1024 tokens are 2 blocks of 512"),
    (M, "[46, 48]", "[46, -1]", 2, "hash_ids", "negative"),
    (M, "[46, 48]", "[46, 9223372036854775808]", 2, "hash_ids", "beyond 64 bits"),
    (M, "[46, 48]", '[46, "x"]', 2, "hash_ids[1]", "expected `int`, got `str`"),
    (M, "[46, 48]", "[46, 48", 2, "row", "is not valid JSON"),
    (O, '"arrival_s":1.5', '"arrival_s":-1.5', 3, "arrival_s", "expected `float` >= 0.0"),
    (O, '"output_tokens":1,', "", 3, "output_tokens", "is missing"),
    (O, '"output_tokens":1,', '"output_tokens":0,', 3, "output_tokens", "expected `int` >= 1"),
    (O, '"prefix_ids":[1,2]', '"prefix_ids":[1,2,3]', 2, "prefix_ids", "20 tokens are 2 blocks of 16"),
    (O, '"prefix_block_tokens":16', '"prefix_block_tokens":0', 2, "prefix_ids", "has 2 entries; 20 tokens are 0"),
    (O, '"concurrency":0', '"concurrency":-1', 1, "concurrency", "expected `int` >= 0"),
    (O, '"concurrency":0', '"colour":0', 1, "colour", "is no field of this format"),
]


@pytest.mark.parametrize(("text", "old", "new", "line", "field", "sentence"), MALFORMED)
def test_a_malformed_row_is_named(
    text: str, old: str, new: str, line: int, field: str, sentence: str, tmp_path: Path
) -> None:
    assert text.count(old) >= 1
    path = tmp_path / "trace"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadTraceRowError) as caught:
        read_trace(path)
    assert caught.value.message.startswith(f"{path}:{line}: {field}: ")
    assert sentence in caught.value.message
    assert len(caught.value.message) < 400
    assert caught.value.path == field


@pytest.mark.parametrize(
    ("first", "field"),
    [
        ("{", "row"),
        ('{"timestamp": 1, "input_length": 10,', "row"),
        ('{"timestamp": NaN, "input_length": 10, "output_length": 1}', "row"),
        ('{"timestamp": 1, "output_length": 1}', "input_length"),
        ('{"gplan_trace": 1, "concurrency"', "row"),
    ],
)
def test_a_malformed_first_row_is_named_as_any(first: str, field: str) -> None:
    with pytest.raises(BadTraceRowError, match=rf"^trace:2: {field}: is ") as caught:
        decode_trace(f"\n{first}\n{MOONCAKE}".encode(), "trace")
    assert caught.value.path == field


def test_bytes_that_are_not_text_name_their_line() -> None:
    with pytest.raises(BadTraceRowError, match=r"^trace:3: row: is not UTF-8 text"):
        decode_trace(AZURE.encode().replace(b"396", b"\xff"), "trace")
    with pytest.raises(BadTraceRowError, match=r"^trace:2: row: is not valid JSON"):
        decode_trace(MOONCAKE.encode().replace(b"27482", b"\xff"), "trace")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('[{"conversations":[{"from":"human","value":1}]}]', "[0].conversations[0].value"),
        ('[{"conversations":[]},{"id":"x"}]', "[1].conversations"),
        ('[{"conversations":"x"}]', "[0].conversations"),
        ("[1]", "[0]"),
    ],
)
def test_a_malformed_conversation_is_named(text: str, path: str) -> None:
    with pytest.raises(BadTraceRowError) as caught:
        decode_trace(text.encode(), "trace", count_words)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "hello",
        "a,b,c\n1,2,3\n",
        "TIMESTAMP,ContextTokens\n1,2\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens,GeneratedTokens\n",
        AZURE.splitlines()[0],
        OWN.splitlines()[0],
        BURSTGPT.replace(",18,", ",0,").replace(",276,", ",0,"),
        '{"a":1}',
        '{"gplan_trace":2}',
        "[]",
        "[",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,1,1\n9999-01-01 00:00:00,1,1\n",
    ],
)
def test_what_is_no_trace(text: str) -> None:
    with pytest.raises(NotATraceError) as caught:
        decode_trace(text.encode(), "trace", count_words)
    assert caught.value.hint


def test_a_missing_file() -> None:
    with pytest.raises(FileAccessError):
        read_trace("no/such/trace.csv")


@pytest.mark.parametrize("make", [lambda n: azure_rows(n), lambda n: mooncake_rows(n), lambda n: own_rows(n)])
def test_twenty_thousand_rows_load_in_under_a_second(make: Callable[[int], str], tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(make(20_000))
    started = time.process_time()
    trace = read_trace(path)
    assert time.process_time() - started < 1.0
    assert len(trace.requests) == 20_000


def azure_rows(count: int) -> str:
    rows = (f"2023-11-16 18:{n // 60 % 60:02}:{n % 60:02}.0000000,{n % 999 + 1},{n % 99 + 1}\n" for n in range(count))
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows)


def mooncake_rows(count: int) -> str:
    row = '{"timestamp": %d, "input_length": 7000, "output_length": 5, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, %d]}\n'
    return "".join(row % (n, n) for n in range(count))


def own_rows(count: int) -> str:
    return encode_trace(Trace(requests=tuple(request(n / 10, 10, 10) for n in range(count)))).decode()


TRACES = st.builds(
    lambda rows, block, concurrency: Trace(
        requests=tuple(
            request(us / 1_000_000, tokens_in, tokens_out, *ids[: -(-tokens_in // block) if block else 0])
            for us, tokens_in, tokens_out, ids in sorted(rows, key=lambda row: row[0])
        ),
        prefix_block_tokens=block,
        concurrency=concurrency,
    ),
    st.lists(
        st.tuples(
            st.integers(0, 10**12),
            st.integers(1, MAX_TOKENS),
            st.integers(1, MAX_TOKENS),
            st.lists(st.integers(0, 2**63 - 1), max_size=3),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 64),
    st.integers(0, 64),
)


@given(trace=TRACES)
def test_own_format_round_trip(trace: Trace) -> None:
    again = decode_trace(encode_trace(trace), "trace")
    assert again == trace
    assert again.digest() == trace.digest()
    assert encode_trace(again) == encode_trace(trace)


def test_writing_and_reading_a_file(tmp_path: Path) -> None:
    write_trace(read(MOONCAKE), tmp_path / "a.jsonl")
    assert read_trace(tmp_path / "a.jsonl") == read(MOONCAKE)


def test_the_digest_depends_on_what_a_simulation_sees() -> None:
    trace = read(MOONCAKE)
    first = trace.requests[0]
    changes: list[dict[str, Any]] = [{"concurrency": 1}, {"prefix_block_tokens": 16}, {"requests": trace.requests[1:]}]
    for name, value in {"arrival_s": 1e-6, "input_tokens": 1, "output_tokens": 1, "prefix_ids": ()}.items():
        changes.append({"requests": (msgspec.structs.replace(first, **{name: value}), *trace.requests[1:])})
    digests = {msgspec.structs.replace(trace, **change).digest() for change in changes} | {trace.digest()}
    assert len(digests) == len(changes) + 1
    unseen: list[dict[str, Any]] = [
        {"num_skipped": 5},
        {"requests": (msgspec.structs.replace(first, arrival_s=1e-8), *trace.requests[1:])},
    ]
    for change in unseen:
        assert msgspec.structs.replace(trace, **change).digest() == trace.digest()


def test_the_digest_is_the_same_for_ever() -> None:
    assert read(AZURE).digest() == "553c792684f0ce7fc928821e23afe70408fe46730badf8bfb6e79fde698990be"


def test_speed() -> None:
    assert [row.arrival_s for row in read(AZURE).sped_up(0.5).requests] == [0.0, 8.629158, 9.083754]
    assert read(AZURE).sped_up(1) == read(AZURE)


@given(trace=TRACES, max_len=st.integers(2, 1000))
def test_truncation(trace: Trace, max_len: int) -> None:
    for before, after in zip(trace.requests, trace.truncated(max_len).requests, strict=True):
        assert after.arrival_s == before.arrival_s
        assert 1 <= after.input_tokens <= before.input_tokens
        assert 1 <= after.output_tokens <= before.output_tokens
        assert after.input_tokens + after.output_tokens <= max_len
        assert after.prefix_ids == before.prefix_ids[: len(after.prefix_ids)]
        if before.input_tokens + before.output_tokens <= max_len:
            assert after == before
        elif before.output_tokens < max_len:
            assert after.output_tokens == before.output_tokens
            assert after.input_tokens + after.output_tokens == max_len


def test_a_truncated_prompt_shares_fewer_blocks() -> None:
    assert read(MOONCAKE).truncated(500).requests[1] == request(27.482, 448, 52, 46)


@given(
    data=st.binary(max_size=300),
    start=st.sampled_from([b"", b"[", b"{", AZURE.encode(), MOONCAKE.encode(), OWN.encode()]),
)
def test_any_bytes(data: bytes, start: bytes) -> None:
    try:
        trace = decode_trace(start + data, "trace", count_words)
    except FormatError:
        return
    assert decode_trace(encode_trace(trace), "trace") == trace
