"""Rotary tables against transformers' own, for every kind and both spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gplan.errors import GplanError, UnsupportedError
from gplan.models import ModelSpec, cos_sin_table

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}

KINDS: dict[str, dict[str, Any]] = {
    "none stated": {},
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn of its own attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
    },
    "yarn not truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    "yarn that fades at once": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 2.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def _spec(**config: Any) -> ModelSpec:
    return ModelSpec.from_config({**CONFIG, **config})


def _transformers_table(length: int, **config: Any) -> torch.Tensor:
    embedding = LlamaRotaryEmbedding(LlamaConfig(**{**CONFIG, **config}))
    cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_scaling with type", "rope_parameters"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, spelling: str) -> None:
    values = dict(KINDS[kind])
    if spelling == "rope_parameters":
        config = {"rope_parameters": {**values, "rope_theta": 5000.0}}
    else:
        if spelling == "rope_scaling with type" and values:
            values["type"] = values.pop("rope_type")
        config = {"rope_scaling": values or None, "rope_theta": 5000.0}
    table = cos_sin_table(_spec(**config), 256, "cpu")
    expected = _transformers_table(256, rope_parameters={"rope_type": "default", **KINDS[kind], "rope_theta": 5000.0})
    assert table.shape == (256, 64)
    assert table.dtype is torch.float32
    torch.testing.assert_close(table, expected, rtol=1e-5, atol=2e-5)


def test_kinds_differ() -> None:
    tables = [
        cos_sin_table(_spec(rope_parameters=KINDS[kind]), 200, "cpu")
        for kind in ("default", "linear", "llama3", "yarn")
    ]
    assert all(not torch.allclose(a, b) for i, a in enumerate(tables) for b in tables[:i])


def test_theta_without_a_section_and_by_default() -> None:
    torch.testing.assert_close(
        cos_sin_table(_spec(rope_theta=777.0), 50, "cpu"),
        _transformers_table(50, rope_parameters={"rope_type": "default", "rope_theta": 777.0}),
    )
    assert _spec().rope.theta == 10000.0


def test_original_maximum_beside_the_section_wins() -> None:
    spec = _spec(rope_parameters=KINDS["llama3"], original_max_position_embeddings=128)
    assert spec.rope.original_max == 128


def test_dynamic_is_the_default_up_to_its_maximum_and_refused_beyond() -> None:
    spec, plain = _spec(rope_parameters=KINDS["dynamic"]), _spec()
    torch.testing.assert_close(cos_sin_table(spec, 256, "cpu"), cos_sin_table(plain, 256, "cpu"))
    with pytest.raises(UnsupportedError, match=r"dynamic: 257 tokens.*256"):
        cos_sin_table(spec, 257, "cpu")
    with pytest.raises(UnsupportedError, match="dynamic"):
        spec.check_max_len(300)


def test_yarn_follows_what_it_stretches_to() -> None:
    spec = _spec(rope_parameters={"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=64)
    assert spec.max_position == 256
    spec.check_max_len(256)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "su"}}, "'su'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_refused_by_name(config: dict[str, Any], names: str) -> None:
    with pytest.raises(UnsupportedError, match=names) as refusal:
        _spec(**config)
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling: factor is -1"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"type": 3}}, "type is 3"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate is 'no'"),
    ],
)
def test_malformed_values_name_their_key(config: dict[str, Any], names: str) -> None:
    with pytest.raises(GplanError, match=names):
        _spec(**config)
