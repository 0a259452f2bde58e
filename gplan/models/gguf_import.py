"""Turns a GGUF file of a Llama model into a checkpoint folder in Hugging Face's form, in float32.

Only a way to come by a checkpoint: nothing that plans or serves reads GGUF. Weights are de-quantised, so they differ
a little from the checkpoint that was quantised. Reading and de-quantising are the `gguf` library's; this module knows
how the two forms name and order things. What it does not know it refuses by name.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gplan.errors import GplanError, UnsupportedError

Array = npt.NDArray[np.float32]

_CONTROL_TOKEN = 3
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile(Protocol):
    """What is asked of an opened file: values by key, and tensors by name."""

    def value(self, key: str, default: Any = None) -> Any: ...

    def names(self) -> list[str]: ...

    def tensors(self) -> Iterator[tuple[str, Array]]: ...


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes `folder` whole or not at all: config, weights, tokenizer and chat template.

    Raises:
        GplanError: the `gguf` library is not installed.
        UnsupportedError: another architecture, tokenizer, rotary scaling or tensor than this module knows.
    """
    convert(_open(source), folder)


def convert(file: GgufFile, folder: Path) -> None:
    """As `convert_gguf`, of a file that is open."""
    _refuse_unknown(file)
    with whole_folder(folder) as target:
        weights = _weights(file)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        (target / "model.safetensors").chmod(0o644)  # save_file makes it readable by its owner alone
        _write_json(target / "config.json", _config(file, tied="lm_head.weight" not in weights))
        _write_json(target / "generation_config.json", _special_ids(file))
        _tokenizer(file).save(str(target / "tokenizer.json"))
        _write_json(target / "tokenizer_config.json", _tokenizer_config(file))


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and is gone when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class _Reader:
    """A `GgufFile` over the library's reader."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)

    def value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def names(self) -> list[str]:
        return list(self._reader.fields)

    def tensors(self) -> Iterator[tuple[str, Array]]:
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            yield tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)


def _open(source: Path) -> GgufFile:
    try:
        return _Reader(source)
    except ImportError:
        raise GplanError("reading a GGUF file needs the gguf library", "pip install gguf") from None
    except (ValueError, IndexError, KeyError) as error:
        raise GplanError(f"{source.name} is not a GGUF file: {error}", "Get the file again.") from error


def _refuse_unknown(file: GgufFile) -> None:
    for key, known in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if file.value(key) != known:
            raise UnsupportedError(
                f"{key} is {file.value(key)!r}; only {known!r} can be converted",
                "Give gplan the checkpoint in Hugging Face's form.",
            )
    for key in file.names():
        if key.startswith(("llama.rope.scaling", "llama.expert")):
            raise UnsupportedError(f"{key} is set, and cannot be converted", "Give gplan the original checkpoint.")


def _weights(file: GgufFile) -> dict[str, Array]:
    heads, kv_heads = file.value("llama.attention.head_count"), file.value("llama.attention.head_count_kv")
    rotated = {"attn_q": heads, "attn_k": kv_heads}
    weights: dict[str, Array] = {}
    for name, tensor in file.tensors():
        target, part = _target(name)
        array = half_split_rows(tensor, rotated[part]) if part in rotated else tensor
        weights[target] = np.ascontiguousarray(array)
    return weights


def _target(name: str) -> tuple[str, str]:
    """Hugging Face's name of a tensor, and which part of a layer it is (empty outside the layers)."""
    if name in _OUTSIDE:
        return _OUTSIDE[name], ""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.weight", part
    raise UnsupportedError(f"tensor {name} cannot be converted", "Give gplan the original checkpoint.")


def half_split_rows(weight: Array, num_heads: int) -> Array:
    """Undoes llama.cpp's order of the rows of a q or k projection.

    It pairs the rows of each head for an interleaved rotation (row 2i turns with 2i + 1); Hugging Face's rotation
    splits a head in halves (row i turns with i + head_dim / 2).
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _config(file: GgufFile, *, tied: bool) -> dict[str, Any]:
    hidden, heads = file.value("llama.embedding_length"), file.value("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": file.value("llama.feed_forward_length"),
        "num_hidden_layers": file.value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.value("llama.attention.head_count_kv"),
        "head_dim": file.value("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": _decimal(file.value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": file.value("llama.rope.freq_base", 10000.0),
        "rope_scaling": None,
        "max_position_embeddings": file.value("llama.context_length"),
        "vocab_size": len(file.value("tokenizer.ggml.tokens")),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        **_special_ids(file),
    }


def _decimal(value: float) -> float:
    """The decimal number that a float32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _special_ids(file: GgufFile) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: file.value(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _tokenizer(file: GgufFile) -> Tokenizer:
    """Byte-level BPE, with every digit a token of its own: what the name `smollm` stands for."""
    tokens = file.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN])
    return tokenizer


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    tokens = file.value("tokenizer.ggml.tokens")
    special = {name.removesuffix("_id"): tokens[index] for name, index in _special_ids(file).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.value("llama.context_length"),
        "add_bos_token": bool(file.value("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "chat_template": file.value("tokenizer.chat_template"),
        **special,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
