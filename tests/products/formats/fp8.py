"""FP8 by hand: the numbers of both formats from their bits, rounding to them in float64, and small scaled matrices."""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import Quantized, Scale
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from tests.products.formats.two_four import same_bits

FP8 = E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS: tuple[Scale, ...] = ("tensor", "row", "block")


class Layout(NamedTuple):
    """Exponent bits, mantissa bits and bias; whether the largest exponent means Inf and NaN as in IEEE 754."""

    exponent: int
    mantissa: int
    bias: int
    ieee: bool


LAYOUTS = {E4M3: Layout(4, 3, 7, False), E5M2: Layout(5, 2, 15, True)}


def number(code: int, layout: Layout) -> float:
    """What a byte stands for."""
    sign = -1.0 if code >> 7 else 1.0
    exponent = code >> layout.mantissa & (1 << layout.exponent) - 1
    mantissa = code & (1 << layout.mantissa) - 1
    if exponent == (1 << layout.exponent) - 1:
        if layout.ieee:
            return math.nan if mantissa else sign * math.inf
        if mantissa == (1 << layout.mantissa) - 1:
            return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - layout.bias - layout.mantissa)
    return sign * math.ldexp(mantissa + (1 << layout.mantissa), exponent - layout.bias - layout.mantissa)


def grid(dtype: torch.dtype) -> list[float]:
    """The finite numbers from 0 up, in the order of their bytes 0, 1, 2, ..."""
    numbers = [number(code, LAYOUTS[dtype]) for code in range(128)]
    return [each for each in numbers if math.isfinite(each)]


def nearest(x: float, dtype: torch.dtype) -> int:
    """The byte of the number nearest to a finite x, exactly; of two the even byte, and none beyond the largest."""
    numbers = [Fraction(each) for each in grid(dtype)]
    size = Fraction(abs(x))
    code = min(range(len(numbers)), key=lambda at: (abs(numbers[at] - size), at % 2))
    return code | (0x80 if math.copysign(1.0, x) < 0 else 0)


def all_nearest(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """`nearest` for many: halfway points between the numbers are exact in float64."""
    numbers = np.array(grid(dtype))
    halves = (numbers[1:] + numbers[:-1]) / 2
    size = np.abs(x.astype(np.float64))
    low, high = np.searchsorted(halves, size, side="left"), np.searchsorted(halves, size, side="right")
    codes = np.where(low % 2 == 0, low, high)
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def codes(values: Tensor) -> np.ndarray:
    return values.cpu().view(torch.uint8).numpy()


def bsr(m: int = 70, k: int = 50, dtype: torch.dtype = torch.float32, density: float = 0.5) -> BSR:
    """Random blocks of 16x32 whose rows differ in size by powers of two. The sides are ragged."""
    a = random_bsr(m, k, (16, 32), density, dtype=torch.float64, seed=int(torch.randint(2**31, ())))
    return BSR(a.pattern, (a.values * sizes(a.values.shape[:2])).to(dtype))


def semi24(m: int = 9, k: int = 40, dtype: torch.dtype = torch.float32) -> Semi24:
    w = torch.randn(m, k, dtype=torch.float64)
    return Semi24.from_dense((w * sizes(w.shape[:1])).to(dtype))


def bsr24(m: int = 150, k: int = 190, dtype: torch.dtype = torch.float32) -> BSR24:
    """Random blocks of 64 whose rows differ in size. The sides are ragged."""
    a = random_bsr(m, k, 64, 0.5, dtype=torch.float64, seed=int(torch.randint(2**31, ())))
    return BSR24.from_bsr(BSR(a.pattern, (a.values * sizes(a.values.shape[:2])).to(dtype)))


MAKERS = (bsr, semi24, bsr24)
CASES: list[Any] = [(make, kind) for make in MAKERS for kind in KINDS if (make, kind) != (semi24, "block")]


def sizes(shape: tuple[int, ...]) -> Tensor:
    """Random powers of two, with a dimension of one behind."""
    return 2.0 ** torch.randint(-8, 5, shape, dtype=torch.float64).unsqueeze(-1)


def kinds(a: BSR | Semi24 | BSR24) -> tuple[Any, ...]:
    return KINDS[:2] if isinstance(a, Semi24) else KINDS


def rows_of(a: BSR | Semi24 | BSR24) -> np.ndarray:
    """The row of the matrix that each stored value lies in, by a loop over block rows."""
    if isinstance(a, Semi24):
        return np.broadcast_to(np.arange(a.shape[0])[:, None], a.values.shape)
    out = np.empty(a.values.shape, dtype=np.int64)
    indptr = a.pattern.indptr.tolist()
    for row in range(a.grid[0]):
        for at in range(indptr[row], indptr[row + 1]):
            out[at] = row * a.block[0] + np.arange(a.block[0])[:, None]
    return out


def same(p: Quantized, q: Quantized) -> bool:
    """Equal to the last bit, class, pattern and metadata with them."""
    a, b = p.matrix, q.matrix
    if type(a) is not type(b) or (p.kind, p.fast_accum, p.shape) != (q.kind, q.fast_accum, q.shape):
        return False
    patterns = [part for x in (a, b) if isinstance(part := getattr(x, "pattern", None), BlockPattern)]
    if patterns and not patterns[0].same_as(patterns[1]):
        return False
    metas = [part for x in (a, b) if isinstance(part := getattr(x, "meta", None), Tensor)]
    if metas and not torch.equal(*metas):
        return False
    views = [isinstance(x, BSR) and x.order is not None for x in (a, b)]
    return views[0] == views[1] and same_bits(a.values, b.values) and same_bits(p.scale, q.scale)
