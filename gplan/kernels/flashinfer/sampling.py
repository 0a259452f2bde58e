"""Launches of drawing tokens, of penalties and of masks."""

from __future__ import annotations

import torch
from torch import Tensor

from gplan.kernels.base import SamplingInputs
from gplan.kernels.flashinfer.sampling_triton import mask_kernel, penalise_kernel, sample_kernel

_SAMPLE_BLOCK = 8192
_PENALTY_BLOCK = 4096
_MASK_BLOCK = 4096


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """See `Kernels.sample`: logits [n, vocab] -> [n] int64, by a program per row."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            logits.contiguous(),
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.min_p,
            inputs.seed,
            inputs.position,
            out,
            vocab,
            BLOCK=_SAMPLE_BLOCK,
            SHIFT=16 if logits.dtype is torch.bfloat16 else 0,
            num_warps=16,
        )
    return out


def penalise(
    logits: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See `Kernels.apply_penalties`."""
    num_rows, vocab = logits.shape
    if num_rows:
        penalise_kernel[(num_rows, -(-vocab // _PENALTY_BLOCK))](
            logits,
            output_counts.contiguous(),
            in_prompt.contiguous(),
            repetition,
            presence,
            frequency,
            vocab,
            BLOCK=_PENALTY_BLOCK,
            num_warps=8,
        )


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See `Kernels.apply_token_mask`."""
    (num_rows, words), vocab = bits.shape, logits.shape[1]
    assert logits.is_contiguous()
    assert bits.is_contiguous()
    if num_rows:
        mask_kernel[(num_rows, -(-vocab // _MASK_BLOCK))](
            logits, rows, bits, vocab, words, BLOCK=_MASK_BLOCK, num_warps=8
        )
