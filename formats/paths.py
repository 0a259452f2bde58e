"""Fields of a plan by their path, as errors, choices and people name them: `decode.ladder[3].size`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from formats.plan import Plan


def path_text(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def is_field(path: str) -> bool:
    """Whether `path` (`decode.backend`) names a field of the plan, down to any depth of its parts."""
    part: Any = Plan
    for name in path.split("."):
        fields = {field.name: field.type for field in msgspec.structs.fields(part)} if _is_struct(part) else {}
        if name not in fields:
            return False
        part = fields[name]
    return True


def _is_struct(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, msgspec.Struct)


def value_at(plan: Plan, path: str) -> Any:
    """The value of a field by its path, None where there is no such field."""
    value: Any = plan
    for name in path.split("."):
        if not isinstance(value, msgspec.Struct) or name not in value.__struct_fields__:
            return None
        value = getattr(value, name)
    return value
