"""How many tokens a text has, by a checkpoint's tokenizer: for traces that hold texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from gplan.errors import GplanError


def token_counter(checkpoint: str) -> Callable[[str], int]:
    """Counts tokens. The tokenizer is read at the first call.

    Raises (by the call, not here):
        GplanError: the checkpoint has no tokenizer that can be read.
    """

    def count(text: str) -> int:
        return len(_tokenizer(checkpoint).encode(text, add_special_tokens=False))

    return count


@cache
def _tokenizer(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise GplanError(
            f"the workload holds texts, and the tokenizer of {checkpoint} cannot be read: {error}",
            "Name a checkpoint with a tokenizer, or a workload that says how many tokens its requests have.",
        ) from error
