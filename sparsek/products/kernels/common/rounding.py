"""How Triton kernels round to FP8 with a scale for what shares one: the bits of `formats.quantized_tensor`.

scale = max of |x|, over 448 or 57344, at least 2^-126, and 1 where all of x is 0        x8 = x / scale, rounded
"""

import triton
import triton.language as tl

from sparsek.core import env
from sparsek.engine.launch.tensors import at, quotients
from sparsek.products.formats.float8 import LEAST

LEAST_SCALE = tl.constexpr(LEAST)
INTERPRETED = tl.constexpr(env.interpreting())
TOP_E4M3 = tl.constexpr(448.0)


@triton.jit
def magnitude_bits(x):
    """Bits of a float32 without the sign. Their order is that of magnitudes, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, TOP: tl.constexpr):
    """The scales of what has these largest `magnitude_bits`."""
    size = largest.to(tl.float32, bitcast=True)
    found = tl.math.div_rn(size, tl.zeros(size.shape, dtype=tl.float32) + TOP)
    found = tl.where(found < LEAST_SCALE, LEAST_SCALE, found)  # a NaN stays
    return tl.where(size == 0, 1.0, found)


@triton.jit
def column_scales(b, col, n, k, sb_k, sb_n, WIDE: tl.constexpr, RN: tl.constexpr, STEP: tl.constexpr):
    """E4M3 scales [TN] of the columns `col` of b [k, n], which are 0 up to no more than RN."""
    row = tl.arange(0, RN)
    kt = tl.arange(0, STEP)
    source = b + (at(row, WIDE) * sb_n)[:, None]
    there = (row < n)[:, None]
    largest = tl.zeros([RN], dtype=tl.int32)
    for k0 in range(0, k, STEP):
        held = tl.load(
            source + (at(k0 + kt, WIDE) * sb_k)[None, :], mask=there & (k0 + kt < k)[None, :], other=0.0
        )
        largest = tl.maximum(largest, tl.max(magnitude_bits(held.to(tl.float32)), axis=1))
    found = scale_of(largest, TOP_E4M3).to(tl.int32, bitcast=True)
    of_column = tl.max(tl.where(row[:, None] == col[None, :], found[:, None], 0), axis=0)
    return tl.where(of_column == 0, 1.0, of_column.to(tl.float32, bitcast=True))  # 1 for columns beyond RN


@triton.jit
def rounded_columns(b, scales):
    """b [K, N] / scales [N], in E4M3."""
    q = tl.trans(quotients(tl.trans(b.to(tl.float32)), scales, INTERPRETED))
    if INTERPRETED:  # its conversion does not round to nearest (Triton 3.6)
        q = _nearest(q)
    return q.to(tl.float8e4nv)


@triton.jit
def _nearest(q):
    """The numbers of E4M3, in float32, that are nearest to q, of at most 448, ties to even."""
    bits = magnitude_bits(q)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    least = (tl.abs(q) + 16384.0) - 16384.0  # multiples of 2^-9
    size = tl.where(tl.abs(q) < 0.015625, least, normal)
    return tl.where(q < 0, -size, tl.where(q == q, size, q))
