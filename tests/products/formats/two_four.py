"""2:4 matrices by hand: the rule in plain Python, random ones from their parts, and what to compare bit by bit."""

import itertools
import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsek.products.formats import two_four
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PAIRS = tuple(itertools.combinations(range(4), 2))
# Ties, signs, zeros of both signs, subnormal and largest numbers in any of the dtypes, infinities and NaN.
VALUES = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6e-8, 65504.0, math.inf, -math.inf, math.nan)


def kept(group: Sequence[float]) -> tuple[int, int]:
    """The columns that a group of four keeps: largest magnitudes, NaN above all, the lower column of equal ones."""
    order = sorted(range(4), key=lambda at: (not math.isnan(group[at]), -abs(group[at]), at))
    low, high = sorted(order[:2])
    return low, high


def nibble(pair: tuple[int, int]) -> int:
    return pair[0] | pair[1] << 2


def packed(pairs: Sequence[Sequence[tuple[int, int]]], columns: int) -> Tensor:
    """Metadata [rows, columns / 8] of rows of pairs."""
    rows = [
        [nibble(even) | nibble(odd) << 4 for even, odd in zip(row[::2], row[1::2], strict=True)]
        for row in pairs
    ]
    return torch.tensor(rows, dtype=torch.uint8).reshape(len(pairs), columns // 8)


def spread(values: Tensor, pairs: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """The dense matrix of values [M, K/2], value by value."""
    out = torch.zeros(values.shape[0], 2 * values.shape[1], dtype=values.dtype)
    for row, of_row in enumerate(pairs):
        for group, pair in enumerate(of_row):
            for slot, column in enumerate(pair):
                out[row, 4 * group + column] = values[row, 2 * group + slot]
    return out


def pruned(w: Tensor, mask: Tensor | None = None) -> Semi24:
    """As Semi24.from_dense, of NaN and Inf too, which it refuses on a CPU."""
    return Semi24.unchecked(*two_four.pack(w, mask))


def semi24(m: int = 6, k: int = 40, dtype: torch.dtype = torch.float16) -> Semi24:
    """The larger half of a random matrix."""
    return Semi24.from_dense(torch.randn(m, k).to(dtype))


def bsr24(m: int = 150, k: int = 190, dtype: torch.dtype = torch.float16) -> BSR24:
    """Random blocks of 64, their larger halves. The sides are ragged."""
    return BSR24.from_bsr(random_bsr(m, k, 64, 0.4, dtype=dtype))


def random_pairs(rows: int, columns: int, generator: torch.Generator) -> list[list[tuple[int, int]]]:
    return [
        [PAIRS[each] for each in row]
        for row in torch.randint(6, (rows, columns // 4), generator=generator).tolist()
    ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, so that NaN equals itself and 0.0 is not -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Small dense matrices, K a multiple of 8, full of ties and of numbers that are none."""
    rows, columns = draw(st.integers(1, 3)), 8 * draw(st.integers(1, 3))
    elements = draw(st.lists(st.sampled_from(VALUES), min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(elements, dtype=torch.float64).view(rows, columns).to(draw(st.sampled_from(DTYPES)))


@st.composite
def masks(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """bool [rows, columns] with none, one or two true elements in every four neighbours."""
    some = [(), *((at,) for at in range(4)), *PAIRS]
    count = rows * columns // 4
    chosen = draw(st.lists(st.sampled_from(some), min_size=count, max_size=count))
    flags = [[at in columns_of for at in range(4)] for columns_of in chosen]
    return torch.tensor(flags, dtype=torch.bool).view(rows, columns)
