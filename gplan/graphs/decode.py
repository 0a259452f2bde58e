"""Decode: one token of each request, the vocabulary head inside the graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gplan.core import DUMMY_ROW, Batch, Phase
from gplan.graphs.runner import PhaseRunner
from gplan.kernels.base import Attention, AttentionBatch


class DecodeRunner(PhaseRunner):
    """Sizes are requests. Input tokens are gathered on the device from each row's last token."""

    phase = Phase.DECODE

    def _make_attention(self, size: int, num_requests: int, *, in_graph: bool) -> Attention:
        return self.parts.kernels.decode_attention(size, in_graph=in_graph)

    def _load(self, batch: Batch, size: int, attention: Attention, *, slots: int) -> None:
        rows = np.fromiter((c.request.row for c in batch.chunks), np.int32, batch.num_requests)
        positions = np.fromiter((c.start for c in batch.chunks), np.int64, batch.num_requests)
        counts = self.parts.page_table.update(batch)
        self._load_rows(size, attention, rows, positions, counts)

    def _load_dummy(self, size: int, attention: Attention, *, slots: int) -> None:
        nothing = np.zeros(0, np.int32)
        self._load_rows(size, attention, nothing, nothing.astype(np.int64), nothing)

    def _load_rows(
        self, size: int, attention: Attention, rows: np.ndarray, positions: np.ndarray, counts: np.ndarray
    ) -> None:
        """Arrays of real requests: [n] each; rows n to size are padded with requests of one token on the dummy page."""
        table, real = self.parts.page_table, len(rows)
        values = {"rows": rows.astype(np.int64), "positions": positions, "kv_slots": table.slots(rows, positions)}
        self.parts.buffers.fill(values, real=real, padded=size, unread=("host_ids",))
        padding = size - real
        rows = np.concatenate([rows, np.full(padding, DUMMY_ROW, np.int32)])
        counts = np.concatenate([counts, np.ones(padding, np.int32)])
        last = np.concatenate([positions % table.page_size + 1, np.ones(padding, np.int64)]).astype(np.int32)
        indptr = np.zeros(size + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        attention.prepare(
            AttentionBatch(
                qo_indptr=np.arange(size + 1, dtype=np.int32),
                kv_indptr=indptr,
                kv_indices=table.indices(rows, counts),
                kv_last_page_len=last,
            )
        )

    def _forward(self, size: int, attention: Attention) -> Callable[[], tuple[Tensor, ...]]:
        parts, inputs = self.parts, self._inputs(size, attention)
        rows, logits = parts.buffers.view("rows", size), parts.buffers.view("logits", size)

        def forward() -> tuple[Tensor, ...]:
            torch.index_select(parts.last_tokens, 0, rows, out=inputs.input_ids)
            parts.model.forward(parts.kernels, inputs)
            parts.model.head(parts.kernels, inputs.residual, logits)
            return (logits,)

        return forward

    def _logits(self, batch: Batch, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0][: batch.num_requests]
