"""The FP8 number formats and their scales, for quantized matrices and dense tensors.

E4M3 has 4 exponent bits of bias 7 and 3 mantissa bits: up to 448, down to 2^-9, NaN but no infinity. E5M2 has 5 of bias
15 and 2: up to 57344, down to 2^-16, with infinity and NaN as in IEEE 754. Sources: OCP 8-bit Floating Point
Specification (OFP8), revision 1.0; Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.tracing import bits_of

NAMES = dtypes.FP8
# A scale is a normal float32: a subnormal has fewer bits, and some units flush it to zero.
LEAST = torch.finfo(torch.float32).tiny
MOST = torch.finfo(torch.float32).max


def largest_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitudes of x over these dims, float32 (float64 for float64); NaN is largest, 0 that of nothing."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.numel():
        return torch.linalg.vector_norm(x, ord=torch.inf, dim=dims, dtype=wide)
    over = {dim % x.ndim for dim in dims}
    return x.new_zeros([side for at, side in enumerate(x.shape) if at not in over], dtype=wide)


def scales_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 scales that map these largest magnitudes, float32 or float64, to the largest number of `dtype`.

    1 where all values are zero, and never below the smallest normal float32; NaN and Inf stay. No sync.
    """
    # By a tensor: a Python number is multiplied by its reciprocal on a GPU, which rounds otherwise.
    top = largest.new_full((), torch.finfo(dtype).max)
    scales = (largest / top).float().clamp(min=LEAST)
    return torch.where(largest == 0, 1.0, scales).contiguous()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x, of any float dtype, to FP8: to nearest, ties to even, saturating at the largest finite number.

    A NaN stays NaN. No sync.
    """
    top = torch.finfo(dtype).max
    x = x.clamp(-top, top)
    return (_cut_to_odd(x) if x.dtype == torch.float64 else x).to(dtype)


def relative_error(original: Tensor, rounded: Tensor) -> float:
    """||rounded - original|| / ||original||, in Frobenius norms; of an original of zeros ||rounded||. One sync.

    `rounded` is float64, and overwritten.
    """
    if not original.numel():
        return 0.0
    original = original.detach().double()
    # Divided by the largest magnitude first, so that no square that matters overflows or underflows.
    largest = torch.linalg.vector_norm(original, ord=torch.inf)
    largest = torch.where(largest == 0, 1.0, largest)
    parts = rounded.detach().sub_(original), original
    wrong, whole = torch.stack([torch.linalg.vector_norm(x / largest) for x in parts]).tolist()
    return wrong / whole if whole else wrong


def _cut_to_odd(x: Tensor) -> Tensor:
    """Round float64 to float32 "to odd": truncate, and set the last bit if that was inexact.

    A second rounding, to nearest, then gives the same result as a single one. Two roundings to nearest do not: the
    first can create ties (Boldo and Melquiond, Emulation of a FMA and Correctly Rounded Sums, 2008, on rounding to
    odd).
    """
    near = x.float()
    back = near.double()
    bits = bits_of(near, torch.int32) - (back.abs() > x.abs()).int()
    return bits_of(bits | (back != x).int(), torch.float32)
