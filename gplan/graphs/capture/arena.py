"""The tape's graph pool: blocks of host memory that are reused in the order in which capture gives them back.

Owns addresses and who holds them. Memory is taken in chunks and kept until `close`, as a CUDA graph pool does, so what
is captured later fits into what earlier captures left free, if it is no larger.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64
"""Of blocks, as torch's own CPU allocator aligns: some kernels add in another order at other alignments."""

POISON = 0xFF
"""Fills freed memory in debug: NaN in every float format, -1 in every integer."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A live range of a chunk."""

    chunk: int
    offset: int
    nbytes: int
    address: int
    memory: Bytes
    """The block's bytes. It keeps the chunk alive, not the block."""


class Arena:
    """Best fit over chunks, free neighbours joined.

    Args:
        chunk_nbytes: least that is taken from the machine at once.
        on_free: told of each block after it was given back.
    """

    def __init__(self, chunk_nbytes: int = 64 << 10, on_free: Callable[[Block], None] | None = None) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._on_free = on_free
        self._chunks: list[Bytes] = []
        self._free: list[list[tuple[int, int]]] = []  # per chunk, (offset, nbytes) by offset
        self._live: dict[int, Block] = {}

    @property
    def nbytes(self) -> int:
        """Bytes taken from the machine."""
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def live_nbytes(self) -> int:
        return sum(block.nbytes for block in self._live.values())

    def tensor_like(self, source: Tensor) -> Tensor:
        """An uninitialised tensor of the source's dtype, shape and strides in a block of its own, which is given back
        when the last tensor or view over it dies. It is contiguous where elements of the source share memory."""
        if torch._debug_has_internal_overlap(source) == 1:
            source = torch.empty(source.shape, dtype=source.dtype, device="meta")
        nbytes = _span(source) * source.itemsize
        block = self._take(max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT))
        owner = block.memory[:]
        finalizer = weakref.finalize(owner, self._give_back, block)
        finalizer.atexit = False
        return _over(owner, source.dtype, source.shape, source.stride(), 0)

    def alias(self, tensor: Tensor) -> Tensor | None:
        """The same view of the same block, without holding the block; None for a tensor that is not of this arena."""
        block = self._live.get(tensor.untyped_storage().data_ptr())
        if block is None:
            return None
        return _over(block.memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def close(self) -> None:
        """Forgets the chunks; each is freed with the last tensor over it."""
        self._chunks.clear()
        self._free.clear()
        self._live.clear()

    def _take(self, nbytes: int) -> Block:
        fits = [
            (size, chunk, offset)
            for chunk, ranges in enumerate(self._free)
            for offset, size in ranges
            if size >= nbytes
        ]
        size, chunk, offset = min(fits) if fits else self._grow(nbytes)
        self._free[chunk].remove((offset, size))
        if size > nbytes:
            insort(self._free[chunk], (offset + nbytes, size - nbytes))
        memory = self._chunks[chunk][offset : offset + nbytes]
        block = Block(chunk, offset, nbytes, memory.ctypes.data, memory)
        self._live[block.address] = block
        return block

    def _grow(self, nbytes: int) -> tuple[int, int, int]:
        size = max(nbytes, self._chunk_nbytes)
        memory = np.empty(size + ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % ALIGNMENT
        self._chunks.append(memory[first : first + size])
        self._free.append([(0, size)])
        return size, len(self._chunks) - 1, 0

    def _give_back(self, block: Block) -> None:
        if self._live.pop(block.address, None) is None:
            return  # closed meanwhile
        ranges, first, last = self._free[block.chunk], block.offset, block.offset + block.nbytes
        for offset, size in list(ranges):
            if offset + size == first or offset == last:
                ranges.remove((offset, size))
                first, last = min(first, offset), max(last, offset + size)
        insort(ranges, (first, last - first))
        if self._on_free is not None:
            self._on_free(block)


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last that the tensor reaches."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _over(memory: Bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride, offset)
