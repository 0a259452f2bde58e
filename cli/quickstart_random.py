"""A small Llama of random weights with a tokenizer that has a token for every byte: needs no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gplan.models.gguf_import import whole_folder

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, MAX_LEN = 128, 4, 4, 2, 32, 384, 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = SPECIAL.index("<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_random_llama(folder: Path, seed: int = 0) -> None:
    """Writes the checkpoint, whole or not at all; the same seed gives the same weights."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    with whole_folder(folder) as target:
        save_file(_weights(len(vocabulary), seed), target / "model.safetensors", metadata={"format": "pt"})
        (target / "model.safetensors").chmod(0o644)
        _tokenizer(vocabulary).save(str(target / "tokenizer.json"))
        for name, value in (("config.json", _config(len(vocabulary))), ("tokenizer_config.json", _tokenizer_config())):
            (target / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _weights(vocab_size: int, seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    generator = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (HIDDEN,)),
                ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
                ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
                ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
                ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
                ("post_attention_layernorm", (HIDDEN,)),
                ("mlp.gate_proj", (INNER, HIDDEN)),
                ("mlp.up_proj", (INNER, HIDDEN)),
                ("mlp.down_proj", (HIDDEN, INNER)),
            )
        }
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else generator.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
        for name, shape in shapes.items()
    }


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LEN,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": SPECIAL.index("<|im_start|>"),
        "eos_token_id": END,
        "pad_token_id": END,
    }


def _tokenizer(vocabulary: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }
