"""Rotary embedding: what a config says about it, and the table of cosines and sines that a forward reads.

The formulas are those of transformers' `modeling_rope_utils`, whose tables ours equal; the kinds are the ones a paged
cache can follow, where a key is rotated once and never again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from gplan.errors import UnsupportedError
from gplan.models.config import ConfigReader

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary embedding. What a kind does not use keeps its default.

    Attributes:
        theta: base of the frequencies.
        factor: how far positions are stretched.
        original_max: tokens the frequencies were trained for.
        low_freq_factor, high_freq_factor: of llama3: where interpolation begins and ends, in turns of `original_max`.
        attention_factor: of yarn: what cosines and sines are multiplied by.
        beta_fast, beta_slow: of yarn: turns within `original_max` between which interpolation fades in.
        truncate: of yarn: whether the bounds of that fade are rounded to whole frequencies.
    """

    kind: RopeKind
    theta: float
    original_max: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class HasRope(Protocol):
    """The part of a model's spec that the table depends on."""

    @property
    def head_dim(self) -> int: ...

    @property
    def rope(self) -> RopeSpec: ...


def read_rope(config: ConfigReader, max_positions: int) -> RopeSpec:
    """Reads `rope_theta` with `rope_scaling`, or `rope_parameters`; `rope_scaling` wins where both are stated.

    Args:
        max_positions: the config's `max_position_embeddings`.

    Raises:
        UnsupportedError: an unknown kind, a partial rotation, or a rotation that differs between layers.
        GplanError: a missing or malformed value, with its key.
    """
    reader = config.section("rope_scaling") or config.section("rope_parameters") or ConfigReader({}, config.where)
    _refuse_other_rotations(config, reader)
    kind = _kind(reader)
    theta = reader.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    if kind in ("default", "dynamic"):
        factor = reader.number("factor") if kind == "dynamic" else 1.0
        return RopeSpec(kind=kind, theta=theta, original_max=max_positions, factor=factor)
    if kind == "linear":
        return RopeSpec(kind=kind, theta=theta, original_max=max_positions, factor=reader.number("factor"))
    original = _original_max(config, reader, max_positions)
    if kind == "llama3":
        return RopeSpec(
            kind=kind,
            theta=theta,
            original_max=original,
            factor=reader.number("factor"),
            low_freq_factor=reader.number("low_freq_factor"),
            high_freq_factor=reader.number("high_freq_factor"),
        )
    return _read_yarn(reader, theta, original, max_positions)


def cos_sin_table(spec: HasRope, max_len: int, device: torch.device | str) -> Tensor:
    """Cosines and sines of every position.

    Returns:
        [max_len, head_dim] float32: cosines of head_dim / 2 frequencies, then their sines; scaled where the kind is.

    Raises:
        UnsupportedError: `dynamic` beyond its original maximum.
    """
    rope = spec.rope
    check_rope_length(rope, max_len)
    frequencies = _frequencies(rope, spec.head_dim)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor
    return table.to(device)


def check_rope_length(rope: RopeSpec, max_len: int) -> None:
    """Refuses what no table can express: `dynamic` rotates all keys anew as a request grows past its maximum.

    Raises:
        UnsupportedError
    """
    if rope.kind == "dynamic" and max_len > rope.original_max:
        raise UnsupportedError(
            f"rope kind dynamic: {max_len} tokens are beyond the {rope.original_max} it was trained for, where its "
            "frequencies change with the length and keys already cached no longer fit",
            f"Use --max-len {rope.original_max} or less.",
        )


def _refuse_other_rotations(config: ConfigReader, reader: ConfigReader) -> None:
    hint = "gplan rotates whole heads, by one position, alike in all layers."
    for source in (reader, config):
        partial = source.number("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise UnsupportedError(f"{source.where}: partial_rotary_factor {partial} is not supported", hint)
    nested = [key for key, value in reader.values.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedError(f"{reader.where}: rotations by kind of layer ({', '.join(nested)})", hint)
    if reader.has("mrope_section"):
        raise UnsupportedError(f"{reader.where}: mrope_section is not supported", hint)


def _kind(reader: ConfigReader) -> RopeKind:
    stated = reader.text("rope_type", reader.text("type", "default"))
    for kind in KINDS:
        if kind == stated:
            return kind
    raise UnsupportedError(f"{reader.where}: rope kind {stated!r} is unknown", f"gplan rotates {', '.join(KINDS)}.")


def _original_max(config: ConfigReader, reader: ConfigReader, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    return config.integer(key, reader.integer(key, max_positions))


def _read_yarn(reader: ConfigReader, theta: float, original: int, max_positions: int) -> RopeSpec:
    factor = reader.number("factor", max_positions / original)
    attention = reader.optional_number("attention_factor")
    if attention is None:
        scale, scale_all = reader.optional_number("mscale"), reader.optional_number("mscale_all_dim")
        if scale and scale_all:
            attention = _magnitude(factor, scale) / _magnitude(factor, scale_all)
        else:
            attention = _magnitude(factor, 1.0)
    return RopeSpec(
        kind="yarn",
        theta=theta,
        original_max=original,
        factor=factor,
        attention_factor=attention,
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        truncate=reader.flag("truncate", True),
    )


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, in radians per token."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(plain, rope)
    if rope.kind == "yarn":
        return _yarn_frequencies(plain, rope, head_dim)
    return plain


def _llama3_frequencies(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended by their turns."""
    turns = rope.original_max * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn_frequencies(plain: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """As llama3, but blended along the index of the frequency."""
    low = _index_of_turns(rope.beta_fast, rope, head_dim)
    high = _index_of_turns(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return stretched * plain / rope.factor + (1 - stretched) * plain


def _index_of_turns(turns: float, rope: RopeSpec, head_dim: int) -> float:
    """The (fractional) index of the frequency that makes so many turns within the original maximum."""
    return head_dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
