"""Maps of blocks from the lists of a mask, by one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.engine.launch.launch import launch

CHUNK = 128  # entries that a program of one warp writes at once

_NUMBERS = ("tiles", "heads", "batch", "mask_heads", "mask_batch", "columns")


@triton.jit
def _write(
    starts, counts, indices, within, made, row, source, columns, CHUNK: tl.constexpr
):  # fmt: skip
    start, count = tl.load(starts + source), tl.load(counts + source)
    for entry in range(0, count, CHUNK):
        at = entry + tl.arange(0, CHUNK)
        column = tl.load(indices + start + at, mask=at < count, other=-1)
        there = (column >= 0) & (column < columns)
        cell = row.to(tl.int64) * columns + column
        value = tl.full((CHUNK,), 1, tl.int8)
        if within is not None:
            value = tl.load(within + cell, mask=there, other=0)
        tl.store(made + cell, value, mask=there)


@triton.jit(do_not_specialize=_NUMBERS)
def _map(
    full_starts, full_counts, full_indices, part_starts, part_counts, part_indices, within, made,
    tiles, heads, batch, mask_heads, mask_batch, columns, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = row // tiles
    b, h = head // heads * mask_batch // batch, head % heads * mask_heads // heads
    source = (b * mask_heads + h) * tiles + row % tiles
    _write(full_starts, full_counts, full_indices, within, made, row, source, columns, CHUNK)
    _write(part_starts, part_counts, part_indices, within, made, row, source, columns, CHUNK)


def mark(mask: BlockMask, made: Tensor, within: Tensor | None = None) -> None:
    """made[b, h, i, j] = 1 for every block that the mask stores; with `within`, a map of the same shape, its value.

    made: int8 [B, H, Mb, Nb], contiguous; the mask has B or 1 batch items, and H heads or a divisor. No sync.
    """
    batch, heads, tiles, columns = made.shape
    with torch.cuda.device_of(made):
        launch(
            _map, (batch * heads * tiles,), *mask.full, *mask.partial, within, made,
            tiles, heads, batch, mask.heads, mask.batch, columns, CHUNK=CHUNK, num_warps=1,
        )  # fmt: skip
