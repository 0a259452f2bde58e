"""Texts of a workload are counted by a tokenizer, or refused with what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gplan.errors import GplanError
from gplan.models.token_counts import token_counter

BROKEN = '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": 5}}'


@pytest.mark.parametrize("text", [BROKEN, "{}", '{"trunc', ""])
def test_a_broken_tokenizer_is_an_error_of_the_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(GplanError, match=r"the tokenizer of .* cannot be read: \w+: .*") as caught:
        token_counter(str(tmp_path))("a text")
    assert "\n" not in caught.value.message


def test_what_has_no_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(GplanError, match="has no tokenizer"):
        token_counter(str(tmp_path))("a text")
    with pytest.raises(GplanError, match="no such folder"):
        token_counter(str(tmp_path / "nothing"))("a text")
