# mypy: ignore-errors
"""How many tokens of a row have each logit, and what they weigh, counted by many programs per row.

A row has SLOTS counters, in order of falling logits. Those of a 16-bit format have a slot for each logit, so the number
of tokens says all. Wider ones have a slot for each upper half of the height; what its tokens weigh is summed in fixed
point, so that no order of summing changes it. 256 slots are a group, whose sums a search reads first.
"""

import triton
import triton.language as tl

from gplan.kernels.flashinfer.logit_order_triton import heights_of, weight_of

SLOTS = tl.constexpr(65536)
GROUP = tl.constexpr(256)
MASSES_ROW = tl.constexpr(65536 + 16)
"""A row's fixed-point masses: of its slots, then of the tokens that min_p keeps."""
MOST_PARTS = tl.constexpr(128)
UNIT = tl.constexpr(2.0**44)
"""Of fixed-point masses: 2**19 tokens that are all the likeliest fit."""


@triton.jit
def slot_of(height, INFINITY: tl.constexpr):
    return INFINITY - height if INFINITY < 0x8000 else (INFINITY >> 16) - (height >> 16)


@triton.jit
def peak_of(peaks, row, PARTS):
    """Height of a row's largest logit, from those of its parts."""
    part = tl.arange(0, MOST_PARTS)
    return tl.max(tl.load(peaks + row * PARTS + part, mask=part < PARTS, other=-0x7F800000), axis=0)


@triton.jit(do_not_specialize=["PART"])
def count_kernel(x, temperature, counts, peaks, VOCAB, PART, BLOCK: tl.constexpr, INFINITY: tl.constexpr):
    """Peaks of parts [rows, parts] int32; of 16-bit logits counts [rows, SLOTS] int32 too, which are 0 before. Grid
    (rows, parts of PART tokens, a multiple of BLOCK)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Greedy rows count nothing.
    least = tl.where(tl.load(temperature + row) > 0, -INFINITY, INFINITY)
    peak = tl.full([BLOCK], -INFINITY, dtype=tl.int32)
    for first in range(part * PART, tl.minimum((part + 1) * PART, VOCAB), BLOCK):
        at = first + tl.arange(0, BLOCK)
        height = heights_of(x + row * VOCAB, at, at < VOCAB, INFINITY)
        peak = tl.maximum(peak, height)
        if INFINITY < 0x8000:
            tl.atomic_add(counts + row * SLOTS + slot_of(height, INFINITY), 1, mask=height > least, sem="relaxed")
    tl.store(peaks + row * tl.num_programs(1) + part, tl.max(peak, axis=0))


@triton.jit(do_not_specialize=["PART"])
def weigh_kernel(
    x, temperature, min_p, peaks, counts, masses, VOCAB, PART, BLOCK: tl.constexpr, INFINITY: tl.constexpr
):
    """Counts and fixed-point masses [rows, MASSES_ROW] int64, 0 before, of wide logits. Grid as of counting."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0:
        floor = tl.load(min_p + row)
        peak = peak_of(peaks, row, tl.num_programs(1))
        likely = tl.zeros([BLOCK], dtype=tl.int64)
        for first in range(part * PART, tl.minimum((part + 1) * PART, VOCAB), BLOCK):
            at = first + tl.arange(0, BLOCK)
            height = heights_of(x + row * VOCAB, at, at < VOCAB, INFINITY)
            counted = height > -INFINITY
            weight = weight_of(height, peak, heat, INFINITY)
            mass = tl.where(counted, weight.to(tl.float64) * UNIT + 0.5, 0.0).to(tl.int64)
            likely += tl.where(weight >= floor, mass, 0)
            slot = slot_of(height, INFINITY)
            tl.atomic_add(counts + row * SLOTS + slot, 1, mask=counted, sem="relaxed")
            tl.atomic_add(masses + row * MASSES_ROW + slot, mass, mask=counted, sem="relaxed")
        tl.atomic_add(masses + row * MASSES_ROW + SLOTS, tl.sum(likely, axis=0), sem="relaxed")


@triton.jit
def slot_masses(masses, slot, number, peak, heat, INFINITY: tl.constexpr):
    """float64 masses of a row's slots that hold `number` tokens each; of 16-bit logits, `masses` is not read."""
    if INFINITY < 0x8000:
        weight = weight_of(INFINITY - slot, peak, heat, INFINITY)
        mass = tl.where(number > 0, number.to(tl.float64) * weight.to(tl.float64), 0.0)
    else:
        mass = tl.load(masses + slot).to(tl.float64) / UNIT
    return mass


@triton.jit(do_not_specialize=["PARTS"])
def sum_groups_kernel(
    counts,
    masses,
    temperature,
    min_p,
    peaks,
    group_counts,
    group_masses,
    likely_masses,
    PARTS,
    GROUPS: tl.constexpr,
    INFINITY: tl.constexpr,
):
    """Tokens [rows, groups] int32, their mass, and that of those which min_p keeps (of 16-bit logits) [rows, groups]
    float64. Greedy rows have none. Grid (rows, groups / GROUPS)."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS
    heat = tl.load(temperature + row)
    if heat > 0:
        peak = peak_of(peaks, row, PARTS)
        slot = first * GROUP + tl.arange(0, GROUPS * GROUP)
        number = tl.load(counts + row * SLOTS + slot)
        mass = slot_masses(masses + row * MASSES_ROW, slot, number, peak, heat, INFINITY)
        place = row * (SLOTS // GROUP) + first + tl.arange(0, GROUPS)
        tl.store(group_counts + place, tl.sum(tl.reshape(number, [GROUPS, GROUP]), axis=1))
        tl.store(group_masses + place, tl.sum(tl.reshape(mass, [GROUPS, GROUP]), axis=1))
        if INFINITY < 0x8000:
            weight = weight_of(INFINITY - slot, peak, heat, INFINITY)
            likely = tl.where(weight >= tl.load(min_p + row), mass, 0.0)
            tl.store(likely_masses + place, tl.sum(tl.reshape(likely, [GROUPS, GROUP]), axis=1))
