"""What a forward works on: the static buffers that both phases and all keys share, and the parts around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from formats.plan import Limits
from gplan.graphs.buffers import StaticBuffers
from gplan.graphs.padding import STALE, ZERO
from gplan.graphs.slots import Slot
from gplan.kernels.base import Kernels, KernelShape
from gplan.memory.kv_pool import KVPool
from gplan.memory.page_table import PageTable
from gplan.models.base import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardParts:
    """What both runners work with; owned by the executor.

    Attributes:
        last_tokens: [max_batch + 1] int64 by request row: decode's input.
    """

    model: Model
    kernels: Kernels
    kv_pool: KVPool
    page_table: PageTable
    buffers: StaticBuffers
    last_tokens: Tensor
    limits: Limits


def forward_slots(shape: KernelShape) -> tuple[Slot, ...]:
    """The shared static buffers, each at its maximum: one row per token of a step, `logits` one per request."""
    tokens, dtype = shape.max_tokens, shape.dtype
    heads = (tokens, shape.num_qo_heads, shape.head_dim)
    written_first = STALE("every row is written by the forward before it is read")
    return (
        # Padded rows take their token from the dummy row, stand at position 0 and write to the dummy page.
        Slot("rows", (tokens,), torch.int64, axis=0, padding=ZERO),
        Slot("host_ids", (tokens,), torch.int64, axis=0, padding=ZERO),
        Slot("positions", (tokens,), torch.int64, axis=0, padding=ZERO),
        Slot("kv_slots", (tokens,), torch.int64, axis=0, padding=ZERO),
        Slot("input_ids", (tokens,), torch.int64, axis=0, padding=written_first),
        Slot("residual", (tokens, shape.hidden_size), dtype, axis=0, padding=written_first),
        Slot("attn_q", heads, dtype, axis=0, padding=written_first),
        Slot("attn_out", heads, dtype, axis=0, padding=STALE("a padded row feeds padded rows only")),
        Slot("logits", (shape.max_batch, shape.vocab_size), dtype, axis=0, padding=written_first),
    )
