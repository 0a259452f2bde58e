# mypy: ignore-errors
"""Choosing and drawing tokens, penalising and masking logits, in Triton. The meaning is that of
`gplan.kernels.sampling`, without its sort.

A place in the order of falling logits is found by the mass (or number) of tokens before it. So a program, which has a
row to itself, builds the searched logit's bits from the highest down, each by one pass over the row: as an integer that
orders as the logits do, it is the largest with enough mass at or above it. Among equal logits the place follows from
what is left of the mass.
"""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit(do_not_specialize=["PART"])
def parts_argmax_kernel(logits, peaks, tokens, VOCAB, PART, BLOCK: tl.constexpr):
    """The largest logit of each part of a row, and the first token that has it. Grid (rows, parts of PART tokens, a
    multiple of BLOCK). peaks [rows, parts] float32, tokens [rows, parts] int32."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    token = part * PART + offsets
    for first in range(part * PART, tl.minimum((part + 1) * PART, VOCAB), BLOCK):
        at = first + offsets
        logit = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        token = tl.where(logit > best, at, token)
        best = tl.maximum(best, logit)
    peak = tl.max(best, axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, peak)
    tl.store(tokens + place, tl.min(tl.where(best == peak, token, VOCAB - 1), axis=0))


@triton.jit(do_not_specialize=["PARTS"])
def first_argmax_kernel(peaks, tokens, out, PARTS, BLOCK: tl.constexpr):
    """The first of the largest over a row's parts. Grid (rows), BLOCK >= PARTS."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < PARTS
    peak = tl.load(peaks + row * PARTS + part, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * PARTS + part, mask=inside, other=0x7FFFFFFF)
    token = tl.where(peak == tl.max(peak, axis=0), token, 0x7FFFFFFF)
    tl.store(out + row, tl.min(token, axis=0).to(tl.int64))


@triton.jit
def sample_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    out,
    VOCAB,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Grid (rows). SHIFT: 16 where logits are bfloat16, whose lower bits say nothing; else 0."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * VOCAB
    heat = tl.load(temperature + row)
    peak = _maximum(x, VOCAB, BLOCK)
    found = _key(peak, SHIFT)
    skipped = tl.zeros([], dtype=tl.int32)
    if heat > 0:
        total, above_floor = _masses(x, peak, heat, tl.load(min_p + row), VOCAB, BLOCK)
        kept = tl.minimum(total, above_floor)
        k = tl.load(top_k + row)
        mass_k = total
        if k < VOCAB:
            key = _search_rank(x, tl.maximum(k, 1), VOCAB, BLOCK, SHIFT)
            mass, count = _above(x, peak, heat, key, VOCAB, BLOCK, SHIFT)
            mass_k = mass + (tl.maximum(k, 1) - count) * _weight_of_key(key, peak, heat, SHIFT)
            kept = tl.minimum(kept, mass_k)
        p = tl.load(top_p + row)
        if p < 1:
            share = tl.maximum(p.to(tl.float64) * mass_k, 1e-30)
            key = _search_mass(x, peak, heat, share, False, VOCAB, BLOCK, SHIFT)
            mass, count = _above(x, peak, heat, key, VOCAB, BLOCK, SHIFT)
            each = _weight_of_key(key, peak, heat, SHIFT)
            kept = tl.minimum(kept, mass + tl.maximum(tl.ceil((share - mass) / each), 1.0) * each)
        target = _uniform(tl.load(seed + row), tl.load(position + row)) * kept
        found = _search_mass(x, peak, heat, target, True, VOCAB, BLOCK, SHIFT)
        mass, count = _above(x, peak, heat, found, VOCAB, BLOCK, SHIFT)
        each = _weight_of_key(found, peak, heat, SHIFT)
        skipped = tl.maximum(tl.floor((target - mass) / each), 0.0).to(tl.int32)
    tl.store(out + row, _token_of_key(x, found, skipped, VOCAB, BLOCK, SHIFT))


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """An unsigned integer that orders as float32 does; both zeros are one."""
    bits = (x.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True)
    return (rising ^ 0x80000000) >> SHIFT


@triton.jit
def _weight(x, peak, heat):
    return tl.exp((x.to(tl.float32) - peak) / heat)


@triton.jit
def _maximum(x, VOCAB, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(x + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32))
    return tl.max(best, axis=0)


@triton.jit
def _masses(x, peak, heat, floor, VOCAB, BLOCK: tl.constexpr):
    """Mass of all tokens, and of those at least `floor` times as likely as the likeliest."""
    everything = tl.zeros([BLOCK], dtype=tl.float64)
    likely = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        weight = _weight(tl.load(x + at, mask=at < VOCAB, other=float("-inf")), peak, heat)
        everything += weight
        likely += tl.where(weight >= floor, weight, 0.0)
    return tl.sum(everything, axis=0), tl.sum(likely, axis=0)


