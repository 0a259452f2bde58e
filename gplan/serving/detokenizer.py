"""Text of a growing answer, token by token: whatever is certain is given out, what may still change is held back.

The deltas joined are the tokenizer's own decoding of all tokens (special tokens skipped). A character whose bytes come
in several tokens is held until it is whole. No token is decoded more than a few times, however long the answer.

Stop strings are not looked for here.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from gplan.serving.vocabulary import Vocabulary

MAX_HELD_BYTES = 64
"""Byte-fallback tokens in a row that are held at most. Some decoders turn the whole run into U+FFFD when its end is no
UTF-8, so that nothing of it is certain until it ends; a longer run is let go character by character."""

_MAX_HELD_TOKENS = 8
_MAX_CONTEXT = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(ABC):
    """State of one answer's text."""

    @abstractmethod
    def push(self, token: int) -> str:
        """Takes the next token in and returns the text that became certain: often one token's, may be empty."""

    @abstractmethod
    def finish(self) -> str:
        """The text held back, as it stands at the end of the answer."""


def make_detokenizer(vocabulary: Vocabulary, context: Sequence[int] = ()) -> Detokenizer:
    """A detokenizer for one answer.

    Args:
        context: tokens that the answer continues (its prompt). Some tokenizers drop the space before the first word of
            a text; with a context, the answer does not begin a text.
    """
    if vocabulary.kind == "bytes":
        return _ByteDetokenizer(vocabulary)
    seen = [token for token in context[-_MAX_CONTEXT:] if not vocabulary.is_skipped(token)]
    if vocabulary.kind == "pieces":
        return _PieceDetokenizer(vocabulary, continues=bool(seen))
    return _WindowDetokenizer(vocabulary, seen)


class _ByteDetokenizer(Detokenizer):
    """Tokens are bytes. Holds at most the three bytes of an unfinished character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = _utf8_decoder("replace")

    def push(self, token: int) -> str:
        if self._vocabulary.is_skipped(token):
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceDetokenizer(Detokenizer):
    """Tokens are pieces of text or raw bytes. A run of raw bytes is text if all of it is UTF-8, else a U+FFFD each."""

    def __init__(self, vocabulary: Vocabulary, *, continues: bool) -> None:
        self._vocabulary = vocabulary
        self._started = continues
        self._run: list[int] = []
        self._utf8 = _utf8_decoder("strict")
        self._broken = False

    def push(self, token: int) -> str:
        vocabulary = self._vocabulary
        if vocabulary.is_skipped(token):
            return ""
        byte = vocabulary.raw_byte(token)
        if byte is not None:
            return self._push_byte(token, byte)
        held = self.finish()
        if self._started:
            return held + vocabulary.piece(token)
        self._started = True
        return held + vocabulary.decode((token,))

    def finish(self) -> str:
        run, self._run, self._broken = self._run, [], False
        self._utf8.reset()
        return self._render(run) if run else ""

    def _push_byte(self, token: int, byte: int) -> str:
        if self._broken:
            return _REPLACEMENT
        self._run.append(token)
        try:
            self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            return self._break_run()
        if len(self._run) > MAX_HELD_BYTES and not self._utf8.getstate()[0]:
            return self.finish()
        return ""

    def _break_run(self) -> str:
        """A byte that fits no UTF-8 decides over its whole run, whatever follows."""
        count = len(self._run)
        self._run, self._broken, self._started = [], True, True
        self._utf8.reset()
        return _REPLACEMENT * count

    def _render(self, ids: Sequence[int]) -> str:
        if self._started:
            return self._vocabulary.text_after(ids)
        self._started = True
        return self._vocabulary.decode(ids)


class _WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes the last few tokens again, behind those that were given out just before.

    The scheme of two offsets into the tokens is that of text-generation-inference and vLLM.
    """

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._ids = list(context)
        self._given = len(self._ids)
        self._given_text = vocabulary.decode(self._ids)

    def push(self, token: int) -> str:
        if self._vocabulary.is_skipped(token):
            return ""
        self._ids.append(token)
        text = self._vocabulary.decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._given < _MAX_HELD_TOKENS:
            return ""
        return self._give(text)

    def finish(self) -> str:
        return self._give(self._vocabulary.decode(self._ids)) if len(self._ids) > self._given else ""

    def _give(self, text: str) -> str:
        delta = text[len(self._given_text) :]
        del self._ids[: self._given]
        self._given = len(self._ids)
        self._given_text = self._vocabulary.decode(self._ids)
        return delta
