"""How many tokens a text has, by a checkpoint's tokenizer: for traces that hold texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from gplan.errors import GplanError
from gplan.models.checkpoint import locate_checkpoint
from gplan.models.text_files import VOCABULARIES
from gplan.models.tokenizer_files import read_tokenizer

_HINT = "Name a checkpoint with a tokenizer, or a workload that says how many tokens its requests have."


def token_counter(checkpoint: str) -> Callable[[str], int]:
    """Counts tokens. The tokenizer is read at the first call; a folder that holds nothing else will do.

    Raises (by the call, not here):
        GplanError: there is no such checkpoint, or it has no tokenizer that can be read.
    """

    def count(text: str) -> int:
        return len(_tokenizer(checkpoint).encode(text, add_special_tokens=False))

    return count


@cache
def _tokenizer(checkpoint: str) -> Any:
    folder = Path(checkpoint)
    if not folder.is_dir():
        folder = locate_checkpoint(checkpoint)
    if not any((folder / name).exists() for name in VOCABULARIES):
        raise GplanError(f"the workload holds texts, and {checkpoint} has no tokenizer", _HINT)
    try:
        return read_tokenizer(str(folder))
    except GplanError as error:
        raise GplanError(f"the workload holds texts, and {error.message}", _HINT) from error
