"""What masking tokens means, in plain ATen."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Makes tokens impossible that may not follow, in place; shapes as in `Kernels.apply_token_mask`."""
    vocab = logits.shape[-1]
    octets = bits.contiguous().view(torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    forbidden = ((octets[:, :, None] >> places) & 1).flatten(1)[:, :vocab] == 0
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, float("-inf")))
