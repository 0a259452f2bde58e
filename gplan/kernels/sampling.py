"""Drawing tokens from logits, as one custom operator `gplan::sample_tokens`, and penalties.

A row's tokens are put in order of falling logits, equal ones by rising id. Every filter keeps a beginning of that
order: `top_k` its first k tokens; `top_p` the fewest first tokens that hold that share of what `top_k` kept; `min_p`
those at least that share as likely as the first. One uniform number then picks the first token at which the
accumulated probability of what was kept exceeds it. The number is a hash of the row's seed and position, so a draw
depends on its own row alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gplan.kernels.base import SamplingInputs
from gplan.kernels.custom_ops import define_operator

_LEAST_WEIGHT = 2.0**-149
"""The least positive float32: what is lighter is impossible."""

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def sample_tokens(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Draws one token per row; see the module.

    Args:
        logits: [n, vocab] of any float dtype; not changed.

    Returns:
        [n] int64. A row whose temperature is 0 has its likeliest token, the first of equals.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    torch.ops.gplan.sample_tokens.default(
        logits,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seed,
        inputs.position,
        out,
    )
    return out


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """The number in [0, 1) that draws a row's token: [n] int64 each -> [n] float64.

    Two rounds of the splitmix64 finaliser (public domain, Sebastiano Vigna): the seed's hash is advanced by the
    position times the golden ratio and hashed again; the upper 53 bits are the fraction. Integers wrap around.
    """
    bits = _mixed(_mixed(seed + _GOLDEN) + position * _GOLDEN)
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def penalise(
    logits: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalises seen tokens in place; shapes as in `Kernels.apply_penalties`."""
    in_output = output_counts > 0
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(in_output | in_prompt, repeated, logits))
    logits.sub_(presence[:, None] * in_output).sub_(frequency[:, None] * output_counts)


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    out: Tensor,
) -> None:
    order = _descending(logits.float())
    scores = logits.float().gather(1, order)
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]
    weights = ((scores - scores[:, :1]) / scale).exp()  # [n, vocab], the likeliest 1
    cumulative = weights.to(torch.float64).cumsum(1)
    kept = _kept(weights, cumulative, top_k, top_p, min_p)
    target = uniform(seed, position)[:, None] * cumulative.gather(1, kept - 1)
    drawn = torch.searchsorted(cumulative, target, right=True).minimum(kept - 1)
    tokens = order.gather(1, drawn.masked_fill_(greedy[:, None], 0))
    out.copy_(tokens[:, 0])


define_operator(
    "sample_tokens",
    "Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position, "
    "Tensor(a!) out",
    _sample,
)


def _kept(weights: Tensor, cumulative: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[n, 1] int64: how many first tokens pass every filter, at least 1. Impossible tokens never do."""
    by_rank = top_k[:, None].to(torch.int64).clamp(1, weights.shape[1])
    share = top_p[:, None].to(torch.float64) * cumulative.gather(1, by_rank - 1)
    by_share = torch.searchsorted(cumulative, share) + 1
    least = min_p.clamp(min=_LEAST_WEIGHT)[:, None]
    by_weight = torch.searchsorted(-weights, -least, right=True)
    return by_rank.minimum(by_share).minimum(by_weight).clamp(min=1)


def _descending(logits: Tensor) -> Tensor:
    """[n, vocab] int64: token ids by falling logit, equal ones by rising id. Sorts one integer per token that holds
    both; numpy's sort of integers is several times faster on a CPU than torch's."""
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # 0.0 makes one zero of both
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = ((~rising).to(torch.int64) << 32) | torch.arange(vocab, device=logits.device)
    on_cpu = keys.device.type == "cpu"
    ordered = torch.from_numpy(np.sort(keys.numpy(), axis=1)) if on_cpu else keys.sort(dim=1).values
    return ordered & 0xFFFFFFFF


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shifts right, filling with zeros."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
