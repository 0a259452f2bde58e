"""Loading: every way a checkpoint can be wrong, its identity wherever it lies, and what loading costs the host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from gplan.errors import GplanError, UnsupportedError
from gplan.models import Decoder, load_model, random_model, read_headers, read_spec, weights_nbytes
from tests.checkpoints import make_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("single") / "tiny", "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sharded") / "tiny", "Qwen2ForCausalLM", sharded=True)


def _load(folder: Path | str, dtype: torch.dtype = torch.float32, max_len: int = 64) -> Decoder:
    headers = read_headers(str(folder))
    return load_model(str(folder), read_spec(str(folder), headers), dtype, "cpu", max_len)


def _copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def _edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


# What is loaded ---------------------------------------------------------------------------------------------------


def test_single_and_sharded_hold_the_same(single: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = dict(_load(single).tensors()), dict(_load(sharded).tensors())
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_parts_are_fused_in_order(single: Path) -> None:
    stored, loaded = load_file(single / "model.safetensors"), dict(_load(single).tensors())
    prefix = "model.layers.2"
    for fused, parts in {
        "qkv": [f"{prefix}.self_attn.{p}_proj.weight" for p in "qkv"],
        "qkv_bias": [f"{prefix}.self_attn.{p}_proj.bias" for p in "qkv"],
        "gate_up": [f"{prefix}.mlp.{p}_proj.weight" for p in ("gate", "up")],
    }.items():
        assert torch.equal(loaded[f"layers.2.{fused}"], torch.cat([stored[part] for part in parts]))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("run", [torch.bfloat16, torch.float16, torch.float32])
def test_converts_dtypes(stored: torch.dtype, run: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=stored, num_hidden_layers=1)
    loaded = dict(_load(folder, run).tensors())
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(run)
    assert torch.equal(loaded["embed"], expected)
    assert {tensor.dtype for name, tensor in loaded.items() if name != "cos_sin"} == {run}


def test_large_tensors_pass_through_staging_in_pieces(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(_load(single, torch.bfloat16).tensors())
    monkeypatch.setattr("gplan.models.loader.STAGING_BYTES", 1000)
    pieces = dict(_load(single, torch.bfloat16).tensors())
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_bytes_are_known_before_loading(single: Path) -> None:
    spec = read_spec(str(single), read_headers(str(single)))
    for dtype in (torch.float32, torch.bfloat16):
        model = _load(single, dtype, max_len=100)
        assert model.nbytes == weights_nbytes(spec, dtype, 100)
        assert len({name for name, _ in model.tensors()}) == len(list(model.tensors()))


def test_a_tied_head_is_the_embedding_and_counted_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    model = _load(folder)
    assert "head" not in dict(model.tensors())
    _edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    _load(folder)
    _edit_tensors(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(GplanError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        _load(folder)


def test_longer_than_the_model_is_refused(single: Path) -> None:
    with pytest.raises(UnsupportedError, match="1025 tokens"):
        _load(single, max_len=1025)


def test_random_models_have_the_loaded_shape(single: Path) -> None:
    spec = read_spec(str(single), read_headers(str(single)))
    shapes = {name: tensor.shape for name, tensor in _load(single).tensors()}
    one, same, other = (dict(random_model(spec, torch.float32, "cpu", 64, seed).tensors()) for seed in (1, 1, 2))
    assert {name: tensor.shape for name, tensor in one.items()} == shapes
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.0.qkv"], other["layers.0.qkv"])


# What is wrong ----------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path, single: Path) -> None:
    with pytest.raises(GplanError, match="no such folder"):
        read_headers(str(tmp_path / "nowhere"))
    with pytest.raises(GplanError, match="is a file"):
        read_headers(str(single / "config.json"))
    with pytest.raises(GplanError, match=r"no config\.json"):
        read_headers(str(tmp_path))


def test_a_hub_name_that_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GplanError, match="nobody/nothing-at-all is no folder here, and cannot be had") as refusal:
        read_headers("nobody/nothing-at-all")
    assert "online" in refusal.value.hint


def test_a_hub_name_that_is_cached(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(single, snapshot)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    headers = read_headers("someone/tiny")
    assert headers.source == "someone/tiny"
    assert headers.tensors == read_headers(str(single)).tensors


def test_no_weights(single: Path, tmp_path: Path) -> None:
    folder = _copy(single, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(GplanError, match=r"neither model\.safetensors nor"):
        read_headers(str(folder))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(GplanError, match=r"only \.bin weights"):
        read_headers(str(folder))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_config_that_is_no_object(text: str, single: Path, tmp_path: Path) -> None:
    folder = _copy(single, tmp_path)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(GplanError, match=r"config\.json: not"):
        read_headers(str(folder))


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    folder = _copy(sharded, tmp_path)
    victim = sorted(folder.glob("*.safetensors"))[2]
    victim.unlink()
    with pytest.raises(GplanError, match=victim.name):
        read_headers(str(folder))


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 1}, {"a": "../x.safetensors"}, {"a": "/etc/passwd"}])
def test_a_broken_index(weight_map: object, sharded: Path, tmp_path: Path) -> None:
    folder = _copy(sharded, tmp_path)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(GplanError, match=r"index\.json"):
        read_headers(str(folder))


def test_a_tensor_that_is_not_in_its_shard(sharded: Path, tmp_path: Path) -> None:
    folder = _copy(sharded, tmp_path)
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.layers.0.absent"] = file
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(GplanError, match=rf"{file}: tensor model\.layers\.0\.absent is missing"):
        read_headers(str(folder))


def test_a_tensor_in_two_shards(sharded: Path, tmp_path: Path) -> None:
    folder = _copy(sharded, tmp_path)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file({**load_file(first), **load_file(second)}, second)
    with pytest.raises(GplanError, match=rf"is both in {first.name} and in {second.name}"):
        read_headers(str(folder))


def test_a_missing_tensor(single: Path, tmp_path: Path) -> None:
    folder = _copy(single, tmp_path)
    _edit_tensors(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(GplanError, match=r"missing tensor model\.layers\.1\.self_attn\.k_proj\.bias"):
        _load(folder)


def test_an_untied_head_that_is_missing(single: Path, tmp_path: Path) -> None:
    folder = _copy(single, tmp_path)
    _edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(GplanError, match=r"missing tensor lm_head\.weight"):
        _load(folder)


def test_unexpected_tensors(single: Path, tmp_path: Path) -> None:
    folder = _copy(single, tmp_path)
    _edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    _load(folder)
    _edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)}))
    with pytest.raises(GplanError, match=r"unexpected tensor model\.layers\.0\.self_attn\.o_proj\.bias"):
        _load(folder)


def test_another_shape(single: Path, tmp_path: Path) -> None:
    folder = _copy(single, tmp_path)
    _edit_config(folder, intermediate_size=100)
    with pytest.raises(GplanError, match=r"mlp\.gate_proj\.weight: expected shape \[100, 64\], found \[96, 64\]"):
        _load(folder)


def test_another_dtype(single: Path, tmp_path: Path) -> None:
    folder = _copy(single, tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    _edit_tensors(folder, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(UnsupportedError, match=rf"{name} is I8"):
        _load(folder)


def test_a_file_cut_anywhere_or_with_a_broken_header(single: Path, tmp_path: Path) -> None:
    folder = _copy(single, tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    broken = [whole[:n] for n in (0, 7, 8, 1000, len(whole) - 1)]
    broken += [
        (2**63).to_bytes(8, "little") + whole[8:],
        b"\x00" * 8 + whole[8:],
        whole[:8] + b"[" + whole[9:],
        _with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        _with_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
        _with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}),
        _with_header({"a": {"dtype": "F32", "shape": [1]}}),
        _with_header({"a": 3}),
        _with_header([]),
    ]
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(GplanError, match=r"model\.safetensors: ") as refusal:
            read_headers(str(folder))
        assert refusal.value.hint


def test_a_file_that_shrinks_after_its_header_was_read(single: Path, tmp_path: Path) -> None:
    from gplan.models.loader import _Reader

    folder = _copy(single, tmp_path)
    header = max(read_headers(str(folder)).tensors, key=lambda tensor: tensor.offset)
    os.truncate(folder / "model.safetensors", header.offset + 10)
    with (
        _Reader(folder, torch.device("cpu")) as reader,
        pytest.raises(GplanError, match=f"within tensor {header.name}"),
    ):
        reader.read_into(header, torch.empty(header.shape))


def _with_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\x00" * 4


# Identity ---------------------------------------------------------------------------------------------------------


def _identity(checkpoint: str, *, hash_contents: bool = False):  # type: ignore[no-untyped-def]
    headers = read_headers(checkpoint, hash_contents=hash_contents)
    return headers.identity(read_spec(checkpoint, headers))


def test_identity_is_the_same_wherever_the_checkpoint_lies(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "a folder, 100%20 moved"
    shutil.copytree(sharded, moved)
    link = tmp_path / "link"
    link.symlink_to(moved)
    monkeypatch.chdir(tmp_path)
    original = _identity(str(sharded), hash_contents=True)
    sources = {
        str(sharded) + "/": "tiny",
        str(moved): "a folder, 100%20 moved",
        "a folder, 100%20 moved": "a folder, 100%20 moved",
        "./a folder, 100%20 moved/": "./a folder, 100%20 moved/",
        "a folder, 100%20 moved/../link/.": "a folder, 100%20 moved/../link/.",
        "link": "link",
        "link/": "link/",
        str(link): "link",
    }
    for written, source in sources.items():
        identity = _identity(written, hash_contents=True)
        assert identity.source == source
        assert msgspec.structs.replace(identity, source=original.source) == original
    files = {path.name: path.resolve() for path in moved.iterdir()}
    cache = tmp_path / "cache"
    cache.mkdir()
    for name, path in files.items():
        (cache / name).symlink_to(path)
    assert msgspec.structs.replace(_identity(str(cache), hash_contents=True), source=original.source) == original


def test_identity_changes_with_config_headers_and_contents(single: Path, tmp_path: Path) -> None:
    original, folder = _identity(str(single), hash_contents=True), _copy(single, tmp_path)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()), indent=7))
    assert _identity(str(folder), hash_contents=True).config_digest == original.config_digest
    _edit_config(folder, rms_norm_eps=0.5)
    assert _identity(str(folder)).config_digest != original.config_digest

    shutil.copy(single / "model.safetensors", folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    flipped = _identity(str(folder), hash_contents=True)
    assert flipped.headers_digest == original.headers_digest
    assert flipped.content_digest != original.content_digest
    assert _identity(str(folder)).content_digest == ""

    _edit_tensors(folder, lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(8)}))
    assert _identity(str(folder)).headers_digest != original.headers_digest


HEADER_CHANGES = {
    "shape": lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].reshape(8, -1)}),
    "dtype": lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].view(torch.int32)}),
    "name": lambda tensors: tensors.update({"model.norm.weights": tensors.pop("model.norm.weight")}),
    "size": lambda tensors: tensors.update({"lm_head.bias": torch.zeros(1)}),
}


@pytest.mark.parametrize("change", HEADER_CHANGES)
def test_identity_changes_with_any_header_though_contents_are_not_hashed(
    single: Path, tmp_path: Path, change: str
) -> None:
    spec, folder = read_spec(str(single), read_headers(str(single))), _copy(single, tmp_path)
    digests = []
    for edit in (lambda tensors: None, lambda tensors: None, HEADER_CHANGES[change]):
        _edit_tensors(folder, edit)
        digests.append(read_headers(str(folder)).identity(spec).headers_digest)
    written, again, changed = digests
    assert written == again != changed


def test_parameters_are_counted(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    assert _identity(str(single)).num_parameters == sum(tensor.numel() for tensor in tensors.values())


# Memory -----------------------------------------------------------------------------------------------------------

_MEASURE = """
import re, sys, torch
from pathlib import Path
from gplan.models import load_model, read_headers, read_spec

def kibibytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

checkpoint, dtype = sys.argv[1], getattr(torch, sys.argv[2])
spec = read_spec(checkpoint, read_headers(checkpoint))
torch.ones(8).add_(1).to(torch.bfloat16)
before = kibibytes("VmRSS")
model = load_model(checkpoint, spec, dtype, "cpu", 16)
print((kibibytes("VmHWM") - before) * 1024, model.nbytes)
"""


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("larger")
    return make_checkpoint(folder, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, vocab_size=4096)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the memory figures of Linux")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_host_memory_is_the_model_plus_one_tensor(dtype: str, larger: Path) -> None:
    command = [sys.executable, "-c", _MEASURE, str(larger), dtype]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak, model_bytes = map(int, output.split())
    largest = max(tensor.nbytes for tensor in read_headers(str(larger)).tensors)
    assert model_bytes > 50 << 20
    assert model_bytes * 0.9 < peak < model_bytes + max(largest, 32 << 20) + (4 << 20)
