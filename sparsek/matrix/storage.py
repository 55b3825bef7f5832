"""How a sparse matrix is stored: one hashable description without tensors, and its tensors as torch.library ops take
them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core.home import Home
from sparsek.matrix.pattern import BlockPattern

TITLES = {
    "bsr": "BSR",
    "semi24": "2:4",
    "bsr24": "BSR24",
    "bsr_fp8": "BSR in FP8",
    "semi24_fp8": "2:4 in FP8",
    "bsr24_fp8": "BSR24 in FP8",
}
FP8 = ("bsr_fp8", "semi24_fp8", "bsr24_fp8")


@dataclass(frozen=True)
class BlockStats:
    """The stored blocks of a matrix as it stands in a product: `nnzb` of `block`, (bm, bk).

    `row_max` is the largest number of stored blocks in a block row. `touches_all_columns`: every block column has a
    block. `merged` holds (R, steps) for factors R > 1: what is left to do when R block rows share a tile is the
    distinct block columns of each R rows, summed over groups of R block rows.
    """

    block: tuple[int, int]
    nnzb: int
    row_max: int = 0
    touches_all_columns: bool = True
    merged: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Storage:
    """How a matrix A is stored that a product reads.

    `dtype` is that of the values: "bf16", "fp16", "fp32", "fp64", "e4m3" or "e5m2". `blocks`: which blocks are stored;
    None: all of it. `two_four`: every four neighbours in a row hold two values. `scale`: what shares a float32 scale,
    "tensor", "row" or "block"; "" for values without scales. `fast_accum`: FP8 sums may stay in the tensor cores, in
    fewer bits than float32 has. `transposed`: A is the transpose of what is stored. Blocks have their sides as they
    stand in the product.
    """

    dtype: str
    blocks: BlockStats | None = None
    two_four: bool = False
    scale: str = ""
    fast_accum: bool = False
    transposed: bool = False

    @property
    def quantized(self) -> bool:
        """The values are FP8 with scales."""
        return self.scale != ""

    @property
    def kind(self) -> str:
        """The format: "bsr", "semi24" or "bsr24", and "_fp8" behind it if quantized."""
        plain = "bsr" if not self.two_four else "semi24" if self.blocks is None else "bsr24"
        return f"{plain}_fp8" if self.quantized else plain

    def unless(self, *kinds: str) -> list[str]:
        """The reason why a kernel that multiplies these kinds does not multiply this one; [] if it does."""
        if self.kind in kinds:
            return []
        return [f"multiplies {' and '.join(TITLES[each] for each in kinds)}, not {TITLES[self.kind]}"]


class Parts(NamedTuple):
    """The tensors and numbers of a matrix, for ops of torch.library.

    `sizes` are rows, columns, bm and bk of the pattern as it is stored, [] without blocks. A `transposed` matrix is the
    transpose of what these parts store.
    """

    values: Tensor
    scale: Tensor | None
    meta: Tensor | None
    indptr: Tensor | None
    indices: Tensor | None
    sizes: Sequence[int]
    scale_kind: str
    fast_accum: bool
    transposed: bool


# What a bound call (ops/bound.py) reads of a matrix: its home; what else the call depends on but the tensors that may
# differ from call to call; and these.
Signature = tuple[Home, Hashable, tuple[Tensor, ...]]


def block_stats(pattern: BlockPattern, merges: bool) -> BlockStats:
    """What the planner reads of a pattern, kept with it. `merges`: block rows may share a tile."""
    return pattern.derived(("block_stats", merges), lambda: _block_stats(pattern, merges))


def _block_stats(pattern: BlockPattern, merges: bool) -> BlockStats:
    indptr, indices = pattern.host
    touched = np.zeros(pattern.grid[1], dtype=bool)
    touched[indices] = True
    longest = int((indptr[1:] - indptr[:-1]).max(initial=0))
    height = pattern.block[0]
    factors = (2, 4, 8) if merges and height <= 64 and not height & (height - 1) else ()
    merged = tuple((r, merged_steps(pattern, r)) for r in factors if r * height <= 128)
    return BlockStats(pattern.block, pattern.nnzb, longest, bool(touched.all()), merged)


def merged_steps(pattern: BlockPattern, merge: int) -> int:
    """Steps of all units when `merge` consecutive block rows share a tile: distinct columns, summed over units."""
    return pattern.derived(("merged_steps", merge), lambda: len(np.unique(merged_keys(pattern, merge))))


def merged_keys(pattern: BlockPattern, merge: int) -> np.ndarray:
    """A number for the unit of `merge` block rows and the block column of each stored block, int64 [nnzb]."""
    indptr = pattern.host.indptr.astype(np.int64)
    unit = np.repeat(np.arange(pattern.grid[0]), np.diff(indptr)) // merge
    return unit * max(pattern.grid[1], 1) + pattern.host.indices


_HOMES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def home_of(meta: Tensor) -> Home:
    """The home of the 2:4 matrices with this metadata, which is to them what a pattern is to a BSR."""
    found: Any = _HOMES.get(meta)
    if found is None:
        found = _HOMES[meta] = Home()
    return found
