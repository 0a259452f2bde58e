"""Which tensors a decoder holds, how they are fused, and from which tensors of a checkpoint they are made.

Projections that read the same input are one matrix: q, k and v, and gate and up. A fused tensor is the rows of its
parts, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gplan.errors import GplanError, UnsupportedError
from gplan.models.checkpoint import Headers
from gplan.models.safetensors_header import DTYPE_NAMES
from gplan.models.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint that becomes rows of a fused one."""

    source: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the decoder."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:])


def weights_of(spec: ModelSpec) -> Iterator[Weight]:
    """Every tensor of the decoder, in the order in which a forward reads them."""
    hidden = spec.hidden_size
    yield _weight("embed", (EMBEDDING, (spec.vocab_size, hidden)))
    for layer in range(spec.num_layers):
        yield from _layer_weights(spec, layer)
    yield _weight("norm", ("model.norm.weight", (hidden,)))
    if not spec.tied_head:
        yield _weight("head", (HEAD, (spec.vocab_size, hidden)))


def weights_nbytes(spec: ModelSpec, dtype: torch.dtype, max_len: int) -> int:
    """Device bytes of a decoder: its weights and its rotary table."""
    elements = sum(math.prod(weight.shape) for weight in weights_of(spec))
    return elements * dtype.itemsize + max_len * spec.head_dim * torch.float32.itemsize


def check_tensors(spec: ModelSpec, headers: Headers) -> None:
    """Compares a checkpoint's tensors with those that the decoder needs.

    Raises:
        GplanError: a tensor that is missing, unexpected or of another shape, by name.
        UnsupportedError: one of a dtype that cannot be run.
    """
    found = {tensor.name: tensor for tensor in headers.tensors}
    expected = {part.source: part.shape for weight in weights_of(spec) for part in weight.parts}
    missing = [name for name in expected if name not in found]
    if missing:
        raise GplanError(
            f"{headers.source}: missing {_some(missing)}, which {spec.architecture} needs",
            "The checkpoint is incomplete, or its config describes another model.",
        )
    optional = {HEAD: expected[EMBEDDING]} if spec.tied_head else {}
    unexpected = [name for name in found if name not in expected and name not in optional and not _is_harmless(name)]
    if unexpected:
        raise GplanError(
            f"{headers.source}: unexpected {_some(unexpected)}, which {spec.architecture} does not use",
            "Leaving weights out would change the answers; the config may describe another model.",
        )
    for name, shape in {**expected, **optional}.items():
        if name not in found:
            continue
        if found[name].shape != shape:
            raise GplanError(
                f"{headers.source}: tensor {name}: expected shape {list(shape)}, found {list(found[name].shape)}",
                "The config describes another model.",
            )
        if found[name].dtype not in DTYPE_NAMES:
            raise UnsupportedError(
                f"{headers.source}: tensor {name} is {found[name].dtype}; gplan loads {', '.join(DTYPE_NAMES)}",
                "Use a checkpoint that is not quantised.",
            )


def _layer_weights(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    ours, attn, mlp = f"layers.{layer}", f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    gate_up = (("gate_proj", inner), ("up_proj", inner))
    yield _weight(f"{ours}.input_norm", (f"model.layers.{layer}.input_layernorm.weight", (hidden,)))
    yield _weight(f"{ours}.qkv", *((f"{attn}.{name}.weight", (rows, hidden)) for name, rows in qkv))
    if spec.qkv_bias:
        yield _weight(f"{ours}.qkv_bias", *((f"{attn}.{name}.bias", (rows,)) for name, rows in qkv))
    if spec.qk_norm:
        yield _weight(f"{ours}.q_norm", (f"{attn}.q_norm.weight", (spec.head_dim,)))
        yield _weight(f"{ours}.k_norm", (f"{attn}.k_norm.weight", (spec.head_dim,)))
    yield _weight(f"{ours}.o", (f"{attn}.o_proj.weight", (hidden, q)))
    if spec.o_bias:
        yield _weight(f"{ours}.o_bias", (f"{attn}.o_proj.bias", (hidden,)))
    yield _weight(f"{ours}.post_norm", (f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)))
    yield _weight(f"{ours}.gate_up", *((f"{mlp}.{name}.weight", (rows, hidden)) for name, rows in gate_up))
    if spec.mlp_bias:
        yield _weight(f"{ours}.gate_up_bias", *((f"{mlp}.{name}.bias", (rows,)) for name, rows in gate_up))
    yield _weight(f"{ours}.down", (f"{mlp}.down_proj.weight", (hidden, inner)))
    if spec.mlp_bias:
        yield _weight(f"{ours}.down_bias", (f"{mlp}.down_proj.bias", (hidden,)))


def _weight(name: str, *parts: tuple[str, tuple[int, ...]]) -> Weight:
    return Weight(name, tuple(Part(source, shape) for source, shape in parts))


def _is_harmless(name: str) -> bool:
    """Tables that old checkpoints carry and every engine computes anew."""
    return name.endswith("rotary_emb.inv_freq")


def _some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(sorted(names)[:3])
    return f"tensor {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
