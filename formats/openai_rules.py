"""Reads the bodies of API requests: JSON, types, unsupported fields, and what fields say together.

Every refusal is a `BadRequestError` that names the parameter; nothing here knows a model or a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from formats.errors import BadRequestError
from formats.explain import explain, shorten
from formats.openai import (
    MAX_CHOICES,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    SamplingRequest,
)
from formats.tokenizing import DetokenizeRequest, TokenizeRequest

MAX_SEQUENCES = 256
"""Prompts times answers of one request at most."""

_REFUSED_COMPLETION: Mapping[str, tuple[Any, ...]] = {"suffix": ("",)}
_REFUSED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_REFUSED_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
}
"""Fields that would change the answer, with the values beside null that would not."""

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatCompletionRequest)
_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Reads the body of `POST /v1/completions`.

    Raises:
        BadRequestError: names the first parameter that is wrong.
    """
    request = _decode(_COMPLETION, body)
    _refuse(request, _REFUSED_COMPLETION, "")
    _check_shared(request)
    _check_prompt(request)
    if request.max_tokens == 0 and not request.echo:
        raise BadRequestError("max_tokens of 0 needs echo to be true", "max_tokens")
    n, best_of = request.n or 1, request.best_of
    if best_of is not None and best_of < n:
        raise BadRequestError(f"best_of ({best_of}) must be at least n ({n})", "best_of")
    if best_of is not None and best_of > n and request.stream:
        raise BadRequestError("best_of larger than n cannot be streamed", "best_of")
    if len(request.prompts) * max(n, best_of or 1) > MAX_SEQUENCES:
        raise BadRequestError(
            f"more than {MAX_SEQUENCES} answers in one request", "n" if best_of is None else "best_of"
        )
    return request


def decode_chat(body: bytes) -> ChatCompletionRequest:
    """Reads the body of `POST /v1/chat/completions`.

    Raises:
        BadRequestError: names the first parameter that is wrong.
    """
    request = _decode(_CHAT, body)
    _refuse(request, _REFUSED_CHAT, "")
    _check_shared(request)
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    _check_format(request)
    _check_tools(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise BadRequestError("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    return request


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """Reads the body of `POST /tokenize`.

    Raises:
        BadRequestError: names the first parameter that is wrong.
    """
    return _decode(_TOKENIZE, body)


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """Reads the body of `POST /detokenize`. Raises as `decode_tokenize`."""
    return _decode(_DETOKENIZE, body)


def _decode(decoder: msgspec.json.Decoder[RequestT], body: bytes) -> RequestT:
    if not body:
        raise BadRequestError("the body is empty; it must be a JSON object", code="invalid_json")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _name(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply", code="invalid_json") from None


def _name(error: msgspec.ValidationError) -> BadRequestError:
    found = explain(error)
    if found.kind == "unknown":
        return BadRequestError(f"unknown parameter: {found.path}", found.path, "unknown_parameter")
    if found.kind == "missing":
        return BadRequestError(f"missing parameter: {found.path}", found.path, "missing_required_parameter")
    return BadRequestError(f"{found.path or 'body'}: {found.problem}", found.path, "invalid_type")


def _refuse(value: msgspec.Struct, refused: Mapping[str, tuple[Any, ...]], parent: str) -> None:
    for name, neutral in refused.items():
        found = getattr(value, name)
        if found is not None and found not in neutral:
            path = f"{parent}.{name}" if parent else name
            raise BadRequestError(
                f"{path} is not supported here and would change the answer", path, "unsupported_parameter"
            )


def _check_shared(request: CompletionRequest | ChatCompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("stream_options needs stream to be true", "stream_options")
    limit = request.max_output_tokens
    if limit is not None and request.min_tokens is not None and request.min_tokens > limit:
        raise BadRequestError(f"min_tokens ({request.min_tokens}) is more than the token limit ({limit})", "min_tokens")


def _check_format(request: ChatCompletionRequest) -> None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_schema" and wanted.json_schema is None:
        path = "response_format.json_schema"
        raise BadRequestError(f"missing parameter: {path}", path, "missing_required_parameter")
    _check_ends(request, "response_format")


def _check_tools(request: ChatCompletionRequest) -> None:
    names = [tool.function.name for tool in request.tools or ()]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise BadRequestError(f"two tools are called {name}", f"tools[{index}].function.name")
    if not request.may_talk and not request.callable_tools:
        raise BadRequestError("tool_choice asks for a tool that is not among tools", "tool_choice")
    if request.callable_tools:
        _check_ends(request, "tools")
        if request.response_format is not None and request.response_format.type != "text":
            raise BadRequestError("response_format cannot be given together with tools", "response_format")


def _check_ends(request: SamplingRequest, wanted: str) -> None:
    """An answer that follows a grammar ends where the grammar says so, and nowhere else."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request, name):
            raise BadRequestError(f"{name} cannot be given together with {wanted}", name)


def _check_prompt(request: CompletionRequest) -> None:
    prompt = request.prompt
    if not prompt:
        raise BadRequestError("prompt is empty", "prompt")
    if isinstance(prompt, str):
        return
    if len({type(item) for item in prompt}) > 1:
        raise BadRequestError("prompt mixes texts and token ids", "prompt", "invalid_type")
    if isinstance(prompt[0], int):
        return
    if len(prompt) > MAX_CHOICES:
        raise BadRequestError(f"more than {MAX_CHOICES} prompts in one request", "prompt")
    for index, item in enumerate(prompt):
        if not item:
            raise BadRequestError(f"prompt[{index}] is empty", f"prompt[{index}]")


def _check_message(message: ChatMessage, path: str) -> None:
    _refuse(message, _REFUSED_MESSAGE, path)
    _check_calls(message, path)
    if message.content is None and not message.tool_calls:
        raise BadRequestError(f"missing parameter: {path}.content", f"{path}.content", "missing_required_parameter")
    for part_path, kind, text in _parts(message, path):
        if kind != "text":
            raise BadRequestError(f"{part_path}: content of type {shorten(kind)!r} is not supported", part_path)
        if text is None:
            raise BadRequestError(
                f"missing parameter: {part_path}.text", f"{part_path}.text", "missing_required_parameter"
            )


def _check_calls(message: ChatMessage, path: str) -> None:
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            raise BadRequestError(f"{path}.{name} belongs to a message of role {role}", f"{path}.{name}")
    for index, call in enumerate(message.tool_calls or ()):
        try:
            call.for_template()
        except (ValueError, RecursionError):
            where = f"{path}.tool_calls[{index}].function.arguments"
            raise BadRequestError(f"{where} is not JSON", where) from None


def _parts(message: ChatMessage, path: str) -> Iterator[tuple[str, str, str | None]]:
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            yield f"{path}.content[{index}]", part.type, part.text
