"""A checkpoint's tokenizer as transformers reads it, from local files alone."""

from __future__ import annotations

from threading import Lock
from typing import Any

from gplan.errors import GplanError

_reading = Lock()


def read_tokenizer(folder: str) -> Any:
    """One thread at a time: of several that import transformers at once, some find it half made.

    Raises:
        GplanError: there is none that can be used.
    """
    with _reading:
        try:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of a broken file, the tokenizers library raises nothing more exact
            why = str(error).strip().partition("\n")[0]
            raise GplanError(
                f"{folder}: no usable tokenizer: {type(error).__name__}: {why}",
                "Put tokenizer.json and tokenizer_config.json beside it.",
            ) from error
