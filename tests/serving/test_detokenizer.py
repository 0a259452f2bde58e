"""Streams are exact: joined deltas are the tokenizer's own decoding, whatever the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gplan.serving.detokenizer import MAX_HELD_BYTES, make_detokenizer
from gplan.serving.vocabulary import Vocabulary
from tests.serving import tokenizers_made as made

VOCABULARIES = {name: Vocabulary(make()) for name, make in made.ALL.items()}
BYTE_FALLBACK = ["llama2_like", "metaspace", "gemma_like"]

texts = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from(list(" \n\t▁é你好界😀👩‍🚀🇩🇪\ufffdabcxyz012<>")),
    ),
    max_size=60,
)


def stream(vocabulary: Vocabulary, ids: list[int], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = make_detokenizer(vocabulary, context)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def byte_ids(name: str, data: bytes) -> list[int]:
    ids = made.ALL[name]().get_vocab()
    return [ids[f"<0x{byte:02X}>"] for byte in data]


def test_each_kind_of_decoder_is_recognised() -> None:
    kinds = {name: vocabulary.kind for name, vocabulary in VOCABULARIES.items()}
    assert kinds == {
        "byte_level": "bytes",
        "llama2_like": "pieces",
        "metaspace": "pieces",
        "gemma_like": "pieces",
        "word_suffix": "other",
    }


@pytest.mark.parametrize("name", made.ALL)
@given(text=texts)
@example(text="\ufffd")
@example(text="a\ufffd b")
@example(text="  two spaces")
@example(text="👩‍🚀👩‍🚀 family 👨‍👩‍👧‍👦")
def test_text_comes_back(name: str, text: str) -> None:
    ids = made.ALL[name]().encode(text).ids
    assert "".join(stream(VOCABULARIES[name], ids)) == VOCABULARIES[name].decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "llama2_like", "metaspace", "gemma_like"])
@given(data=st.data())
def test_any_tokens_at_all(name: str, data: st.DataObject) -> None:
    """Random tokens: broken characters, special tokens in between, ids beyond the vocabulary."""
    size = made.ALL[name]().get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 5), max_size=MAX_HELD_BYTES))
    assert "".join(stream(VOCABULARIES[name], ids)) == VOCABULARIES[name].decode(ids)


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@given(parts=st.lists(st.one_of(texts.map(str.encode), st.binary(max_size=6)), max_size=6), word=st.booleans())
def test_runs_of_byte_tokens(name: str, parts: list[bytes], word: bool) -> None:
    tokenizer = made.ALL[name]()
    ids: list[int] = tokenizer.encode("the dog", add_special_tokens=False).ids if word else []
    for part in parts:
        ids += byte_ids(name, part[:MAX_HELD_BYTES]) + tokenizer.encode("river", add_special_tokens=False).ids
    ids += byte_ids(name, parts[-1][:MAX_HELD_BYTES]) if parts else []
    assert "".join(stream(VOCABULARIES[name], ids)) == VOCABULARIES[name].decode(ids)


@pytest.mark.parametrize("name", ["byte_level", *BYTE_FALLBACK])
@given(prompt=texts.filter(bool), answer=texts)
def test_an_answer_that_continues_a_prompt_keeps_its_leading_space(name: str, prompt: str, answer: str) -> None:
    tokenizer, vocabulary = made.ALL[name](), VOCABULARIES[name]
    before = [*tokenizer.encode(prompt + "dog").ids]
    after = tokenizer.encode(answer, add_special_tokens=False).ids
    whole = vocabulary.decode(before + after)
    assert vocabulary.decode(before) + "".join(stream(vocabulary, after, tuple(before))) == whole


@pytest.mark.parametrize("name", ["byte_level", *BYTE_FALLBACK])
def test_a_split_character_is_held_until_it_is_whole(name: str) -> None:
    ids = made.ALL[name]().encode("x😀y", add_special_tokens=False).ids
    deltas = stream(VOCABULARIES[name], ids)
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == VOCABULARIES[name].decode(ids)
    assert len(ids) >= 5, "the emoji must be several tokens here, or nothing was tested"


def test_a_genuine_replacement_character_is_not_held() -> None:
    ids = made.byte_level().encode("a\ufffd").ids
    detokenizer = make_detokenizer(VOCABULARIES["byte_level"])
    assert "".join(detokenizer.push(token) for token in ids) == "a\ufffd"


@pytest.mark.parametrize("name", BYTE_FALLBACK)
def test_a_long_run_of_emoji_is_not_held_for_ever(name: str) -> None:
    detokenizer = make_detokenizer(VOCABULARIES[name])
    held = longest = 0
    text = ""
    for token in byte_ids(name, "😀".encode() * 200):
        delta = detokenizer.push(token)
        held = 0 if delta else held + 1
        longest = max(longest, held)
        text += delta
    assert MAX_HELD_BYTES <= longest <= MAX_HELD_BYTES + 4
    assert text + detokenizer.finish() == "😀" * 200


@pytest.mark.parametrize("name", BYTE_FALLBACK)
def test_a_broken_run_is_let_go_at_once(name: str) -> None:
    detokenizer = make_detokenizer(VOCABULARIES[name])
    deltas = [detokenizer.push(token) for token in byte_ids(name, b"\xf0\x9f\xff" + b"\x80" * 300)]
    assert deltas[2:] == ["\ufffd" * 3] + ["\ufffd"] * 300


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("name", made.ALL)
def test_no_token_is_decoded_again_and_again(name: str) -> None:
    counting = CountingTokenizer(made.ALL[name]())
    vocabulary = Vocabulary(counting)
    size = made.ALL[name]().get_vocab_size()
    ids = [(7919 * index) % size for index in range(8000)]
    stream(vocabulary, ids)
    assert counting.decoded <= 20 * len(ids)


@pytest.mark.parametrize("name", ["byte_level", *BYTE_FALLBACK])
def test_token_bytes_joined_are_the_text(name: str) -> None:
    ids = made.ALL[name]().encode("x Grüße 你好 😀 <tool call>", add_special_tokens=False).ids
    joined = b"".join(VOCABULARIES[name].token_bytes(token) for token in ids)
    assert joined.decode().strip() == "x Grüße 你好 😀 <tool call>"


def test_bytes_of_special_and_unknown_tokens() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    assert vocabulary.token_bytes(0) == b"<|begin|>"
    assert vocabulary.token_bytes(10**6) == b""
    assert vocabulary.is_skipped(0)
    assert vocabulary.is_skipped(10**6)
