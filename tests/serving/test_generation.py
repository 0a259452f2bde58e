"""From the engine's outputs to an answer's text: however they arrive and however they are read, it is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core import FinishReason, SamplingParams
from gplan.serving.generation import (
    Answer,
    AnswerGivenUpError,
    ClientGoneError,
    Generation,
    InterruptedAnswerError,
    Job,
)
from gplan.serving.protocol import Output
from gplan.serving.stopping import StopMatcher
from gplan.serving.vocabulary import Vocabulary
from tests.serving import tokenizers_made as made

VOCABULARY = Vocabulary(made.byte_level())


class Hand:
    """Where the engine would be: keeps what it is given, and gives out what a test says."""

    def __init__(self) -> None:
        self.takes: dict[str, Callable[[Output], None]] = {}
        self.interrupts: list[Callable[[str], None]] = []
        self.aborted: list[str] = []

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        take: Callable[[Output], None],
        interrupt: Callable[[str], None],
        client: str = "",
    ) -> None:
        assert name not in self.takes
        self.takes[name] = take
        self.interrupts.append(interrupt)

    def abort(self, names: Sequence[str]) -> None:
        self.aborted += names


def job(*stops: str, logprobs: int | None = None) -> Job:
    return Job((5,), SamplingParams(max_tokens=1000, logprobs=logprobs), stops)


def begin(hand: Hand, *jobs: Job, on_close: Callable[[], None] = lambda: None) -> Generation:
    generation = Generation(hand, VOCABULARY, jobs, on_close)
    generation.start()
    return generation


def outputs(name: str, tokens: Sequence[int], reason: str, logprobs: bool = False) -> list[Output]:
    """One output a token, the last with the reason."""
    scores = [[(-float(index), [(token, -float(index))])] if logprobs else [] for index, token in enumerate(tokens)]
    made = [Output(name, [token], score, "") for token, score in zip(tokens, scores, strict=True)]
    last = made.pop() if made else Output(name, [], [], "")
    return [*made, Output(name, last.tokens, last.logprobs, reason)]


def deliver(tokens: Sequence[int], job: Job, sizes: Sequence[int]) -> tuple[Answer, Hand]:
    """Delivers outputs in bunches of `sizes`, reading after each; returns the answer."""

    async def run() -> tuple[Answer, Hand]:
        hand = Hand()
        generation = begin(hand, job)
        (name,) = hand.takes
        answer = Answer()
        remaining = outputs(name, tokens, "length", job.params.logprobs is not None)
        bunches = iter(sizes)
        while answer_is_open := bool(remaining):
            size = next(bunches, 1)
            for output in remaining[:size]:
                if not hand.aborted:
                    hand.takes[name](output)
            del remaining[:size]
            for _, delta in await asyncio.wait_for(generation.read(), 5):
                answer.text += delta.text
                answer.scored += delta.scored
                answer.num_tokens += delta.num_tokens
                if delta.finish_reason is not None:
                    answer.finish_reason = delta.finish_reason
                    answer_is_open = False
            if not answer_is_open:
                break
        assert await generation.read() == []
        generation.close()
        return answer, hand

    return asyncio.run(run())


texts = st.text(st.sampled_from("ab \ufffdé你😀x"), min_size=1, max_size=30)
stops = st.lists(st.text(st.sampled_from("ab é你x"), min_size=1, max_size=4), max_size=3)
bunches = st.lists(st.integers(1, 9), max_size=40)


@given(text=texts, stops=stops, sizes=bunches, logprobs=st.booleans())
def test_bunching_changes_nothing(text: str, stops: list[str], sizes: list[int], logprobs: bool) -> None:
    tokens = made.byte_level().encode(text).ids
    asked = job(*stops, logprobs=0 if logprobs else None)
    one_by_one, _ = deliver(tokens, asked, [])
    answer, hand = deliver(tokens, asked, sizes)
    assert (answer.text, answer.finish_reason) == (one_by_one.text, one_by_one.finish_reason)
    assert answer.scored == one_by_one.scored
    assert answer.text == first_complete(text, stops)
    assert (answer.finish_reason is FinishReason.STOP) == any(stop in text for stop in stops)
    assert answer.num_tokens <= len(tokens)
    if hand.aborted:
        assert answer.finish_reason is FinishReason.STOP


def first_complete(text: str, stops: Sequence[str]) -> str:
    """The definition: the text before the stop string that ends first; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(parts=st.lists(st.text("abc", max_size=5), max_size=12), stops=st.lists(st.text("abc", min_size=1), max_size=4))
