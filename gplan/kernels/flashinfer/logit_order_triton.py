# mypy: ignore-errors
"""Logits as integers in Triton: how they order, what they weigh, and the number that draws among them.

A logit's *height* is an int32 that orders as the logits of its format do; both zeros have height 0, and what is not a
number has that of minus infinity. Kernels read logits as the integers that hold their bits. INFINITY, those of plus
infinity, names the format: 0x7F80 bfloat16, 0x7C00 float16, 0x7F800000 float32.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def heights_of(x, at, inside, INFINITY: tl.constexpr):
    """Heights of the tokens `at` of a row; outside of it, that of minus infinity."""
    bits = tl.load(x + at, mask=inside, other=0).to(tl.int32)
    size = bits & (0x7FFF if INFINITY < 0x8000 else 0x7FFFFFFF)
    height = tl.where(bits < 0, -size, size)
    return tl.where(inside & (size <= INFINITY), height, -INFINITY)


@triton.jit
def weight_of(height, peak, heat, INFINITY: tl.constexpr):
    """A token's probability over that of the likeliest, whose height is `peak`; float32."""
    x = tl.div_rn(_value_of(height, INFINITY) - _value_of(peak, INFINITY), heat)
    power = x * _LOG2_E
    # What rounding took from the power: with it the weight is as exact as an exponential of the C library.
    rest = tl.fma(x, _LOG2_E, -power)
    weight = tl.where(power > -150.0, tl.exp2(power) * (1.0 + rest * _LN_2), 0.0)
    return tl.where(height == peak, 1.0, weight)


@triton.jit
def _value_of(height, INFINITY: tl.constexpr):
    size = tl.abs(height)
    if INFINITY == 0x7F80:
        value = (size << 16).to(tl.float32, bitcast=True)
    elif INFINITY == 0x7C00:
        value = size.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = size.to(tl.float32, bitcast=True)
    return tl.where(height < 0, -value, value)


@triton.jit
def uniform(seed, position):
    """See `gplan.kernels.sampling.uniform`."""
    start = _mixed(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    bits = _mixed(start + position.to(tl.uint64, bitcast=True) * _GOLDEN)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)
