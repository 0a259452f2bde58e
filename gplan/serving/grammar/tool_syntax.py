"""How a model writes the calls of tools, read off its own chat template: a call that is known is rendered, and what
stands around it is what the model has learned to write.

Understood are templates that write a call as one JSON object of a name and arguments, with fixed text around it (the
Hermes form of Qwen and others, the plain form of Llama 3.1). Others are refused, by a sentence that says why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from formats.openai_tools import FunctionDefinition
from gplan.serving.grammar.library import GrammarError, bounded

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Applies the chat template to messages; the flag asks for the beginning of an answer."""

_NAME, _ARGUMENTS = "probe_of_a_call", {"probe_key": "probe_value"}
_BEFORE_NAME = re.compile(r'\{\s*"name":\s*"$')
_BEFORE_ARGUMENTS = re.compile(r'",\s*"(?:arguments|parameters)":\s*')
_AFTER_ARGUMENTS = re.compile(r'\s*(?:,\s*"id":\s*"[^"]*"\s*)?\}')


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """The fixed text of calls: `begin head NAME middle ARGUMENTS tail (separator head ... tail)* end`.

    Attributes:
        separator: between two calls; None where the template takes one call only.
    """

    begin: str
    head: str
    middle: str
    tail: str
    separator: str | None
    end: str

    @property
    def trigger(self) -> str:
        """The text with which an answer turns from words to calls."""
        return self.begin.strip() or self.head

    def opening(self, *, after_trigger: bool) -> str:
        """What stands before the first name, beyond the trigger where that was written."""
        whole = self.begin + self.head
        return whole[whole.index(self.trigger) + len(self.trigger) :] if after_trigger else whole

    def grammar(self, functions: Sequence[FunctionDefinition], *, may_talk: bool, may_repeat: bool) -> str:
        """The grammar of answers: calls alone, or where the model `may_talk`, words, or words and then calls."""
        lines = ["%llguidance {}", "start: TEXT | trigger calls" if may_talk else "start: calls"]
        if may_talk:
            lines += [r"TEXT: /(.|\n)*/", f"trigger[lazy]: TEXT {_quoted(self.trigger)}"]
        again = f"({_quoted(self.separator + self.head)} call)*" if self.separator is not None and may_repeat else ""
        opening = _quoted(self.opening(after_trigger=may_talk))
        lines += [f"calls: {opening} call {again} {_quoted(self.end)}"]
        lines += ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
        for index, function in enumerate(functions):
            name, schema = _quoted(function.name + self.middle), json.dumps(bounded(function.schema))
            lines.append(f"call_{index}: {name} %json {schema} {_quoted(self.tail)}")
        return "\n".join(lines) + "\n"


def read_syntax(render: Render, special_tokens: Collection[str]) -> ToolSyntax:
    """
    Raises:
        GrammarError: the template does not write calls in a form that is understood here.
        Exception: whatever the template raises where it takes no calls.
    """
    user = {"role": "user", "content": "?"}
    before, one = render([user], True), render([user, _calls(1)], False)
    if not one.startswith(before):
        raise _unlike("does not begin an answer with calls as it begins any")
    written = one[len(before) :]
    head, middle, tail, first, last = _find(written, 0)
    end = _until_special(written[last:], special_tokens)
    syntax = ToolSyntax(written[:first], head, middle, tail, _separator(render, user, before), end)
    fixed = (syntax.begin, syntax.separator or "", syntax.end)
    if any(token in part for token in special_tokens for part in fixed):
        raise _unlike("marks calls with special tokens")
    return syntax


def _separator(render: Render, user: Mapping[str, Any], before: str) -> str | None:
    try:
        written = render([user, _calls(2)], False)[len(before) :]
        last = _find(written, 0)[4]
        return written[last : _find(written, last)[3]]
    except Exception:
        # The template says that it takes one call only, each in its own way.
        return None


def _find(written: str, start: int) -> tuple[str, str, str, int, int]:
    """The first call from `start` on: its fixed texts, and where it begins and ends."""
    name = written.find(_NAME, start)
    if name < 0:
        raise _unlike("does not write calls")
    head = _BEFORE_NAME.search(written[start:name])
    middle = _BEFORE_ARGUMENTS.match(written, name + len(_NAME))
    if head is None or middle is None:
        raise _unlike("does not write a call as a JSON object of name and arguments")
    try:
        found, stop = json.JSONDecoder().raw_decode(written, middle.end())
    except ValueError:
        found, stop = None, 0
    tail = _AFTER_ARGUMENTS.match(written, stop)
    if found != _ARGUMENTS or tail is None:
        raise _unlike("does not write arguments as a JSON object")
    return head[0], middle[0], "}", start + head.start(), tail.end()


def _calls(count: int) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    calls = [{"id": f"probe{index:04d}", "type": "function", "function": function} for index in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _until_special(text: str, special_tokens: Collection[str]) -> str:
    """What the model itself writes: special tokens end its turn, as does the text."""
    cuts = [text.index(token) for token in special_tokens if token in text]
    return text[: min(cuts, default=len(text))].rstrip() if cuts else text.rstrip()


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _unlike(why: str) -> GrammarError:
    return GrammarError(f"the model's chat template {why}", "Ask for JSON with response_format.")
