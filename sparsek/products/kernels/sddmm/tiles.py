"""The tiles of a sampled product, made on the pattern's device in one launch of plain Triton: those of
`plan.sddmm_schedule`, bit by bit.

One program lists the tiles of one block row: it counts the groups of the rows before. Programs share what is left over.
"""

import torch
import triton
import triton.language as tl

from sparsek.core import env
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan.sddmm_schedule import FIELDS, OUTSIDE, SddmmTiles, capacity_of, sddmm_tiles

LISTED, WARPS = 256, 4
READ = 1 << 27  # lengths that all programs together read in some 0.1 ms

_SIZES = (
    "block_rows", "nnzb", "bm", "bn", "steps", "rows", "piece", "slices", "per_block", "groups", "ctas", "capacity",
)  # fmt: skip


@triton.jit
def _groups(indptr, row, live, per_block, groups):
    """The groups of block rows; 0 for those that are not live."""
    first = tl.load(indptr + row, mask=live, other=0)
    last = tl.load(indptr + row + 1, mask=live, other=0)
    return ((last - first) * per_block + groups - 1) // groups


@triton.jit(
    do_not_specialize=_SIZES,
    do_not_specialize_on_alignment=["indptr", "indices", "tiles", "starts", "columns", "stored"],
)
def _list(
    indptr, indices, tiles, starts, columns, stored,
    block_rows, nnzb, bm, bn, steps, rows, piece, slices, per_block, groups, ctas, capacity,
    OUTSIDE: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0)
    lane = tl.arange(0, LISTED)
    before, total = 0, 0
    for done in range(0, block_rows, LISTED):
        row = done + lane
        count = _groups(indptr, row, row < block_rows, per_block, groups)
        before += tl.sum(tl.where(row < me, count, 0), 0)
        total += tl.sum(count, 0)
    first, last = tl.load(indptr + me), tl.load(indptr + me + 1)
    own = ((last - first) * per_block + groups - 1) // groups

    for done in range(0, own * groups, LISTED):
        place = done + lane
        live = place < own * groups
        entry = first + place // per_block
        there = live & (entry < last)
        column = tl.load(indices + entry, mask=there, other=0) * bn
        column += tl.minimum(place % per_block * piece, tl.maximum(bn - piece, 0))
        to = before * groups + place
        tl.store(columns + to, tl.where(there, column, OUTSIDE), mask=live)
        tl.store(stored + to, tl.where(there, entry, nnzb), mask=live)

    field = tl.arange(0, 8)[None, :]
    each, rest = total * slices // ctas, total * slices % ctas
    for done in range(0, own * slices, LISTED):
        place = done + lane
        live = place < own * slices
        tile = before * slices + place
        inside = tl.minimum(place % slices * rows, tl.maximum(bm - rows, 0))
        record = tl.where(field == 1, steps, tl.where(field == 5, -1, 0))
        record = tl.where(field == 2, inside[:, None], record)
        record = tl.where(field == 3, (before + place // slices)[:, None], record)
        record = tl.where(field == 4, (me * bm + inside)[:, None], record)
        worker = tile % ctas
        to = worker * each + tl.minimum(worker, rest) + tile // ctas
        tl.store(tiles + to.to(tl.int64)[:, None] * 8 + field, record, mask=live[:, None])

    for done in range(me * LISTED, (capacity - total) * groups, block_rows * LISTED):
        place = done + lane
        live = place < (capacity - total) * groups
        to = total * groups + place
        tl.store(columns + to, tl.zeros((LISTED,), tl.int32) + OUTSIDE, mask=live)
        tl.store(stored + to, tl.zeros((LISTED,), tl.int32) + nnzb, mask=live)
    for done in range(me * LISTED, (capacity - total) * slices + 1, block_rows * LISTED):
        place = done + lane
        to = (total * slices + place).to(tl.int64)[:, None] * 8 + field
        live = place < (capacity - total) * slices + 1
        tl.store(tiles + to, tl.zeros((LISTED, 8), tl.int32), mask=live[:, None])
    for done in range(me * LISTED, ctas + 1, block_rows * LISTED):
        worker = done + lane
        tl.store(starts + worker, worker * each + tl.minimum(worker, rest), mask=worker < ctas + 1)


def tiles_of(pattern: BlockPattern, steps: int, rows: int, piece: int, groups: int, ctas: int) -> SddmmTiles:
    """`sddmm_tiles`, by a launch where it can."""
    (bm, bn), block_rows, nnzb = pattern.block, pattern.grid[0], pattern.nnzb
    launches = pattern.indptr.is_cuda or env.interpreting()
    if not launches or not block_rows or block_rows**2 > READ:
        return sddmm_tiles(pattern, steps, rows, piece, groups, ctas)
    slices, per_block = max(1, -(-bm // rows)), max(1, -(-bn // piece))
    capacity = capacity_of(pattern, per_block, groups)
    sides = (capacity * slices + 1, FIELDS), (ctas + 1,), (capacity, groups), (capacity, groups)
    made = SddmmTiles(*(torch.empty(each, dtype=torch.int32, device=pattern.device) for each in sides))
    sizes = block_rows, nnzb, bm, bn, steps, rows, piece, slices, per_block, groups, ctas, capacity
    args = (pattern.indptr, pattern.indices, *made, *sizes)
    launch_unspecialized(_list, pattern.device, block_rows, args, (OUTSIDE, LISTED), WARPS)
    return made
