"""Device memory that the CUDA kernel set takes once.

Everything here is sized from `KernelShape` before anything is allocated, shared by all keys and phases (no two of their
steps overlap on the device), and never grown or moved: graphs refer to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gplan.kernels.base import KernelShape
from gplan.kernels.flashinfer.cublaslt import WORKSPACE_BYTES
from gplan.kernels.flashinfer.prefill_module import load_prefill_module

PARTIAL_FLOATS = 4 << 20
"""Room for the parts of products that are split along k; the rule that splits them stays below."""
MAX_TILES = 4096
"""Tiles of one split product at most: each has a counter."""
DECODE_PROGRAMS = 264
"""Programs of decode attention that run at once on an H200, two on each multiprocessor."""
MAX_GRAPH_SLOTS = 32
"""Request slots of a prefill graph at most: FlashInfer's room for split contexts grows with them."""

_TILE = 128
"""FlashInfer's largest tile of queries; `padded tiles * tile` is largest for it."""
_SMALL_TILE = 16
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the buffers are sized by, each at its most.

    Attributes:
        decode_items: work items of a decode step.
        page_ids, requests: of one step.
        decode_lists, prefill_lists, decode_partial, decode_counters: elements of these buffers.
        prefill_partial_bytes, prefill_plan_bytes: of FlashInfer's two workspaces.
    """

    decode_items: int
    page_ids: int
    requests: int
    decode_lists: int
    prefill_lists: int
    decode_partial: int
    decode_counters: int
    prefill_partial_bytes: int
    prefill_plan_bytes: int

    @staticmethod
    def of(shape: KernelShape) -> Sizes:
        items = decode_items(shape, shape.max_batch)
        # A batch of padding alone may hold a whole step's tokens in one request.
        pages = max(shape.max_batch * shape.max_pages_per_request, -(-shape.max_tokens // shape.page_size))
        pages += shape.max_batch
        return Sizes(
            decode_items=items,
            page_ids=pages,
            requests=shape.max_batch,
            decode_lists=4 * items + 2 * (shape.max_batch + 1) + pages,
            prefill_lists=3 * (shape.max_batch + 1) + pages,
            decode_partial=items * shape.num_kv_heads * group_padded(shape) * (shape.head_dim + 2),
            decode_counters=shape.max_batch * shape.num_kv_heads,
            prefill_partial_bytes=_prefill_partial_bytes(shape),
            prefill_plan_bytes=_prefill_plan_bytes(shape),
        )


def decode_items(shape: KernelShape, num_requests: int) -> int:
    """Work items of a decode step at most: one per request, and one for each cut."""
    return num_requests + decode_lanes(shape)


def decode_lanes(shape: KernelShape) -> int:
    """Work items of decode attention that run at once, each on all heads."""
    return -(-DECODE_PROGRAMS // shape.num_kv_heads)


def group_padded(shape: KernelShape) -> int:
    """Query heads that share a head of keys and values, as a power of two."""
    return 1 << (shape.num_qo_heads // shape.num_kv_heads - 1).bit_length()


class Workspace:
    """The buffers, cut from one piece of memory. Counters are 0 between kernels: each kernel that counts sets its own
    back."""

    def __init__(self, shape: KernelShape) -> None:
        self.sizes = Sizes.of(shape)
        self._memory = torch.zeros(self.nbytes(shape), dtype=torch.uint8, device=shape.device)
        self._tensors: dict[str, Tensor] = {}
        start = 0
        for name, (size, dtype) in _layout(self.sizes).items():
            self._tensors[name] = self._memory[start : start + size * dtype.itemsize].view(dtype)
            start += _aligned(size * dtype.itemsize)
        self.gemm_partial = self._tensors["gemm_partial"]
        self.gemm_counters = self._tensors["gemm_counters"]
        self.decode_partial = self._tensors["decode_partial"]
        self.decode_counters = self._tensors["decode_counters"]
        self.decode_lists = self._tensors["decode_lists"]
        self.prefill_lists = self._tensors["prefill_lists"]
        self.prefill_partial = self._tensors["prefill_partial"]
        self.prefill_plan = self._tensors["prefill_plan"]
        self.blas = self._tensors["blas"]

    @staticmethod
    def nbytes(shape: KernelShape) -> int:
        return sum(_aligned(size * dtype.itemsize) for size, dtype in _layout(Sizes.of(shape)).values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()


def _layout(sizes: Sizes) -> dict[str, tuple[int, torch.dtype]]:
    return {
        "gemm_partial": (PARTIAL_FLOATS, torch.float32),
        "gemm_counters": (MAX_TILES, torch.int32),
        "decode_partial": (sizes.decode_partial, torch.float32),
        "decode_counters": (sizes.decode_counters, torch.int32),
        "decode_lists": (sizes.decode_lists, torch.int32),
        "prefill_lists": (sizes.prefill_lists, torch.int32),
        "prefill_partial": (sizes.prefill_partial_bytes, torch.uint8),
        "prefill_plan": (sizes.prefill_plan_bytes, torch.uint8),
        "blas": (WORKSPACE_BYTES, torch.uint8),
    }


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def graph_slots(shape: KernelShape) -> int:
    return min(shape.max_batch, shape.max_tokens, MAX_GRAPH_SLOTS)


def _prefill_partial_bytes(shape: KernelShape) -> int:
    """fa2 keeps sums and weights of every tile of queries where contexts are split, in a graph always; fa3 never splits
    them."""
    if _prefill_kernel(shape) == "fa3":
        return _ALIGNMENT
    group = shape.num_qo_heads // shape.num_kv_heads
    in_graph = -(-shape.max_tokens * group // _TILE) + graph_slots(shape) - 1
    tiles = max(_split_tiles(shape), in_graph)
    return tiles * _TILE * shape.num_qo_heads * (shape.head_dim + 1) * 4 + 256


def _prefill_plan_bytes(shape: KernelShape) -> int:
    """fa2: four lists by tile, one by row and one by request. fa3: seven lists by tile and head."""
    if _prefill_kernel(shape) == "fa3":
        tiles = -(-shape.max_tokens // _TILE) + shape.max_batch
        return 4 * (7 * tiles * shape.num_qo_heads) + 4096
    group = shape.num_qo_heads // shape.num_kv_heads
    tiles = max(_split_tiles(shape), -(-shape.max_tokens * group // _SMALL_TILE) + shape.max_batch)
    return 4 * (4 * tiles + shape.max_tokens + shape.max_batch) + 4096


def _prefill_kernel(shape: KernelShape) -> str:
    return load_prefill_module(shape.dtype, shape.head_dim, shape.device)[0]


def _split_tiles(shape: KernelShape) -> int:
    """Tiles that FlashInfer splits contexts into, to give every multiprocessor two programs."""
    processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
    return 2 * processors // shape.num_kv_heads + 1
