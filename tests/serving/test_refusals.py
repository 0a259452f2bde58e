"""What is refused: a short 4xx in the API's form, no engine step, and the next request is served."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.serving.live import MAX_LEN, MODEL, Live, post_head

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def costs_no_step_and_the_next_is_served(server: Live) -> Iterator[None]:
    before = server.metric("gplan_steps_total")
    yield
    assert server.metric("gplan_steps_total") == before
    assert server.post("/v1/completions", COMPLETION).status_code == 200


def refused(server: Live, path: str, body: Any = None, status: int = 400, **options: Any) -> dict[str, Any]:
    answer = server.post(path, body, **options)
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 600
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [[5], [VOCAB_SIZE + 7]]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [7] * MAX_LEN, "max_tokens": None}, "prompt"),
        ({"prompt": [7] * (MAX_LEN - 2), "max_tokens": 3}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 10**6}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 99}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias[...]"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_parameters_of_a_completion(server: Live, changes: dict[str, Any], param: str) -> None:
    body = {name: value for name, value in {**COMPLETION, **changes}.items() if value is not None}
    assert refused(server, "/v1/completions", body)["param"] == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * MAX_LEN}]}, "messages"),
        ({"max_tokens": MAX_LEN}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 99, "logprobs": True}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"n": 129}, "n"),
    ],
)
def test_parameters_of_a_chat(server: Live, changes: dict[str, Any], param: str) -> None:
    assert refused(server, "/v1/chat/completions", {**CHAT, **changes})["param"] == param


def test_figures_are_said(server: Live) -> None:
    message = refused(server, "/v1/completions", {**COMPLETION, "prompt": [7] * 500, "max_tokens": 13})["message"]
    assert "512" in message
    assert "500" in message
    assert "13" in message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"hello"', b'{"model": "tiny", "prompt": "a\xff"}', b"\xff\xfe", b"[" * 100_000],
)
def test_bodies_that_are_no_request(server: Live, content: bytes) -> None:
    refused(server, "/v1/completions", content=content, headers=JSON)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(server: Live, value: str) -> None:
    body = json.dumps(COMPLETION)[:-1] + f', "temperature": {value}}}'
    refused(server, "/v1/completions", content=body.encode(), headers=JSON)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_other_content_types(server: Live, kind: str) -> None:
    body = json.dumps(COMPLETION).encode()
    error = refused(server, "/v1/completions", status=415, content=body, headers={"Content-Type": kind})
    assert "application/json" in error["message"]


def test_bodies_that_are_encoded(server: Live) -> None:
    body = gzip.compress(json.dumps(COMPLETION).encode())
    error = refused(server, "/v1/completions", status=415, content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert "gzip" in error["message"]


def test_an_empty_body_is_called_one(server: Live) -> None:
    assert "empty" in refused(server, "/v1/completions", content=b"", headers=JSON)["message"]


def test_what_a_template_may_not_be_given(server: Live) -> None:
    for name in ("self", "chat_template", "tokenize"):
        error = refused(server, "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: 1}})
        assert error["param"] == "chat_template_kwargs"
        assert "PreTrained" not in error["message"]


def test_a_model_that_is_not_served(server: Live) -> None:
    error = refused(server, "/v1/completions", {**COMPLETION, "model": "gpt-" + "9" * 5000}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert refused_get(server, "/v1/models/other", 404)["code"] == "model_not_found"


def test_unknown_paths_and_methods(server: Live) -> None:
    assert "POST" in refused_get(server, "/v1/completions", 405)["message"]
    assert server.get("/v1/completions").headers["allow"] == "POST"
    refused_get(server, "/v2/anything", 404)
    assert len(refused_get(server, "/" + "y" * 20_000, 404)["message"]) < 200
    refused(server, "/v1/completions/", COMPLETION, 404)  # and no redirect to wherever Host says
    refused_get(server, "/../../etc/passwd", 404)


def refused_get(server: Live, path: str, status: int) -> dict[str, Any]:
    answer = server.get(path)
    assert answer.status_code == status
    return dict(answer.json()["error"])


def test_a_body_of_ten_megabytes_is_refused_by_its_stated_length(server: Live) -> None:
    """Nothing of the body needs to arrive."""
    with server.connect() as connection:
        connection.sendall(post_head("/v1/completions", 10 << 20))
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_of_ten_megabytes_without_a_stated_length_is_cut_off(server: Live) -> None:
    def parts() -> Iterator[bytes]:
        yield json.dumps(COMPLETION)[:-1].encode() + b', "user": "'
        for _ in range(160):
            yield b"x" * 65536
        yield b'"}'

    refused(server, "/v1/completions", status=413, content=parts(), headers=JSON)


def test_a_body_that_ends_early(server: Live) -> None:
    with server.connect() as connection:
        connection.sendall(post_head("/v1/completions", 1000) + b'{"model"')


def test_long_headers(server: Live) -> None:
    assert server.get("/health", headers={"x-long": "y" * 100_000}).status_code == 431


def test_tokenize_and_detokenize_refuse_too(server: Live) -> None:
    assert refused(server, "/tokenize", {"text": "hello"})["param"] in ("text", "prompt")
    assert refused(server, "/tokenize", {"prompt": 5})["param"] == "prompt"
    refused(server, "/tokenize", {"prompt": "hello", "model": "other"}, 404)
    refused(server, "/detokenize", {"tokens": [1], "model": "other"}, 404)
    for wrong in ([VOCAB_SIZE], [-1], [10**30]):
        assert refused(server, "/detokenize", {"tokens": wrong})["code"] == "invalid_token_id"
    assert refused(server, "/detokenize", {"tokens": [1, "abc"]})["param"] == "tokens[1]"
