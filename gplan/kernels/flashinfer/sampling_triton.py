# mypy: ignore-errors
"""Choosing the likeliest tokens, penalising and masking logits, in Triton."""

import triton
import triton.language as tl


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
