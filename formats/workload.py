"""Traffic stated in words, made into a trace; and the one place that knows a stated workload from a file.

    uniform:100-1024                    prompts and answers of 100 to 1024 tokens, all there at the start
    poisson:rate=8,in=512,out=128       8 requests a second at random moments
    closed:64,in=512,out=100-300        64 clients, each sending its next request when it has its answer

Any of them takes `n` (requests) and `seed`; a length is a number or a range, drawn evenly. The same words give the same
trace on every machine and version: draws use nothing but `random.Random.random`, arrivals are whole microseconds.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Mapping

from formats.errors import BadWorkloadError
from formats.trace import MAX_ARRIVAL_S, MAX_TOKENS, Trace, TraceRequest
from formats.trace_readers import CountTokens, read_trace

MAX_REQUESTS = 1_000_000

_STATED = re.compile(r"(uniform|poisson|closed):(.*)", re.DOTALL)
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_HINT = (
    "State it as uniform:100-1024, poisson:rate=8,in=512,out=128 or closed:64,in=512,out=128; n and seed may follow."
)

Range = tuple[int, int]


def read_workload(spec: str, count_tokens: CountTokens | None = None) -> Trace:
    """The traffic that `spec` states, or that the file of this name holds.

    Raises:
        BadWorkloadError: a stated workload that cannot be read; says which part.
        FormatError: the file cannot be read as a trace; see `trace_readers.read_trace`.
    """
    if is_stated(spec):
        return stated(spec)
    if re.match(r"\w+:", spec) and not os.path.exists(spec):
        raise BadWorkloadError(f"{spec!r} is neither a file nor a stated workload", _HINT)
    return read_trace(spec, count_tokens)


def is_stated(spec: str) -> bool:
    return _STATED.fullmatch(spec) is not None


def stated(spec: str) -> Trace:
    """Makes the trace that a stated workload describes.

    Raises:
        BadWorkloadError: says which part cannot be read.
    """
    match = _STATED.fullmatch(spec)
    if match is None:
        raise BadWorkloadError(f"{spec!r} is not a stated workload", _HINT)
    kind, rest = match[1], match[2]
    given = _arguments(spec, kind, rest)
    rng = random.Random(_number(spec, given, "seed", "0", 0, 2**63 - 1))
    if kind == "uniform":
        lengths = _length(spec, given, "lengths")
        return _trace(rng, _number(spec, given, "n", "256", 1, MAX_REQUESTS), lengths, lengths)
    tokens_in, tokens_out = _length(spec, given, "in"), _length(spec, given, "out")
    if kind == "closed":
        clients = _number(spec, given, "clients", "", 1, MAX_REQUESTS)
        count = _number(spec, given, "n", str(min(MAX_REQUESTS, max(256, 16 * clients))), 1, MAX_REQUESTS)
        return _trace(rng, count, tokens_in, tokens_out, concurrency=clients)
    rate = _rate(spec, given)
    return _trace(rng, _number(spec, given, "n", "1000", 1, MAX_REQUESTS), tokens_in, tokens_out, rate=rate)


def _trace(
    rng: random.Random, count: int, tokens_in: Range, tokens_out: Range, rate: float = math.inf, concurrency: int = 0
) -> Trace:
    requests, now = [], 0.0
    for _ in range(count):
        requests.append(
            TraceRequest(
                arrival_s=round(now, 6), input_tokens=_draw(rng, tokens_in), output_tokens=_draw(rng, tokens_out)
            )
        )
        now += -math.log(1 - rng.random()) / rate
    return Trace(requests=tuple(requests), concurrency=concurrency)


def _draw(rng: random.Random, bounds: Range) -> int:
    first, last = bounds
    return first + int(rng.random() * (last - first + 1))


_KEYS: Mapping[str, tuple[str, ...]] = {
    "uniform": ("lengths", "n", "seed"),
    "poisson": ("rate", "in", "out", "n", "seed"),
    "closed": ("clients", "in", "out", "n", "seed"),
}
_DEFAULTS: Mapping[str, Mapping[str, str]] = {"closed": {"in": "512", "out": "128"}}


def _arguments(spec: str, kind: str, rest: str) -> dict[str, str]:
    """The parts by name. The first part of `uniform` and `closed` is given without one."""
    given: dict[str, str] = {}
    for index, part in enumerate(rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals and index == 0 and kind != "poisson":
            name, value = _KEYS[kind][0], name
        name, value = name.strip(), value.strip()
        if name not in _KEYS[kind] or not value:
            raise BadWorkloadError(f"{spec!r}: {part!r} is no part of a {kind} workload", _HINT, name)
        if name in given:
            raise BadWorkloadError(f"{spec!r}: {name} is given twice", _HINT, name)
        given[name] = value
    given = {**_DEFAULTS.get(kind, {}), **given}
    for name in _KEYS[kind]:
        if name not in given and name not in ("n", "seed"):
            raise BadWorkloadError(f"{spec!r}: {name} is missing", _HINT, name)
    return given


def _number(spec: str, given: Mapping[str, str], name: str, default: str, least: int, most: int) -> int:
    text = given.get(name, default)
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise BadWorkloadError(f"{spec!r}: {name} is {text!r}, not a whole number from {least} to {most}", _HINT, name)
    return int(text)


def _length(spec: str, given: Mapping[str, str], name: str) -> Range:
    match = _RANGE.fullmatch(given[name])
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= MAX_TOKENS:
        raise BadWorkloadError(f"{spec!r}: {name} is {given[name]!r}, not a length or a range as 100-1024", _HINT, name)
    return first, last


def _rate(spec: str, given: Mapping[str, str]) -> float:
    try:
        rate = float(given["rate"])
    except ValueError:
        rate = math.nan
    slowest = MAX_REQUESTS * 100 / MAX_ARRIVAL_S
    if not slowest <= rate <= 1e6:
        raise BadWorkloadError(
            f"{spec!r}: rate is {given['rate']!r}, not {slowest:g} to 1e6 requests a second", _HINT, "rate"
        )
    return rate
