"""Scored prompts of a real server, against the model run by transformers; and what is counted as a token."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.checkpoints import EOS, make_model, make_tokenizer
from tests.serving.live import MAX_LEN, MODEL, Live, events

TOKENIZER = make_tokenizer()
PROMPTS = ["hello", "Grüße, 你好 😀", "the quick brown fox " * 9]
"""The last is longer than a step."""


def ids_of(prompt: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(prompt)]


@pytest.fixture(scope="module")
def scores() -> dict[str, torch.Tensor]:
    """Log probabilities after each token of each prompt."""
    model = make_model("LlamaForCausalLM")
    with torch.no_grad():
        return {p: model(torch.tensor([ids_of(p)])).logits[0].log_softmax(-1) for p in PROMPTS}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 2, **changes}


@pytest.mark.parametrize("time", ["first", "again"])
def test_every_token_of_a_prompt_is_scored_but_the_first(
    server: Live, scores: dict[str, torch.Tensor], time: str
) -> None:
    """However often it was computed: a prefix that is known is computed for its scores."""
    answer = server.post("/v1/completions", body()).json()
    assert answer["usage"]["completion_tokens"] == 0
    for prompt, choice in zip(PROMPTS, answer["choices"], strict=True):
        ids, found = ids_of(prompt), choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        expected = scores[prompt][range(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:]), expected, atol=1e-4, rtol=1e-4)
        best = scores[prompt][:-1].max(-1).values
        tops = torch.tensor([max(top.values()) for top in found["top_logprobs"][1:]])
        torch.testing.assert_close(tops, best, atol=1e-4, rtol=1e-4)
        assert len(found["tokens"]) == len(found["text_offset"]) == len(ids)
        assert found["text_offset"] == sorted(found["text_offset"])
    hello = answer["choices"][0]["logprobs"]
    assert (hello["tokens"], hello["text_offset"]) == (list("hello"), [0, 1, 2, 3, 4])


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_answer_goes_on_where_the_prompt_ends(server: Live, as_ids: bool) -> None:
    prompt = ids_of("hello") if as_ids else "hello"
    changes = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    plain = server.post("/v1/completions", body(**changes, echo=False)).json()["choices"][0]
    echoed = server.post("/v1/completions", body(**changes)).json()["choices"][0]
    assert echoed["text"] == "hello" + plain["text"]
    assert echoed["logprobs"]["tokens"][5:] == plain["logprobs"]["tokens"]
    assert echoed["logprobs"]["token_logprobs"][5:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    assert echoed["logprobs"]["text_offset"][5:] == [5 + offset for offset in plain["logprobs"]["text_offset"]]


@pytest.mark.parametrize("max_tokens", [0, 9])
def test_a_stream_has_the_same_scores(server: Live, max_tokens: int) -> None:
    changes = {"max_tokens": max_tokens, "temperature": 0, "n": 2, "seed": 1, "ignore_eos": True}
    whole = server.post("/v1/completions", body(**changes)).json()["choices"]
    texts = ["" for _ in whole]
    parts: list[dict[str, list[Any]]] = [{} for _ in whole]
    with server.stream("/v1/completions", body(**changes, stream=True)) as response:
        for event in events(response):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    parts[choice["index"]].setdefault(name, []).extend(values)
    assert texts == [choice["text"] for choice in whole]
    for part, expected in zip(parts, [choice["logprobs"] for choice in whole], strict=True):
        assert (part["tokens"], part["text_offset"]) == (expected["tokens"], expected["text_offset"])
        # Other steps may have computed them, with other last bits.
        assert part["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
        assert len(part["top_logprobs"]) == len(part["tokens"])


def test_scores_take_no_page_for_longer_than_their_request(server: Live) -> None:
    server.post("/v1/completions", body())
    assert server.metric("gplan_kv_pages_used") == 0


def test_an_end_token_is_counted_though_it_has_no_text(server: Live) -> None:
    force = {"logit_bias": {str(EOS): 100}, "echo": False, "logprobs": None, "prompt": "hello", "max_tokens": 9}
    answer = server.post("/v1/completions", body(**force)).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_text_much_too_long_is_refused_before_all_of_it_is_read(server: Live, path: str) -> None:
    text = "word " * 400_000
    asked = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    started = time.monotonic()
    refusal = server.post(f"/v1/{path}", {"model": MODEL, "max_tokens": 5, **asked})
    assert refusal.status_code == 400
    assert refusal.json()["error"]["code"] == "context_length_exceeded"
    count = int(refusal.json()["error"]["message"].split("more than ")[1].split()[0])
    assert MAX_LEN < count < 8 * MAX_LEN, f"it read {count} tokens, {time.monotonic() - started:.2f} s"
