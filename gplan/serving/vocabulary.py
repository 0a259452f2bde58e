"""A tokenizer's tokens as text and bytes. Shared by all requests; owns no request's state.

How text comes out of tokens depends on the tokenizer's decoder, of which there are three kinds here:

* `bytes`: every token is bytes, and the text is their UTF-8 (byte-level BPE: Llama 3, Qwen, SmolLM);
* `pieces`: every token is a piece of text that only the text's beginning changes, or one raw byte (the SentencePiece
  family: Llama 2, Mistral);
* `other`: a token's text depends on its neighbours in some other way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

Kind = Literal["bytes", "pieces", "other"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class RustTokenizer(Protocol):
    """What is used of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def encode(self, sequence: Any, *, add_special_tokens: bool = True) -> Any: ...
    def id_to_token(self, id: int) -> str | None: ...
    def get_added_tokens_decoder(self) -> dict[int, Any]: ...
    def to_str(self) -> str: ...


class Vocabulary:
    """Tokens of a `tokenizers` tokenizer.

    Args:
        tokenizer: read on construction and by `decode`; not to be changed afterwards.
    """

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        decoders = _decoders(tokenizer)
        self.has_byte_tokens = any(decoder["type"] == "ByteFallback" for decoder in decoders)
        self._anchor = self._find_anchor()
        self.kind = _kind(decoders)
        if self.kind == "pieces" and self._anchor is None:
            self.kind = "other"
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text of `ids`, special and unknown tokens left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def is_skipped(self, token: int) -> bool:
        """Whether a token has no text: special, or beyond the vocabulary."""
        return token in self._special or self._tokenizer.id_to_token(token) is None

    def raw_byte(self, token: int) -> int | None:
        """The byte that a byte-fallback token stands for; None for any other token."""
        if not self.has_byte_tokens:
            return None
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "")
        return int(match[1], 16) if match else None

    def text_after(self, ids: Sequence[int]) -> str:
        """Text of `ids` where other text goes before. Only where the kind is `pieces`."""
        assert self._anchor is not None
        anchor, length = self._anchor
        return self.decode([anchor, *ids])[length:]

    def piece(self, token: int) -> str:
        """Text of one token where other text goes before; remembered. Only where the kind is `pieces`."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.text_after((token,))
        return piece

    def token_bytes(self, token: int) -> bytes:
        """A token's own bytes, which need not be whole characters; of a special token its name's."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    def _find_bytes(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._special:
            return name.encode()
        byte = self.raw_byte(token)
        if byte is not None:
            return bytes((byte,))
        if self.kind == "bytes":
            return byte_level_bytes(name)
        return (self.piece(token) if self.kind == "pieces" else self.decode((token,))).encode()

    def _find_anchor(self) -> tuple[int, int] | None:
        """A plain letter's token and its length as text: put before others, it makes them what they are in a text."""
        for letter in "ax0":
            for token in self._tokenizer.encode(letter, add_special_tokens=False).ids:
                text = self.decode((token,))
                if not self.is_skipped(token) and self.raw_byte(token) is None and text.strip() == letter:
                    return token, len(text)
        return None


def byte_level_bytes(name: str) -> bytes:
    """Bytes of a byte-level token. An added token with a character outside the byte alphabet is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in name])
    except KeyError:
        return name.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one printable character for each byte: itself where printable, else 256 and up in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _decoders(tokenizer: RustTokenizer) -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder; empty for a tokenizer without one."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _kind(decoders: Sequence[dict[str, Any]]) -> Kind:
    names = [decoder["type"] for decoder in decoders]
    if names == ["ByteLevel"]:
        return "bytes"
    steps = list(names)
    if steps[-2:] == ["Fuse", "Strip"] and _strips_one_at_start(decoders[-1]):
        del steps[-2:]
    elif steps[-1:] == ["Fuse"]:
        del steps[-1:]
    known = {"Replace", "ByteFallback", "Metaspace"}
    return "pieces" if names and known.issuperset(steps) and steps.count("ByteFallback") <= 1 else "other"


def _strips_one_at_start(decoder: dict[str, Any]) -> bool:
    return bool(decoder["start"] <= 1 and decoder["stop"] == 0)
