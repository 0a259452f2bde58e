"""Decode attention of the CUDA kernel set: the list of work items made on the host, and the launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gplan.errors import CaptureError
from gplan.kernels.base import Attention, AttentionBatch, IntArray, KernelShape
from gplan.kernels.flashinfer.attention_triton import decode_attention_kernel
from gplan.kernels.flashinfer.workspace import Staging, Workspace, decode_items, group_padded

CHUNK_STEP = 64
"""Parts of a context are a multiple of this many tokens."""


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
        self._staging = Staging(((sizes.decode_lists,), torch.int32))

    def load(self, batch: AttentionBatch, items: IntArray, item_indptr: IntArray) -> None:
        (area,) = self._staging.take()
        host, num_pages = area.numpy(), len(batch.kv_indices)
        assert num_pages <= len(self.page_ids), "more pages than the kernel set is sized for"
        host[: items.size] = items.reshape(-1)
        host[self._page_indptr[0] :][: len(batch.kv_indptr)] = batch.kv_indptr
        host[self._item_indptr[0] :][: len(item_indptr)] = item_indptr
        end = self._page_ids + num_pages
        host[self._page_ids : end] = batch.kv_indices
        self._device[:end].copy_(area[:end], non_blocking=True)
        self._staging.sent()


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
        self._num_items = decode_items(shape, num_requests)

    def prepare(self, batch: AttentionBatch) -> None:
        n = batch.num_requests
        assert n == self._most if self._in_graph else n <= self._most, "another number of requests"
        page_size = self._shape.page_size
        lengths = (np.diff(batch.kv_indptr) - 1) * page_size + batch.kv_last_page_len
        most = decode_items(self._shape, n)
        items, item_indptr = work_items(lengths.astype(np.int64), most, CHUNK_STEP)
        if not self._in_graph:
            self._num_items = int(item_indptr[-1])
        self._lists.load(batch, items, item_indptr)

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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "lists", self._workspace.decode_lists
        yield "partial", self._workspace.decode_partial
        yield "counters", self._workspace.decode_counters


def work_items(lengths: IntArray, most: int, step: int) -> tuple[IntArray, IntArray]:
    """Cuts contexts into at most `most` items, all parts of a step about equally long.

    The part length is the smallest multiple of `step` with which the items are few enough. The longest items come
    first, so that none of them runs alone at the end.

    Args:
        lengths: [n] tokens of each request, at least 1; n <= most.

    Returns:
        items: [most, 4] int32: request, first token, end, number of the part; request -1 for no work.
        item_indptr: [n + 1] int32: part numbers of each request.
    """
    size = _part_length(lengths, most, step)
    counts = -(-lengths // size)
    indptr = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    total = int(indptr[-1])
    request = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    part = np.arange(total, dtype=np.int32)
    first = (part - indptr[request]) * size
    end = np.minimum(first + size, lengths[request])
    order = np.argsort(first - end, kind="stable")
    items = np.full((most, 4), -1, np.int32)
    items[:total] = np.stack([request, first, end, part], axis=1)[order]
    return items, indptr


def _part_length(lengths: IntArray, most: int, step: int) -> int:
    low, high = 1, -(-int(lengths.max()) // step)
    while low < high:
        middle = (low + high) // 2
        if int((-(-lengths // (middle * step))).sum()) > most:
            low = middle + 1
        else:
            high = middle
    return low * step
