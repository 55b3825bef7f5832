"""The highest of a row of scores, in registers: device code of plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order(x, WIDE: tl.constexpr):
    """An integer of the same order as x, int64 if WIDE: of a float64. Both zeros are 0; NaN is arbitrary."""
    if WIDE:
        b = x.to(tl.int64, bitcast=True)
        b = tl.where(b == -0x8000000000000000, 0, b)
        return b ^ ((b >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        b = x.to(tl.int32, bitcast=True)
        b = tl.where(b == -0x80000000, 0, b)
        return b ^ ((b >> 31) & 0x7FFFFFFF)


@triton.jit
def count_over(key, bound):
    """How many keys are over a bound."""
    return tl.sum((key > bound).to(tl.int32), axis=0)


@triton.jit
def highest(key, count, nothing, low, high):
    """The `count` highest keys over `nothing`; of equal ones those of lower columns. At least `count` keys are over
    `low`, unless that is `nothing`, and at most `count` over `high`.
    """
    able = count_over(key, low)
    high = tl.where(able <= count, low, high)
    over = count_over(key, high)
    # More than `count` keys are over `low`, `over` of them and no more than `count` over `high`.
    middle = (low & high) + ((low ^ high) >> 1)
    while middle != low:
        here = count_over(key, middle)
        many = here > count
        low = tl.where(many, middle, tl.where(here == count, middle, low))
        high = tl.where(many, high, middle)
        over = tl.where(many, over, here)
        middle = (low & high) + ((low ^ high) >> 1)
    kept = key > high
    if over < count:
        level = (key == high) & (key > nothing)
        kept = kept | (level & (tl.cumsum(level.to(tl.int32), 0) <= count - over))
    return kept