def test_stop_strings_by_their_definition(parts: list[str], stops: list[str]) -> None:
    matcher, given_out, is_stopped = StopMatcher(stops), "", False
    for part in parts:
        piece, is_stopped = matcher.push(part)
        given_out += piece
        if is_stopped:
            break
    if not is_stopped:
        held = matcher.finish()
        assert any(stop.startswith(held) and stop != held for stop in stops) or held == "", "held without need"
        given_out += held
    assert given_out == first_complete("".join(parts), stops)


@given(text=texts)
def test_offsets_say_where_a_token_begins(text: str) -> None:
    tokens = made.byte_level().encode(text).ids
    answer, _ = deliver(tokens, job(logprobs=0), [])
    assert [entry.token for entry in answer.scored] == tokens
    for entry in answer.scored:
        own = VOCABULARY.token_bytes(entry.token)
        try:
            name = own.decode()
        except UnicodeDecodeError:
            continue
        assert answer.text[entry.offset :].startswith(name)


def test_a_slow_reader_gets_what_came_meanwhile_in_one_piece() -> None:
    async def run() -> None:
        hand = Hand()
        generation = begin(hand, job())
        (name,) = hand.takes
        tokens = made.byte_level().encode("the quick brown fox").ids
        for output in outputs(name, tokens, "stop"):
            hand.takes[name](output)
        ((index, delta),) = await generation.read()
        assert (index, delta.text, delta.num_tokens) == (0, "the quick brown fox", len(tokens) + 1), (
            "the end token counts"
        )
        assert delta.finish_reason is FinishReason.STOP

    asyncio.run(run())


def test_a_stop_string_aborts_at_once_without_a_reader() -> None:
    async def run() -> None:
        hand = Hand()
        begin(hand, job("quick"))
        (name,) = hand.takes
        for output in outputs(name, made.byte_level().encode("the quick brown fox").ids, ""):
            if not hand.aborted:
                hand.takes[name](output)
        assert hand.aborted == [name]

    asyncio.run(run())


def test_closing_gives_up_what_is_open_and_frees_the_seat_once() -> None:
    async def run() -> None:
        hand, closed = Hand(), []
        generation = begin(hand, job(), job(), on_close=lambda: closed.append(1))
        first, second = hand.takes
        hand.takes[first](Output(first, [9], [], "length"))
        await generation.read()
        waiting = asyncio.create_task(generation.read())
        await asyncio.sleep(0)
        generation.close()
        generation.close()
        with pytest.raises(ClientGoneError):
            await waiting
        assert hand.aborted == [second]
        assert closed == [1]

    asyncio.run(run())


def test_what_came_before_the_engine_died_is_read_first() -> None:
    async def run() -> None:
        hand = Hand()
        generation = begin(hand, job())
        (name,) = hand.takes
        hand.takes[name](Output(name, made.byte_level().encode("dog").ids, [], ""))
        hand.interrupts[0]("")
        ((_, delta),) = await generation.read()
        assert delta.text == "dog"
        with pytest.raises(InterruptedAnswerError):
            await generation.read()

    asyncio.run(run())


def test_an_answer_that_cannot_go_on_says_why_and_its_siblings_are_given_up() -> None:
    async def run() -> None:
        hand = Hand()
        generation = begin(hand, job(), job())
        first, second = hand.takes
        hand.interrupts[0]("its grammar: too much")
        with pytest.raises(AnswerGivenUpError, match="too much") as failure:
            await generation.read()
        assert (failure.value.status, failure.value.code) == (500, "answer_failed")
        assert set(hand.aborted) == {first, second}

    asyncio.run(run())
