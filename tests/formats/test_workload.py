"""Traffic stated in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import BadWorkloadError, FileAccessError
from formats.trace import Trace
from formats.trace_readers import decode_trace
from formats.workload import is_stated, read_workload, stated


def lengths(trace: Trace, name: str) -> list[int]:
    return [getattr(request, name) for request in trace.requests]


def test_uniform() -> None:
    trace = stated("uniform:100-1024")
    assert len(trace.requests) == 256
    assert {request.arrival_s for request in trace.requests} == {0.0}
    for name in ("input_tokens", "output_tokens"):
        assert 100 <= min(lengths(trace, name)) < 150
        assert 974 < max(lengths(trace, name)) <= 1024
    assert trace.concurrency == 0


def test_every_length_of_a_range_is_drawn() -> None:
    assert set(lengths(stated("uniform:1-3,n=100"), "input_tokens")) == {1, 2, 3}


def test_poisson() -> None:
    trace = stated("poisson:rate=8,in=512,out=128")
    arrivals = [request.arrival_s for request in trace.requests]
    assert len(arrivals) == 1000
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert 110 < arrivals[-1] < 140
    assert set(lengths(trace, "input_tokens")) == {512}
    assert set(lengths(trace, "output_tokens")) == {128}


def test_closed() -> None:
    trace = stated("closed:64")
    assert trace.concurrency == 64
    assert len(trace.requests) == 1024
    assert {request.arrival_s for request in trace.requests} == {0.0}
    trace = stated("closed:4,in=10-20,out=5,n=7")
    assert (trace.concurrency, len(trace.requests)) == (4, 7)
    assert set(lengths(trace, "output_tokens")) == {5}
    assert set(lengths(trace, "input_tokens")) <= set(range(10, 21))


@pytest.mark.parametrize("words", ["uniform:1-9,n=20", "poisson:rate=1,in=1-9,out=1-9,n=20", "closed:2,in=1-9,n=20"])
def test_a_seed_makes_another_trace_and_the_same_words_the_same(words: str) -> None:
    assert stated(words).digest() == stated(words).digest() == stated(f"{words},seed=0").digest()
    assert stated(f"{words},seed=1").digest() != stated(words).digest()


def test_the_same_words_are_the_same_trace_for_ever() -> None:
    assert (
        stated("poisson:rate=8,in=100-200,out=50-60,n=50").digest()
        == "627f7c72559a048cc33f81896f36802e6521647972ba8ea0a6e603c02d601851"
    )


def test_named_first_parts() -> None:
    assert stated("uniform:lengths=5") == stated("uniform:5")
    assert stated("closed:clients=5") == stated("closed:5")


WRONG = [
    ("uniform:", "no part"),
    ("uniform:x", "lengths is 'x'"),
    ("uniform:0", "lengths is '0'"),
    ("uniform:5-4", "lengths is '5-4'"),
    ("uniform:1-99999999", "lengths is '1-99999999'"),
    ("uniform:5,in=5", "no part of a uniform workload"),
    ("uniform:5,n=0", "n is '0'"),
    ("uniform:5,n=1000001", "n is '1000001', not a whole number from 1 to 1000000"),
    ("uniform:5,n=x", "n is 'x'"),
    ("uniform:5,n=1,n=2", "n is given twice"),
    ("uniform:5,lengths=6", "lengths is given twice"),
    ("uniform:\u0661", "lengths is"),
    ("uniform:5,seed=-1", "seed is '-1'"),
    ("uniform:5,,", "no part"),
    ("uniform:n=5", "lengths is missing"),
    ("poisson:8", "'8' is no part of a poisson workload"),
    ("poisson:rate=8", "in is missing"),
    ("poisson:rate=8,in=5", "out is missing"),
    ("poisson:in=5,out=5", "rate is missing"),
    ("poisson:rate=0,in=5,out=5", "rate is '0'"),
    ("poisson:rate=-1,in=5,out=5", "rate is '-1'"),
    ("poisson:rate=nan,in=5,out=5", "rate is 'nan'"),
    ("poisson:rate=inf,in=5,out=5", "rate is 'inf'"),
    ("poisson:rate=1e-9,in=5,out=5", "rate is '1e-9'"),
    ("poisson:rate=fast,in=5,out=5", "rate is 'fast'"),
    ("closed:0", "clients is '0'"),
    ("closed:in=5", "clients is missing"),
    ("closed:5,out=", "no part"),
    ("something else", "not a stated workload"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_what_cannot_be_read(words: str, sentence: str) -> None:
    with pytest.raises(BadWorkloadError) as caught:
        stated(words)
    assert sentence in caught.value.message
    assert words in caught.value.message
    assert "poisson:rate=8" in caught.value.hint


@given(words=st.text(max_size=30), kind=st.sampled_from(["", "uniform:", "poisson:", "closed:1,n="]))
def test_any_words(words: str, kind: str) -> None:
    try:
        trace = stated(kind + words)
    except BadWorkloadError:
        return
    assert trace.requests


def test_a_workload_is_stated_or_a_file(tmp_path: Path) -> None:
    assert is_stated("closed:4")
    assert not is_stated("closed.csv")
    assert read_workload("closed:4,n=8") == stated("closed:4,n=8")
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,2\n"
    (tmp_path / "a.csv").write_text(text)
    assert read_workload(str(tmp_path / "a.csv")) == decode_trace(text.encode(), "a.csv")
    with pytest.raises(FileAccessError):
        read_workload(str(tmp_path / "b.csv"))
    with pytest.raises(BadWorkloadError, match="neither a file nor a stated workload"):
        read_workload("possion:rate=8,in=1,out=1")


def test_texts_are_counted_by_the_caller(tmp_path: Path) -> None:
    conversation = '[{"conversations":[{"from":"human","value":"one two"},{"from":"gpt","value":"three"}]}]'
    (tmp_path / "a.json").write_text(conversation)
    trace = read_workload(str(tmp_path / "a.json"), lambda text: len(text.split()))
    assert (trace.requests[0].input_tokens, trace.requests[0].output_tokens) == (2, 1)
