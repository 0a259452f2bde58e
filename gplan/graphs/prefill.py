"""Prefill and mixed steps: ragged chunks of tokens, of which the head needs the last of each request alone.

So a graph of more tokens than there may be requests goes on with these last tokens alone once the last layer has
attended. A graph with request slots has the head inside, on a row per slot. Elsewhere it runs outside, on the rows that
need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gplan.core import DUMMY_PAGE, Batch, Chunk, Phase, ShapeKey
from gplan.graphs.forward import DRAW_SLOTS, LAST_HIDDEN, LAST_TOKENS
from gplan.graphs.runner import BY_TOKEN, ByRequest, PhaseRunner
from gplan.kernels.base import Attention, AttentionBatch
from gplan.models.base import Ends

FROM_DEVICE = -1
"""In `host_ids`: the token was drawn by a step whose result the host has not read; take the row's last token."""


class PrefillRunner(PhaseRunner):
    """Sizes are tokens. Tokens come from the host, but for those that only the device knows yet."""

    phase = Phase.PREFILL

    def _make_attention(self, size: int, num_requests: int, *, in_graph: bool) -> Attention:
        return self.parts.kernels.prefill_attention(size, num_requests, in_graph=in_graph)

    def by_request(self, key: ShapeKey) -> ByRequest:
        slots = self.slots_of(key)
        ends = slots or self._max_requests
        return ByRequest(slots, ends if ends < key.size else 0)

    def _load(self, batch: Batch, size: int, attention: Attention, *, by: ByRequest) -> None:
        chunks, table = batch.chunks, self.parts.page_table
        lengths = np.fromiter((c.length for c in chunks), np.int32, len(chunks))
        rows = np.fromiter((c.request.row for c in chunks), np.int32, len(chunks))
        counts = table.update(batch)
        token_rows = np.repeat(rows, lengths)
        positions = _positions(chunks, lengths)
        values = {
            "rows": token_rows.astype(np.int64),
            "host_ids": np.array([token for c in chunks for token in _tokens(c)], np.int64),
            "positions": positions,
            "kv_slots": table.slots(token_rows, positions),
        }
        self.parts.buffers.fill(values, real=len(positions), padded=size)
        self._fill_last_tokens(np.cumsum(lengths, dtype=np.int64) - 1, by)
        ends = np.fromiter((c.end for c in chunks), np.int32, len(chunks))
        metadata = AttentionBatch(
            qo_indptr=_indptr(lengths),
            kv_indptr=_indptr(counts),
            kv_indices=table.indices(rows, counts),
            kv_last_page_len=(ends - 1) % table.page_size + 1,
        )
        attention.prepare(_with_empty_slots(metadata, by.slots))

    def _load_dummy(self, size: int, attention: Attention, *, by: ByRequest) -> None:
        nothing = np.zeros(0, np.int64)
        names = ("rows", "host_ids", "positions", "kv_slots")
        self.parts.buffers.fill(dict.fromkeys(names, nothing), real=0, padded=size)
        self._fill_last_tokens(nothing, by)
        page_size = self.parts.page_table.page_size
        num_pages = -(-size // page_size)
        metadata = AttentionBatch(
            qo_indptr=np.array([0, size], np.int32),
            kv_indptr=np.array([0, num_pages], np.int32),
            kv_indices=np.zeros(num_pages, np.int32),
            kv_last_page_len=np.array([(size - 1) % page_size + 1], np.int32),
        )
        attention.prepare(_with_empty_slots(metadata, by.slots))

    def _fill_last_tokens(self, rows: np.ndarray, by: ByRequest) -> None:
        padded = by.slots or by.ends
        if padded:
            self.parts.by_request.fill({LAST_TOKENS: rows}, real=len(rows), padded=padded, unread=DRAW_SLOTS)

    def _forward(
        self,
        size: int,
        attention: Attention,
        *,
        draw: str = "",
        by: ByRequest = BY_TOKEN,
        is_compiled: bool = False,
    ) -> Callable[[], tuple[Tensor, ...]]:
        parts = self.parts
        last = parts.by_request.view(LAST_TOKENS, by.slots or by.ends)
        ends = Ends(last, parts.buffers.view(LAST_HIDDEN, by.ends)) if by.ends else None
        inputs = self._inputs(size, attention, ends)
        rows, host_ids = parts.buffers.view("rows", size), parts.buffers.view("host_ids", size)
        logits = parts.buffers.view("logits", by.slots)

        run_model = self._model_forward(inputs, attention, is_compiled=is_compiled)

        def forward() -> tuple[Tensor, ...]:
            drawn = parts.last_tokens.index_select(0, rows)
            torch.where(host_ids == FROM_DEVICE, drawn, host_ids, out=inputs.input_ids)
            run_model()
            if not by.slots:
                return (inputs.residual if ends is None else ends.out,)
            hidden = inputs.residual.index_select(0, last) if ends is None else ends.out
            parts.model.head(parts.kernels, hidden, logits)
            return (logits,)

        return forward

    def _logits(self, batch: Batch, outputs: tuple[Tensor, ...], *, by: ByRequest) -> Tensor:
        if by.slots:
            return self._of_sampling(batch, outputs[0])
        hidden = outputs[0]
        rows = range(by.ends) if by.ends else (np.cumsum([chunk.length for chunk in batch.chunks]) - 1).tolist()
        last = [row for row, chunk in zip(rows, batch.chunks, strict=False) if chunk.samples]
        logits = self.parts.buffers.view("logits", len(last))
        if last:
            index = torch.tensor(last).to(hidden.device, non_blocking=True)
            self.parts.model.head(self.parts.kernels, hidden.index_select(0, index), logits)
        return logits

    def _of_sampling(self, batch: Batch, logits: Tensor) -> Tensor:
        """Of a row per request those of the requests that sample."""
        sampling = [index for index, chunk in enumerate(batch.chunks) if chunk.samples]
        if len(sampling) == batch.num_requests:
            return logits[: batch.num_requests]
        return logits.index_select(0, torch.tensor(sampling, dtype=torch.int64).to(logits.device, non_blocking=True))


def _positions(chunks: Sequence[Chunk], lengths: np.ndarray) -> np.ndarray:
    """Positions of all tokens, chunk after chunk: [sum of lengths] int64."""
    firsts = np.cumsum(lengths) - lengths
    starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
    positions: np.ndarray = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - firsts, lengths)
    return positions


def _tokens(chunk: Chunk) -> list[int]:
    known = chunk.request.tokens[chunk.start : chunk.end]
    return known + [FROM_DEVICE] * (chunk.length - len(known))


def _indptr(lengths: np.ndarray) -> np.ndarray:
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=indptr[1:])
    return indptr


def _with_empty_slots(batch: AttentionBatch, num_requests: int) -> AttentionBatch:
    """Adds request slots without queries, each reading one token of the dummy page, up to `num_requests`."""
    missing = num_requests - batch.num_requests
    if missing <= 0:
        return batch
    last = batch.kv_indptr[-1]
    return AttentionBatch(
        qo_indptr=np.concatenate([batch.qo_indptr, np.full(missing, batch.qo_indptr[-1], np.int32)]),
        kv_indptr=np.concatenate([batch.kv_indptr, np.arange(last + 1, last + missing + 1, dtype=np.int32)]),
        kv_indices=np.concatenate([batch.kv_indices, np.full(missing, DUMMY_PAGE, np.int32)]),
        kv_last_page_len=np.concatenate([batch.kv_last_page_len, np.ones(missing, np.int32)]),
    )
