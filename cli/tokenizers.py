"""Whether a checkpoint's tokenizer can be used, found out before anything long is done with the checkpoint."""

from __future__ import annotations

from gplan.errors import GplanError


def tokenizer_problem(checkpoint: str) -> GplanError | None:
    """What serve would say of the tokenizer; None where it can be used.

    Raises:
        GplanError: there is no such checkpoint.
    """
    from gplan.models import locate_checkpoint
    from gplan.serving.tokenizer import ServedTokenizer

    folder = str(locate_checkpoint(checkpoint))
    try:
        ServedTokenizer(folder)
    except GplanError as error:
        return error
    return None


def has_tokenizer(checkpoint: str) -> bool:
    """Whether there are files of a tokenizer, usable or not.

    Raises:
        GplanError: there is no such checkpoint.
    """
    from gplan.models import locate_checkpoint
    from gplan.models.text_files import VOCABULARIES

    folder = locate_checkpoint(checkpoint)
    return any((folder / name).exists() for name in VOCABULARIES)
