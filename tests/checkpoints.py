"""Tiny checkpoints of random weights in the Hugging Face layout, written by transformers itself.

Their weights are spread so that greedy answers vary from token to token and depend on the whole prompt: a wrong key,
position or bias then shows as a wrong token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

VOCAB_SIZE = 320
"""Above the tokenizer's, as in real checkpoints: a drawn token may have no text."""

BOS, EOS, PAD = 256, 257, 258
SPECIAL_TOKENS = {"<|im_start|>": BOS, "<|im_end|>": EOS, "<|pad|>": PAD}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

_OF_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 24},
}


def make_checkpoint(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Writes a checkpoint with its tokenizer and returns its folder.

    Args:
        sharded: several files and an index, rather than one.
        config: values of the transformers config that differ from the tiny default.
    """
    model = make_model(architecture, seed=seed, **config).to(dtype)
    model.save_pretrained(folder, max_shard_size="64KB" if sharded else "1GB")
    make_tokenizer().save_pretrained(folder)
    return folder


def make_model(architecture: str, *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """The model that `make_checkpoint` writes, in float32."""
    values = {**_SHAPE, **_OF_ARCHITECTURE[architecture], **config}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), attn_implementation="sdpa")
    assert type(model).__name__ == architecture
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_spread(name, noise))
    return model.eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, three special tokens, a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    bos, eos, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _spread(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    if name.endswith("embed_tokens.weight"):
        return 0.3 * noise
    return noise * 2 / noise.shape[-1] ** 0.5
