"""Digests of what decides about tokens and ends of answers: the same for the same meaning, another for any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gplan.errors import GplanError
from gplan.models.text_files import TextDigests, read_text_digests
from tests.checkpoints import CHAT_TEMPLATE, make_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 3, "bos_token_id": 1}')
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def edit(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **values}))

    return change


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def move_template(folder: Path) -> None:
    edit("tokenizer_config.json", chat_template=CHAT_TEMPLATE)(folder)
    (folder / "chat_template.jinja").unlink()


def lay_out_anew(folder: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(dict(reversed(content.items())), indent=7))


def name_template(folder: Path) -> None:
    edit("tokenizer_config.json", chat_template=[{"name": "default", "template": CHAT_TEMPLATE}])(folder)
    (folder / "chat_template.jinja").unlink()


SAME = {
    "untouched": lambda folder: None,
    "laid out anew": lay_out_anew,
    "template in the config": move_template,
    "template in the config by name": name_template,
    "overruled template in the config": edit("tokenizer_config.json", chat_template="{{ messages }}"),
    "a file that nothing reads": write("README.md", "hello"),
    "training arguments": write("training_args.json", "{}"),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_meaning_has_the_same_digests(original: Path, folder: Path, name: str) -> None:
    SAME[name](folder)
    assert read_text_digests(folder) == read_text_digests(original)


OTHER = {
    "vocabulary": ("tokenizer", edit("tokenizer.json", truncation=None, version="2.0")),
    "vocabulary, laid out anew": ("tokenizer", lambda f: edit("tokenizer.json")(f)),
    "configuration": ("tokenizer", edit("tokenizer_config.json", add_prefix_space=True)),
    "more tokens": ("tokenizer", write("added_tokens.json", '{"<x>": 300}')),
    "special tokens": ("tokenizer", write("special_tokens_map.json", '{"eos_token": "x"}')),
    "template": ("chat_template", write("chat_template.jinja", CHAT_TEMPLATE + "\n")),
    "one more template": (
        "chat_template",
        edit("tokenizer_config.json", chat_template=[{"name": "tools", "template": "x"}]),
    ),
    "no template": ("chat_template", lambda folder: (folder / "chat_template.jinja").unlink()),
    "ends": ("generation", edit("generation_config.json", eos_token_id=[3, 4])),
    "no generation config": ("generation", lambda folder: (folder / "generation_config.json").unlink()),
}


@pytest.mark.parametrize("name", OTHER)
def test_any_other_meaning_changes_its_digest_alone(original: Path, folder: Path, name: str) -> None:
    part, change = OTHER[name]
    before = read_text_digests(original)
    change(folder)
    after = read_text_digests(folder)
    parts = TextDigests.__dataclass_fields__
    assert [field for field in parts if getattr(before, field) != getattr(after, field)] == [part]


def test_nothing_has_no_digest(tmp_path: Path) -> None:
    assert read_text_digests(tmp_path) == TextDigests(tokenizer="", chat_template="", generation="")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", "[" * 50_000], ids=["empty", "cut", "list", "bytes", "deep"])
def test_a_broken_file_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(GplanError, match=name):
        read_text_digests(folder)


@pytest.mark.parametrize("template", [7, {"a": 1}, [7, {"name": 3}], ["x"], "\ud800"])
def test_a_template_of_no_known_form_has_a_digest_all_the_same(folder: Path, template: object) -> None:
    before = read_text_digests(folder).chat_template
    (folder / "chat_template.jinja").unlink()
    edit("tokenizer_config.json", chat_template=template)(folder)
    assert read_text_digests(folder).chat_template not in ("", before)
