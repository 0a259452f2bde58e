"""What a chat answer must follow, and how it is read: text of a format, or words and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from formats.openai import ChatAnswer, ChatCompletionRequest, ChatDelta, ChatFinishReason
from formats.openai_tools import FunctionCall, FunctionDelta, NamedToolChoice, ToolCall, ToolCallDelta
from gplan.core import FinishReason
from gplan.serving.grammar.library import GrammarError, schema_grammar, tools_grammar
from gplan.serving.grammar.tool_calls import Arguments, Called, Piece, ToolCallReader, Words
from gplan.serving.grammar.tool_syntax import ToolSyntax
from gplan.serving.http.answers import finish_reason
from gplan.serving.http.errors import ApiError
from gplan.serving.http.service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """What the answers to one request follow.

    Attributes:
        grammar: empty where an answer may be any text.
        syntax: how calls are written; None where no tool may be called.
        may_talk: an answer need not call a tool.
        is_named: the one tool to call was named.
    """

    grammar: str = ""
    syntax: ToolSyntax | None = None
    may_talk: bool = True
    is_named: bool = False

    def reader(self) -> AnswerReader:
        return AnswerReader(self)


def guidance_of(service: Service, body: ChatCompletionRequest) -> Guidance:
    """
    Raises:
        ApiError: 400 for what the schema, the model's template or the installation do not support; names it.
    """
    schema = None if body.response_format is None else body.response_format.schema
    param = "tools" if body.callable_tools else "response_format"
    try:
        if body.callable_tools:
            service.require_grammars(param)
            return _of_tools(service, body)
        if schema is not None:
            service.require_grammars(param)
            return Guidance(grammar=schema_grammar(schema))
    except GrammarError as error:
        raise ApiError(400, f"{param}: {error.message}", param=param, code="invalid_schema") from None
    return Guidance()


def _of_tools(service: Service, body: ChatCompletionRequest) -> Guidance:
    syntax, functions = service.tokenizer.tool_syntax, [tool.function for tool in body.callable_tools]
    is_named = isinstance(body.tool_choice, NamedToolChoice)
    may_repeat = body.parallel_tool_calls is not False and not is_named
    lark = syntax.grammar(functions, may_talk=body.may_talk, may_repeat=may_repeat)
    return Guidance(grammar=tools_grammar(lark), syntax=syntax, may_talk=body.may_talk, is_named=is_named)


class AnswerReader:
    """Reads one answer as it grows."""

    def __init__(self, guidance: Guidance) -> None:
        self._is_named = guidance.is_named
        self._calls: ToolCallReader | None = None
        if guidance.syntax is not None:
            self._calls = ToolCallReader(guidance.syntax, may_talk=guidance.may_talk)

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        if self._calls is None:
            return [Words(text)] if text else []
        return self._calls.push(text) + (self._calls.finish() if is_last else [])

    def finish_reason(self, reason: FinishReason) -> ChatFinishReason:
        """As the API has it: where the tool was named, calling it is no reason of its own."""
        found = finish_reason(reason)
        if found == "stop" and self._calls is not None and self._calls.num_complete and not self._is_named:
            return "tool_calls"
        return found


def delta_of(piece: Piece) -> ChatDelta:
    match piece:
        case Words():
            return ChatDelta(content=piece.text)
        case Called():
            function = FunctionDelta(name=piece.name, arguments="")
            return ChatDelta(
                tool_calls=[ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)]
            )
        case Arguments():
            return ChatDelta(
                tool_calls=[ToolCallDelta(index=piece.index, function=FunctionDelta(arguments=piece.text))]
            )


def answer_of(pieces: Sequence[Piece]) -> ChatAnswer:
    words = "".join(piece.text for piece in pieces if isinstance(piece, Words))
    calls = [
        ToolCall(id=piece.id, function=FunctionCall(name=piece.name, arguments=_arguments(pieces, piece.index)))
        for piece in pieces
        if isinstance(piece, Called)
    ]
    return ChatAnswer(content=words if words or not calls else None, tool_calls=calls or UNSET)


def _arguments(pieces: Iterable[Piece], index: int) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == index)
