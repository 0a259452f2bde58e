"""Checkpoints of well-known shapes with random weights, made on the spot, for measuring.

python benchmarks/checkpoints.py llama-3.1-8b OUT_DIR [--layers N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gplan.models import ModelSpec
from gplan.models.weights import weights_of

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}

CONFIGS = {"llama-3.1-8b": LLAMA_3_1_8B, "qwen3-8b": QWEN3_8B}

SHARD_BYTES = 4 << 30


def spec_of(name: str, layers: int | None = None) -> ModelSpec:
    return ModelSpec.from_config(config_of(name, layers))


def config_of(name: str, layers: int | None = None) -> dict[str, Any]:
    config = dict(CONFIGS[name])
    return config | ({"num_hidden_layers": layers} if layers else {})


def write_checkpoint(name: str, folder: Path, layers: int | None = None, seed: int = 0) -> Path:
    """Writes config.json, a tokenizer of bytes and sharded safetensors; weights are drawn on the GPU where there is
    one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(name, layers)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    num_shards = 0

    def flush() -> None:
        nonlocal num_shards, shard
        num_shards += 1
        file = f"model-{num_shards:05d}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard = {}

    parts = [part for weight in weights_of(ModelSpec.from_config(config)) for part in weight.parts]
    for part in parts:
        drawn = torch.randn(part.shape, generator=generator, device=device, dtype=torch.float32) * 0.02
        weight = (1 + drawn if part.source.endswith("norm.weight") else drawn).to(torch.bfloat16).cpu()
        shard[part.source] = weight
        if sum(held.nbytes for held in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    write_checkpoint(arguments.name, arguments.folder, arguments.layers)
