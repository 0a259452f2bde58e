"""One answer from the engine, as text: tokens in, deltas out, ended by stop strings and cleaned up whatever happens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from gplan.core import FinishReason, SamplingParams
from gplan.errors import GplanError
from gplan.serving.client import EngineClient
from gplan.serving.detokenizer import make_detokenizer
from gplan.serving.protocol import Output
from gplan.serving.stopping import StopMatcher
from gplan.serving.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. `stops` are strings; stop tokens are in `params`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log probability and the likeliest at its place, where those were asked for."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step, or several, added to an answer. `finish_reason` is set in the last."""

    text: str
    tokens: tuple[Scored, ...]
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    text: str = ""
    tokens: list[Scored] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.STOP

    @property
    def mean_logprob(self) -> float:
        scores = [entry.logprob for entry in self.tokens if entry.logprob is not None]
        return sum(scores) / len(scores) if scores else 0.0


class InterruptedAnswerError(GplanError):
    """The engine died before the answer was complete."""


async def stream(client: EngineClient, vocabulary: Vocabulary, job: Job) -> AsyncIterator[Delta]:
    """Generates an answer piece by piece. Closing the iterator early gives the request up.

    Raises:
        InterruptedAnswerError: the engine died.
    """
    name = uuid.uuid4().hex
    queue = await client.submit(name, list(job.prompt), job.params)
    try:
        detokenizer, matcher = make_detokenizer(vocabulary, job.prompt), StopMatcher(job.stops)
        while True:
            outputs = await _next(queue)
            tokens = tuple(scored for output in outputs for scored in _scored(output))
            text, is_stopped, used = "", False, 0
            for scored in tokens:
                used += 1
                piece, is_stopped = matcher.push(detokenizer.push(scored.token))
                text += piece
                if is_stopped:
                    break
            reason = FinishReason(outputs[-1].finish_reason) if outputs[-1].finish_reason else None
            if reason is not None and not is_stopped:
                piece, is_stopped = matcher.push(detokenizer.finish())
                text += piece + ("" if is_stopped else matcher.finish())
            if is_stopped:
                reason = FinishReason.STOP
            if text or tokens or reason is not None:
                yield Delta(text, tokens[:used], reason)
            if reason is not None:
                return
    finally:
        await client.abort([name])


async def complete(client: EngineClient, vocabulary: Vocabulary, job: Job) -> Answer:
    """Generates an answer whole."""
    answer = Answer()
    pieces = []
    async for delta in stream(client, vocabulary, job):
        pieces.append(delta.text)
        answer.tokens.extend(delta.tokens)
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason
    answer.text = "".join(pieces)
    return answer


async def complete_all(client: EngineClient, vocabulary: Vocabulary, jobs: Sequence[Job]) -> list[Answer]:
    """Generates several answers at once; gives all of them up when one fails or the caller goes."""
    tasks = [asyncio.create_task(complete(client, vocabulary, job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next(queue: asyncio.Queue[Output | None]) -> list[Output]:
    """The next output and all that came meanwhile."""
    outputs = [await queue.get()]
    while not queue.empty():
        outputs.append(queue.get_nowait())
    found = [output for output in outputs if output is not None]
    if len(found) < len(outputs):
        raise InterruptedAnswerError("the engine died", "Ask again once the server is back.")
    return found


def _scored(output: Output) -> list[Scored]:
    if not output.logprobs:
        return [Scored(token, None, ()) for token in output.tokens]
    pairs = zip(output.tokens, output.logprobs, strict=True)
    return [Scored(token, logprob, tuple(top)) for token, (logprob, top) in pairs]
