"""Ragged sides, which are no multiples of the block: blocks reach beyond the shape, and are zero there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.products.formats.pattern import BlockPattern


def tiles_of(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """View a dense matrix as [Mb, bm, Kb, bk]; if a side is ragged, a copy that is padded with zeros."""
    below, beside = (-side % step for side, step in zip(dense.shape, block, strict=True))
    if below or beside:
        dense = functional.pad(dense, (0, beside, 0, below))
    return dense.view(dense.shape[0] // block[0], block[0], dense.shape[1] // block[1], block[1])


def zero_padding(pattern: BlockPattern, values: Tensor) -> Tensor:
    """Set values [nnzb, bm, bk] outside the shape to 0, in place. Return the same tensor."""
    if pattern.is_ragged:
        at, outside = padding_of(pattern)
        values[at] = values.index_select(0, at).masked_fill(outside, 0)
    return values


def zero_outside(pattern: BlockPattern, values: Tensor, columns: Tensor | None = None) -> Tensor:
    """Values [nnzb, bm, bk] with 0 outside the shape; the same tensor if no side is ragged. No sync.

    `columns`: the column of each value in its block, where values are not contiguous columns.
    """
    (m, k), (bm, bk), here = pattern.shape, pattern.block, values.device
    if m % bm:
        rows = pattern.block_rows[:, None] * bm + torch.arange(bm, dtype=torch.int32, device=here)
        values = values.masked_fill((rows >= m)[:, :, None], 0)
    if k % bk:
        if columns is None:
            columns = torch.arange(bk, dtype=torch.int32, device=here)
        values = values.masked_fill(pattern.indices[:, None, None] * bk + columns >= k, 0)
    return values


def padding_of(pattern: BlockPattern) -> tuple[Tensor, Tensor]:
    """Positions [e] of the stored blocks that reach over an edge, and bool [e, bm, bk]: which elements are outside.

    Cached with a ragged pattern; the first call synchronizes.
    """
    return pattern.derived("padding", lambda: _padding(pattern))


def _padding(pattern: BlockPattern) -> tuple[Tensor, Tensor]:
    indptr, indices = pattern.host
    (rows, columns), (bm, bk) = pattern.shape, pattern.block
    last_row, last_column = (max(count - 1, 0) for count in pattern.grid)
    in_last_row = np.arange(indices.size) >= indptr[last_row]
    in_last_column = indices == last_column
    at = np.flatnonzero((in_last_row & bool(rows % bm)) | (in_last_column & bool(columns % bk)))
    below = (np.arange(bm) >= rows - last_row * bm)[None, :, None] & in_last_row[at, None, None]
    beside = (np.arange(bk) >= columns - last_column * bk)[None, None, :] & in_last_column[at, None, None]
    return torch.tensor(at, device=pattern.device), torch.tensor(below | beside, device=pattern.device)
