"""Launches of drawing tokens: counting each row's logits, finding the place that is drawn, taking its token."""

from __future__ import annotations

import torch
from torch import Tensor

from gplan.kernels.base import SamplingInputs
from gplan.kernels.flashinfer.counting_triton import (
    GROUP,
    MASSES_ROW,
    MOST_PARTS,
    SLOTS,
    count_kernel,
    sum_groups_kernel,
    weigh_kernel,
)
from gplan.kernels.flashinfer.drawing_triton import find_place_kernel, take_token_kernel

_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
"""Bits of plus infinity, by which kernels know a format."""
_NUM_SLOTS, _NUM_GROUPS = SLOTS.value, SLOTS.value // GROUP.value

_MOST_ROWS = {2: 64, 4: 32}
"""Rows at once, by bytes of a logit: scratch of 16.5 MiB; of 24 MiB and a token list of as many bytes as the logits."""
_PROGRAMS = 1056
"""Programs that count at once: what fills an H200, whose processors hold eight of them each."""
_COUNT_BLOCK = 1024
_GROUPS_AT_ONCE = 16


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """See `Kernels.sample`: logits [n, vocab] -> [n] int64. Scratch stays bounded: many rows are drawn some at a
    time."""
    num_rows = logits.shape[0]
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logits, most = logits.contiguous(), _MOST_ROWS[logits.element_size()]
    for first in range(0, num_rows, most):
        rows = slice(first, first + most)
        some = SamplingInputs(
            inputs.temperature[rows],
            inputs.top_k[rows],
            inputs.top_p[rows],
            inputs.min_p[rows],
            inputs.seed[rows],
            inputs.position[rows],
        )
        _draw(logits[rows], some, out[rows])
    return out


def _draw(logits: Tensor, inputs: SamplingInputs, out: Tensor) -> None:
    (num_rows, vocab), infinity, device = logits.shape, _INFINITY[logits.dtype], logits.device
    is_wide = logits.element_size() > 2
    x = logits.view(torch.int32 if is_wide else torch.int16)
    blocks = -(-vocab // _COUNT_BLOCK)
    part = -(-blocks // max(1, min(MOST_PARTS.value, _PROGRAMS // num_rows))) * _COUNT_BLOCK
    parts = -(-vocab // part)
    peaks = torch.empty((num_rows, parts), dtype=torch.int32, device=device)
    counts = torch.zeros((num_rows, _NUM_SLOTS), dtype=torch.int32, device=device)
    count_kernel[(num_rows, parts)](
        x, inputs.temperature, counts, peaks, vocab, part, BLOCK=_COUNT_BLOCK, INFINITY=infinity, num_warps=4
    )
    masses = listed = counts  # of 16-bit logits, not read
    if is_wide:
        listed = torch.empty((num_rows, vocab), dtype=torch.int32, device=device)
        masses = torch.zeros((num_rows, MASSES_ROW.value), dtype=torch.int64, device=device)
        weigh_kernel[(num_rows, parts)](
            x,
            inputs.temperature,
            inputs.min_p,
            peaks,
            counts,
            masses,
            vocab,
            part,
            BLOCK=_COUNT_BLOCK,
            INFINITY=infinity,
            num_warps=4,
        )
    group_counts = torch.empty((num_rows, _NUM_GROUPS), dtype=torch.int32, device=device)
    group_masses = torch.empty((2, num_rows, _NUM_GROUPS), dtype=torch.float64, device=device)
    sum_groups_kernel[(num_rows, _NUM_GROUPS // _GROUPS_AT_ONCE)](
        counts,
        masses,
        inputs.temperature,
        inputs.min_p,
        peaks,
        group_counts,
        group_masses[0],
        group_masses[1],
        parts,
        GROUPS=_GROUPS_AT_ONCE,
        INFINITY=infinity,
        num_warps=8,
    )
    places = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
    find_place_kernel[(num_rows,)](
        x,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.seed,
        inputs.position,
        counts,
        masses,
        peaks,
        group_counts,
        group_masses[0],
        group_masses[1],
        listed,
        places,
        vocab,
        parts,
        INFINITY=infinity,
        num_warps=16 if is_wide else 4,
    )
    take_token_kernel[(num_rows,)](x, places, out, vocab, INFINITY=infinity, num_warps=16)
