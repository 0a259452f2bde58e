"""`response_format` of a real server, asked with the official client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.checkpoints import make_tokenizer
from tests.serving.live import MODEL, Live

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "count": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["ok", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA, "strict": True}}
BIAS = {str(make_tokenizer().encode(space)[0]): -50 for space in " \n\r\t"}
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Is it so?"}], "logit_bias": BIAS, "max_tokens": 60}


@pytest.fixture(scope="module")
def client(server: Live) -> OpenAI:
    return server.client()


def ask(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{**ASK, **options})


def test_every_answer_is_what_the_schema_says_and_decode_is_replayed(server: Live, client: OpenAI) -> None:
    def replays(outcome: str) -> float:
        return server.metric("gplan_steps_total", phase="decode", outcome=outcome)

    replayed, eager = replays("replayed"), replays("eager")
    choices = ask(client, n=4, seed=3, response_format=FORMAT, logprobs=True, top_logprobs=2).choices
    for choice in choices:
        found = json.loads(choice.message.content)
        assert set(found) == {"ok", "count"}
        assert found["count"] in (1, 2, 3)
        assert choice.finish_reason == "stop"
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert len({choice.message.content for choice in choices}) > 1
    assert replays("replayed") > replayed
    assert replays("eager") == eager


def test_a_stream_is_the_same_answer(client: OpenAI) -> None:
    whole = ask(client, temperature=0, response_format=FORMAT).choices[0].message.content
    chunks = ask(client, temperature=0, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_any_json_object(client: OpenAI) -> None:
    choice = ask(client, response_format={"type": "json_object"}, seed=1).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_free_answers_beside_guided_ones_are_what_they_were(client: OpenAI) -> None:
    def free() -> str:
        return str(ask(client, temperature=0, logit_bias={}).choices[0].message.content)

    alone = free()
    with ThreadPoolExecutor(6) as threads:
        guided = [threads.submit(ask, client, seed=i, response_format=FORMAT) for i in range(4)]
        beside = [threads.submit(free) for _ in range(2)]
        assert [future.result() for future in beside] == [alone] * 2
        assert all(json.loads(future.result().choices[0].message.content) for future in guided)


def test_any_text_is_the_default(client: OpenAI) -> None:
    assert ask(client, temperature=0, response_format={"type": "text"}).choices[0].message == (
        ask(client, temperature=0).choices[0].message
    )


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}}, "ignore_eos", "together"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 5}}, "min_tokens", "together"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
            "response_format",
            "uniqueItems",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "",
        ),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(
    client: OpenAI, options: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(BadRequestError) as refusal:
        ask(client, **options)
    assert refusal.value.param == param
    assert said in refusal.value.message
