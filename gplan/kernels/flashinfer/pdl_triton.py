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
