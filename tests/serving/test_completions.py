"""`/v1/completions` of a real server, asked with the official client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from openai import BadRequestError, OpenAI

from tests.checkpoints import EOS, VOCAB_SIZE, make_model, make_tokenizer
from tests.serving.live import MAX_LEN, MODEL, Live, events

TOKENIZER = make_tokenizer()
PROMPTS = ["hello", "the quick brown fox", "x" * 200, "Grüße, 你好 😀"]


@pytest.fixture(scope="module")
def client(server: Live) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Greedy answers of 40 tokens by transformers, end tokens taken as any other."""
    model = make_model("LlamaForCausalLM")
    answers = {}
    for prompt in PROMPTS:
        ids = torch.tensor([TOKENIZER.encode(prompt)])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, eos_token_id=VOCAB_SIZE
        )
        answers[prompt] = made[0, ids.shape[1] :].tolist()
    return answers


def text_of(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def ids_of(prompt: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(prompt)]


GREEDY = {"model": MODEL, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def test_greedy_answers_are_those_of_transformers(client: OpenAI, expected: dict[str, list[int]]) -> None:
    answer = client.completions.create(prompt=PROMPTS, max_tokens=40, **GREEDY)
    assert [choice.text for choice in answer.choices] == [text_of(expected[prompt]) for prompt in PROMPTS]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(ids_of(prompt)) for prompt in PROMPTS)
    assert answer.usage.completion_tokens == 160


@pytest.mark.parametrize("prompt", PROMPTS)
def test_joined_deltas_are_the_whole_text(client: OpenAI, expected: dict[str, list[int]], prompt: str) -> None:
    deltas = list(client.completions.create(prompt=prompt, max_tokens=40, stream=True, **GREEDY))
    assert "".join(delta.choices[0].text for delta in deltas) == text_of(expected[prompt])
    assert [delta.choices[0].finish_reason for delta in deltas][-1] == "length"
    assert all(delta.choices[0].finish_reason is None for delta in deltas[:-1])
    assert len({delta.id for delta in deltas}) == 1
    assert all(delta.usage is None for delta in deltas)


def test_prompts_as_token_ids(client: OpenAI, expected: dict[str, list[int]]) -> None:
    one = client.completions.create(prompt=ids_of(PROMPTS[1]), max_tokens=40, **GREEDY)
    two = client.completions.create(prompt=[ids_of(prompt) for prompt in PROMPTS[:2]], max_tokens=40, **GREEDY)
    assert one.choices[0].text == text_of(expected[PROMPTS[1]])
    assert [choice.text for choice in two.choices] == [text_of(expected[prompt]) for prompt in PROMPTS[:2]]


def test_max_tokens_is_16_unless_given_and_less_where_less_fits(client: OpenAI) -> None:
    def generated(prompt: list[int]) -> int:
        usage = client.completions.create(prompt=prompt, **GREEDY).usage
        assert usage is not None
        return usage.completion_tokens

    assert generated([5] * 10) == 16
    assert generated([5] * (MAX_LEN - 3)) == 3


def test_the_longest_request_is_served_and_one_token_more_is_not(client: OpenAI) -> None:
    answer = client.completions.create(prompt=[7] * (MAX_LEN - 1), max_tokens=1, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_LEN
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(prompt=[7] * MAX_LEN, max_tokens=1, **GREEDY)
    assert str(MAX_LEN) in refused.value.message
    with pytest.raises(BadRequestError, match=r"11.*500|500.*11|512"):
        client.completions.create(prompt=[7] * 12, max_tokens=501, **GREEDY)


def test_an_end_token_ends_the_answer_and_is_no_part_of_it(client: OpenAI, expected: dict[str, list[int]]) -> None:
    tokens = expected[PROMPTS[0]]
    stop = next(token for token in tokens[5:] if token not in tokens[:5])
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPTS[0],
        max_tokens=40,
        temperature=0,
        extra_body={"ignore_eos": True, "stop_token_ids": [stop]},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text_of(tokens[: tokens.index(stop)])


def test_logit_bias_reaches_the_sampler_and_eos_stops(client: OpenAI) -> None:
    forced = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=5, temperature=0, logit_bias={str(EOS): 100}
    )
    assert (forced.choices[0].text, forced.choices[0].finish_reason) == ("", "stop")
    letters = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=5, temperature=0, logit_bias={str(ids_of("q")[0]): 100}
    )
    assert letters.choices[0].text == "qqqqq"


