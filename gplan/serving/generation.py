"""Answers in the making: the engine's tokens become text, ended by stop strings, for one HTTP request at a time.

Text is made as tokens arrive from the engine, whether or not the client reads: a slow reader keeps neither pages nor
anybody else's tokens. What it has not read yet waits here, joined, up to a bound beyond which the request is given up.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gplan.core import FinishReason, SamplingParams
from gplan.errors import GplanError
from gplan.serving.detokenizer import make_detokenizer
from gplan.serving.protocol import Output, TokenScore
from gplan.serving.stopping import StopMatcher
from gplan.serving.vocabulary import Vocabulary

MAX_UNREAD_BYTES = 16 << 20
"""What may wait for the client of one request to read it, about. Text alone comes nowhere near it; scores may."""

_SCORE_BYTES = 128

_names = itertools.count()


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. `stops` are strings; stop tokens are in `params`.

    Attributes:
        continues_prompt: the text goes on where the prompt's ended, rather than being a text of its own. Some
            tokenizers drop the space before a text's first word.
        is_prompt_only: nothing is wanted but the prompt's scores; what is generated is dropped.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    stops: tuple[str, ...] = ()
    continues_prompt: bool = True
    is_prompt_only: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log probability and the likeliest at its place.

    Attributes:
        offset: characters of the answer before the token.
        logprob: None of a prompt's first token, which nothing predicts.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step, or several, added to an answer. `finish_reason` is set in the last.

    Attributes:
        scored: tokens of the text given out so far that were not in an earlier delta; only where logprobs were asked.
        num_tokens: tokens generated: those of a stop string, the end token and those still held as text included.
        prompt_scores: of the prompt's tokens but the first, in the first delta; only where they were asked for.
    """

    text: str
    scored: tuple[Scored, ...]
    num_tokens: int
    finish_reason: FinishReason | None = None
    prompt_scores: tuple[TokenScore, ...] = ()


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    prompt_scores: tuple[TokenScore, ...] = ()

    @property
    def mean_logprob(self) -> float:
        return sum(entry.logprob or 0.0 for entry in self.scored) / len(self.scored) if self.scored else 0.0


class InterruptedAnswerError(GplanError):
    """The engine died before the answer was complete."""


class AnswerGivenUpError(GplanError):
    """The answer was given up before it was complete, for a reason that is the request's own.

    Attributes:
        status, code: as the API has them.
    """

    def __init__(self, status: int, code: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.status, self.code = status, code


class ClientGoneError(Exception):
    """Nobody waits for the answers any more."""


class _Growing:
    """One answer as it grows. `take` is called for each of the engine's outputs, `read` when the client wants more."""

    __slots__ = (
        "_detokenizer",
        "_given",
        "_is_cut",
        "_is_prompt_only",
        "_length",
        "_matcher",
        "_num_prompt_scores",
        "_num_tokens",
        "_prompt_scores",
        "_scored",
        "_text",
        "_vocabulary",
        "_wants_scores",
        "finish_reason",
        "name",
        "unread_bytes",
    )

    def __init__(self, name: str, vocabulary: Vocabulary, job: Job) -> None:
        self.name = name
        self.finish_reason: FinishReason | None = None
        self.unread_bytes = 0
        """About what the text and the scores take that wait to be read."""
        self._vocabulary = vocabulary
        self._detokenizer = make_detokenizer(vocabulary, job.prompt if job.continues_prompt else ())
        self._matcher = StopMatcher(job.stops)
        self._is_cut = False
        self._wants_scores = job.params.logprobs is not None
        self._is_prompt_only = job.is_prompt_only
        self._prompt_scores: list[TokenScore] = []
        self._num_prompt_scores = 0
        self._text: list[str] = []
        self._scored: list[Scored] = []
        self._num_tokens = 0
        self._length = 0
        """Characters that came out of the detokenizer."""
        self._given = 0
        """Of these, the characters that passed the matcher."""

    def take(self, output: Output) -> None:
        self._take_prompt(output)
        if self._is_prompt_only:
            self.finish_reason = FinishReason.LENGTH if output.finish_reason else None
            return
        for index, token in enumerate(output.tokens):
            self._num_tokens += 1
            text = self._detokenizer.push(token)
            if self._wants_scores:
                logprob, top = output.logprobs[index]
                self._scored.append(Scored(token, logprob, tuple(top), self._offset(token, text)))
                self.unread_bytes += _SCORE_BYTES * (1 + len(top))
            if self._add(text):
                return
        if not output.finish_reason:
            return
        if self._add(self._detokenizer.finish()):
            return
        self._give(self._matcher.finish())
        self.finish_reason = FinishReason(output.finish_reason)
        self._num_tokens += self.finish_reason is FinishReason.STOP

    def _take_prompt(self, output: Output) -> None:
        """Scores of the prompt; a prompt that was computed twice has some twice."""
        fresh = output.prompt_logprobs[max(0, self._num_prompt_scores + 1 - output.prompt_start) :]
        self._num_prompt_scores += len(fresh)
        self._prompt_scores += fresh
        self.unread_bytes += sum(_SCORE_BYTES * (1 + len(top)) for _, top in fresh)

    def read(self) -> Delta | None:
        """What was added since the last call, if anything."""
        if not self._text and not self._num_tokens and self.finish_reason is None:
            return None
        prompt, self._prompt_scores = tuple(self._prompt_scores), []
        delta = Delta("".join(self._text), self._release_scores(), self._num_tokens, self.finish_reason, prompt)
        self._text.clear()
        self._num_tokens = 0
        self.unread_bytes = sum(_SCORE_BYTES * (1 + len(entry.top)) for entry in self._scored)
        return delta

    def _offset(self, token: int, text: str) -> int:
        """Where a token begins in the answer. Its push may have let go of text that was held before it."""
        own = self._vocabulary.token_bytes(token).decode(errors="replace")
        return self._length + (len(text) - len(own) if own and text.endswith(own) else 0)

    def _add(self, text: str) -> bool:
        """Whether the text completed a stop string, which ends the answer."""
        if not text:
            return False
        self._length += len(text)
        text, self._is_cut = self._matcher.push(text)
        self._give(text)
        if self._is_cut:
            self.finish_reason = FinishReason.STOP
        return self._is_cut

    def _give(self, text: str) -> None:
        if text:
            self._given += len(text)
            self.unread_bytes += len(text)
            self._text.append(text)

    def _release_scores(self) -> tuple[Scored, ...]:
        """Scores of tokens whose text was given out; at the end all that are left, but none of a stop string."""
        count = len(self._scored)
        if self.finish_reason is None or self._is_cut:
            count = sum(entry.offset < self._given for entry in self._scored)
        released = tuple(self._scored[:count])
        del self._scored[:count]
        return released


class Engine(Protocol):
    """The part of the engine's client that is needed here; see `EngineClient`."""

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        take: Callable[[Output], None],
        interrupt: Callable[[str], None],
        client: str = "",
    ) -> None: ...

    def abort(self, names: Sequence[str]) -> None: ...


