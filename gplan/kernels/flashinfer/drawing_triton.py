# mypy: ignore-errors
"""Drawing a row's token from the counts of its logits, in Triton. The meaning is that of `gplan.kernels.sampling`,
without its sort.

A place in the order of falling logits is found by the mass (or number) of tokens before it: the group of slots, then
the slot. Where a slot holds many logits, its tokens are listed and the lower half of the height is built from its
highest bit down, as the largest with enough at or above it. Among equal logits the place follows from what is left.
"""

import triton
import triton.language as tl

from gplan.kernels.flashinfer.counting_triton import GROUP, MASSES_ROW, SLOTS, UNIT, peak_of, slot_masses
from gplan.kernels.flashinfer.logit_order_triton import heights_of, uniform, weight_of

_PASS = tl.constexpr(16384)
"""Tokens read at once by a program that has a row to itself."""
_LIST = tl.constexpr(512)
_GROUPS = tl.constexpr(256)


@triton.jit(do_not_specialize=["PARTS"])
def find_place_kernel(
    x,
    temperature,
    top_k,
    top_p,
    seed,
    position,
    counts,
    masses,
    peaks,
    group_counts,
    group_masses,
    likely_masses,
    listed,
    places,
    VOCAB,
    PARTS,
    INFINITY: tl.constexpr,
):
    """Places [rows, 2] int32 of what is drawn: a height, and how many tokens of it come before. Grid (rows). Of 16-bit
    logits neither `masses` nor `listed` is read; else `listed` [rows, VOCAB] int32 is scratch."""
    row = tl.program_id(0).to(tl.int64)
    x += row * VOCAB
    counts += row * SLOTS
    masses += row * MASSES_ROW
    listed += row * VOCAB
    peak = peak_of(peaks, row, PARTS)
    heat = tl.load(temperature + row)
    place = _place(peak, tl.zeros([], dtype=tl.int32), INFINITY)
    if heat > 0:
        group = row * _GROUPS + tl.arange(0, _GROUPS)
        numbers, sums = tl.load(group_counts + group), tl.load(group_masses + group)
        mass_k = tl.sum(sums, axis=0)
        if INFINITY < 0x8000:
            likely = tl.sum(tl.load(likely_masses + group), axis=0)
        else:
            likely = tl.load(masses + SLOTS).to(tl.float64) / UNIT
        kept = tl.minimum(mass_k, likely)
        last = tl.full([], 0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
        k = tl.maximum(tl.load(top_k + row), 1)
        if k < tl.sum(numbers, axis=0):
            height, before, mass, number = _find(
                x, counts, masses, numbers, sums, listed, k.to(tl.float64), peak, heat, VOCAB, True, False, INFINITY
            )
            taken = tl.minimum(tl.maximum(k - before, 1.0), number)
            mass_k = mass + taken * _each(height, peak, heat, INFINITY)
            kept = tl.minimum(kept, mass_k)
            last = tl.minimum(last, _place(height, taken - 1, INFINITY))
        p = tl.load(top_p + row)
        if p < 1:
            share = tl.maximum(p.to(tl.float64) * mass_k, 1e-30)
            height, before, mass, number = _find(
                x, counts, masses, numbers, sums, listed, share, peak, heat, VOCAB, False, False, INFINITY
            )
            each = _each(height, peak, heat, INFINITY)
            taken = tl.minimum(tl.maximum(tl.ceil((share - mass) / each), 1.0), number)
            kept = tl.minimum(kept, mass + taken * each)
            last = tl.minimum(last, _place(height, taken - 1, INFINITY))
        target = uniform(tl.load(seed + row), tl.load(position + row)) * kept
        height, before, mass, number = _find(
            x, counts, masses, numbers, sums, listed, target, peak, heat, VOCAB, False, True, INFINITY
        )
        skipped = tl.floor((target - mass) / _each(height, peak, heat, INFINITY))
        # Sums differ in their last bits by how they are made; what a filter leaves out is never drawn for that.
        place = tl.minimum(_place(height, tl.minimum(skipped, number - 1), INFINITY), last)
    tl.store(places + 2 * row, (INFINITY - (place >> 31)).to(tl.int32))
    tl.store(places + 2 * row + 1, (place & 0x7FFFFFFF).to(tl.int32))


@triton.jit
def take_token_kernel(x, places, out, VOCAB, INFINITY: tl.constexpr):
    """The token [rows] int64 at a row's place, the last of its height where there are fewer, or 0 where there is none.
    Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    x += row * VOCAB
    height, skipped = tl.load(places + 2 * row), tl.load(places + 2 * row + 1)
    before = tl.zeros([], dtype=tl.int32)
    passed = tl.zeros([], dtype=tl.int32)
    start = tl.zeros([], dtype=tl.int32)
    first = tl.zeros([], dtype=tl.int32)
    while (first < VOCAB) & (before <= skipped):
        number = tl.sum(_is_at(x, first + tl.arange(0, _PASS), height, VOCAB, INFINITY), axis=0)
        passed = tl.where(number > 0, before, passed)
        start = tl.where(number > 0, first, start)
        before += number
        first += _PASS
    at = start + tl.arange(0, _PASS)
    equal = _is_at(x, at, height, VOCAB, INFINITY)
    rank = passed + tl.cumsum(equal, axis=0) - 1
    tl.store(out + row, tl.max(tl.where((equal > 0) & (rank <= skipped), at, 0), axis=0).to(tl.int64))


@triton.jit
def _is_at(x, at, height, VOCAB, INFINITY: tl.constexpr):
    return ((heights_of(x, at, at < VOCAB, INFINITY) == height) & (at < VOCAB)).to(tl.int32)


@triton.jit
def _place(height, skipped, INFINITY: tl.constexpr):
    """A place in the order as one int64, which rises along it."""
    return ((INFINITY - height.to(tl.int64)) << 31) | tl.maximum(skipped, 0).to(tl.int64)


@triton.jit
def _each(height, peak, heat, INFINITY: tl.constexpr):
    """What a token of that height weighs; never 0."""
    return tl.maximum(weight_of(height, peak, heat, INFINITY).to(tl.float64), 1e-60)


@triton.jit
def _find(
    x,
    counts,
    masses,
    numbers,
    sums,
    listed,
    target,
    peak,
    heat,
    VOCAB,
    BY_RANK: tl.constexpr,
    STRICT: tl.constexpr,
    INFINITY: tl.constexpr,
):
    """The first height with which the mass (the number, where BY_RANK) of tokens reaches `target` (exceeds it, where
    STRICT); the last height of all where none does. numbers, sums: of the groups, [256].

    Returns: the height; number and mass of the tokens above it; number of those that have it.
    """
    at = tl.arange(0, GROUP)
    group = _first_of(numbers.to(tl.float64) if BY_RANK else sums, 0.0, target, STRICT, _GROUPS)
    is_above = tl.arange(0, _GROUPS) < group
    before = tl.sum(tl.where(is_above, numbers, 0), axis=0).to(tl.float64)
    mass = tl.sum(tl.where(is_above, sums, 0.0), axis=0)
    held = tl.load(counts + group * GROUP + at)
    weights = slot_masses(masses, group * GROUP + at, held, peak, heat, INFINITY)
    if BY_RANK:
        slot = _first_of(held.to(tl.float64), before, target, STRICT, GROUP)
    else:
        slot = _first_of(weights, mass, target, STRICT, GROUP)
    before += tl.sum(tl.where(at < slot, held, 0), axis=0).to(tl.float64)
    mass += tl.sum(tl.where(at < slot, weights, 0.0), axis=0)
    slot += group * GROUP
    if INFINITY < 0x8000:
        height = INFINITY - slot
        number = tl.load(counts + slot).to(tl.float64)
    else:
        upper = (INFINITY >> 16) - slot
        length = _list_tokens(x, listed, upper, VOCAB, INFINITY)
        base = before if BY_RANK else mass
        low = _lower_half(x, listed, length, base, target, peak, heat, BY_RANK, STRICT, INFINITY)
        height = (upper << 16) | low
        more, more_mass, number = _above(x, listed, length, height, peak, heat, INFINITY)
        before += more
        mass += more_mass
    return height, before, mass, number


@triton.jit
def _first_of(amounts, base, target, STRICT: tl.constexpr, WIDTH: tl.constexpr):
    """Index of the first amount with which the sum reaches `target`, else of the last that is more than 0."""
    at = tl.arange(0, WIDTH)
    reached = base + tl.cumsum(amounts, axis=0)
    enough = reached > target if STRICT else reached >= target
    last = tl.max(tl.where(amounts > 0, at, 0), axis=0)
    return tl.minimum(tl.min(tl.where(enough & (amounts > 0), at, WIDTH), axis=0), last)


@triton.jit
def _list_tokens(x, tokens, upper, VOCAB, INFINITY: tl.constexpr):
    """Writes the tokens whose height has that upper half, by rising id; returns how many there are."""
    length = tl.zeros([], dtype=tl.int32)
    tl.debug_barrier()
    for first in range(0, VOCAB, _PASS):
        at = first + tl.arange(0, _PASS)
        chosen = (((heights_of(x, at, at < VOCAB, INFINITY) >> 16) == upper) & (at < VOCAB)).to(tl.int32)
        number = tl.sum(chosen, axis=0)
        if number > 0:
            tl.store(tokens + length + tl.cumsum(chosen, axis=0) - 1, at, mask=chosen > 0)
        length += number
    tl.debug_barrier()
    return length


@triton.jit
def _lower_half(
    x, tokens, length, base, target, peak, heat, BY_RANK: tl.constexpr, STRICT: tl.constexpr, INFINITY: tl.constexpr
):
    """Lower half of the first height in the list with which what it holds, after `base`, reaches `target`; else of its
    last height."""
    low = tl.zeros([], dtype=tl.int32)
    step = tl.full([], 0x8000, dtype=tl.int32)
    for _ in range(0, 16):
        candidate = low | step
        step = step >> 1
        amount = tl.zeros([_LIST], dtype=tl.float64)
        least = tl.full([_LIST], 0xFFFF, dtype=tl.int32)
        for first in range(0, length, _LIST):
            at = first + tl.arange(0, _LIST)
            height = heights_of(x, tl.load(tokens + at, mask=at < length, other=0), at < length, INFINITY)
            each = 1.0 if BY_RANK else weight_of(height, peak, heat, INFINITY)
            amount += tl.where((at < length) & ((height & 0xFFFF) >= candidate), each, 0.0)
            least = tl.minimum(least, tl.where(at < length, height & 0xFFFF, 0xFFFF))
        reached = base + tl.sum(amount, axis=0)
        enough = reached > target if STRICT else reached >= target
        low = tl.where(enough | (candidate <= tl.min(least, axis=0)), candidate, low)
    return low


@triton.jit
def _above(x, tokens, length, middle, peak, heat, INFINITY: tl.constexpr):
    """Of a list: number and mass of the tokens above a height, number of those that have it."""
    more = tl.zeros([_LIST], dtype=tl.int32)
    mass = tl.zeros([_LIST], dtype=tl.float64)
    equal = tl.zeros([_LIST], dtype=tl.int32)
    for first in range(0, length, _LIST):
        at = first + tl.arange(0, _LIST)
        height = heights_of(x, tl.load(tokens + at, mask=at < length, other=0), at < length, INFINITY)
        is_above = (at < length) & (height > middle)
        more += is_above.to(tl.int32)
        mass += tl.where(is_above, weight_of(height, peak, heat, INFINITY), 0.0)
        equal += ((at < length) & (height == middle)).to(tl.int32)
    return tl.sum(more, axis=0).to(tl.float64), tl.sum(mass, axis=0), tl.sum(equal, axis=0).to(tl.float64)
