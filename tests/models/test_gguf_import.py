"""A GGUF file becomes the checkpoint it was made from: same weights, same logits, same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gplan.errors import GplanError, UnsupportedError
from gplan.models.gguf_import import convert_gguf, half_split_rows

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdef0123456789", "Ġ", "Ċ", "ab", "Ġa"]
MERGES = ["a b", "Ġ a"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def interleaved_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does, row by row: row i of a head goes to 2i, row i + d/2 to 2i + 1."""
    out = np.empty_like(weight)
    dim = weight.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + i + dim // 2]
    return out


def gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[1:2] == ["layers"]:
        return f"blk.{parts[2]}.{NAMES[parts[-1]]}.weight"
    return f"{NAMES['.'.join(parts)]}.weight"


def original(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: LlamaForCausalLM, **changes: Any) -> Path:
    writer = gguf.GGUFWriter(path, changes.get("arch", "llama"))
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if "scaling" in changes:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleaved_rows(array, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(changes.get("rename", {}).get(name, gguf_name(name)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LlamaForCausalLM, Path]:
    """A model, and the folder that its GGUF was converted to."""
    model = original(request.param)
    convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    return model, tmp_path / "out"


def test_the_converted_model_computes_the_same(pair: tuple[LlamaForCausalLM, Path]) -> None:
    model, folder = pair
    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert converted.dtype == torch.float32
    ids = torch.randint(0, len(TOKENS), (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_rows_left_interleaved_would_compute_something_else(tmp_path: Path) -> None:
    weight = np.arange(KV_HEADS * HEAD_DIM * 3, dtype=np.float32).reshape(KV_HEADS * HEAD_DIM, 3)
    mixed = interleaved_rows(weight, KV_HEADS)
    assert not np.array_equal(mixed, weight)
    assert np.array_equal(half_split_rows(mixed, KV_HEADS), weight)


def test_the_tokenizer_is_the_files(pair: tuple[LlamaForCausalLM, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    ids = tokenizer("ab a 12\n<|im_end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "Ġa", "Ġ", "1", "2", "Ċ", "<|im_end|>"]
    assert tokenizer.decode(ids) == "ab a 12\n<|im_end|>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre"),
        ({"scaling": True}, "llama.rope.scaling"),
        ({"rename": {"model.norm.weight": "rope_freqs.weight"}}, "rope_freqs.weight"),
        ({"rename": {"model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up_exps.weight"}}, "blk.0.ffn_up_exps.weight"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", original(tied=True), **changes)
    with pytest.raises(UnsupportedError, match=named.replace(".", r"\.")):
        convert_gguf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="mamba"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_a_file_that_is_not_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(GplanError, match=r"m\.gguf is not a GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
