"""Traffic as a value: when requests come and how many tokens they bring and take. Texts are not part of it.

This module owns the value, its digest and its own file format (JSON lines, in GPLAN.md). Other formats are read by
`trace_readers`, and traffic stated in words (`poisson:rate=8,in=512,out=128`) by `workload`.
"""

from __future__ import annotations

import hashlib
import os
from typing import Annotated

import msgspec
from msgspec import Meta

from formats.errors import BadWorkloadError
from formats.files import write_atomic

TRACE_FORMAT = 1
MAX_TOKENS = 1 << 24
"""Of one request, in or out."""

MAX_ARRIVAL_S = 10**9

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request.

    Attributes:
        arrival_s: seconds after the start of the trace; microseconds count, what is finer does not.
        input_tokens, output_tokens: prompt and answer, at least 1 each.
        prefix_ids: one id per block of `Trace.prefix_block_tokens` prompt tokens, the last perhaps not full. Requests
            whose first k ids are equal share the first k blocks of their prompts. Empty: nothing is known to be shared.
    """

    arrival_s: Annotated[float, Meta(ge=0, le=MAX_ARRIVAL_S)]
    input_tokens: Tokens
    output_tokens: Tokens
    prefix_ids: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...] = ()


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a trace in gplan's own format; see `Trace` for the fields."""

    gplan_trace: int
    concurrency: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    prefix_block_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    num_skipped: Annotated[int, Meta(ge=0)] = 0


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order of arrival.

    Attributes:
        concurrency: 0: requests arrive when they say. Otherwise so many clients take the requests in order, each
            sending its next when it has the answer to the last; arrival times are 0.
        prefix_block_tokens: prompt tokens per entry of `prefix_ids`, 0 where there are none.
        num_skipped: requests of the source that were left out because they have no answer.
    """

    requests: tuple[TraceRequest, ...]
    concurrency: int = 0
    prefix_block_tokens: int = 0
    num_skipped: int = 0

    def digest(self) -> str:
        """sha256 of what a simulation depends on: all but `num_skipped`, arrivals in whole microseconds."""
        lines = [f"gplan-trace {TRACE_FORMAT} {self.concurrency} {self.prefix_block_tokens}"]
        for request in self.requests:
            ids = ",".join(map(str, request.prefix_ids))
            arrival_us = round(request.arrival_s * 1_000_000)
            lines.append(f"{arrival_us} {request.input_tokens} {request.output_tokens} {ids}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def sped_up(self, factor: float) -> Trace:
        """The same requests arriving `factor` times as fast; `factor` is positive.

        Raises:
            BadWorkloadError: they would arrive beyond what a trace holds.
        """
        assert factor > 0
        last = self.requests[-1].arrival_s if self.requests else 0.0
        if last > MAX_ARRIVAL_S * factor:
            raise BadWorkloadError(
                f"{factor:g} times as fast, its arrivals are more than {MAX_ARRIVAL_S} seconds apart",
                "Give a larger speed-up.",
            )
        requests = tuple(
            msgspec.structs.replace(request, arrival_s=round(request.arrival_s / factor, 6))
            for request in self.requests
        )
        return msgspec.structs.replace(self, requests=requests)

    def truncated(self, max_len: int) -> Trace:
        """Every request cut to `max_len` tokens in all, at least 2: the prompt gives way to the answer, as clients
        shorten a history to leave room for the reply; an answer that is too long alone is cut too."""
        assert max_len >= 2
        requests = tuple(_cut(request, max_len, self.prefix_block_tokens) for request in self.requests)
        return msgspec.structs.replace(self, requests=requests)


def encode_trace(trace: Trace) -> bytes:
    """The trace in gplan's own format: a header line, then one line per request."""
    header = TraceHeader(
        gplan_trace=TRACE_FORMAT,
        concurrency=trace.concurrency,
        prefix_block_tokens=trace.prefix_block_tokens,
        num_skipped=trace.num_skipped,
    )
    return msgspec.json.Encoder().encode_lines((header, *trace.requests))


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the trace in gplan's own format, whole or not at all. Raises FileAccessError."""
    write_atomic(path, encode_trace(trace))


def _cut(request: TraceRequest, max_len: int, block: int) -> TraceRequest:
    if request.input_tokens + request.output_tokens <= max_len:
        return request
    output_tokens = min(request.output_tokens, max_len - 1)
    input_tokens = min(request.input_tokens, max_len - output_tokens)
    blocks = -(-input_tokens // block) if block else 0
    return msgspec.structs.replace(
        request, input_tokens=input_tokens, output_tokens=output_tokens, prefix_ids=request.prefix_ids[:blocks]
    )
