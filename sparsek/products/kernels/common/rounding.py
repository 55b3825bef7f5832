"""How Triton kernels round to FP8 with a scale for what shares one: the bits of `formats.quantized_tensor`.

scale = max of |x|, over 448 or 57344, at least 2^-126, and 1 where all of x is 0        x8 = x / scale, rounded
"""

import triton
import triton.language as tl

from sparsek.products.formats.float8 import LEAST

LEAST_SCALE = tl.constexpr(LEAST)


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
