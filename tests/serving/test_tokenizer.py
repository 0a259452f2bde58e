"""A tokenizer that cannot be used is refused with the folder and the reason, whatever is broken about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gplan.errors import GplanError
from gplan.serving.tokenizer import ServedTokenizer
from tests.checkpoints import make_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text()[:200])


def without(key: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        del content[key]
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return change


BROKEN = {
    "cut": cut("tokenizer.json"),
    "no model": without("model"),
    "empty": lambda folder: (folder / "tokenizer.json").write_text(""),
    "not text": lambda folder: (folder / "tokenizer.json").write_bytes(bytes(range(256))),
    "no file": lambda folder: (folder / "tokenizer.json").unlink(),
    "config cut": cut("tokenizer_config.json"),
    "config a list": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    "template": lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"),
    "template not text": lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_with_the_folder(folder: Path, name: str) -> None:
    ServedTokenizer(str(folder))
    BROKEN[name](folder)
    with pytest.raises(GplanError) as raised:
        ServedTokenizer(str(folder))
    assert str(folder) in raised.value.message
    assert "\n" not in raised.value.message
    assert raised.value.hint


def test_a_template_that_refuses_a_conversation_is_not_broken(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a system message comes first') }}")
    assert ServedTokenizer(str(folder)).has_chat_template
