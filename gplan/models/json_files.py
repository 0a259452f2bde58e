"""JSON files of a checkpoint: read with care, and digested by what they say rather than how they are laid out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gplan.errors import GplanError
from gplan.models.config import Json


def read_json(path: Path) -> Json:
    """An object from a JSON file.

    Raises:
        GplanError: unreadable, not JSON, or not an object.
    """
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GplanError(f"{path}: cannot be read ({error.strerror})", "Check the file and its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise GplanError(f"{path}: not JSON ({error})", "Get the file again.") from error
    if not isinstance(value, dict):
        raise GplanError(f"{path}: not a JSON object", "Get the file again.")
    return value


def digest_json(value: object) -> str:
    """sha256 of the value in one canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
