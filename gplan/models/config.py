"""Typed reading of a Hugging Face config.json: every wrong value is an error that names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gplan.errors import GplanError

Json = Mapping[str, Any]


class ConfigReader:
    """Reads values of one JSON object. A key that is missing or null takes its default, where it has one.

    Args:
        values: the object.
        where: its name in messages, such as `config.json` or `config.json: rope_scaling`.
    """

    def __init__(self, values: Json, where: str) -> None:
        self.values, self.where = values, where

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            GplanError: not one, or missing without a default.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number.

        Raises:
            GplanError: not one, or missing without a default.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def section(self, key: str) -> ConfigReader | None:
        """The object under a key; None where there is none, or an empty one.

        Raises:
            GplanError: something else is there.
        """
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ConfigReader(value, f"{self.where}: {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where the key is missing or null."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise GplanError(f"{self.where}: {key} is missing", "The checkpoint's config must state it.")
        return default

    def _wrong(self, key: str, value: object, expected: str) -> GplanError:
        return GplanError(f"{self.where}: {key} is {value!r}, expected {expected}", "Correct the checkpoint's config.")
