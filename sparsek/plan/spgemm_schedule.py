"""Tiles of C = A @ B for two BSR matrices, and which CTA does which: made on the device, without a host sync.

A tile is a block of C or a part of one; its steps are the pairs of blocks that add to it. CTAs that run together have
neighbours, which read the same blocks of A and of B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.plan.matches import Matches

FIELDS = 8


class SpgemmTiles(NamedTuple):
    """CTA p does records starts[p] to starts[p + 1] - 1 of `tiles` int32 [tiles + 2, FIELDS].

    A record is (first pair, end pair, row and column of C as it is stored, column inside the block, -1, row inside the
    block, 0).
    """

    tiles: Tensor
    starts: Tensor


def spgemm_tiles(
    matches: Matches, dense: bool, rows: int, cols: int, ctas: int, runs: bool = False
) -> SpgemmTiles:
    """Tiles of `rows` x `cols` of every block of C: all of them if C is dense, the stored ones otherwise.

    Every round the CTAs take a window of tiles that lie together, the longest first to the first or to the last in
    turns. With `runs` each takes a run of tiles instead, each with about as much to do, where a tile counts its pairs
    and one more: on an H200 74 us instead of 84 us where writing C decides, and 615 us instead of 342 us where pairs
    do. The last slice of a block overlaps the one before it where `rows` does not divide the block, and both write
    the same bits; `cols` divides it, or is wider.
    """
    pattern, device = matches.pattern, matches.indptr.device
    (bm, bn), (block_rows, block_cols) = pattern.block, pattern.grid
    begin, end = matches.indptr[:-1].long(), matches.indptr[1:].long()
    if dense:
        cell = pattern.block_rows.long() * block_cols + pattern.indices
        blocks = block_rows * block_cols
        firsts, lasts = begin.new_zeros(blocks), begin.new_zeros(blocks)
        firsts[cell], lasts[cell] = begin, end
        begin, end = firsts, lasts
    else:
        blocks = pattern.nnzb
    down, across = max(1, -(-bm // rows)), max(1, -(-bn // cols))
    tile = torch.arange(blocks * down * across, device=device)
    block = tile // (down * across)
    row = (tile // across % down * rows).clamp(max=max(bm - rows, 0))
    col = tile % across * cols
    if dense:
        c_row, c_col = block // max(block_cols, 1) * bm + row, block % max(block_cols, 1) * bn + col
    else:
        c_row, c_col = block * bm + row, col
    tiles = torch.zeros(len(tile) + 2, FIELDS, dtype=torch.int32, device=device)
    for at, part in ((0, begin[block]), (1, end[block]), (2, c_row), (3, c_col), (4, col), (6, row)):
        tiles[:-2, at] = part
    tiles[:, 5] = -1
    steps = tiles[:-2, 1] - tiles[:-2, 0]
    if runs:
        cost = steps.double() + 1.0
        reached = cost.cumsum(0)
        share = torch.arange(ctas + 1, device=device, dtype=torch.float64) / ctas
        # A tile goes to the CTA in whose share its middle lies.
        starts = torch.searchsorted(reached - cost / 2, share * reached[-1:] if len(tile) else share)
        return SpgemmTiles(tiles, starts.int())
    window = tile // ctas
    order = torch.argsort(window * (1 << 32) - steps, stable=True)
    # Every two windows begin elsewhere: a longest and a shortest tile together are more than two middle ones.
    place = torch.where(window % 2 == 0, tile % ctas, ctas - 1 - tile % ctas)
    place = (place + window // 2 * round(0.62 * ctas)) % ctas
    held = torch.zeros(ctas, dtype=torch.int64, device=device).index_add_(0, place, torch.ones_like(place))
    starts = torch.cat((held.new_zeros(1), held.cumsum(0)))
    dealt = torch.zeros_like(tiles)
    dealt[starts[place] + window] = tiles[:-2][order]
    tiles = dealt
    return SpgemmTiles(tiles, starts.int())
