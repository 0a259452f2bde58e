"""`/v1/chat/completions` of a real server, asked with the official client."""

from __future__ import annotations

import pytest
import torch
from openai import BadRequestError, OpenAI

from tests.checkpoints import VOCAB_SIZE, make_model, make_tokenizer
from tests.serving.live import MAX_LEN, MODEL, Live

TOKENIZER = make_tokenizer()
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 你好"}]
GREEDY = {"model": MODEL, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Live) -> OpenAI:
    return server.client()


def prompt_ids(messages: list[dict[str, str]]) -> list[int]:
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    ids = torch.tensor([prompt_ids(MESSAGES)])
    model = make_model("LlamaForCausalLM")
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, eos_token_id=VOCAB_SIZE
    )
    return list(made[0, ids.shape[1] :].tolist())


def text_of(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def test_an_answer_is_that_of_transformers(client: OpenAI, expected: list[int]) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=32, **GREEDY)  # type: ignore[call-overload]
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", text_of(expected))
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt_ids(MESSAGES))
    assert answer.usage.completion_tokens == 32


def test_a_stream_is_the_same_answer(client: OpenAI, expected: list[int]) -> None:
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            messages=MESSAGES,
            max_completion_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in (first, *middle)) == text_of(expected)
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in (first, *middle))
    assert usage.choices == []
    assert usage.usage.completion_tokens == 32


def test_without_a_limit_the_answer_may_fill_what_is_left(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)  # type: ignore[call-overload]
    assert answer.usage.total_tokens == MAX_LEN


def test_several_answers_in_one_stream(client: OpenAI) -> None:
    options = {"messages": MESSAGES, "model": MODEL, "n": 3, "seed": 5, "temperature": 1.4, "max_tokens": 20}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in client.chat.completions.create(stream=True, **options):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role is not None
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ends == [1, 1, 1]


def test_logprobs_with_bytes(client: OpenAI, expected: list[int]) -> None:
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        messages=MESSAGES, max_tokens=32, logprobs=True, top_logprobs=2, **GREEDY
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 32
    ordinary = [(entry, token) for entry, token in zip(content, expected, strict=True) if token < 256]
    joined = b"".join(bytes(entry.bytes) for entry, _ in ordinary)
    assert joined.decode(errors="replace") == answer.choices[0].message.content
    assert any(entry.token.startswith("bytes:\\x") for entry in content), "no token was part of a character"
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob


def test_logprobs_of_a_stopped_answer_end_with_its_text(client: OpenAI, expected: list[int]) -> None:
    text = text_of(expected)
    stop = text[6:9]
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        messages=MESSAGES, max_tokens=32, logprobs=True, stop=stop, **GREEDY
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == text[: text.index(stop)]
    shown = b"".join(bytes(e.bytes) for e in choice.logprobs.content if not e.token.startswith("<|"))
    assert shown.decode(errors="replace").startswith(choice.message.content)
    assert len(choice.logprobs.content) < answer.usage.completion_tokens


def test_message_content_in_parts_and_the_developer_role(client: OpenAI) -> None:
    def ask(messages: list[dict[str, object]]) -> str:
        answer = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)  # type: ignore[call-overload]
        return str(answer.choices[0].message.content)

    plain = ask([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}])
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]
    assert ask([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]) == plain


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "add_generation_prompt", "messages"])
def test_a_request_cannot_bring_its_own_template(client: OpenAI, name: str) -> None:
    with pytest.raises(BadRequestError, match=f"chat_template_kwargs: {name}"):
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,  # type: ignore[arg-type]
            extra_body={"chat_template_kwargs": {name: "{{ 'x' * 10 ** 9 }}"}},
        )


def test_a_variable_of_the_template_is_let_through(server: Live) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    assert server.post("/v1/chat/completions", body).status_code == 200
