"""Tiles of a sampled product: up to `groups` stored blocks of one block row side by side, made on the pattern's
device.

No host sync: anything that depends on the pattern stays on the device, and the host has an upper bound of the tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.products.formats.pattern import BlockPattern

FIELDS = 8
OUTSIDE = 1 << 30  # beyond every column


class SddmmTiles(NamedTuple):
    """CTA p computes records starts[p] to starts[p + 1] - 1 of `tiles` int32 [capacity + 1, FIELDS].

    A record is (0, steps of K, row inside the block, group, row of X, -1, 0, 0). `columns` and `stored` int32
    [capacity, groups]: for each piece of a group, its first column of Y and the position of its block; OUTSIDE and
    nnzb for missing pieces.
    """

    tiles: Tensor
    starts: Tensor
    columns: Tensor
    stored: Tensor


def capacity_of(pattern: BlockPattern, per_block: int, groups: int) -> int:
    """The most groups that block rows may have."""
    return (pattern.nnzb * per_block + pattern.grid[0] * (groups - 1)) // groups


def sddmm_tiles(
    pattern: BlockPattern, steps: int, rows: int, piece: int, groups: int, ctas: int
) -> SddmmTiles:
    """The tiles of `rows` rows and `groups` pieces of `piece` columns; taller or wider blocks are cut.

    The last slice or piece of a block overlaps the previous one, and both write the same bits. Tiles are assigned to
    CTAs round-robin, so that concurrent CTAs share rows of X and columns of Y.
    """
    device, (bm, bn), block_rows = pattern.device, pattern.block, pattern.grid[0]

    def count(n: int) -> Tensor:
        return torch.arange(n, device=device)

    slices, per_block = max(1, -(-bm // rows)), max(1, -(-bn // piece))
    chunks = (pattern.row_lengths.long() * per_block + groups - 1) // groups
    ends = chunks.cumsum(0)
    capacity = capacity_of(pattern, per_block, groups)
    group = count(capacity)
    row = torch.searchsorted(ends, group, right=True).clamp(max=max(block_rows - 1, 0))
    first = (group - ends[row] + chunks[row]) * groups
    piece_of = first[:, None] + count(groups)
    entry = pattern.indptr[row].long()[:, None] + piece_of // per_block
    there = (entry < pattern.indptr[row + 1].long()[:, None]) & (group < ends[-1])[:, None]
    inside = entry.clamp(max=max(pattern.nnzb - 1, 0))
    shift = (piece_of % per_block * piece).clamp(max=max(bn - piece, 0))
    columns = torch.where(there, pattern.indices[inside].long() * bn + shift, OUTSIDE)
    stored = torch.where(there, entry, pattern.nnzb)

    tile = count(capacity * slices)
    offset = (tile % slices * rows).clamp(max=max(bm - rows, 0))
    of = tile // slices
    total = ends[-1] * slices
    held = (total - count(ctas) + ctas - 1).clamp(min=0) // ctas
    starts = torch.cat((held.new_zeros(1), held.cumsum(0)))
    place = torch.where(tile < total, starts[tile % ctas] + tile // ctas, capacity * slices)
    record = torch.zeros(capacity * slices, FIELDS, dtype=torch.int64, device=device)
    parts = (steps, offset, of, row[of] * bm + offset, -1)
    for at, part in enumerate(parts, 1):
        record[:, at] = part
    tiles = torch.zeros(capacity * slices + 1, FIELDS, dtype=torch.int32, device=device)
    tiles[place] = record.int()
    tiles[-1] = 0
    return SddmmTiles(tiles, starts.int(), columns.int(), stored.int())
