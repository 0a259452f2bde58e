"""The base of every struct that leaves the process."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts: strict on fields. Each part says frozen and kw_only itself: kw_only is not inherited, and mypy
    wants both."""
