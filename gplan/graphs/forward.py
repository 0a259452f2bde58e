"""What a forward works on: the static buffers that both phases and all keys share, and the parts around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from formats.plan import Limits
from gplan.graphs.buffers import StaticBuffers
from gplan.graphs.padding import Padding, Sentinel, Stale, Zero
from gplan.graphs.slots import Slot
from gplan.kernels.base import Kernels, KernelShape
from gplan.memory.kv_pool import KVPool
from gplan.memory.page_table import PageTable
from gplan.models.base import Model

LAST_TOKENS, LAST_HIDDEN = "last_token_rows", "last_hidden"
DRAW_SLOTS = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Static buffers by request of what `SamplingInputs` holds, beside positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardParts:
    """What both runners work with; owned by the executor.

    Attributes:
        last_tokens: [max_batch + 1] int64 by request row: decode's input.
        by_request: the buffers of `request_slots`.
    """

    model: Model
    kernels: Kernels
    kv_pool: KVPool
    page_table: PageTable
    buffers: StaticBuffers
    last_tokens: Tensor
    by_request: StaticBuffers
    limits: Limits


def forward_slots(shape: KernelShape) -> tuple[Slot, ...]:
    """The shared static buffers, each at its maximum: one row per token of a step, the last two one per
    request."""
    tokens, dtype = shape.max_tokens, shape.dtype
    heads = (tokens, shape.num_qo_heads, shape.head_dim)
    written_first = Stale("every row is written by the forward before it is read")
    return (
        # Padded rows take their token from the dummy row, stand at position 0 and write to the dummy page.
        Slot("rows", (tokens,), torch.int64, Zero()),
        Slot("host_ids", (tokens,), torch.int64, Zero()),
        Slot("positions", (tokens,), torch.int64, Zero()),
        Slot("kv_slots", (tokens,), torch.int64, Zero()),
        Slot("input_ids", (tokens,), torch.int64, written_first),
        Slot("residual", (tokens, shape.hidden_size), dtype, written_first),
        Slot("attn_q", heads, dtype, written_first),
        Slot("attn_out", heads, dtype, Stale("a padded row feeds padded rows only")),
        Slot(LAST_HIDDEN, (shape.max_batch, shape.hidden_size), dtype, written_first),
        Slot("logits", (shape.max_batch, shape.vocab_size), dtype, written_first),
    )


def request_slots(shape: KernelShape) -> tuple[Slot, ...]:
    """Static buffers of one row per request: where the last token of each request of a prefill step is, and how each
    row of a decode step is drawn. What a padded row gives is not read: its hidden state is that of the first token, it
    is drawn greedily, and its token goes to the dummy row."""
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
    paddings: tuple[Padding, ...] = (Zero(), Sentinel(1), Sentinel(1), Zero(), Zero())
    draws = (
        Slot(name, (shape.max_batch,), dtype, padding)
        for name, dtype, padding in zip(DRAW_SLOTS, dtypes, paddings, strict=True)
    )
    return (Slot(LAST_TOKENS, (shape.max_batch,), torch.int64, Zero()), *draws)
