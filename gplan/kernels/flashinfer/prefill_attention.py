"""Prefill attention of the CUDA kernel set: FlashInfer's for prompts, ours for the rows that decode beside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gplan.errors import CaptureError, UnsupportedError
from gplan.kernels.base import Attention, AttentionBatch, KernelShape
from gplan.kernels.flashinfer.decode_attention import DecodeAttention
from gplan.kernels.flashinfer.prefill_kernel import PrefillKernel
from gplan.kernels.flashinfer.workspace import Workspace, graph_slots
from gplan.kernels.pinned import PinnedAreas


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
        self._pinned = PinnedAreas(((sizes.prefill_lists,), torch.int32), ((sizes.prefill_plan_bytes,), torch.uint8))

    def load(self, batch: AttentionBatch) -> Tensor:
        """Starts the copy; returns pinned memory for FlashInfer's lists, in use until `sent`."""
        area, plan = self._pinned.take()
        assert len(batch.kv_indices) <= len(self.page_ids), "more pages than the kernel set is sized for"
        host = area.numpy()
        parts = (batch.qo_indptr, batch.kv_indptr, batch.kv_last_page_len, batch.kv_indices)
        for start, values in zip(self._starts, parts, strict=True):
            host[start : start + len(values)] = values
        end = self._starts[3] + len(batch.kv_indices)
        self._device[:end].copy_(area[:end], non_blocking=True)
        return plan

    def sent(self) -> None:
        self._pinned.sent()

    def select(self, num_requests: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """On the device: qo_indptr, kv_indptr, page ids, last page lengths of so many requests."""
        return (
            self.qo_indptr[: num_requests + 1],
            self.kv_indptr[: num_requests + 1],
            self.page_ids,
            self.last_page_len[:num_requests],
        )


class PrefillAttention(Attention):
    """Ragged causal attention over cached prefixes.

    In a graph the grid is that of the key's tokens and slots. Outside it is each step's, and the requests that lead the
    batch with one token each are given to decode attention: a tile of queries would be wasted on each of them. There a
    step is laid out only when its first layer comes to attend, while the device is busy with what is before that.

    Args:
        decode: attends for the leading single tokens of eager steps; None in a graph.
    """

    def __init__(
        self,
        shape: KernelShape,
        workspace: Workspace,
        lists: PrefillLists,
        kernel: PrefillKernel,
        decode: DecodeAttention | None,
        num_tokens: int,
        num_requests: int,
    ) -> None:
        assert num_tokens <= shape.max_tokens, "more tokens than the kernel set is sized for"
        assert num_requests <= shape.max_batch, "more requests than the kernel set is sized for"
        self._in_graph = decode is None
        if self._in_graph and num_requests > min(graph_slots(shape), num_tokens):
            raise UnsupportedError(
                f"a prefill graph of {num_tokens} tokens with {num_requests} request slots",
                f"Use at most {min(graph_slots(shape), num_tokens)} slots.",
            )
        self._shape, self._workspace, self._lists = shape, workspace, lists
        self._kernel, self._decode = kernel, decode
        self._num_tokens, self._num_requests = num_tokens, num_requests
        self._num_decodes = 0
        self._pending: AttentionBatch | None = None
        self._plan: list[int] | None = None
        self._selected = lists.select(num_requests)

    def prepare(self, batch: AttentionBatch) -> None:
        if self._in_graph:
            self._lay_out(batch)
        else:
            self._pending = batch

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        if not self._in_graph and torch.cuda.is_current_stream_capturing():
            raise CaptureError("attention made for eager steps inside a capture", "Ask for it with in_graph=True.")
        if self._pending is not None:
            self._lay_out(self._pending)
            self._pending = None
        first = self._num_decodes
        if self._decode is not None and first:
            self._decode.run(q[:first], k_cache, v_cache, out[:first])
        if self._plan is not None:
            self._kernel.run(self._plan, self._workspace, self._selected, q[first:], k_cache, v_cache, out[first:])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "lists", self._workspace.prefill_lists
        yield "partial", self._workspace.prefill_partial
        yield "plan", self._workspace.prefill_plan
        if self._decode is not None:
            for name, tensor in self._decode.tensors():
                yield f"decode {name}", tensor

    def _lay_out(self, batch: AttentionBatch) -> None:
        if self._decode is not None:
            self._num_decodes = _leading_single_tokens(batch)
            if self._num_decodes:
                self._decode.prepare(_requests(batch, 0, self._num_decodes))
                batch = _requests(batch, self._num_decodes, batch.num_requests)
            self._selected = self._lists.select(batch.num_requests)
        else:
            assert batch.num_requests == self._num_requests, "a graph holds an exact number of slots"
        num_tokens = int(batch.qo_indptr[-1])
        assert num_tokens <= self._num_tokens, "more tokens than there are rows"
        self._plan = None if num_tokens == 0 and not self._in_graph else self._planned(batch, num_tokens)

    def _planned(self, batch: AttentionBatch, num_tokens: int) -> list[int]:
        lengths = (np.diff(batch.kv_indptr) - 1) * self._shape.page_size + batch.kv_last_page_len
        plan = self._kernel.plan(
            self._workspace,
            self._lists.load(batch),
            batch.qo_indptr,
            batch.kv_indptr,
            lengths,
            self._num_tokens if self._in_graph else num_tokens,
            in_graph=self._in_graph,
        )
        self._lists.sent()
        return plan


def _leading_single_tokens(batch: AttentionBatch) -> int:
    others = np.flatnonzero(np.diff(batch.qo_indptr) != 1)
    return int(others[0]) if len(others) else batch.num_requests


def _requests(batch: AttentionBatch, first: int, end: int) -> AttentionBatch:
    """The requests [first, end) of a batch, as one of their own."""
    pages = slice(int(batch.kv_indptr[first]), int(batch.kv_indptr[end]))
    return AttentionBatch(
        qo_indptr=batch.qo_indptr[first : end + 1] - batch.qo_indptr[first],
        kv_indptr=batch.kv_indptr[first : end + 1] - batch.kv_indptr[first],
        kv_indices=batch.kv_indices[pages],
        kv_last_page_len=batch.kv_last_page_len[first:end],
    )
