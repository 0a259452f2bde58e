"""`POST /v1/completions`."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from formats.openai import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse
from formats.openai_rules import decode_completion
from gplan.serving.detokenizer import make_detokenizer
from gplan.serving.generation import Answer, Delta, Job, Scored
from gplan.serving.http.answers import completion_logprobs, finish_reason, usage_of
from gplan.serving.http.bodies import decode_body
from gplan.serving.http.events import EventStream, WholeAnswer, event
from gplan.serving.http.service import Service
from gplan.serving.protocol import TokenScore
from gplan.serving.tokenizer import ServedTokenizer, TooManyTokensError
from gplan.serving.vocabulary import Vocabulary

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt: its tokens, what is echoed before its answers, and the jobs for them.

    Attributes:
        offsets: characters of the echo before each token; empty unless the prompt is scored.
    """

    tokens: tuple[int, ...]
    echo: str
    jobs: list[Job]
    offsets: tuple[int, ...] = ()

    def scored(self, scores: Sequence[TokenScore]) -> list[Scored]:
        """The echo's tokens with their scores; nothing predicts the first."""
        if not self.offsets:
            return []
        rest = zip(self.tokens[1:], scores, self.offsets[1:], strict=True)
        return [
            Scored(self.tokens[0], None, (), 0),
            *(Scored(token, score, tuple(top), offset) for token, (score, top), offset in rest),
        ]

    def shifted(self, scored: Sequence[Scored]) -> list[Scored]:
        """Scores of the answer, as of the text that begins with the echo."""
        return [replace(entry, offset=entry.offset + len(self.echo)) for entry in scored]


@dataclass(frozen=True, slots=True)
class _Reply:
    """What all choices and chunks of a reply share."""

    model: str
    created: int
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")


async def completions(service: Service, request: Request) -> Response:
    body = await decode_body(request, decode_completion)
    service.check_model(body.model)
    best_of = body.best_of or body.n or 1
    seat = service.admit(request, best_of * len(body.prompts))
    prompts = await service.in_thread_with(seat, _prompts, service, body, best_of)
    reply = _Reply(service.model, service.now())
    vocabulary = service.tokenizer.vocabulary
    generation = service.begin([job for prompt in prompts for job in prompt.jobs], seat)
    if body.stream:
        return EventStream(generation, _Writer(body, prompts, reply, vocabulary))
    return WholeAnswer(generation, functools.partial(_response, body, prompts, reply, vocabulary))