@triton.jit
def _above(x, peak, heat, key, VOCAB, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """Mass and number of the tokens whose logit is above that of `key`."""
    mass = tl.zeros([BLOCK], dtype=tl.float64)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < VOCAB, other=float("-inf"))
        above = (_key(values, SHIFT) > key) & (at < VOCAB)
        mass += tl.where(above, _weight(values, peak, heat), 0.0)
        count += above.to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(count, axis=0)


@triton.jit
def _weight_of_key(key, peak, heat, SHIFT: tl.constexpr):
    """The weight of a token with that key; never 0."""
    rising = ((key << SHIFT) ^ 0x80000000).to(tl.int32, bitcast=True)
    rising = tl.where(rising < 0, rising | ((1 << SHIFT) - 1), rising)
    bits = rising ^ ((rising >> 31) & 0x7FFFFFFF)
    weight = _weight(bits.to(tl.float32, bitcast=True), peak, heat)
    return tl.maximum(weight, 1e-38).to(tl.float64)


@triton.jit
def _search_rank(x, k, VOCAB, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The key of the k-th token in order."""
    key = tl.zeros([], dtype=tl.uint32)
    step = tl.full([], 1 << (31 - SHIFT), dtype=tl.uint32)
    for _ in range(0, 32 - SHIFT):
        candidate = key | step
        step = step >> 1
        count = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, VOCAB, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(x + at, mask=at < VOCAB, other=float("-inf"))
            count += ((_key(values, SHIFT) >= candidate) & (at < VOCAB)).to(tl.int32)
        key = tl.where(tl.sum(count, axis=0) >= k, candidate, key)
    return key


@triton.jit
def _search_mass(x, peak, heat, target, STRICT: tl.constexpr, VOCAB, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The key of the first token in order with which the mass reaches `target` (exceeds it, where STRICT)."""
    key = tl.zeros([], dtype=tl.uint32)
    step = tl.full([], 1 << (31 - SHIFT), dtype=tl.uint32)
    for _ in range(0, 32 - SHIFT):
        candidate = key | step
        step = step >> 1
        mass = tl.zeros([BLOCK], dtype=tl.float64)
        for first in range(0, VOCAB, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(x + at, mask=at < VOCAB, other=float("-inf"))
            mass += tl.where(_key(values, SHIFT) >= candidate, _weight(values, peak, heat), 0.0)
        reached = tl.sum(mass, axis=0)
        enough = reached > target if STRICT else reached >= target
        key = tl.where(enough, candidate, key)
    return key


@triton.jit
def _token_of_key(x, key, skipped, VOCAB, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """The token with that key that has `skipped` smaller ones, or the last of them where there are fewer."""
    before = tl.zeros([], dtype=tl.int32)
    token = tl.zeros([], dtype=tl.int32)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < VOCAB, other=float("-inf"))
        equal = ((_key(values, SHIFT) == key) & (at < VOCAB)).to(tl.int32)
        number = tl.sum(equal, axis=0)
        if (number > 0) & (before <= skipped):
            rank = before + tl.cumsum(equal, axis=0) - 1
            token = tl.max(tl.where((equal > 0) & (rank <= skipped), at, 0), axis=0)
        before += number
    return token.to(tl.int64)


@triton.jit
def _uniform(seed, position):
    """See `gplan.kernels.sampling.uniform`."""
    start = _mixed(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    bits = _mixed(start + position.to(tl.uint64, bitcast=True) * _GOLDEN)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def penalise_kernel(logits, output_counts, in_prompt, repetition, presence, frequency, VOCAB, BLOCK: tl.constexpr):
    """See `Kernels.apply_penalties`. Grid (rows, blocks of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    score = tl.load(logits + row * VOCAB + at, mask=inside)
    count = tl.load(output_counts + row * VOCAB + at, mask=inside, other=0)
    seen = (count > 0) | (tl.load(in_prompt + row * VOCAB + at, mask=inside, other=0) != 0)
    factor = tl.load(repetition + row)
    repeated = tl.where(score > 0, score / factor, score * factor)
    score = tl.where(seen, repeated, score)
    score -= tl.where(count > 0, tl.load(presence + row), 0.0) + tl.load(frequency + row) * count.to(tl.float32)
    tl.store(logits + row * VOCAB + at, score, mask=inside)


@triton.jit
def mask_kernel(logits, rows, bits, VOCAB, WORDS, BLOCK: tl.constexpr):
    """See `Kernels.apply_token_mask`. Grid (masked rows, blocks of the vocabulary)."""
    masked = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + masked)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    word = tl.load(bits + masked * WORDS + (at >> 5), mask=inside, other=0)
    forbidden = ((word >> (at & 31)) & 1) == 0
    tl.store(logits + row * VOCAB + at, float("-inf"), mask=inside & forbidden)
