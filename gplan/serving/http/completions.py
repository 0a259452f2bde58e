"""`POST /v1/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from formats.openai import CompletionChoice, CompletionRequest, CompletionResponse
from formats.openai_rules import decode_completion
from gplan.serving.generation import Answer, InterruptedAnswerError, Job, complete_all
from gplan.serving.http.answers import completion_logprobs, finish_reason, usage_of
from gplan.serving.http.errors import ApiError
from gplan.serving.http.events import DONE, event, merged
from gplan.serving.http.service import Service, decode_body, in_thread, while_connected


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt: its tokens, what is echoed before its answers, and the jobs for them."""

    tokens: tuple[int, ...]
    echo: str
    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class _Reply:
    """What all choices and chunks of a reply share."""

    model: str
    created: int
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")


async def completions(service: Service, request: Request) -> Response:
    body = await decode_body(request, decode_completion)
    service.check_model(body.model)
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported here", param="echo", code="unsupported_parameter")
    best_of = body.best_of or body.n or 1
    service.check_room(best_of * len(body.prompts))
    prompts = await in_thread(_prompts, service, body, best_of)
    reply = _Reply(service.model, service.now())
    if body.stream:
        return StreamingResponse(_events(service, body, prompts, reply), media_type="text/event-stream")
    jobs = [job for prompt in prompts for job in prompt.jobs]
    answers = await while_connected(request, complete_all(service.client, service.tokenizer.vocabulary, jobs))
    if answers is None:
        return Response(status_code=499)
    return Response(
        msgspec.json.encode(_response(service, body, prompts, answers, reply)), media_type="application/json"
    )


def _prompts(service: Service, body: CompletionRequest, best_of: int) -> list[_Prompt]:
    """Tokenises; runs in a thread."""
    found = []
    ranked = best_of > (body.n or 1)
    for index, prompt in enumerate(body.prompts):
        name = "prompt" if isinstance(body.prompt, str) or len(body.prompts) == 1 else f"prompt[{index}]"
        tokens = service.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        logprobs = 0 if ranked and body.logprobs is None else body.logprobs
        jobs = service.jobs(
            body, tokens, count=best_of, max_tokens=body.max_output_tokens, logprobs=logprobs, param=name
        )
        text = prompt if isinstance(prompt, str) else service.tokenizer.decode(tokens)
        found.append(_Prompt(tuple(tokens), text if body.echo else "", jobs))
    return found


def _response(
    service: Service, body: CompletionRequest, prompts: Sequence[_Prompt], answers: Sequence[Answer], reply: _Reply
) -> CompletionResponse:
    choices: list[CompletionChoice] = []
    done = 0
    for prompt in prompts:
        mine = answers[done : done + len(prompt.jobs)]
        done += len(prompt.jobs)
        best = sorted(mine, key=lambda answer: -answer.mean_logprob) if len(mine) > (body.n or 1) else mine
        for answer in best[: body.n or 1]:
            logprobs = None
            if body.logprobs is not None:
                vocabulary = service.tokenizer.vocabulary
                logprobs = completion_logprobs(vocabulary, answer.tokens, len(prompt.echo), body.logprobs > 0)
            text = prompt.echo + answer.text
            choices.append(
                CompletionChoice(
                    index=len(choices), text=text, logprobs=logprobs, finish_reason=finish_reason(answer.finish_reason)
                )
            )
    used = usage_of(sum(len(p.tokens) for p in prompts), sum(len(answer.tokens) for answer in answers))
    return CompletionResponse(id=reply.id, created=reply.created, model=reply.model, choices=choices, usage=used)


async def _events(
    service: Service, body: CompletionRequest, prompts: Sequence[_Prompt], reply: _Reply
) -> AsyncIterator[bytes]:
    vocabulary = service.tokenizer.vocabulary
    jobs = [job for prompt in prompts for job in prompt.jobs]
    offsets = [len(prompt.echo) for prompt in prompts for _ in prompt.jobs]
    num_tokens = 0

    def chunk(choice: CompletionChoice) -> bytes:
        usage = None if body.wants_usage_chunk else msgspec.UNSET
        return event(
            CompletionResponse(id=reply.id, created=reply.created, model=reply.model, choices=[choice], usage=usage)
        )

    echoes = [prompt.echo for prompt in prompts for _ in prompt.jobs]
    for index, echo in enumerate(echoes):
        if echo:
            yield chunk(CompletionChoice(index=index, text=echo))
    try:
        async for deltas in merged(service.client, vocabulary, jobs):
            parts = []
            for index, delta in deltas:
                num_tokens += len(delta.tokens)
                logprobs = None
                if body.logprobs is not None:
                    logprobs = completion_logprobs(vocabulary, delta.tokens, offsets[index], body.logprobs > 0)
                offsets[index] += len(delta.text)
                reason = None if delta.finish_reason is None else finish_reason(delta.finish_reason)
                if delta.text or reason or (logprobs is not None and delta.tokens):
                    parts.append(
                        chunk(CompletionChoice(index=index, text=delta.text, logprobs=logprobs, finish_reason=reason))
                    )
            if parts:
                yield b"".join(parts)
    except InterruptedAnswerError as error:
        yield event(ApiError(500, error.message, code="engine_down").body())
        return
    if body.wants_usage_chunk:
        usage = usage_of(sum(len(p.tokens) for p in prompts), num_tokens)
        yield event(CompletionResponse(id=reply.id, created=reply.created, model=reply.model, choices=[], usage=usage))
    yield DONE