def _prompts(service: Service, body: CompletionRequest, best_of: int) -> list[_Prompt]:
    """Tokenises; runs in a thread."""
    found = []
    is_ranked = best_of > (body.n or 1)
    for index, prompt in enumerate(body.prompts):
        name = "prompt" if isinstance(body.prompt, str) or len(body.prompts) == 1 else f"prompt[{index}]"
        tokens = _tokens(service, prompt, name)
        jobs = service.jobs.make(
            body,
            tokens,
            count=best_of,
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=0 if is_ranked and body.logprobs is None else body.logprobs,
            param=name,
            continues_prompt=True,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        echo = ""
        if body.echo:
            echo = prompt if isinstance(prompt, str) else service.tokenizer.decode(tokens)
        offsets = _offsets(service.tokenizer, prompt, tokens) if body.echo and body.logprobs is not None else ()
        found.append(_Prompt(tuple(tokens), echo, jobs, tuple(offsets)))
    return found


def _tokens(service: Service, prompt: str | tuple[int, ...], name: str) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        return service.tokenizer.encode_at_most(prompt, service.jobs.max_len)
    except TooManyTokensError as error:
        raise service.jobs.too_long(f"the prompt has more than {error.count} tokens", name) from None


def _offsets(tokenizer: ServedTokenizer, prompt: str | tuple[int, ...], tokens: Sequence[int]) -> Sequence[int]:
    """Characters of the echo before each token of it."""
    if isinstance(prompt, str):
        return tokenizer.offsets(prompt)
    detokenizer, length, offsets = make_detokenizer(tokenizer.vocabulary), 0, []
    for token in tokens:
        offsets.append(length)
        length += len(detokenizer.push(token))
    return offsets


def _response(
    body: CompletionRequest,
    prompts: Sequence[_Prompt],
    reply: _Reply,
    vocabulary: Vocabulary,
    answers: Sequence[Answer],
) -> CompletionResponse:
    choices: list[CompletionChoice] = []
    n = body.n or 1
    remaining = iter(answers)
    for prompt in prompts:
        mine = [next(remaining) for _ in prompt.jobs]
        best = sorted(mine, key=lambda answer: -answer.mean_logprob) if len(mine) > n else mine
        for answer in best[:n]:
            logprobs = None
            if body.logprobs is not None:
                scored = prompt.scored(answer.prompt_scores) + prompt.shifted(answer.scored)
                logprobs = completion_logprobs(vocabulary, scored, body.logprobs > 0)
            choices.append(
                CompletionChoice(
                    index=len(choices),
                    text=prompt.echo + answer.text,
                    logprobs=logprobs,
                    finish_reason=finish_reason(answer.finish_reason),
                )
            )
    used = usage_of(sum(len(p.tokens) for p in prompts), sum(answer.num_tokens for answer in answers))
    return CompletionResponse(id=reply.id, created=reply.created, model=reply.model, choices=choices, usage=used)


class _Writer:
    """Chunks of a stream."""

    def __init__(
        self, body: CompletionRequest, prompts: Sequence[_Prompt], reply: _Reply, vocabulary: Vocabulary
    ) -> None:
        self._body, self._reply, self._vocabulary = body, reply, vocabulary
        self._prompts = [prompt for prompt in prompts for _ in prompt.jobs]
        self._is_echoed = [False] * len(self._prompts)
        self._num_prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self._num_tokens = 0

    def begin(self) -> bytes:
        # A scored echo waits for its scores.
        return b"".join([self._echo(i) for i, prompt in enumerate(self._prompts) if prompt.echo and not prompt.offsets])

    def part(self, news: Sequence[tuple[int, Delta]]) -> bytes:
        return b"".join([self._delta(index, delta) for index, delta in news])

    def end(self) -> bytes:
        if not self._body.wants_usage_chunk:
            return b""
        usage = usage_of(self._num_prompt_tokens, self._num_tokens)
        return event(msgspec.structs.replace(self._response([]), usage=usage))

    def _delta(self, index: int, delta: Delta) -> bytes:
        self._num_tokens += delta.num_tokens
        prompt, data = self._prompts[index], b""
        if prompt.offsets and not self._is_echoed[index]:
            self._is_echoed[index] = True
            data = self._echo(index, prompt.scored(delta.prompt_scores))
        logprobs = self._logprobs(prompt.shifted(delta.scored))
        reason = None if delta.finish_reason is None else finish_reason(delta.finish_reason)
        if not (delta.text or reason or logprobs):
            return data
        choice = CompletionChoice(index=index, text=delta.text, logprobs=logprobs, finish_reason=reason)
        return data + self._chunk(choice)

    def _echo(self, index: int, scored: Sequence[Scored] = ()) -> bytes:
        echo = self._prompts[index].echo
        return self._chunk(CompletionChoice(index=index, text=echo, logprobs=self._logprobs(scored)))

    def _logprobs(self, scored: Sequence[Scored]) -> CompletionLogprobs | None:
        wanted = self._body.logprobs
        return completion_logprobs(self._vocabulary, scored, wanted > 0) if wanted is not None and scored else None

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return event(self._response([choice]))

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        reply = self._reply
        usage = None if self._body.wants_usage_chunk else msgspec.UNSET
        return CompletionResponse(id=reply.id, created=reply.created, model=reply.model, choices=choices, usage=usage)
