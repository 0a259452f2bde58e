"""More requests than can be served: who is let in, whose turn it is, and what becomes of those whose time is over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.live import MAX_BATCH, MODEL, Live, eventually, post_head

LONG: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 500, "temperature": 0, "ignore_eos": True}
OTHER = "127.0.0.2"


def from_other(server: Live, body: dict[str, Any], **headers: str) -> httpx.Response:
    """Asks from another address."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=OTHER), timeout=60) as client:
        return client.post(f"{server.url}/v1/completions", json=body, headers=headers)


def timed(server: Live, body: dict[str, Any], seconds: str, path: str = "/v1/completions") -> httpx.Response:
    return server.post(path, body, headers={"X-Request-Timeout": seconds})


@pytest.fixture(autouse=True)
def leaves_nothing_behind(server: Live) -> Iterator[None]:
    yield
    assert eventually(lambda: server.metric("gplan_kv_pages_used") == 0)
    assert server.metric("gplan_requests_running") == server.metric("gplan_requests_waiting") == 0


@pytest.fixture
def crowd(server: Live) -> Iterator[None]:
    """Requests that keep every row busy and a queue besides, from one address."""
    with server.stream("/v1/completions", {**LONG, "n": 40, "stream": True}) as response:
        lines = response.iter_lines()  # kept: a response whose lines nobody can ask for any more is closed
        next(lines)
        yield
        assert next(lines) is not None


def test_a_request_whose_time_is_over_is_answered_504(server: Live) -> None:
    before = server.metric("gplan_output_tokens_total")
    answer = timed(server, {**LONG, "n": 60}, "0.3")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "before its answer was complete" in answer.json()["error"]["message"]
    assert eventually(lambda: server.metric("gplan_kv_pages_used") == 0)
    assert server.metric("gplan_output_tokens_total") - before < 15_000, "it was generated to its end"


def test_a_stream_whose_time_is_over_ends_with_an_error(server: Live) -> None:
    url = f"{server.url}/v1/completions"
    body, headers = {**LONG, "n": 60, "stream": True}, {"X-Request-Timeout": "0.3"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert len(lines) > 1, "what was generated in time is given out"
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


@pytest.mark.usefixtures("crowd")
def test_a_request_whose_time_is_over_while_it_waits_is_never_run(server: Live) -> None:
    """From the crowd's own address, so that it waits behind it."""
    before = server.metric("gplan_prompt_tokens_total")
    answer = timed(server, {**LONG, "prompt": [7] * 200, "max_tokens": 3}, "0.2")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "before its first token" in answer.json()["error"]["message"]
    assert server.metric("gplan_prompt_tokens_total") - before < 200


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", "", "601"])
def test_time_limits_that_are_none(server: Live, value: str) -> None:
    answer = timed(server, LONG, value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout")
    assert "at most 600 here" in answer.json()["error"]["message"]


def test_time_enough_changes_nothing(server: Live) -> None:
    body = {**LONG, "max_tokens": 5}
    assert timed(server, body, "600").json()["choices"] == server.post("/v1/completions", body).json()["choices"]


@pytest.mark.usefixtures("crowd")
def test_a_single_client_is_served_while_a_crowd_waits(server: Live) -> None:
    assert eventually(lambda: server.metric("gplan_requests_waiting") > 20)
    waiting = server.metric("gplan_requests_waiting")
    assert from_other(server, {**LONG, "max_tokens": 4}).status_code == 200
    assert server.metric("gplan_requests_waiting") > waiting - 3 * MAX_BATCH, "it waited for the crowd"


def test_a_crowd_cannot_take_every_seat(server: Live) -> None:
    """The server takes 256 answers at once, of one client fewer where others may come."""
    with (
        server.stream("/v1/completions", {**LONG, "n": 100, "stream": True}) as first,
        server.stream("/v1/completions", {**LONG, "n": 90, "stream": True}) as second,
    ):
        lines = first.iter_lines()
        next(lines)
        refused = server.post("/v1/completions", {**LONG, "n": 60})
        other = from_other(server, {**LONG, "n": 60, "max_tokens": 1})
        assert second.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert other.status_code == 200


def test_a_full_server_refuses_before_it_reads_the_body(server: Live) -> None:
    """And the connection goes on, whatever of the body comes afterwards."""
    with server.stream("/v1/completions", {**LONG, "n": 128, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        with server.stream("/v1/completions", {**LONG, "n": 64, "stream": True}), server.connect() as connection:
            connection.sendall(post_head("/v1/completions", 1000, "X-Request-Id: mine"))
            answer = connection.recv(1000).lower()
            assert answer.startswith(b"http/1.1 429 too many requests\r\n")
            assert b"\r\nretry-after: " in answer
            assert b"\r\nx-request-id: mine\r\n" in answer
            assert b'"code":"queue_full"' in answer
            connection.sendall(b"{" * 1000 + post_head("/v1/chat/completions", 2) + b"{}")
            assert connection.recv(1000).startswith(b"HTTP/1.1 429")
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += connection.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            connection.sendall(post_head("/v1/completions", 2, "Connection: close") + b"{}")
            assert connection.recv(1000).startswith(b"HTTP/1.1 429")
            assert connection.recv(1000) == b""
            with server.connect() as old:
                kept = post_head("/v1/completions", 2, "Connection: keep-alive")
                old.sendall(kept.replace(b"HTTP/1.1", b"HTTP/1.0") + b"{}")
                assert old.recv(1000).startswith(b"HTTP/1.1 429")
                assert old.recv(1000) == b"", "a client of HTTP/1.0 takes the connection's end for the answer's"
    assert server.metric("gplan_requests_total", endpoint="/v1/completions", status="429") >= 2
