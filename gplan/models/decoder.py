"""The one decoder: a config decides what it holds, a kernel set what its operators are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gplan.kernels.base import Kernels, QKNorm
from gplan.models.base import ForwardInputs, Model, Projection
from gplan.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one layer; shapes as in `gplan.models.weights`."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: QKNorm | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Decoder(Model):
    """A decoder-only model of any supported architecture.

    Args:
        weights: every tensor of `weights_of(spec)` by name, of one dtype on one device.
        cos_sin: [max_len, head_dim] float32, as `cos_sin_table` gives it.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], cos_sin: Tensor) -> None:
        self.spec = spec
        self._weights = dict(weights)
        self._cos_sin = cos_sin
        self._embed, self._norm = weights["embed"], weights["norm"]
        self._head = weights.get("head", self._embed)
        self._layers = tuple(_layer(spec, weights, f"layers.{index}") for index in range(spec.num_layers))

    def forward(self, kernels: Kernels, inputs: ForwardInputs) -> None:
        residual, eps = inputs.residual, self.spec.norm_eps
        torch.index_select(self._embed, 0, inputs.input_ids, out=residual)
        for layer, (k_cache, v_cache) in zip(self._layers, inputs.kv_caches, strict=True):
            qkv = kernels.norm_linear(residual, layer.input_norm, eps, layer.qkv, layer.qkv_bias)
            kernels.rope_append(
                qkv, inputs.attn_q, inputs.positions, self._cos_sin, k_cache, v_cache, inputs.kv_slots, layer.qk_norm
            )
            del qkv
            inputs.attend(inputs.attn_q, k_cache, v_cache, inputs.attn_out)
            if inputs.ends is None or layer is not self._layers[-1]:
                self._after_attention(kernels, layer, inputs.attn_out, residual)
        if inputs.ends is not None:
            # What other rows would become after their last keys and values is read by nobody.
            rows, out = inputs.ends.rows, inputs.ends.out
            torch.index_select(residual, 0, rows, out=out)
            self.finish(kernels, inputs.attn_out.index_select(0, rows), out)

    def finish(self, kernels: Kernels, attended: Tensor, residual: Tensor) -> None:
        self._after_attention(kernels, self._layers[-1], attended, residual)

    def _after_attention(self, kernels: Kernels, layer: Layer, attended: Tensor, residual: Tensor) -> None:
        eps = self.spec.norm_eps
        kernels.linear_add(attended.view(len(residual), -1), layer.o, residual, layer.o_bias)
        hidden = kernels.norm_gate_up(residual, layer.post_norm, eps, layer.gate_up, layer.gate_up_bias)
        kernels.linear_add(hidden, layer.down, residual, layer.down_bias)

    def head(self, kernels: Kernels, hidden: Tensor, out: Tensor) -> None:
        kernels.linear(kernels.rms_norm(hidden, self._norm, self.spec.norm_eps), self._head, out=out)

    def projections(self) -> tuple[Projection, ...]:
        first, layers = self._layers[0], self._layers
        return (
            Projection(tuple(layer.qkv for layer in layers), has_bias=first.qkv_bias is not None),
            Projection(tuple(layer.o for layer in layers), adds=True),
            Projection(tuple(layer.gate_up for layer in layers), gated=True, has_bias=first.gate_up_bias is not None),
            Projection(tuple(layer.down for layer in layers), adds=True),
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.items()
        yield "cos_sin", self._cos_sin


def _layer(spec: ModelSpec, weights: Mapping[str, Tensor], prefix: str) -> Layer:
    norm = None
    if spec.qk_norm:
        norm = QKNorm(weights[f"{prefix}.q_norm"], weights[f"{prefix}.k_norm"], spec.norm_eps)
    return Layer(
        input_norm=weights[f"{prefix}.input_norm"],
        qkv=weights[f"{prefix}.qkv"],
        qkv_bias=weights.get(f"{prefix}.qkv_bias"),
        qk_norm=norm,
        o=weights[f"{prefix}.o"],
        o_bias=weights.get(f"{prefix}.o_bias"),
        post_norm=weights[f"{prefix}.post_norm"],
        gate_up=weights[f"{prefix}.gate_up"],
        gate_up_bias=weights.get(f"{prefix}.gate_up_bias"),
        down=weights[f"{prefix}.down"],
        down_bias=weights.get(f"{prefix}.down_bias"),
    )
