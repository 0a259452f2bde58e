"""Answers of the HTTP API, read by the official client's own types."""

from __future__ import annotations

import json

import msgspec
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from formats import openai as api
from formats.openai_rules import decode_chat

USAGE = api.Usage(
    prompt_tokens=3,
    completion_tokens=2,
    total_tokens=5,
    prompt_tokens_details=api.PromptTokensDetails(cached_tokens=2),
)
TOKEN = api.TokenLogprob(
    token="hello",
    logprob=-0.5,
    bytes=[104, 101],
    top_logprobs=[api.TopLogprob(token="hello", logprob=-0.5, bytes=None)],
)
CHAT_RESPONSE = api.ChatCompletionResponse(
    id="chatcmpl-1",
    created=1,
    model="m",
    choices=[
        api.ChatChoice(
            index=0,
            message=api.ChatAnswer(content="hello"),
            finish_reason="stop",
            logprobs=api.ChatLogprobs(content=[TOKEN]),
        )
    ],
    usage=USAGE,
)


def test_the_official_client_reads_a_chat_answer() -> None:
    read = ChatCompletion.model_validate_json(msgspec.json.encode(CHAT_RESPONSE), strict=True)
    assert read.object == "chat.completion"
    assert read.choices[0].message.content == "hello"
    assert read.choices[0].message.role == "assistant"
    assert read.choices[0].logprobs is not None
    assert read.choices[0].logprobs.content is not None
    assert read.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5
    assert read.usage is not None
    assert read.usage.prompt_tokens_details is not None
    assert read.usage.prompt_tokens_details.cached_tokens == 2


def test_the_official_client_reads_chunks() -> None:
    choice = api.ChatChunkChoice(index=0, delta=api.ChatDelta(role="assistant", content=""))
    chunk = api.ChatCompletionChunk(id="c", created=1, model="m", choices=[choice])
    text = msgspec.json.encode(chunk)
    assert b"usage" not in text
    assert b'"delta":{"role":"assistant","content":""}' in text
    assert ChatCompletionChunk.model_validate_json(text, strict=True).choices[0].delta.role == "assistant"
    last = api.ChatChunkChoice(index=0, delta=api.ChatDelta(), finish_reason="length")
    text = msgspec.json.encode(api.ChatCompletionChunk(id="c", created=1, model="m", choices=[last], usage=None))
    assert b'"delta":{}' in text
    assert b'"usage":null' in text
    end = api.ChatCompletionChunk(id="c", created=1, model="m", choices=[], usage=USAGE)
    read = ChatCompletionChunk.model_validate_json(msgspec.json.encode(end), strict=True)
    assert read.usage is not None
    assert read.usage.total_tokens == 5


def test_the_official_client_reads_a_completion() -> None:
    logprobs = api.CompletionLogprobs(
        tokens=["a"], token_logprobs=[-1.0], top_logprobs=[{"a": -1.0, "b": -2.0}], text_offset=[0]
    )
    choice = api.CompletionChoice(index=0, text="a", logprobs=logprobs, finish_reason="stop")
    answer = api.CompletionResponse(id="c", created=1, model="m", choices=[choice], usage=USAGE)
    read = Completion.model_validate_json(msgspec.json.encode(answer), strict=True)
    assert read.object == "text_completion"
    assert read.choices[0].logprobs is not None
    assert read.choices[0].logprobs.top_logprobs == [{"a": -1.0, "b": -2.0}]


def test_errors_and_models() -> None:
    error = api.ErrorResponse(error=api.ErrorBody(message="no", param="n", code="invalid_value"))
    assert json.loads(msgspec.json.encode(error)) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    models = api.ModelList(data=[api.ModelCard(id="m", created=1, max_model_len=256)])
    text = msgspec.json.encode(models)
    assert json.loads(text)["object"] == "list"
    assert Model.model_validate(json.loads(text)["data"][0], strict=True).id == "m"


def test_the_answer_of_the_official_client_can_be_sent_back() -> None:
    answer = ChatCompletion.model_validate_json(msgspec.json.encode(CHAT_RESPONSE)).choices[0].message
    request = decode_chat(json.dumps({"model": "m", "messages": [answer.model_dump()]}).encode())
    assert request.messages[0].for_template() == {"role": "assistant", "content": "hello"}
