"""The decoder against transformers, in float32: logits, and greedy tokens over chunked prompts and shared steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gplan.models import load_model, read_headers, read_spec
from tests.checkpoints import ARCHITECTURES, VOCAB_SIZE, make_checkpoint
from tests.models.harness import Harness, Stream

ROPE = {"rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    **{f"{name} tied": (name, {"tie_word_embeddings": True}) for name in ARCHITECTURES},
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "explicit head_dim": ("LlamaForCausalLM", {"head_dim": 20}),
    "one kv head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "as many kv heads": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    "dynamic": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
    "yarn": (
        "Qwen2ForCausalLM",
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64, **ROPE}},
    ),
    "llama3": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                **ROPE,
            }
        },
    ),
}


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> Harness:
    spec = read_spec(str(folder), read_headers(str(folder)))
    return Harness(spec, load_model(str(folder), spec, dtype, "cpu", 1024))


def _prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    inputs = torch.tensor([prompt])
    answer = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens, do_sample=False, eos_token_id=[]
    )
    return answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path: Path) -> None:
    architecture, config = VARIANTS[variant]
    folder = make_checkpoint(tmp_path, architecture, sharded="tied" in variant, **config)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    harness = _load(folder)
    prompts = _prompts(1, 7, 40, 130)
    answers = harness.generate(prompts, 12, chunk=16)
    assert answers == [_greedy(reference, prompt, 12) for prompt in prompts]

    harness = _load(folder)
    for prompt in prompts:
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        stream = Stream(list(prompt))
        while stream.cached < len(prompt):
            logits = harness.step([(stream, min(50, len(prompt) - stream.cached))])
        torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    (prompt,) = _prompts(50)
    exact = _load(folder).step([(Stream(list(prompt)), 50)])
    rounded = _load(folder, dtype).step([(Stream(list(prompt)), 50)])
    assert rounded.dtype is dtype
    assert (rounded.float() - exact).abs().mean() < 0.15 * exact.std()


@pytest.mark.parametrize("variant", ["LlamaForCausalLM", "llama biases", "Qwen3ForCausalLM", "explicit head_dim"])
def test_rows_left_out_after_the_last_attention_change_nothing_and_can_be_finished(
    variant: str, tmp_path: Path
) -> None:
    architecture, config = VARIANTS[variant]
    harness = _load(make_checkpoint(tmp_path, architecture, **config))
    prompts = _prompts(9, 1, 30)
    everything = harness.step([(Stream(list(prompt)), len(prompt)) for prompt in prompts])
    hidden = harness.hidden
    fewer = harness.step([(Stream(list(prompt)), len(prompt)) for prompt in prompts], leave_out=True)
    torch.testing.assert_close(fewer, everything, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(harness.hidden, hidden, rtol=1e-5, atol=1e-5)
    assert (harness.left_out - hidden).abs().mean() > 1e-3, "nothing was left out"


def test_attends_once_per_layer_in_order(tmp_path: Path) -> None:
    harness = _load(make_checkpoint(tmp_path))
    seen: list[int] = []
    caches = {layer[0].data_ptr(): index for index, layer in enumerate(harness.cache)}
    run = harness._prefill.run

    def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(caches[k_cache.data_ptr()])
        run(q, k_cache, v_cache, out)

    harness._prefill.run = attend  # type: ignore[method-assign]
    harness.step([(Stream([1, 2, 3]), 3)])
    assert seen == [0, 1, 2]


def test_wrong_weights_are_noticed(tmp_path: Path) -> None:
    """The negative control of every comparison above: a small change to one bias changes the answers."""
    folder = make_checkpoint(tmp_path, "Qwen2ForCausalLM")
    prompts = _prompts(40)
    right = _load(folder).generate(prompts, 12, chunk=16)
    harness = _load(folder)
    weights = dict(harness.model.tensors())
    weights["layers.1.qkv_bias"][-5:] += 1.0
    assert harness.generate(prompts, 12, chunk=16) != right
