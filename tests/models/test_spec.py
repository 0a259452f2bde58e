"""What a config says, and what is refused by name before anything is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gplan.errors import GplanError, UnsupportedError
from gplan.models import ModelSpec
from tests.checkpoints import ARCHITECTURES, make_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def _spec(*, max_len: int | None = None, **config: Any) -> ModelSpec:
    values = {**CONFIG, **config}
    return ModelSpec.from_config({k: v for k, v in values.items() if v != "absent"}, max_len=max_len)


def test_reads_every_value() -> None:
    spec = _spec(eos_token_id=[5, 6], tie_word_embeddings=True)
    assert dataclasses.asdict(spec) | {"rope": None} == {
        "architecture": "LlamaForCausalLM",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 3,
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position": 1024,
        "norm_eps": 1e-5,
        "rope": None,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tied_head": True,
        "dtype": "bfloat16",
        "eos_token_ids": (5, 6),
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reads_what_transformers_writes(architecture: str) -> None:
    model = make_model(architecture)
    spec = ModelSpec.from_config({**model.config.to_dict(), "architectures": [architecture]}, tensor_dtype="float32")
    attention = model.model.layers[0].self_attn
    assert spec.q_size == attention.q_proj.weight.shape[0]
    assert spec.kv_size == attention.k_proj.weight.shape[0]
    assert spec.qkv_bias == (attention.q_proj.bias is not None)
    assert spec.o_bias == (attention.o_proj.bias is not None)
    assert spec.qk_norm == hasattr(attention, "q_norm")
    assert spec.norm_eps == model.model.norm.variance_epsilon


def test_explicit_head_dim_wins_and_families_have_their_defaults() -> None:
    assert _spec(head_dim=32).head_dim == 32
    assert _spec(head_dim=None).head_dim == 16
    assert _spec(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert _spec(hidden_size=66, head_dim=10).head_dim == 10


def test_kv_heads_left_out() -> None:
    assert _spec(num_key_value_heads="absent").num_kv_heads == 4
    assert _spec(num_key_value_heads=None, architectures=["Qwen2ForCausalLM"]).num_kv_heads == 4
    with pytest.raises(GplanError, match="num_key_value_heads is missing"):
        _spec(num_key_value_heads="absent", architectures=["Qwen2ForCausalLM"])


def test_biases_and_norms_by_family() -> None:
    def facts(architecture: str, **config: Any) -> tuple[bool, bool, bool, bool]:
        spec = _spec(architectures=[architecture], **{"sliding_window": None, **config})
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm

    both = {"attention_bias": True, "mlp_bias": True}
    assert facts("LlamaForCausalLM", **both) == (True, True, True, False)
    assert facts("MistralForCausalLM", **both) == (False, False, False, False)
    assert facts("Qwen2ForCausalLM") == (True, False, False, False)
    assert facts("Qwen3ForCausalLM", **both) == (True, True, False, True)


def test_dtype_from_either_key_then_from_the_tensors() -> None:
    assert _spec(dtype="float16").dtype == "float16"
    assert _spec(torch_dtype="torch.float16").dtype == "float16"
    config = {k: v for k, v in CONFIG.items() if k != "torch_dtype"}
    assert ModelSpec.from_config(config, tensor_dtype="float32").dtype == "float32"
    with pytest.raises(GplanError, match="dtype is missing"):
        ModelSpec.from_config(config)


def test_end_of_sequence_from_generation_config_first() -> None:
    config = {**CONFIG, "eos_token_id": 7}
    assert ModelSpec.from_config(config).eos_token_ids == (7,)
    assert ModelSpec.from_config(config, generation_config={"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    assert ModelSpec.from_config(config, generation_config={}).eos_token_ids == (7,)
    assert ModelSpec.from_config(CONFIG).eos_token_ids == ()


def test_a_window_is_refused_only_where_it_would_be_felt() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert _spec(**mistral, sliding_window=None).max_position == 1024
    assert _spec(**mistral, sliding_window=1024).max_position == 1024
    assert _spec(**mistral, max_position_embeddings=4096).max_position == 4096
    with pytest.raises(UnsupportedError, match=r"sliding_window 512 is live for requests of 1024") as refusal:
        _spec(**mistral, sliding_window=512)
    assert "--max-len 512" in refusal.value.hint
    short = _spec(**mistral, sliding_window=512, max_len=512)
    assert short.max_position == 512
    with pytest.raises(UnsupportedError, match="513"):
        short.check_max_len(513)
    with pytest.raises(UnsupportedError, match="sliding_window 4096"):  # what transformers takes where none is stated
        _spec(**mistral, max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config.*awq"),
        ({"compression_config": {"x": 1}}, "compression_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
)
def test_refused_by_name(config: dict[str, Any], names: str) -> None:
    with pytest.raises(UnsupportedError, match=names) as refusal:
        _spec(**config)
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("config", "names"),
    [
        *(({key: "absent"}, f"{key} is missing") for key in ("hidden_size", "num_hidden_layers", "vocab_size")),
        *(({key: None}, f"{key} is missing") for key in ("intermediate_size", "num_attention_heads")),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 63}, "hidden_size 63"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"architectures": []}, "architectures is"),
        ({"architectures": ["A", "B"]}, "architectures is"),
        ({"architectures": "absent"}, "architectures is None"),
        ({"layer_types": "full_attention"}, "layer_types is"),
        ({"torch_dtype": 32}, "torch_dtype is 32"),
        ({"quantization_config": 4}, "quantization_config is 4"),
    ],
)
def test_malformed_values_name_their_key(config: dict[str, Any], names: str) -> None:
    with pytest.raises(GplanError, match=names) as refusal:
        _spec(**config)
    assert refusal.value.hint


def test_longer_than_the_model_is_refused() -> None:
    _spec(max_len=1024)
    with pytest.raises(UnsupportedError, match="1025 tokens"):
        _spec(max_len=1025)
