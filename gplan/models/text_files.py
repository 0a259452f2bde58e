"""What of a checkpoint decides which tokens a text becomes and where an answer ends: its digests.

None of it changes a graph or a byte of memory, all of it changes answers. A file that is laid out anew but says the
same keeps its digest where it is small; of a vocabulary the bytes count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gplan.errors import GplanError
from gplan.models.config import Json
from gplan.models.json_files import digest_json, read_json

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDigests:
    """sha256 of each part; empty where the checkpoint has nothing of it."""

    tokenizer: str
    chat_template: str
    generation: str


def read_text_digests(folder: Path) -> TextDigests:
    """
    Raises:
        GplanError: a file that cannot be read or, where it should be, is not JSON.
    """
    config = dict(read_json(folder / TOKENIZER_CONFIG)) if (folder / TOKENIZER_CONFIG).is_file() else {}
    own_template = config.pop("chat_template", None)
    generation = folder / GENERATION_CONFIG
    return TextDigests(
        tokenizer=_tokenizer_digest(folder, config),
        chat_template=_templates_digest(folder, own_template),
        generation=digest_json(read_json(generation)) if generation.is_file() else "",
    )


def _tokenizer_digest(folder: Path, config: Json) -> str:
    files = {name: _digest_file(folder / name) for name in VOCABULARIES if (folder / name).is_file()}
    return digest_json({"files": files, "config": config}) if files else ""


def _templates_digest(folder: Path, own: Any) -> str:
    """A file goes before what tokenizer_config.json holds, as it does in transformers."""
    digests: dict[str, str] = {}
    named = own if isinstance(own, list) else [] if own is None else [{"name": "default", "template": own}]
    for entry in named:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else ("", entry)
        digests[str(name)] = _digest_text(template) if isinstance(template, str) else digest_json(template)
    if (folder / CHAT_TEMPLATE).is_file():
        digests["default"] = _digest_file(folder / CHAT_TEMPLATE)
    for path in (folder / MORE_TEMPLATES).glob("*.jinja"):
        digests[path.stem] = _digest_file(path)
    return digest_json(digests) if digests else ""


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _digest_file(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise GplanError(f"{path}: cannot be read ({error.strerror})", "Check the file and its permissions.") from error