@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings_across_tokens(server: Live, expected: dict[str, list[int]], streams: bool) -> None:
    """Every token is one byte here, so that any string of three characters straddles tokens."""
    text = text_of(expected[PROMPTS[1]])
    stop = text[10:13]
    cut = text.index(stop)
    body = {"model": MODEL, "prompt": PROMPTS[1], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer, reason = ask(server, {**body, "stop": ["never met", stop]}, streams)
    assert (answer, reason) == (text[:cut], "stop")


@pytest.mark.parametrize("streams", [False, True])
def test_text_held_for_a_stop_string_that_did_not_come_is_given_out(
    server: Live, expected: dict[str, list[int]], streams: bool
) -> None:
    text = text_of(expected[PROMPTS[1]])
    body = {"model": MODEL, "prompt": PROMPTS[1], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer, reason = ask(server, {**body, "stop": text[-4:] + "\N{SNOWMAN}"}, streams)
    assert (answer, reason) == (text, "length")


def ask(server: Live, body: dict[str, object], streams: bool) -> tuple[str, str]:
    if not streams:
        choice = server.post("/v1/completions", body).json()["choices"][0]
        return choice["text"], choice["finish_reason"]
    with server.stream("/v1/completions", {**body, "stream": True}) as response:
        choices = [event["choices"][0] for event in events(response)]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def test_the_same_seed_gives_the_same_answer_and_no_seed_another(client: OpenAI) -> None:
    def draw(**options: object) -> str:
        return (
            client.completions.create(model=MODEL, prompt="hello", max_tokens=24, temperature=1.5, **options)
            .choices[0]
            .text
        )  # type: ignore[call-overload,no-any-return]

    assert draw(seed=7) == draw(seed=7) != draw(seed=8)
    assert draw() != draw()


def test_n_answers_differ_and_repeat_with_the_seed(client: OpenAI) -> None:
    def draw(n: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="hello", max_tokens=24, temperature=1.5, seed=3, n=n, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.text for choice in answer.choices]

    three = draw(3)
    assert len(set(three)) == 3
    assert draw(3) == three
    assert draw(1) == three[:1], "the first of n is what is drawn with n = 1"


def test_best_of_returns_the_likeliest(client: OpenAI) -> None:
    def draw(**options: object) -> list[tuple[str, float]]:
        answer = client.completions.create(
            model=MODEL, prompt="hello", max_tokens=12, temperature=1.2, seed=3, logprobs=0,
            extra_body={"ignore_eos": True}, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6 * 12, "tokens of all candidates are counted"
        scores = [(choice.text, choice.logprobs.token_logprobs or []) for choice in answer.choices if choice.logprobs]
        return [(text, sum(filter(None, score)) / len(score)) for text, score in scores]

    best = draw(n=2, best_of=6)
    ranked = sorted(draw(n=6), key=lambda entry: -entry[1])
    assert [text for text, _ in best] == [text for text, _ in ranked[:2]]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("prompt", ["hello", ids_of("hello")])
def test_echo(server: Live, expected: dict[str, list[int]], streams: bool, prompt: str | list[int]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "echo": True}
    assert ask(server, body, streams)[0] == "hello" + text_of(expected["hello"])


def test_logprobs(client: OpenAI, expected: dict[str, list[int]]) -> None:
    answer = client.completions.create(prompt="hello", max_tokens=40, logprobs=3, **GREEDY)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 40
    for name, score, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[name] == score == max(top.values()), "greedy takes the likeliest"
        assert score <= 0
    text = answer.choices[0].text
    assert found.text_offset == sorted(found.text_offset)
    readable = [i for i, name in enumerate(found.tokens) if not name.startswith("bytes:") and name.isprintable()]
    assert readable, "nothing was compared"
    for index in readable:
        if not expected["hello"][index] >= 256:
            assert text[found.text_offset[index]] == found.tokens[index]


def test_logprobs_of_a_stream_are_those_of_the_whole(server: Live) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 40, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    whole = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    with server.stream("/v1/completions", {**body, "stream": True}) as response:
        parts = [event["choices"][0]["logprobs"] for event in events(response)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts if part for entry in part[field]] == whole[field], field


def test_usage_in_a_stream(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(
            prompt=["hello", "you"], max_tokens=9, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *parts, last = chunks
    assert all(part.usage is None and part.choices for part in parts)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (8, 18, 26)


def test_concurrent_answers_do_not_mix(server: Live, expected: dict[str, list[int]]) -> None:
    def one(index: int) -> bool:
        prompt = PROMPTS[index % len(PROMPTS)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        return ask(server, body, index % 2 == 0)[0] == text_of(expected[prompt])

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(one, range(24)))


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", ""])
def test_curl_style_request(server: Live, kind: str) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2})
    answer = server.post("/v1/completions", content=body.encode(), headers={"Content-Type": kind})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"]
