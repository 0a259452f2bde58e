"""Takes msgspec's sentences apart: which kind of thing is wrong, where, and in words of our own."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"^Object (contains unknown|missing required) field `(.*)`$", re.DOTALL)
_LONGEST = 100


class Explained(msgspec.Struct, frozen=True):
    """Attributes:
    kind: an unknown field, a missing one, or a value of the wrong type or range.
    path: as `limits.max_batch` or `decode.ladder[3].size`; empty for the whole value.
    problem: what is expected and what was found; empty unless the kind is `type`.
    """

    kind: Literal["unknown", "missing", "type"]
    path: str
    problem: str


def explain(error: msgspec.ValidationError) -> Explained:
    """Reads the kind, the path of the field and the rest of the sentence off a validation error."""
    text = str(error)
    at = _AT.search(text)
    parent = at[1] if at else ""
    text = _AT.sub("", text)
    field = _FIELD.match(text)
    if field is None:
        return Explained("type", shorten(parent), shorten(f"{text[:1].lower()}{text[1:]}"))
    path = shorten(f"{parent}.{field[2]}" if parent else field[2])
    return Explained("unknown" if field[1] == "contains unknown" else "missing", path, "")


def shorten(text: str) -> str:
    """Keeps an error readable whatever length the value in it has."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
