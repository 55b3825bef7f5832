"""Results that may differ by the order of their sums: on a CPU bits depend on shapes, strides, alignment and threads.

Equal bits are asked for on a CPU only where the call and its operands' layout are the same: SPARSEK_TEST_CPU=sums
(tests/odd_cpu.py) finds tests that ask for more.
"""

import math

import torch
from torch import Tensor

from sparsek.testing.budget import FACTOR, ROUNDED, error, rounding_unit, summing_unit


def alike(found: Tensor, right: Tensor, terms: int = 1024) -> bool:
    """Whether both are one result, of sums of `terms` terms each in any order, by their error in the norm.

    Shape, dtype and what is not finite are the same.
    """
    if (found.shape, found.dtype) != (right.shape, right.dtype):
        return False
    ends = ~right.isfinite()
    if not torch.equal(found.isfinite(), right.isfinite()):
        return False
    if not torch.equal(found[ends].nan_to_num(0), right[ends].nan_to_num(0)):
        return False
    exact = right.detach().double().masked_fill(ends, 0)
    unit = summing_unit(right.dtype) * math.sqrt(ROUNDED * terms / 2)
    return error(found.masked_fill(ends, 0), exact) <= FACTOR * (unit + rounding_unit(right.dtype))


def apart(dtype: torch.dtype, terms: int, size: float) -> float:
    """How far two right results may be apart in one element, of sums of `terms` terms and of about `size`.

    Single errors are up to five times as large as their mean, and both results have some.
    """
    return 5 * FACTOR * (summing_unit(dtype) * math.sqrt(ROUNDED * terms / 2) + rounding_unit(dtype)) * size
