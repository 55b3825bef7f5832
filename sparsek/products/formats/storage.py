"""Storage, the hashable description of how a sparse matrix is stored, and Parts, its tensors for torch.library ops."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core.plan_owner import PlanOwner
from sparsek.products.formats.pattern import BlockPattern

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
    """Statistics of the stored blocks of a matrix, as it is used in a product: `nnzb` blocks of `block`, (bm, bk).

    `row_max` is the largest number of stored blocks in a block row. `touches_all_columns`: every block column has a
    block. `merged` holds (R, steps) for factors R > 1: when R block rows share a tile, the steps are the distinct block
    columns of each group of R block rows, summed over the groups. `unread`: of a passing pattern, whose indices no host
    has read; `row_max` is then what fits, and predictions take the rows for even.
    """

    block: tuple[int, int]
    nnzb: int
    row_max: int = 0
    touches_all_columns: bool = True
    merged: tuple[tuple[int, int], ...] = ()
    unread: bool = False


@dataclass(frozen=True)
class Storage:
    """How the sparse operand A of a product is stored, without its tensors. The planner reads it.

    `dtype` is that of the values: "bf16", "fp16", "fp32", "fp64", "e4m3" or "e5m2". `blocks`: statistics of the stored
    blocks; None if all is stored. `two_four`: every four neighbours in a row hold two values. `scale`: what shares a
    float32 scale, "tensor", "row" or "block"; "" for values without scales. `fast_accum`: FP8 products may accumulate
    in the tensor cores, in fewer bits than float32. `transposed`: A is the transpose of what is stored. The sides of
    blocks are those in the product.
    """

    dtype: str
    blocks: BlockStats | None = None
    two_four: bool = False
    scale: str = ""
    fast_accum: bool = False
    transposed: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the values are FP8 with scales."""
        return self.scale != ""

    @property
    def kind(self) -> str:
        """The format: "bsr", "semi24" or "bsr24", with the suffix "_fp8" if quantized."""
        plain = "bsr" if not self.two_four else "semi24" if self.blocks is None else "bsr24"
        return f"{plain}_fp8" if self.quantized else plain

    def unless(self, *kinds: str) -> list[str]:
        """Return the reason why a kernel for these kinds does not multiply this one; [] if it does."""
        if self.kind in kinds:
            return []
        return [f"multiplies {' and '.join(TITLES[each] for each in kinds)}, not {TITLES[self.kind]}"]


class Parts(NamedTuple):
    """The tensors and numbers of a matrix, for torch.library ops.

    `sizes` are rows, columns, bm and bk of the pattern as it is stored, [] without blocks. `transposed`: the matrix is
    the transpose of what these parts store.
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


# The part of a matrix in the key of a recorded call (engine/call/recorded_calls.py): its owner; what else the call
# depends on; and the tensors, which may change from call to call.
Signature = tuple[PlanOwner, Hashable, tuple[Tensor, ...]]


def block_stats(pattern: BlockPattern, merges: bool) -> BlockStats:
    """The statistics of a pattern for the planner, cached with it. `merges`: block rows may share a tile."""
    return pattern.derived(("block_stats", merges), lambda: _block_stats(pattern, merges))


def unread_stats(pattern: BlockPattern) -> BlockStats:
    """What is known of a pattern without its indices."""
    most = min(pattern.grid[1], pattern.nnzb)
    return BlockStats(pattern.block, pattern.nnzb, most, touches_all_columns=False, unread=True)


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


_OWNERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def owner_of(meta: Tensor) -> PlanOwner:
    """The PlanOwner, which caches plans, of the 2:4 matrices with this metadata; a BSR has its pattern for that."""
    found: Any = _OWNERS.get(meta)
    if found is None:
        found = _OWNERS[meta] = PlanOwner()
    return found
