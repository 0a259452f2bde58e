"""Bodies of the HTTP API: what is accepted, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats import openai as api
from formats.errors import BadRequestError
from formats.openai_rules import decode_chat, decode_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> api.CompletionRequest:
    return decode_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def chat(**fields: Any) -> api.ChatCompletionRequest:
    return decode_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


def message(**fields: Any) -> api.ChatCompletionRequest:
    return chat(messages=[{"role": "user", "content": "hi", **fields}])


SHARED: list[tuple[str, list[Any]]] = [
    ("max_tokens", [1, 2**31 - 1]),
    ("temperature", [0, 0.0, 1, 2]),
    ("top_p", [0.01, 1]),
    ("n", [1, 128]),
    ("stop", ["x", [], ["a", "b"]]),
    ("seed", [0, -1, -(2**63), 2**63 - 1]),
    ("presence_penalty", [-2, 0.5, 2]),
    ("frequency_penalty", [-2, 0.5, 2]),
    ("logit_bias", [{}, {"5": -100, "7": 1.5}]),
    ("stream", [True, False]),
    ("top_k", [-1, 0, 50]),
    ("min_p", [0, 0.5, 1]),
    ("repetition_penalty", [0.5, 1.3]),
    ("ignore_eos", [True, False]),
    ("min_tokens", [0, 16]),
    ("stop_token_ids", [[], [0, 5]]),
]
COMPLETION = [
    *SHARED,
    ("best_of", [1, 128]),
    ("echo", [True, False]),
    ("logprobs", [0, 20]),
]
CHAT = [
    *SHARED,
    ("max_completion_tokens", [1, 100]),
    ("logprobs", [True, False]),
    ("chat_template_kwargs", [{}, {"enable_thinking": False}]),
    ("add_generation_prompt", [True, False]),
]
HARMLESS = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
}
GRAMMARS = {"response_format", "tools", "tool_choice", "parallel_tool_calls"}
"""Tried where answers follow them."""

# value that is refused, values that change nothing
REFUSED: dict[str, tuple[Any, list[Any]]] = {
    "audio": ({"voice": "x"}, []),
    "function_call": ("auto", ["none"]),
    "functions": ([{"name": "f"}], [[]]),
    "modalities": (["text", "audio"], [["text"]]),
    "moderation": ({"model": "x"}, []),
    "prediction": ({"type": "content", "content": "x"}, []),
    "reasoning_effort": ("low", []),
    "verbosity": ("low", ["medium"]),
    "web_search_options": ({}, []),
}


def cases(table: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in table for value in [*values, None]]


@pytest.mark.parametrize(("field", "value"), cases(COMPLETION))
def test_supported_by_completions(field: str, value: Any) -> None:
    found = msgspec.to_builtins(getattr(completion(**{field: value}), field), str_keys=True)
    assert found == value


@pytest.mark.parametrize(("field", "value"), cases(CHAT))
def test_supported_by_chat(field: str, value: Any) -> None:
    found = msgspec.to_builtins(getattr(chat(**{field: value}), field), str_keys=True)
    assert found == value


@pytest.mark.parametrize("field", HARMLESS)
def test_harmless_fields_are_accepted(field: str) -> None:
    assert chat(**{field: HARMLESS[field]}).messages == chat().messages


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_would_change_the_answer_are_refused_by_name(field: str) -> None:
    value, neutral = REFUSED[field]
    with pytest.raises(BadRequestError, match=rf"^{field} is not supported here") as caught:
        chat(**{field: value})
    assert (caught.value.path, caught.value.code) == (field, "unsupported_parameter")
    for harmless in [*neutral, None]:
        chat(**{field: harmless})


def test_suffix_is_refused() -> None:
    assert completion(suffix="").suffix == ""
    with pytest.raises(BadRequestError, match="suffix is not supported here"):
        completion(suffix="x")


def test_every_field_is_of_one_kind() -> None:
    """Supported, harmless or refused: every field of the structs is in a table above, as documented by the API."""
    of_chat = {field for field, _ in CHAT} | set(HARMLESS) | set(REFUSED)
    assert of_chat | GRAMMARS | {"model", "messages", "top_logprobs", "stream_options"} == set(
        api.ChatCompletionRequest.__struct_fields__
    )
    of_completion = {field for field, _ in COMPLETION} | {"user", "suffix"}
    assert of_completion | {"model", "prompt", "stream_options"} == set(api.CompletionRequest.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"colour": 1}, "colour", "unknown parameter: colour"),
        ({"max_tokens": -1}, "max_tokens", "expected `int` >="),
        ({"max_tokens": 1.5}, "max_tokens", "expected `int"),
        ({"max_tokens": "5"}, "max_tokens", "expected `int"),
        ({"max_tokens": True}, "max_tokens", "expected `int"),
        ({"max_tokens": 2**31}, "max_tokens", "expected `int` <="),
        ({"temperature": -0.1}, "temperature", "expected `float` >= 0.0"),
        ({"temperature": 2.1}, "temperature", "expected `float` <= 2.0"),
        ({"top_p": 0}, "top_p", "expected `float` > 0.0"),
        ({"top_p": 1.1}, "top_p", "expected `float` <= 1.0"),
        ({"n": 0}, "n", "expected `int` >= 1"),
        ({"n": 129}, "n", "expected `int` <= 128"),
        ({"n": 10**30}, "n", "<= 128"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": ["a"] * 17}, "stop", "length <= 16"),
        ({"stop": [""]}, "stop[0]", "length >= 1"),
        ({"stop": "x" * 1025}, "stop", "length <= 1024"),
        ({"seed": 2**63}, "seed", "<= 9223372036854775807"),
        ({"presence_penalty": 2.5}, "presence_penalty", "<= 2.0"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", ">= -2.0"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "<= 100.0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "expected `int`"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "expected `int` >= 0"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "length <= 1024"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 1.5}, "min_p", "<= 1.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "> 0.0"),
        ({"min_tokens": -1}, "min_tokens", ">= 0"),
        ({"min_tokens": 17, "max_tokens": 16}, "min_tokens", "more than the token limit (16)"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour", "unknown parameter"),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_refused_by_both(make: Any, fields: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        make(**fields)
    assert caught.value.path == param
    assert sentence in caught.value.message
    assert param.split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "is empty"),
        ({"prompt": [[1], []]}, "prompt[1]", "is empty"),
        ({"prompt": [1, "a"]}, "prompt", "mixes texts and token ids"),
        ({"prompt": [[1], "a"]}, "prompt", "mixes texts and token ids"),
        ({"prompt": [1, [1]]}, "prompt", "mixes texts and token ids"),
        ({"prompt": [-1]}, "prompt[0]", "expected `int` >= 0"),
        ({"prompt": [True]}, "prompt[0]", "got `bool`"),
        ({"prompt": [1.0]}, "prompt[0]", "got `float`"),
        ({"prompt": None}, "prompt", "got `null`"),
        ({"prompt": {}}, "prompt", "got `object`"),
        ({"prompt": ["a"] * 129}, "prompt", "more than 128 prompts"),
        ({"prompt": ["a"] * 100, "n": 3}, "n", "more than 256 answers"),
        ({"prompt": ["a"] * 100, "best_of": 3}, "best_of", "more than 256 answers"),
        ({"best_of": 1, "n": 2}, "best_of", "must be at least n"),
        ({"best_of": 129}, "best_of", "<= 128"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"logprobs": 21}, "logprobs", "<= 20"),
        ({"logprobs": True}, "logprobs", "got `bool`"),
        ({"min_tokens": 17}, "min_tokens", "more than the token limit (16)"),
        ({"messages": []}, "messages", "unknown parameter"),
    ],
)
def test_refused_by_completions(fields: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        completion(**fields)
    assert caught.value.path == param
    assert sentence in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": None}, "messages", "got `null`"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing parameter"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing parameter"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid enum value 'robot'"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 1}]}, "messages[1].content", "expected `str | array"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            "content of type 'image_url' is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing parameter",
        ),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"top_logprobs": 1}, "top_logprobs", "needs logprobs to be true"),
        ({"logprobs": 1}, "logprobs", "expected `bool"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"min_tokens": 3, "max_completion_tokens": 2}, "min_tokens", "more than the token limit (2)"),
        ({"prompt": "x"}, "prompt", "unknown parameter"),
        ({"best_of": 2}, "best_of", "unknown parameter"),
    ],
)
def test_refused_by_chat(fields: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(**fields)
    assert caught.value.path == param
    assert sentence in caught.value.message


@pytest.mark.parametrize("field", ["refusal", "annotations", "audio", "function_call"])
def test_fields_of_messages_that_would_be_lost_are_refused(field: str) -> None:
    message(**{field: None})
    with pytest.raises(BadRequestError, match=rf"^messages\[0\]\.{field} is not supported"):
        message(**{field: "x"})


def test_missing_fields_are_named() -> None:
    for body, param in ((b'{"prompt":"x"}', "model"), (b'{"model":"x"}', "prompt")):
        with pytest.raises(BadRequestError, match=f"missing parameter: {param}") as caught:
            decode_completion(body)
        assert (caught.value.path, caught.value.code) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"model":"m","prompt":"\xff"}',
        b'{"model":"m","prompt":"\\ud800"}',
        b'{"model":"m","prompt":"x","temperature":NaN}',
        b'{"model":"m","prompt":"x","user":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","prompt":"x"} trailing',
    ],
)
def test_what_is_not_json(body: bytes) -> None:
    with pytest.raises(BadRequestError) as caught:
        decode_completion(body)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"1"])
def test_json_that_is_no_object(body: bytes) -> None:
    with pytest.raises(BadRequestError, match=r"^body: expected `object`"):
        decode_chat(body)


def test_an_error_stays_short_whatever_was_sent() -> None:
    for fields in ({"x" * 100_000: 1}, {"stop_token_ids": ["x" * 100_000]}, {"chat_template_kwargs": "x" * 100_000}):
        with pytest.raises(BadRequestError) as caught:
            chat(**fields)
        assert len(caught.value.message) < 300
        assert len(caught.value.path) < 200


@given(
    body=st.dictionaries(
        st.sampled_from([*api.ChatCompletionRequest.__struct_fields__, "prompt", "best_of", "echo", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=5,
        ),
        max_size=6,
    )
)
def test_any_object(body: dict[str, Any]) -> None:
    for decode, required in ((decode_completion, {"prompt": "x"}), (decode_chat, {"messages": MESSAGES})):
        try:
            decode(json.dumps({"model": "m", **required, **body}).encode())
        except BadRequestError as error:
            assert error.code  # noqa: PT017


def test_prompts() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))


def test_stop_strings() -> None:
    assert completion().stop_strings == ()
    assert completion(stop="a").stop_strings == ("a",)
    assert completion(stop=["a", "b"]).stop_strings == ("a", "b")


def test_token_limits() -> None:
    assert completion().max_output_tokens == 16
    assert completion(max_tokens=5).max_output_tokens == 5
    assert chat().max_output_tokens is None
    assert chat(max_tokens=5).max_output_tokens == 5
    assert chat(max_completion_tokens=5).max_output_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).max_output_tokens == 5


def test_usage_in_a_stream() -> None:
    assert not chat(stream=True).wants_usage_chunk
    assert not chat(stream=True, stream_options={"include_usage": False}).wants_usage_chunk
    assert chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": True}).wants_usage_chunk


def test_messages_for_templates() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "name": "ada", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": ""},
        ]
    )
    assert [each.for_template() for each in request.messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab", "name": "ada"},
        {"role": "assistant", "content": ""},
    ]
