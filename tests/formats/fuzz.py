"""Coverage-guided fuzzing of what reads a plan, by hand:

    pip install atheris
    python -m tests.formats.fuzz CORPUS [libFuzzer options, such as -max_total_time=600]

CORPUS is a folder; it is filled with valid plans first. Every input is read as a file, and as the JSON inside a file
that is otherwise in order; what comes out must be a plan that is written back to the same text, or a named error, in a
second and with 64 MiB. Of memory every hundredth input is held to that: to be told of every allocation costs a lot.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["formats"]):
    from formats.container import MAX_JSON_BYTES, decode, encode
    from formats.errors import FormatError

from tests.formats.containers import DATA, pack, text_of
from tests.formats.plans import CUDA, make_plan

MAX_SECONDS, MAX_BYTES = 1.0, 64 << 20
LOOK_AT_MEMORY_EVERY = 100

_count = 0


def check(data: bytes) -> None:
    global _count
    _count += 1
    looks = _count % LOOK_AT_MEMORY_EVERY == 0
    if looks:
        tracemalloc.start()
    try:
        for candidate in (data, pack(data[:MAX_JSON_BYTES])):
            started = time.process_time()
            try:
                plan = decode(candidate)
            except FormatError:
                pass
            else:
                assert text_of(encode(plan)) == text_of(candidate)
            assert time.process_time() - started < MAX_SECONDS
        if looks:
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def tokens(text: bytes) -> list[bytes]:
    """Names and values of a plan's JSON, for the fuzzer to put together anew."""
    found: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            found.update(json.dumps(key) + ":" for key in value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(item)
        if not isinstance(value, dict | list):
            found.add(json.dumps(value))

    walk(json.loads(text))
    return sorted(token.encode() for token in found)


def main() -> None:
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    plans = (make_plan(), make_plan(max_batch=1, chunk=1), make_plan(fingerprint=CUDA, prefill_backend="full"))
    seeds = [DATA, *(text_of(encode(plan)) for plan in plans)]
    for index, seed in enumerate(seeds):
        (corpus / f"seed-{index}").write_bytes(seed)
    escaped = ("".join(f"\\x{byte:02x}" for byte in token) for token in tokens(seeds[1]))
    words = corpus.with_suffix(".words")
    words.write_text("".join(f'"{token}"\n' for token in escaped))
    options = [f"-dict={words}", "-timeout=5", "-rss_limit_mb=1024", *sys.argv[2:]]
    atheris.Setup([sys.argv[0], str(corpus), *options], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
