"""`POST /v1/chat/completions`."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from formats.openai import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
)
from formats.openai_rules import decode_chat
from formats.openai_tools import Tool
from gplan.serving.generation import Answer, Delta, Job, Scored
from gplan.serving.http.answers import chat_logprobs, usage_of
from gplan.serving.http.bodies import decode_body
from gplan.serving.http.errors import ApiError
from gplan.serving.http.events import EventStream, WholeAnswer, event
from gplan.serving.http.guidance import AnswerReader, Guidance, answer_of, delta_of, guidance_of
from gplan.serving.http.service import Service
from gplan.serving.tokenizer import TemplateRefusalError, TooManyTokensError
from gplan.serving.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class _Reply:
    """What all choices and chunks of a reply share."""

    model: str
    created: int
    num_prompt_tokens: int
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")


async def chat_completions(service: Service, request: Request) -> Response:
    body = await decode_body(request, decode_chat)
    service.check_model(body.model)
    if not service.tokenizer.has_chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
    seat = service.admit(request, body.n or 1)
    guidance, jobs = await service.in_thread_with(seat, _jobs, service, body)
    reply = _Reply(service.model, service.now(), len(jobs[0].prompt))
    vocabulary = service.tokenizer.vocabulary
    generation = service.begin(jobs, seat)
    if body.stream:
        return EventStream(generation, _Writer(body, [guidance.reader() for _ in jobs], reply, vocabulary))
    return WholeAnswer(generation, functools.partial(_response, body, guidance, reply, vocabulary))


def _jobs(service: Service, body: ChatCompletionRequest) -> tuple[Guidance, list[Job]]:
    """Applies the template, tokenises, and makes a grammar where one is asked for; runs in a thread."""
    guidance = guidance_of(service, body)
    tools = body.tools if body.callable_tools else None
    try:
        prompt = service.tokenizer.encode_chat(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            template_arguments=body.chat_template_kwargs or {},
            limit=service.jobs.max_len,
            tools=[_for_template(tool) for tool in tools or ()],
        )
    except TemplateRefusalError as error:
        raise ApiError(400, str(error), param=error.param) from None
    except TooManyTokensError as error:
        raise service.jobs.too_long(f"the messages have more than {error.count} tokens", "messages") from None
    jobs = service.jobs.make(
        body,
        prompt,
        count=body.n or 1,
        max_tokens=body.max_output_tokens,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        param="messages",
        continues_prompt=False,
        grammar=guidance.grammar,
    )
    return guidance, jobs


def _for_template(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.function.name, "parameters": tool.function.schema}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    return {"type": tool.type, "function": function}


def _response(
    body: ChatCompletionRequest, guidance: Guidance, reply: _Reply, vocabulary: Vocabulary, answers: Sequence[Answer]
) -> ChatCompletionResponse:
    choices = []
    for index, answer in enumerate(answers):
        reader = guidance.reader()
        message = answer_of(reader.push(answer.text, is_last=True))
        reason, logprobs = reader.finish_reason(answer.finish_reason), _logprobs(body, vocabulary, answer.scored)
        choices.append(ChatChoice(index=index, message=message, finish_reason=reason, logprobs=logprobs))
    usage = usage_of(reply.num_prompt_tokens, sum(answer.num_tokens for answer in answers))
    return ChatCompletionResponse(id=reply.id, created=reply.created, model=reply.model, choices=choices, usage=usage)


def _logprobs(body: ChatCompletionRequest, vocabulary: Vocabulary, tokens: Sequence[Scored]) -> ChatLogprobs | None:
    return chat_logprobs(vocabulary, tokens) if body.logprobs else None


class _Writer:
    """Chunks of a stream."""

    def __init__(
        self, body: ChatCompletionRequest, readers: Sequence[AnswerReader], reply: _Reply, vocabulary: Vocabulary
    ) -> None:
        self._body, self._readers, self._reply, self._vocabulary = body, readers, reply, vocabulary
        self._num_tokens = 0

    def begin(self) -> bytes:
        role = ChatDelta(role="assistant", content="")
        return b"".join(self._chunk(ChatChunkChoice(index=i, delta=role)) for i in range(len(self._readers)))

    def part(self, news: Sequence[tuple[int, Delta]]) -> bytes:
        return b"".join([self._delta(index, delta) for index, delta in news])

    def end(self) -> bytes:
        if not self._body.wants_usage_chunk:
            return b""
        usage = usage_of(self._reply.num_prompt_tokens, self._num_tokens)
        return event(msgspec.structs.replace(self._response([]), usage=usage))

    def _delta(self, index: int, delta: Delta) -> bytes:
        self._num_tokens += delta.num_tokens
        reader, reason = self._readers[index], delta.finish_reason
        logprobs = _logprobs(self._body, self._vocabulary, delta.scored) if delta.scored else None
        changes = [delta_of(piece) for piece in reader.push(delta.text, is_last=reason is not None)]
        if logprobs is not None and not changes:
            changes = [ChatDelta(content="")]
        choices = [ChatChunkChoice(index=index, delta=change) for change in changes]
        if choices:
            choices[0] = msgspec.structs.replace(choices[0], logprobs=logprobs)
        if reason is not None:
            finish = reader.finish_reason(reason)
            choices.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=finish))
        return b"".join([self._chunk(choice) for choice in choices])

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return event(self._response([choice]))

    def _response(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        reply = self._reply
        usage = None if self._body.wants_usage_chunk else msgspec.UNSET
        return ChatCompletionChunk(id=reply.id, created=reply.created, model=reply.model, choices=choices, usage=usage)
