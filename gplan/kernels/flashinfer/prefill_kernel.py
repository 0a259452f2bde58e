"""FlashInfer's paged prefill kernels, fa2 and fa3, behind one call each for planning and running.

Their modules are called directly rather than through `BatchPrefillWithPagedKVCacheWrapper`: the wrapper takes 8 MiB of
device and of pinned memory for each key, copies page lists from pageable memory in calls that wait for the device, and
reuses its pinned memory without asking whether the copy is done. The calls are those of flashinfer-python 0.6.18.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from flashinfer.utils import MaskMode, TensorLayout
from torch import Tensor

from gplan.kernels.base import IntArray, KernelShape
from gplan.kernels.flashinfer.prefill_module import load_prefill_module
from gplan.kernels.flashinfer.workspace import Workspace

_NO_WINDOW = -1
_AUTO_SPLIT = -1
_SHORT = 512
"""Contexts up to so many tokens are never split: measured on an H200, the merge takes longer than it saves."""
_TILE = 128
"""Rows of a tile where many are multiplied: tokens times the query heads that share keys."""


class PrefillKernel:
    """One of the two kernels for the heads of a shape.

    fa3 is written for Hopper and gives a row of tiles to each multiprocessor. fa2 runs everywhere, and may split long
    contexts to give few queries more multiprocessors.

    Attributes:
        name: `fa2` or `fa3`.
    """

    def __init__(self, shape: KernelShape) -> None:
        self.name, self._module = load_prefill_module(shape.dtype, shape.head_dim, shape.device)
        self._shape = shape
        self._scale = 1.0 / math.sqrt(shape.head_dim)
        self._processors = torch.cuda.get_device_properties(shape.device).multi_processor_count

    def plan(
        self,
        workspace: Workspace,
        pinned: Tensor,
        qo_indptr: IntArray,
        kv_indptr: IntArray,
        lengths: IntArray,
        num_rows: int,
        *,
        in_graph: bool,
    ) -> list[int]:
        """Lays out a step's tiles and starts the copy of their lists to the device.

        Args:
            pinned: host memory the lists are written into; not to be touched before the copy is done.
            qo_indptr, kv_indptr: [n + 1]; `lengths`: [n] tokens of each context.
            num_rows: query tokens; in a graph the most there can be.
        """
        shape, n = self._shape, len(lengths)
        arguments = (
            workspace.prefill_partial,
            workspace.prefill_plan,
            pinned,
            torch.from_numpy(np.ascontiguousarray(qo_indptr)),
            torch.from_numpy(np.ascontiguousarray(kv_indptr)),
            torch.from_numpy(np.ascontiguousarray(lengths, dtype=np.int32)),
            num_rows,
            n,
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.page_size,
            in_graph,
            shape.head_dim,
            shape.head_dim,
            True,  # causal
            _NO_WINDOW,
        )
        if self.name == "fa3":
            plan: list[int] = self._module.plan(*arguments)
            return plan
        whole = not in_graph and (int(lengths.max()) <= _SHORT or self._fills_device(num_rows))
        plan = self._module.plan(*arguments, _AUTO_SPLIT, whole, 0, 0)  # no colocated programs, no uniform lengths
        return plan

    def run(
        self,
        plan: list[int],
        workspace: Workspace,
        lists: tuple[Tensor, Tensor, Tensor, Tensor],
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
    ) -> None:
        """Attends; `lists` are qo_indptr, kv_indptr, page ids and last page lengths on the device."""
        self._module.paged_run(
            workspace.prefill_partial,
            workspace.prefill_plan,
            plan,
            q,
            k_cache,
            v_cache,
            *lists,
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

    def _fills_device(self, num_rows: int) -> bool:
        """Whether unsplit tiles come near one for each multiprocessor: splitting then costs a merge of all results and
        wins little. Measured on an H200 at 512 tokens: 25 us whole, 68 us split."""
        tiles = -(-num_rows * (self._shape.num_qo_heads // self._shape.num_kv_heads) // _TILE)
        return 2 * tiles * self._shape.num_kv_heads >= self._processors
