"""Prefill attention of the CUDA kernel set: FlashInfer's paged prefill (fa2).

FlashInfer's module is called directly rather than through `BatchPrefillWithPagedKVCacheWrapper`: the wrapper takes
8 MiB of device and of pinned memory for each key, copies page lists from pageable memory in calls that wait for the
device, and reuses its pinned memory without asking whether the copy is done. The calls are those of
flashinfer-python 0.6.18.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from flashinfer.prefill import get_batch_prefill_module
from flashinfer.utils import MaskMode, TensorLayout
from torch import Tensor

from gplan.errors import CaptureError, UnsupportedError
from gplan.kernels.base import Attention, AttentionBatch, KernelShape
from gplan.kernels.flashinfer.workspace import Staging, Workspace, graph_slots

_NO_WINDOW = -1
_AUTO_SPLIT = -1


class PrefillLists:
    """Device copy of a step's page lists, shared by all keys, and the pinned memory it and FlashInfer's own lists come
    from."""

    def __init__(self, shape: KernelShape, workspace: Workspace) -> None:
        sizes, self._device = workspace.sizes, workspace.prefill_lists
        starts = [index * (sizes.requests + 1) for index in range(4)]
        self._starts = starts
        self.qo_indptr = self._device[starts[0] : starts[1]]
        self.kv_indptr = self._device[starts[1] : starts[2]]
        self.last_page_len = self._device[starts[2] : starts[3]]
        self.page_ids = self._device[starts[3] :]
        self._staging = Staging(((sizes.prefill_lists,), torch.int32), ((sizes.prefill_plan_bytes,), torch.uint8))

    def load(self, batch: AttentionBatch) -> Tensor:
        """Starts the copy; returns pinned memory for FlashInfer's lists, in use until `sent`."""
        area, plan = self._staging.take()
        assert len(batch.kv_indices) <= len(self.page_ids), "more pages than the kernel set is sized for"
        host = area.numpy()
        parts = (batch.qo_indptr, batch.kv_indptr, batch.kv_last_page_len, batch.kv_indices)
        for start, values in zip(self._starts, parts, strict=True):
            host[start : start + len(values)] = values
        end = self._starts[3] + len(batch.kv_indices)
        self._device[:end].copy_(area[:end], non_blocking=True)
        return plan

    def sent(self) -> None:
        self._staging.sent()


class PrefillAttention(Attention):
    """Ragged causal attention over cached prefixes.

    In a graph the grid is that of the key's tokens and slots, and contexts are always treated as split; outside,
    FlashInfer decides by each step's lengths.
    """

    def __init__(
        self,
        shape: KernelShape,
        workspace: Workspace,
        lists: PrefillLists,
        num_tokens: int,
        num_requests: int,
        *,
        in_graph: bool,
    ) -> None:
        assert num_tokens <= shape.max_tokens, "more tokens than the kernel set is sized for"
        assert num_requests <= shape.max_batch, "more requests than the kernel set is sized for"
        if in_graph and num_requests > min(graph_slots(shape), num_tokens):
            raise UnsupportedError(
                f"a prefill graph of {num_tokens} tokens with {num_requests} request slots",
                f"Use at most {min(graph_slots(shape), num_tokens)} slots.",
            )
        self._shape, self._workspace, self._lists = shape, workspace, lists
        self._num_tokens, self._num_requests, self._in_graph = num_tokens, num_requests, in_graph
        d, dtype = shape.head_dim, shape.dtype
        self._module: Any = get_batch_prefill_module(
            "fa2", dtype, dtype, dtype, torch.int32, d, d, 0, False, False, False
        )
        self._scale = 1.0 / math.sqrt(d)
        self._plan: list[int] | None = None
        self._select(num_requests)

    def prepare(self, batch: AttentionBatch) -> None:
        n, num_tokens = batch.num_requests, int(batch.qo_indptr[-1])
        if self._in_graph:
            assert n == self._num_requests, "a graph holds an exact number of slots"
            assert num_tokens <= self._num_tokens, "more tokens than the graph has rows"
        else:
            self._select(n)
        shape, workspace = self._shape, self._workspace
        lengths = (np.diff(batch.kv_indptr) - 1) * shape.page_size + batch.kv_last_page_len
        pinned = self._lists.load(batch)
        self._plan = self._module.plan(
            workspace.prefill_partial,
            workspace.prefill_plan,
            pinned,
            torch.from_numpy(np.ascontiguousarray(batch.qo_indptr)),
            torch.from_numpy(np.ascontiguousarray(batch.kv_indptr)),
            torch.from_numpy(lengths.astype(np.int32)),
            self._num_tokens if self._in_graph else num_tokens,
            n,
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.page_size,
            self._in_graph,
            shape.head_dim,
            shape.head_dim,
            True,  # causal
            _NO_WINDOW,
            _AUTO_SPLIT,
            False,  # do not forbid splits
            0,  # colocated programs
            0,  # uniform query length
        )
        self._lists.sent()

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        if not self._in_graph and torch.cuda.is_current_stream_capturing():
            raise CaptureError("attention made for eager steps inside a capture", "Ask for it with in_graph=True.")
        assert self._plan is not None, "run before prepare"
        lists, workspace = self._lists, self._workspace
        self._module.paged_run(
            workspace.prefill_partial,
            workspace.prefill_plan,
            self._plan,
            q,
            k_cache,
            v_cache,
            self._qo_indptr,
            self._kv_indptr,
            lists.page_ids,
            self._last_page_len,
            out,
            None,  # log-sum-exp
            MaskMode.CAUSAL.value,
            TensorLayout["NHD"].value,
            _NO_WINDOW,
            False,  # programmatic dependent launch: its neighbours take no part
            *(None,) * 6,  # custom mask and its indptr, alibi slopes, three of multi-item scoring
            0.0,  # soft cap
            self._scale,
            *(None,) * 3,  # scales of quantised inputs
            1.0,  # rope scale and theta, unused: positions are encoded before
            1e4,
            0,  # multi-item scoring
            0,  # workspace size, of another backend
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "lists", self._workspace.prefill_lists
        yield "partial", self._workspace.prefill_partial
        yield "plan", self._workspace.prefill_plan

    def _select(self, num_requests: int) -> None:
        lists = self._lists
        self._qo_indptr = lists.qo_indptr[: num_requests + 1]
        self._kv_indptr = lists.kv_indptr[: num_requests + 1]
        self._last_page_len = lists.last_page_len[:num_requests]
