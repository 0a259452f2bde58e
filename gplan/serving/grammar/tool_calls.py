"""Calls of tools in a growing answer: words are given out as words, calls piece by piece as calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from gplan.serving.grammar.tool_syntax import ToolSyntax
from gplan.serving.stopping import StopMatcher


@dataclass(frozen=True, slots=True)
class Words:
    """More of what is said beside the calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call began. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are JSON when they are complete."""

    index: int
    text: str


Piece = Words | Called | Arguments


class ToolCallReader:
    """Reads one answer that follows `ToolSyntax.grammar`; one that is cut off is read as far as it goes.

    Args:
        may_talk: as for the grammar.
    """

    def __init__(self, syntax: ToolSyntax, *, may_talk: bool) -> None:
        self._syntax = syntax
        self._words: StopMatcher | None = StopMatcher((syntax.trigger,)) if may_talk else None
        self._expected = syntax.opening(after_trigger=may_talk)
        self._name = ""
        self._index = -1
        self._arguments: _Json | None = None
        self.num_complete = 0

    def push(self, text: str) -> list[Piece]:
        """Takes more of the answer in: what it adds, pieces of the same kind joined."""
        return list(_joined(piece for character in text for piece in self._push(character)))

    def finish(self) -> list[Piece]:
        """Words held back because a call might have begun."""
        held = self._words.finish() if self._words is not None else ""
        return [Words(held)] if held else []

    def _push(self, character: str) -> Iterator[Piece]:
        if self._words is not None:
            words, is_met = self._words.push(character)
            if words:
                yield Words(words)
            if is_met:
                self._words = None
        elif self._expected:
            self._expected = self._expected[1:]
        elif self._arguments is None:
            yield from self._push_name(character)
        else:
            yield Arguments(self._index, character)
            if self._arguments.push(character):
                self._end_call()

    def _push_name(self, character: str) -> Iterator[Piece]:
        self._name += character
        if self._name.endswith(self._syntax.middle):
            name, self._name = self._name.removesuffix(self._syntax.middle), ""
            self._index += 1
            self._arguments = _Json()
            yield Called(self._index, f"call_{uuid.uuid4().hex[:24]}", name)

    def _end_call(self) -> None:
        syntax = self._syntax
        self._arguments = None
        self.num_complete += 1
        # The end stands where the separator would: what is left of it then is never a name.
        self._expected = syntax.tail + (syntax.separator + syntax.head if syntax.separator is not None else "")


class _Json:
    """Tells where a JSON object ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, character: str) -> bool:
        """Whether the object ends with this character."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    last: Piece | None = None
    for piece in pieces:
        match last, piece:
            case Words(), Words():
                last = Words(last.text + piece.text)
            case Arguments(), Arguments() if last.index == piece.index:
                last = Arguments(last.index, last.text + piece.text)
            case _:
                if last is not None:
                    yield last
                last = piece
    if last is not None:
        yield last
