"""Decode attention of the CUDA kernel set: the list of work items made on the host, and the launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gplan.core import DUMMY_PAGE
from gplan.errors import CaptureError
from gplan.kernels.base import Attention, AttentionBatch, IntArray, KernelShape
from gplan.kernels.flashinfer.attention_triton import advance_kernel, decode_attention_kernel
from gplan.kernels.flashinfer.work_items import CUT_STEP, NO_WORK, work_items
from gplan.kernels.flashinfer.workspace import Workspace, decode_items, decode_lanes, group_padded
from gplan.kernels.pinned import PinnedAreas

_ADVANCE_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch shape: tokens of a tile, pipeline stages and warps."""

    tokens: int
    stages: int
    warps: int

    @staticmethod
    def of(num_requests: int, num_kv_heads: int, head_dim: int) -> Tuning:
        """As measured: small tiles, far ahead, where there are too few programs to hide a load behind each other."""
        if num_requests * num_kv_heads >= 256:
            return Tuning(tokens=64, stages=3, warps=4)
        return Tuning(tokens=32, stages=5, warps=2 if head_dim <= 128 else 4)


class DecodeLists:
    """Device copy of a decode step's lists, shared by all keys, and its pinned source."""

    def __init__(self, shape: KernelShape, workspace: Workspace) -> None:
        sizes, self._device = workspace.sizes, workspace.decode_lists
        self._items = (0, 4 * sizes.decode_items)
        self._page_indptr = (self._items[1], self._items[1] + sizes.requests + 1)
        self._item_indptr = (self._page_indptr[1], self._page_indptr[1] + sizes.requests + 1)
        self._page_ids = self._item_indptr[1]
        self.items = self._device[slice(*self._items)]
        self.page_indptr = self._device[slice(*self._page_indptr)]
        self.item_indptr = self._device[slice(*self._item_indptr)]
        self.page_ids = self._device[self._page_ids :]
        self._pinned = PinnedAreas(((sizes.decode_lists,), torch.int32))

    def load(self, batch: AttentionBatch, items: IntArray, item_indptr: IntArray, num_items: int) -> None:
        """Starts the copy, with items of no work up to `num_items`."""
        (area,) = self._pinned.take()
        host, num_pages = area.numpy(), len(batch.kv_indices)
        assert num_pages <= len(self.page_ids), "more pages than the kernel set is sized for"
        assert len(items) <= num_items, "more work items than the grid has programs for"
        host[: items.size] = items.reshape(-1)
        host[items.size : 4 * num_items] = NO_WORK
        host[self._page_indptr[0] :][: len(batch.kv_indptr)] = batch.kv_indptr
        host[self._item_indptr[0] :][: len(item_indptr)] = item_indptr
        end = self._page_ids + num_pages
        host[self._page_ids : end] = batch.kv_indices
        self._device[:end].copy_(area[:end], non_blocking=True)
        self._pinned.sent()


class DecodeAttention(Attention):
    """One query token per request.

    In a graph the number of items is that of the key, whatever the lengths; outside, what the step needs.
    """

    def __init__(
        self,
        shape: KernelShape,
        workspace: Workspace,
        lists: DecodeLists,
        num_requests: int,
        *,
        in_graph: bool,
        pdl: bool,
    ) -> None:
        assert 0 < num_requests <= shape.max_batch, "more requests than the kernel set is sized for"
        self._shape, self._workspace, self._lists = shape, workspace, lists
        self._most, self._in_graph, self._pdl = num_requests, in_graph, pdl
        self._tuning = Tuning.of(num_requests, shape.num_kv_heads, shape.head_dim)
        self._group = shape.num_qo_heads // shape.num_kv_heads
        self._group_padded = group_padded(shape)
        self._scale_log2 = math.log2(math.e) / math.sqrt(shape.head_dim)
        self._lanes = decode_lanes(shape)
        self._num_items = decode_items(shape, num_requests)
        # Where contexts are cut depends on their lengths in cut steps alone.
        self.advance_tokens = math.gcd(shape.page_size, CUT_STEP)

    def prepare(self, batch: AttentionBatch) -> None:
        n = batch.num_requests
        assert n == self._most if self._in_graph else n <= self._most, "another number of requests"
        page_size = self._shape.page_size
        lengths = (np.diff(batch.kv_indptr) - 1) * page_size + batch.kv_last_page_len
        # Rows of padding, after all others, have the dummy page alone: they read nothing, and their result is zero.
        num_real = int(np.count_nonzero(batch.kv_indices[batch.kv_indptr[:-1]] != DUMMY_PAGE))
        items, item_indptr = work_items(lengths[:num_real], self._lanes, padding=n - num_real)
        if not self._in_graph:
            self._num_items = len(items)
        self._lists.load(batch, items, item_indptr, self._num_items)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        if not self._in_graph and torch.cuda.is_current_stream_capturing():
            raise CaptureError("attention made for eager steps inside a capture", "Ask for it with in_graph=True.")
        shape, lists, tuning = self._shape, self._lists, self._tuning
        decode_attention_kernel[(shape.num_kv_heads, self._num_items)](
            q,
            k_cache,
            v_cache,
            out,
            lists.items,
            lists.page_indptr,
            lists.item_indptr,
            lists.page_ids,
            self._workspace.decode_partial,
            self._workspace.decode_counters,
            self._scale_log2,
            GROUP=self._group,
            GROUP_PADDED=self._group_padded,
            ROWS=max(16, self._group_padded),
            D=shape.head_dim,
            PAGE=shape.page_size,
            TOKENS=tuning.tokens,
            STAGES=tuning.stages,
            MERGE=max(1, min(8, 4096 // (self._group_padded * shape.head_dim))),
            PDL=self._pdl,
            num_warps=tuning.warps,
            launch_pdl=self._pdl,
        )

    def advance(self, rows: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        """Of each request the last item grows by a token; which items are the last does not change within a page."""
        n, lists = len(rows), self._lists
        advance_kernel[(-(-max(n, self._num_items) // _ADVANCE_BLOCK),)](
            rows,
            positions,
            kv_slots,
            lists.items,
            lists.item_indptr,
            n,
            self._num_items,
            BLOCK=_ADVANCE_BLOCK,
            num_warps=4,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "lists", self._workspace.decode_lists
        yield "partial", self._workspace.decode_partial
        yield "counters", self._workspace.decode_counters
