"""Which of FlashInfer's prefill kernels this machine has."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from flashinfer.prefill import get_batch_prefill_module


@cache
def load_prefill_module(dtype: torch.dtype, head_dim: int, device: torch.device) -> tuple[str, Any]:
    """`fa3` and its module on a Hopper GPU where FlashInfer has it compiled or can compile it; else `fa2` and its."""
    heads = (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False)
    if torch.cuda.get_device_capability(device)[0] == 9:
        try:
            return "fa3", get_batch_prefill_module("fa3", *heads)
        except (RuntimeError, OSError):  # neither compiled ahead of time, nor a compiler here to do it now
            pass
    return "fa2", get_batch_prefill_module("fa2", *heads)
