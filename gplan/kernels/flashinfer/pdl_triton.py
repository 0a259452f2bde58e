# mypy: ignore-errors
"""Overlap of one kernel's end with the next one's start (programmatic dependent launch), for kernels in Triton.

A kernel launched so may begin while the one before it still runs. It must touch nothing but constants (weights, page
lists copied before the step) until `await_previous`. Every kernel here calls that before it ends, on every path: so a
kernel that has passed it knows that everything launched earlier is complete, not only its neighbour.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Waits for everything launched before, then lets the next kernel begin as room permits."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch(addresses, BYTES: tl.constexpr):
    """Asks for BYTES, a multiple of 16, at each of some addresses (int64, of global memory) to be brought to L2. Does
    not wait. Each warp works through its addresses one by one: give each thread one."""
    size = tl.full(addresses.shape, BYTES, dtype=tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(base, rows, row_bytes, first_byte, PARTS: tl.constexpr, PART_BYTES: tl.constexpr):
    """Prefetches the first PARTS * PART_BYTES bytes, from `first_byte` on, of some rows of a matrix."""
    start = rows.to(tl.int64)[:, None] * row_bytes + first_byte + (tl.arange(0, PARTS) * PART_BYTES)[None, :]
    prefetch(base.to(tl.int64) + start, PART_BYTES)


@triton.jit
def prefetch_range(base, num_bytes, PARTS: tl.constexpr, PART_BYTES: tl.constexpr):
    """Prefetches up to PARTS * PART_BYTES of the bytes that follow `base`, a multiple of PART_BYTES in all."""
    if num_bytes > 0:
        offset = tl.minimum(tl.arange(0, PARTS) * PART_BYTES, num_bytes - PART_BYTES)
        prefetch(base.to(tl.int64) + offset, PART_BYTES)
