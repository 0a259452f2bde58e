"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from formats.openai import (
    ChatAnswer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from formats.openai_rules import decode_chat
from gplan.serving.generation import Answer, InterruptedAnswerError, Job, Scored, complete_all
from gplan.serving.http.answers import chat_logprobs, finish_reason, usage_of
from gplan.serving.http.errors import ApiError
from gplan.serving.http.events import DONE, event, merged
from gplan.serving.http.service import Service, decode_body, in_thread, while_connected


async def chat_completions(service: Service, request: Request) -> Response:
    body = await decode_body(request, decode_chat)
    service.check_model(body.model)
    service.check_room(body.n or 1)
    if not service.tokenizer.has_chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
    jobs = await in_thread(_jobs, service, body)
    name, created = f"chatcmpl-{uuid.uuid4().hex}", service.now()
    if body.stream:
        return StreamingResponse(_events(service, body, jobs, name, created), media_type="text/event-stream")
    answers = await while_connected(request, complete_all(service.client, service.tokenizer.vocabulary, jobs))
    if answers is None:
        return Response(status_code=499)
    reply = ChatCompletionResponse(
        id=name,
        created=created,
        model=service.model,
        choices=[_choice(service, body, index, answer) for index, answer in enumerate(answers)],
        usage=usage_of(len(jobs[0].prompt), sum(len(answer.tokens) for answer in answers)),
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _jobs(service: Service, body: ChatCompletionRequest) -> list[Job]:
    """Applies the template and tokenises; runs in a thread."""
    try:
        prompt = service.tokenizer.encode_chat(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            template_arguments=body.chat_template_kwargs,
        )
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param="messages") from None
    return service.jobs(
        body,
        prompt,
        count=body.n or 1,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        param="messages",
    )


def _choice(service: Service, body: ChatCompletionRequest, index: int, answer: Answer) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=ChatAnswer(content=answer.text),
        finish_reason=finish_reason(answer.finish_reason),
        logprobs=_logprobs(service, body, answer.tokens),
    )


def _logprobs(service: Service, body: ChatCompletionRequest, tokens: Sequence[Scored]) -> ChatLogprobs | None:
    return chat_logprobs(service.tokenizer.vocabulary, tokens) if body.logprobs else None


async def _events(
    service: Service, body: ChatCompletionRequest, jobs: Sequence[Job], name: str, created: int
) -> AsyncIterator[bytes]:
    num_tokens = 0

    def chunk(choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        shown = usage if body.wants_usage_chunk else msgspec.UNSET
        return event(ChatCompletionChunk(id=name, created=created, model=service.model, choices=choices, usage=shown))

    for index in range(len(jobs)):
        yield chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))])
    try:
        async for deltas in merged(service.client, service.tokenizer.vocabulary, jobs):
            parts = []
            for index, delta in deltas:
                num_tokens += len(delta.tokens)
                logprobs = _logprobs(service, body, delta.tokens) if delta.tokens else None
                if delta.text or logprobs is not None:
                    content = ChatDelta(content=delta.text)
                    parts.append(chunk([ChatChunkChoice(index=index, delta=content, logprobs=logprobs)]))
                if delta.finish_reason is not None:
                    reason = finish_reason(delta.finish_reason)
                    parts.append(chunk([ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)]))
            if parts:
                yield b"".join(parts)
    except InterruptedAnswerError as error:
        yield event(ApiError(500, error.message, code="engine_down").body())
        return
    if body.wants_usage_chunk:
        yield chunk([], usage_of(len(jobs[0].prompt), num_tokens))
    yield DONE
