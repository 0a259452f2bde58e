"""Structs of `/tokenize` and `/detokenize`, which OpenAI's API does not have. `openai_rules` reads the bodies."""

from __future__ import annotations

import msgspec


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids of any size: which there are is for the server to check."""

    tokens: list[int]
    model: str | None = None
