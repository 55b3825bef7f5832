"""The lists of a transposed pattern in one launch of plain Triton: `pattern.transposed` on a GPU, the same lists.

One program makes one block column of the pattern, a block row of the transposed one. It counts the blocks in columns
before, then lists its own in their order. So no scan, no sort, no sync; each program reads all indices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.engine.launch.launch import launch_unspecialized

LISTED, WARPS = 1024, 4
READ = 1 << 27  # indices that all programs together read in some 0.1 ms; torch sorts more


@triton.jit(
    do_not_specialize=["rows", "columns", "nnzb", "depth"],
    do_not_specialize_on_alignment=["indptr", "indices", "starts", "lists", "perm", "inverse"],
)
def _transpose(
    indptr, indices, starts, lists, perm, inverse, rows, columns, nnzb, depth, LISTED: tl.constexpr
):  # fmt: skip
    me = tl.program_id(0)
    lane = tl.arange(0, LISTED)
    begin = 0
    for done in range(0, nnzb, LISTED):
        column = tl.load(indices + done + lane, mask=done + lane < nnzb, other=2147483647)
        begin += tl.sum((column < me).to(tl.int32), 0)
    tl.store(starts + me, begin)
    if me == columns - 1:
        tl.store(starts + columns, nnzb)
    for done in range(0, nnzb, LISTED):
        block = done + lane
        mine = tl.load(indices + block, mask=block < nnzb, other=2147483647) == me
        count = mine.to(tl.int32)
        low = tl.zeros(
            (LISTED,), dtype=tl.int32
        )  # the block row is the last that begins at or before the block
        high = tl.where(mine, rows, 1)
        for _ in range(depth):
            middle = (low + high) // 2
            after = tl.load(indptr + middle, mask=mine, other=0) > block
            high = tl.where(after, middle, high)
            low = tl.where(after, low, middle)
        to = begin + tl.cumsum(count, 0) - 1
        tl.store(lists + to, low, mask=mine)
        tl.store(perm + to, block, mask=mine)
        tl.store(inverse + block, to, mask=mine)
        begin += tl.sum(count, 0)


def transposed_lists(
    indptr: Tensor, indices: Tensor, grid: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """indptr and indices of the transposed pattern of a `grid`, perm and its inverse, int32; None for a large one."""
    (rows, columns), nnzb = grid, len(indices)
    if not columns or columns * nnzb > READ:
        return None
    sizes = columns + 1, nnzb, nnzb, nnzb  # apart, because kernels count on aligned addresses
    starts, lists, perm, inverse = (
        torch.empty(size, dtype=torch.int32, device=indptr.device) for size in sizes
    )
    made = starts, lists, perm, inverse
    args = indptr, indices, *made, rows, columns, nnzb, rows.bit_length()
    launch_unspecialized(_transpose, indptr.device, columns, args, (LISTED,), WARPS)
    return made
