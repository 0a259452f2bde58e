"""Texts of a workload are counted by a tokenizer, or refused with what is wrong with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gplan.errors import GplanError
from gplan.models.token_counts import token_counter
from tests.checkpoints import make_tokenizer
from tests.import_rules import ROOT

BROKEN = '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": 5}}'


@pytest.mark.parametrize("text", [BROKEN, "{}", '{"trunc', ""])
def test_a_broken_tokenizer_is_an_error_of_the_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(GplanError, match=r"the workload holds texts, and .*: no usable tokenizer: \w+: .*") as caught:
        token_counter(str(tmp_path))("a text")
    assert "\n" not in caught.value.message


def test_threads_may_read_tokenizers_at_once(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    code = f"""
from concurrent.futures import ThreadPoolExecutor
from gplan.models.tokenizer_files import read_tokenizer

with ThreadPoolExecutor(3) as pool:
    print(len(list(pool.map(read_tokenizer, 3 * [{str(tmp_path)!r}]))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "3\n", done.stderr


def test_what_has_no_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(GplanError, match="has no tokenizer"):
        token_counter(str(tmp_path))("a text")
    with pytest.raises(GplanError, match="no such folder"):
        token_counter(str(tmp_path / "nothing"))("a text")
