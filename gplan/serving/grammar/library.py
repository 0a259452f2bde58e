"""The grammar library, llguidance: grammars from JSON schemas, and what may follow by them.

It was chosen over xgrammar by measurement: it refuses by name each schema keyword that it does not enforce, compiles in
milliseconds, and depends on nothing. It is imported where a grammar is first asked for, so that serving without it
works.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from gplan.errors import GplanError

MAX_SCHEMA_BYTES = 256 << 10
"""Of a schema as JSON. One of this size compiles in well under a second."""

_WHITESPACE = r"[ \n\r\t]{1,40}"
"""Between the parts of a JSON text: enough to indent, too little for a model to lose itself in."""

STEP_FUEL = 100_000
"""What one mask may take, by the library's measure: some milliseconds. An answer whose grammar needs more fails."""

Bits = npt.NDArray[np.int32]


class GrammarError(GplanError):
    """A grammar cannot be used: it asks for what is not supported, or the library is missing."""


def schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of JSON texts that a schema allows.

    Raises:
        GrammarError: names the keyword that is not supported, or what is wrong with the schema.
    """
    try:
        found: str = _library().LLMatcher.grammar_from_json_schema(json.dumps(bounded(schema)))
    except ValueError as error:
        raise _refusal(str(error)) from error
    check(found)
    return found


def tools_grammar(lark: str) -> str:
    """The same of a grammar in the library's Lark dialect."""
    found: str = _library().LLMatcher.grammar_from_lark(lark)
    check(found)
    return found


def bounded(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """A schema whose texts hold no endless whitespace.

    Raises:
        GrammarError: it is too long, or too deep.
    """
    try:
        length = len(json.dumps(schema))
    except RecursionError:
        raise _too_deep() from None
    if length > MAX_SCHEMA_BYTES:
        raise GrammarError(f"the schema is longer than {MAX_SCHEMA_BYTES} bytes", "Use a smaller one.")
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}


def check(grammar: str) -> None:
    """
    Raises:
        GrammarError: the grammar cannot be used, and why.
    """
    library = _library()
    problem = library.LLMatcher.validate_grammar(grammar, limits=_limits(library, STEP_FUEL))
    if problem:
        raise _refusal(problem)


class GrammarVocabulary:
    """A tokenizer's tokens as the library needs them. Building one takes a second and lets no other thread run.

    Args:
        tokenizer: contents of a `tokenizer.json`.
        vocab_size: width of the model's logits; ids beyond the tokenizer's never follow.
        eos_token_ids: may follow where an answer may end, and nowhere else.
        step_fuel: what one mask may take.

    Raises:
        GrammarError: the library is missing, or cannot read this tokenizer.
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_token_ids: Collection[int], step_fuel: int = STEP_FUEL
    ) -> None:
        self._library = _library()
        self._limits = _limits(self._library, step_fuel)
        self._numpy = import_module("llguidance.numpy")
        if not eos_token_ids:
            raise GrammarError("the model has no end-of-text token", "Answers that follow a grammar need one to end.")
        try:
            self._tokenizer = self._library.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except ValueError as error:
            raise GrammarError(f"the grammar library cannot read the tokenizer: {error}", "Serve without.") from error
        self._threads = self._library.LLExecutor()
        self._words = -(-vocab_size // 32)

    def matcher(self, grammar: str) -> Any:
        """Compiles a grammar: a matcher at its beginning, of which copies are cheap. Other threads run meanwhile.

        Raises:
            GrammarError: it cannot be used.
        """
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher

    def masks(self, matchers: Sequence[Any]) -> Bits:
        """[number of matchers, words] int32: a bit for each token that may follow. A matcher that fails meanwhile is in
        its error state afterwards, and its row says nothing."""
        bits = np.empty((len(matchers), self._words), np.int32)
        if len(matchers) == 1:
            self._numpy.fill_next_token_bitmask(matchers[0], bits, 0)
        else:
            places = [(matcher, index) for index, matcher in enumerate(matchers)]
            self._numpy.fill_next_token_bitmask_par(self._threads, places, bits)
        return bits


def _library() -> Any:
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise GrammarError("llguidance is not installed, which grammars need", "pip install llguidance") from error


def _limits(library: Any, step_fuel: int) -> Any:
    return library.LLParserLimits(step_lexer_fuel=step_fuel, verbose_errors=False)


def _refusal(problem: str) -> GrammarError:
    """Of what the library says, the first part: some messages go on with the whole grammar."""
    if "recursion limit exceeded" in problem:
        return _too_deep()
    first = problem.strip().split("\n\n")[0]
    return GrammarError(" ".join(first.split())[:500], "Say it with other keywords.")


def _too_deep() -> GrammarError:
    return GrammarError("the schema is nested too deeply", "Use $defs and $ref.")
