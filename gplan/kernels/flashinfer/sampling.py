"""Launches of choosing the likeliest tokens, of penalties and of masks."""

from __future__ import annotations

import torch
from torch import Tensor

from gplan.kernels.flashinfer.sampling_triton import (
    first_argmax_kernel,
    mask_kernel,
    parts_argmax_kernel,
    penalise_kernel,
)

_ARGMAX_BLOCK = 2048
_ARGMAX_PROGRAMS = 1056
"""Programs that read logits at once: what fills an H200, whose processors hold eight of them each."""
_ARGMAX_MOST_PARTS = 64
_PENALTY_BLOCK = 4096
_MASK_BLOCK = 4096


def argmax(logits: Tensor) -> Tensor:
    """See `Kernels.argmax`: few rows are cut into parts, so that they are read by the whole device."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    blocks = -(-vocab // _ARGMAX_BLOCK)
    parts = max(1, min(_ARGMAX_MOST_PARTS, _ARGMAX_PROGRAMS // num_rows, blocks))
    part = -(-blocks // parts) * _ARGMAX_BLOCK
    parts = -(-vocab // part)
    peaks = torch.empty((num_rows, parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    parts_argmax_kernel[(num_rows, parts)](
        logits.contiguous(), peaks, tokens, vocab, part, BLOCK=_ARGMAX_BLOCK, num_warps=4
    )
    first_argmax_kernel[(num_rows,)](peaks, tokens, out, parts, BLOCK=_ARGMAX_MOST_PARTS, num_warps=1)
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
