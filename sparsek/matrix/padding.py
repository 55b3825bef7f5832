"""Sides that are no multiples of a block: what lies outside the true shape is zeros."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.matrix.pattern import BlockPattern


def tiles_of(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """A view [Mb, bm, Kb, bk] of a dense matrix; of a copy padded with zeros if a side is ragged."""
    below, beside = (-side % step for side, step in zip(dense.shape, block, strict=True))
    if below or beside:
        dense = functional.pad(dense, (0, beside, 0, below))
    return dense.view(dense.shape[0] // block[0], block[0], dense.shape[1] // block[1], block[1])


def zero_padding(pattern: BlockPattern, values: Tensor) -> Tensor:
    """Writes 0, in place, into values [nnzb, bm, bk] outside the true shape. Returns the same tensor."""
    if pattern.is_ragged:
        at, outside = padding_of(pattern)
        values[at] = values.index_select(0, at).masked_fill(outside, 0)
    return values


def zero_outside(pattern: BlockPattern, values: Tensor, columns: Tensor | None = None) -> Tensor:
    """Values [nnzb, bm, bk] with 0 outside the true shape; the same tensor where no side is ragged. No sync.

    `columns`: in which column of its block each value stands, if values do not stand side by side.
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
    """Positions [e] of the stored blocks that reach over an edge, and bool [e, bm, bk]: what lies outside.

    Kept with a ragged pattern; the first time it syncs.
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
