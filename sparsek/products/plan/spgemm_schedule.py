"""The schedule of C = A @ B for two BSR matrices, made on the device, without a host sync.

A tile is a block of C or a part of one; its steps are the pairs of blocks that add to it. Concurrent CTAs have
adjacent tiles, which read the same blocks of A and of B. Block rows of C that read the same block of B may be far
apart: a B larger than the L2 cache is read in several sweeps over its columns, each of which stays there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan.matches import Matches

FIELDS = 8


class SpgemmTiles(NamedTuple):
    """CTA p computes records starts[p] to starts[p + 1] - 1 of `tiles` int32 [tiles + 2, FIELDS].

    A record is (first pair, end pair, row and column of C as it is stored, column inside the block, -1, row inside
    the block, 0).
    """

    tiles: Tensor
    starts: Tensor


def spgemm_tiles(
    matches: Matches, dense: bool, rows: int, cols: int, ctas: int, sweeps: int = 1
) -> SpgemmTiles:
    """Tiles of `rows` x `cols` of every block of C: all of them if C is dense, the stored ones otherwise, which come in
    `sweeps` over the columns.

    In every round the CTAs take a window of adjacent tiles, longest first, in alternating directions; every two
    rounds the starting CTA shifts. The last slice of a block overlaps the previous one if `rows` does not divide the
    block, and both write the same bits; `cols` divides it, or is wider.

    This is the specification; on a GPU products/kernels/spgemm/tiles.py makes the same tiles in one launch.
    """
    pattern, device = matches.pattern, matches.indptr.device
    (bm, bn), block_cols = pattern.block, max(pattern.grid[1], 1)
    blocks, down, across = counts_of(matches, dense, rows, cols)
    begin, end = matches.indptr[:-1].long(), matches.indptr[1:].long()
    if dense:
        cell = pattern.block_rows.long() * block_cols + pattern.indices
        firsts, lasts = begin.new_zeros(blocks), begin.new_zeros(blocks)
        firsts[cell], lasts[cell] = begin, end
        begin, end = firsts, lasts
    tile = torch.arange(blocks * down * across, device=device)
    block = tile // (down * across)
    if sweeps > 1 and not dense:
        block = swept(pattern, sweeps).long()[block]
    row = (tile // across % down * rows).clamp(max=max(bm - rows, 0))
    col = tile % across * cols
    c_row, c_col = block * bm + row, col
    if dense:
        c_row, c_col = block // block_cols * bm + row, block % block_cols * bn + col
    made = torch.zeros(len(tile), FIELDS, dtype=torch.int32, device=device)
    for at, part in ((0, begin[block]), (1, end[block]), (2, c_row), (3, c_col), (4, col), (6, row)):
        made[:, at] = part

    window = tile // ctas
    order = torch.argsort(window * (1 << 32) - (end - begin)[block], stable=True)
    place = torch.where(window % 2 == 0, tile % ctas, ctas - 1 - tile % ctas)
    place = (place + window // 2 * turn(ctas)) % ctas
    held = torch.zeros(ctas, dtype=torch.int64, device=device).index_add_(0, place, torch.ones_like(place))
    starts = torch.cat((held.new_zeros(1), held.cumsum(0)))
    tiles = torch.zeros(len(tile) + 2, FIELDS, dtype=torch.int32, device=device)
    tiles[starts[place] + window] = made[order]
    tiles[:, 5] = -1
    return SpgemmTiles(tiles, starts.int())


def swept(pattern: BlockPattern, sweeps: int) -> Tensor:
    """The stored blocks, int32 [nnzb], in order of the sweep over columns that they are in, then of rows."""
    sweep = pattern.indices.long() // width_of(pattern, sweeps)
    return torch.argsort(sweep * pattern.grid[0] + pattern.block_rows.long(), stable=True).int()


def width_of(pattern: BlockPattern, sweeps: int) -> int:
    """Block columns of a sweep."""
    return max(1, -(-pattern.grid[1] // sweeps))


def counts_of(matches: Matches, dense: bool, rows: int, cols: int) -> tuple[int, int, int]:
    """How many blocks of C have tiles, and how many tiles a block has vertically and horizontally."""
    pattern = matches.pattern
    (bm, bn), (block_rows, block_cols) = pattern.block, pattern.grid
    return block_rows * block_cols if dense else pattern.nnzb, max(1, -(-bm // rows)), max(1, -(-bn // cols))


def turn(ctas: int) -> int:
    """The shift of the starting CTA every two windows: a longest plus a shortest tile exceed two middle ones."""
    return round(0.62 * ctas)
