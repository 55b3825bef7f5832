"""The symbolic phase of BSR x BSR: pairs of blocks of A and B, and the block of C that each pair adds to.

A block (i, k) of A pairs with every block (k, j) of B; their product is added to block (i, j) of C. All of it is
computed on the patterns' device. The numbers of pairs and blocks determine tensor sizes, so each costs one sync.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.pattern import BlockPattern


class Matches(NamedTuple):
    """Block r of `pattern` (C's) is the sum over p from indptr[r] to indptr[r + 1] - 1 of A[left[p]] @ B[right[p]].

    `indptr` int32 [nnzb + 1], `left` and `right` int32 [pairs]: positions of blocks in the order of A's and of B's
    pattern. Pairs of a block are in the order of A's columns. `longest` is the largest number of pairs of a block.
    """

    pattern: BlockPattern
    indptr: Tensor
    left: Tensor
    right: Tensor
    longest: int

    @property
    def pairs(self) -> int:
        return self.left.shape[0]


def match(a: BlockPattern, b: BlockPattern, wanted: BlockPattern | None = None) -> Matches:
    """The matches of A [M, K] and B [K, N]; C has the blocks with at least one pair, or those of `wanted`.

    Pairs whose block is not in `wanted` are left out, and wanted blocks may have no pair. Raises InvalidInput for
    patterns that do not fit, or if there are 2^31 pairs or more.
    """
    _check(a, b, wanted)
    rows, columns = a.grid[0], b.grid[1]
    shape, block = (a.shape[0], b.shape[1]), (a.block[0], b.block[1])
    met = b.row_lengths[a.indices].long()
    ends = met.cumsum(0)
    pairs = int(ends[-1]) if a.nnzb else 0
    if pairs > INT32_MAX:
        raise InvalidInput(f"{pairs} pairs of blocks meet; at most {INT32_MAX} can be indexed")
    left = torch.repeat_interleave(
        torch.arange(a.nnzb, dtype=torch.int64, device=a.device), met, output_size=pairs
    )
    place = torch.arange(pairs, device=a.device) - (ends - met)[left]
    right = b.indptr[a.indices[left]] + place
    key = a.block_rows[left].long() * columns + b.indices[right]
    key, order = torch.sort(
        key, stable=True
    )  # A's columns rise within a row, so pairs of a block stay in order
    left, right = left[order], right[order]
    if wanted is None:
        kept, counts = torch.unique_consecutive(key, return_counts=True)
        starts = torch.arange(rows + 1, device=a.device) * columns
        indptr = torch.searchsorted(kept, starts, out_int32=True)
        wanted = BlockPattern.unchecked(shape, block, indptr, (kept % max(columns, 1)).int())
    else:
        cells = wanted.block_rows.long() * columns + wanted.indices
        at = torch.searchsorted(cells, key)
        inside = cells[at.clamp(max=max(wanted.nnzb - 1, 0))] == key if wanted.nnzb else key < 0
        left, right = left[inside], right[inside]
        counts = torch.bincount(at[inside], minlength=wanted.nnzb)
    indptr = torch.zeros(wanted.nnzb + 1, dtype=torch.int32, device=a.device)
    indptr[1:] = counts.cumsum(0)
    longest = int(counts.max()) if counts.numel() else 0
    return Matches(wanted, indptr, left.int(), right.int(), longest)


def _check(a: BlockPattern, b: BlockPattern, wanted: BlockPattern | None) -> None:
    if a.shape[1] != b.shape[0]:
        raise InvalidInput(
            f"A is {a.shape[0]}x{a.shape[1]} and B {b.shape[0]}x{b.shape[1]}: B needs {a.shape[1]} rows"
        )
    if a.block[1] != b.block[0]:
        raise InvalidInput(
            f"blocks of A are {a.block[0]}x{a.block[1]} and of B {b.block[0]}x{b.block[1]}: those of B need "
            f"{a.block[1]} rows"
        )
    if a.device != b.device or (wanted is not None and wanted.device != a.device):
        raise InvalidInput("the patterns of A, B and C must be on one device")
    if wanted is None:
        return
    shape, block = (a.shape[0], b.shape[1]), (a.block[0], b.block[1])
    if (wanted.shape, wanted.block) != (shape, block):
        raise InvalidInput(
            f"C is {shape[0]}x{shape[1]} in blocks of {block[0]}x{block[1]}; the pattern is "
            f"{wanted.shape[0]}x{wanted.shape[1]} in blocks of {wanted.block[0]}x{wanted.block[1]}"
        )