class Generation:
    """All answers of one HTTP request.

    Args:
        on_close: called once, when nothing of it is left with the engine.
        client: whom it is for.
        deadline: when it is given up, of the monotonic clock.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        jobs: Sequence[Job],
        on_close: Callable[[], None],
        *,
        client: str = "",
        deadline: float = math.inf,
    ) -> None:
        self._engine, self._jobs, self._on_close = engine, jobs, on_close
        self._client, self._deadline = client, deadline
        self._open: dict[int, _Growing] = {
            index: _Growing(f"{next(_names):x}", vocabulary, job) for index, job in enumerate(jobs)
        }
        self._has_news = asyncio.Event()
        self._is_closed = False
        self._failure: GplanError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        """Whether any token came."""

    def start(self) -> None:
        """Hands everything to the engine.

        Raises:
            EngineDiedError: there is none any more.
        """
        if self._deadline < math.inf:
            left = self._deadline - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)
        for index, growing in self._open.items():
            job, sink = self._jobs[index], self._sink(growing)
            self._engine.submit(growing.name, job.prompt, job.params, sink, self._interrupt, self._client)

    async def read(self) -> list[tuple[int, Delta]]:
        """Waits until there is something and returns it, by index of the job; nothing once all answers are complete.

        Raises:
            InterruptedAnswerError: the engine died.
            AnswerGivenUpError: its time was over, too much of it was left unread, or the engine cannot go on with it.
            ClientGoneError: `close` was called.
        """
        while self._open:
            self._has_news.clear()
            if self._is_closed:
                raise ClientGoneError
            news = [(index, delta) for index, growing in self._open.items() if (delta := growing.read()) is not None]
            if news:
                self._forget_complete(news)
                return news
            if self._failure is not None:
                raise self._failure
            await self._has_news.wait()
        return []

    async def complete(self) -> list[Answer]:
        """The answers, whole. Raises as `read` does."""
        answers = [Answer() for _ in self._jobs]
        texts: list[list[str]] = [[] for _ in self._jobs]
        while news := await self.read():
            for index, delta in news:
                answer = answers[index]
                texts[index].append(delta.text)
                answer.scored += delta.scored
                answer.num_tokens += delta.num_tokens
                answer.finish_reason = delta.finish_reason or answer.finish_reason
                answer.prompt_scores += delta.prompt_scores
        for answer, parts in zip(answers, texts, strict=True):
            answer.text = "".join(parts)
        return answers

    @property
    def is_complete(self) -> bool:
        """Whether every answer is complete and was read."""
        return not self._open

    def close(self) -> None:
        """Gives up what is unfinished. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._engine.abort(self._unfinished())
        self._has_news.set()
        self._on_close()

    def _forget_complete(self, news: Sequence[tuple[int, Delta]]) -> None:
        for index, delta in news:
            if delta.finish_reason is not None:
                del self._open[index]

    def _sink(self, growing: _Growing) -> Callable[[Output], None]:
        def take(output: Output) -> None:
            growing.take(output)
            self._has_begun = True
            if growing.finish_reason is not None and not output.finish_reason:
                self._engine.abort([growing.name])
            if growing.unread_bytes > MAX_UNREAD_BYTES // len(self._jobs):
                self._give_up(
                    AnswerGivenUpError(
                        400, "slow_reader", "too much of the answer was left unread", "Read streams as they come."
                    )
                )
            self._has_news.set()

        return take

    def _interrupt(self, why: str) -> None:
        if why:
            message = f"the answer cannot go on: {why}"
            self._give_up(AnswerGivenUpError(500, "answer_failed", message, "Ask for something simpler."))
        else:
            self._give_up(InterruptedAnswerError("the engine died", "Ask again once the server is back."))

    def _expire(self) -> None:
        stage = "answer was complete" if self._has_begun else "first token"
        self._give_up(
            AnswerGivenUpError(
                504, "deadline_exceeded", f"the request's time was over before its {stage}", "Allow it more time."
            )
        )

    def _give_up(self, failure: GplanError) -> None:
        """Ends what is unfinished; the client is told once it has read what there is."""
        if self._failure is None and self._unfinished():
            self._failure = failure
            self._engine.abort(self._unfinished())
            self._has_news.set()

    def _unfinished(self) -> list[str]:
        return [growing.name for growing in self._open.values() if growing.finish_reason is None]
