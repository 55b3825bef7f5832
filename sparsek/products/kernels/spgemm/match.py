"""The symbolic phase of BSR x BSR in plain Triton: finds the pairs of blocks to multiply. products/plan/matches.py on a
GPU.

    pairs of C's block (i, j) = { (p, q): block p of A is (i, k), block q of B is (k, j) },  in the order of k

One program has a chunk of the cells of one block row i of C. It walks A's row, DEEP blocks per step, and looks up
every column of its chunk in the rows k of B by bisection:

                       WIDTH columns j of C's row i
    A's row i   k0   |  .  q  .  .  q  .  .  .  |     q: position of (k0, j) in B's pattern,   .: not stored
                k1   |  .  q  .  .  .  .  q  .  |
                k5   |  .  .  .  .  q  .  .  .  |     DEEP rows at once
    counts           |  0  2  0  0  2  0  1  0  |     of the chunk: 3 blocks, 5 pairs, at most 2 to a block

    _count   counts of every cell; blocks, pairs and the longest of every chunk
    _sum     one program: where each chunk's blocks and pairs begin, and the totals
    (sync)   the totals are copied to the host, which allocates
    _fill    the same walk; a pair's index is its chunk's begin + the pairs of columns before it + those of the same
             column before it, so pairs of a block stay in the order of A's columns

If the pattern of C is given, the cells are its blocks, and the columns are read from it. Three launches and one copy,
no table of A or B, no atomics. The lists are bit for bit those of products/plan/matches.py.

Bottleneck: the host, with its launches, allocations and one wait. The device looks up nnzb(A) * Nb cells in each
walk, each in about log2 of the longest row's blocks steps: 4 million for 32768 squared in blocks of 64 with 3 %
stored.
"""

import torch
import triton
import triton.language as tl

from sparsek.core import env
from sparsek.core.errors import InvalidInput
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.products.formats.pattern import INT32_MAX, BlockPattern
from sparsek.products.plan import matches
from sparsek.products.plan.matches import Matches

# A thread has one column and DEEP rows of B in flight: 48 to 56 registers, so 9 programs share an SM. With 16 rows
# _fill takes 96. A sum of 2048 chunks, those of 512 x 512 blocks, is one step.
WIDTH, DEEP, WARPS = 128, 8, 4
SUM_STEP, SUM_WARPS = 2048, 16

# Beyond these limits torch sorts the pairs. The cells' counts take 256 MB, and cell numbers fit int32. A walk of 2^28
# look-ups should take about 0.5 ms. If fewer than one in 64 finds a pair, sorting should be as fast. Not measured yet
# (2026-11-21).
CELLS = 2**26
LOOK_UPS, HIT_RATE = 2**28, 64


@triton.jit
def _cells(row, chunk, c_indptr, c_indices, columns, WIDTH: tl.constexpr):
    """The columns [WIDTH] of a chunk, the addresses of their counts, and the live lanes; the others find no block."""
    lane = chunk * WIDTH + tl.arange(0, WIDTH)
    if c_indptr is None:
        return lane, row * columns + lane, lane < columns
    else:
        start = tl.load(c_indptr + row)
        live = lane < tl.load(c_indptr + row + 1) - start
        return tl.load(c_indices + start + lane, mask=live, other=-2), start + lane, live


@triton.jit
def _look_up(a_indices, length, j, b_indptr, b_indices, WIDTH: tl.constexpr, DEEP: tl.constexpr):
    """int32 [DEEP * WIDTH]: B's position of (k, j), or -1, for the next DEEP blocks k of A's row; `length` are left.

    All columns of the first k, then all of the second. One axis, because Triton's order of two axes depends on its
    version: here neighbouring threads read the same row of B, and each has one column of every k.
    """
    lane = tl.arange(0, DEEP * WIDTH)
    inside = lane // WIDTH < length
    k = tl.load(a_indices + lane // WIDTH, mask=inside, other=0)
    start = tl.load(b_indptr + k, mask=inside, other=0)
    size = tl.load(b_indptr + k + 1, mask=inside, other=0) - start
    j = tl.reshape(tl.broadcast_to(j[None, :], (DEEP, WIDTH)), (DEEP * WIDTH,))
    # The number of blocks of the row that are known to be at j or before it, and the column of the last of them.
    below = tl.zeros((DEEP * WIDTH,), dtype=tl.int32)
    nearest = below - 1
    rest = tl.max(size, 0)
    while rest > 0:
        half = (rest + 1) // 2
        rest -= half
        ahead = below + half
        column = tl.load(b_indices + (start + (ahead - 1)), mask=ahead <= size, other=2147483647)
        reached = column <= j
        below = tl.where(reached, ahead, below)
        nearest = tl.where(reached, column, nearest)
    return tl.where(nearest == j, start + (below - 1), -1)


# Triton does not specialize for these: no size and no alignment of a list triggers a compilation.
_SIZES = ("columns", "per_row")
_LISTS = ("a_indptr", "a_indices", "b_indptr", "b_indices", "c_indptr", "c_indices", "counts", "sums")
_RESULTS = ("indptr", "indices", "starts", "left", "right")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_LISTS)
def _count(
    a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, counts, sums, columns, per_row,
    WIDTH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    pid, chunks = tl.program_id(0), tl.num_programs(0)
    row = pid // per_row
    j, cell, live = _cells(row, pid % per_row, c_indptr, c_indices, columns, WIDTH)
    start = tl.load(a_indptr + row)
    length = tl.load(a_indptr + row + 1) - start
    if c_indptr is not None:
        length = tl.where(tl.max(live.to(tl.int32), 0) > 0, length, 0)
    count = tl.zeros((WIDTH,), dtype=tl.int32)
    for done in range(0, length, DEEP):
        q = _look_up(a_indices + start + done, length - done, j, b_indptr, b_indices, WIDTH, DEEP)
        count += tl.sum(tl.reshape((q >= 0).to(tl.int32), (DEEP, WIDTH)), 0)
    tl.store(counts + cell, count, mask=live)
    tl.store(sums + pid, tl.sum((count > 0).to(tl.int32), 0).to(tl.int64))
    tl.store(sums + chunks + pid, tl.sum(count.to(tl.int64), 0))
    tl.store(sums + 2 * chunks + pid, tl.max(count, 0).to(tl.int64))


@triton.jit(do_not_specialize=("chunks",), do_not_specialize_on_alignment=("sums",))
def _sum(sums, chunks, STEP: tl.constexpr):
    """Turns blocks and pairs of each chunk into prefix sums; after them the totals, and the longest."""
    blocks, pairs, longest = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for done in range(0, chunks, STEP):
        at = done + tl.arange(0, STEP)
        live = at < chunks
        of_blocks = tl.load(sums + at, mask=live, other=0)
        of_pairs = tl.load(sums + chunks + at, mask=live, other=0)
        of_longest = tl.load(sums + 2 * chunks + at, mask=live, other=0)
        tl.store(sums + at, blocks + tl.cumsum(of_blocks, 0) - of_blocks, mask=live)
        tl.store(sums + chunks + at, pairs + tl.cumsum(of_pairs, 0) - of_pairs, mask=live)
        blocks += tl.sum(of_blocks, 0)
        pairs += tl.sum(of_pairs, 0)
        longest = tl.maximum(longest, tl.max(of_longest, 0))
    tl.store(sums + 3 * chunks, blocks)
    tl.store(sums + 3 * chunks + 1, pairs)
    tl.store(sums + 3 * chunks + 2, longest)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_LISTS + _RESULTS)
def _fill(
    a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, counts, sums, columns, per_row,
    indptr, indices, starts, left, right,
    WIDTH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    pid, chunks = tl.program_id(0), tl.num_programs(0)
    row, chunk = pid // per_row, pid % per_row
    j, cell, live = _cells(row, chunk, c_indptr, c_indices, columns, WIDTH)
    count = tl.load(counts + cell, mask=live, other=0)
    pairs = tl.sum(count, 0)
    first_pair = tl.load(sums + chunks + pid).to(tl.int32)
    place = first_pair + tl.cumsum(count, 0) - count  # of each column's next pair

    if c_indptr is None:
        kept = (count > 0).to(tl.int32)
        first = tl.load(sums + pid).to(tl.int32)
        end = first + tl.sum(kept, 0)
        block = first + tl.cumsum(kept, 0) - kept
        tl.store(indices + block, j, mask=kept > 0)
        tl.store(starts + block, place, mask=kept > 0)
        if chunk == 0:
            tl.store(indptr + row, first)
        if pid == chunks - 1:
            tl.store(indptr + row + 1, end)
    else:
        end = tl.load(c_indptr + row + 1)
        tl.store(starts + cell, place, mask=live)
    if pid == chunks - 1:
        tl.store(starts + end, first_pair + pairs)

    start = tl.load(a_indptr + row)
    length = tl.where(pairs > 0, tl.load(a_indptr + row + 1) - start, 0)
    deep = tl.arange(0, DEEP * WIDTH) // WIDTH
    for done in range(0, length, DEEP):
        q = _look_up(a_indices + start + done, length - done, j, b_indptr, b_indices, WIDTH, DEEP)
        met = tl.reshape((q >= 0).to(tl.int32), (DEEP, WIDTH))
        pair = tl.reshape(place[None, :] + tl.cumsum(met, 0) - met, (DEEP * WIDTH,))
        tl.store(left + pair, start + (done + deep), mask=q >= 0)
        tl.store(right + pair, q, mask=q >= 0)
        place += tl.sum(met, 0)


def match(a: BlockPattern, b: BlockPattern, wanted: BlockPattern | None = None) -> Matches:
    """The matches of A [M, K] and B [K, N], bit for bit those of `plan.matches.match`. One sync.

    Where `why_not` gives a reason, that function runs instead. Raises InvalidInput for patterns that do not fit, or
    if 2^31 pairs or more are left; pairs outside `wanted` are not counted here.
    """
    if why_not(a, b):
        return matches.match(a, b, wanted)
    matches._check(a, b, wanted)
    return _match(a, b, wanted)


def why_not(a: BlockPattern, b: BlockPattern) -> list[str]:
    """Why torch makes the matches of A and B, by sorting the pairs instead of walking the cells."""
    rows, columns = a.grid[0], b.grid[1]
    width = -(-columns // WIDTH) * WIDTH
    why = []
    if not a.indptr.is_cuda and not env.interpreting():
        why.append("the patterns are on the CPU")
    if rows * columns == 0:
        why.append(f"C has {rows} x {columns} blocks: there is no cell to count")
    if rows * width > CELLS:
        why.append(
            f"C has {rows} x {columns} blocks: counts of {rows * width} cells are over {CELLS >> 18} MB"
        )
    if a.nnzb * width > LOOK_UPS and b.nnzb * HIT_RATE < b.grid[0] * columns:
        why.append(
            f"{a.nnzb * width} look-ups are over {LOOK_UPS}, and fewer than one in {HIT_RATE} finds a block of B"
        )
    return why


def _match(a: BlockPattern, b: BlockPattern, wanted: BlockPattern | None) -> Matches:
    """`match` on the cells: both patterns on one device, at least one cell."""
    (rows, columns), make, device = (a.grid[0], b.grid[1]), a.indptr.new_empty, a.indptr.device
    per_row = -(-columns // WIDTH)
    chunks = rows * per_row
    counts = make(rows * columns if wanted is None else wanted.nnzb)
    sums = make(3 * chunks + 3, dtype=torch.int64)  # three per chunk, then the totals
    given = (None, None) if wanted is None else (wanted.indptr, wanted.indices)
    lists = a.indptr, a.indices, b.indptr, b.indices, *given, counts, sums, columns, per_row
    launch_unspecialized(_count, device, chunks, lists, (WIDTH, DEEP), WARPS)
    launch_unspecialized(_sum, device, 1, (sums, chunks), (SUM_STEP,), SUM_WARPS)
    indptr = make(rows + 1) if wanted is None else wanted.indptr
    blocks, pairs, longest = sums[3 * chunks :].tolist()
    if pairs > INT32_MAX:
        raise InvalidInput(f"{pairs} pairs of blocks meet; at most {INT32_MAX} can be indexed")
    if wanted is None:
        shape, block = (a.shape[0], b.shape[1]), (a.block[0], b.block[1])
        wanted = BlockPattern.unchecked(shape, block, indptr, make(blocks))
    starts, left, right = make(wanted.nnzb + 1), make(pairs), make(pairs)
    results = indptr, wanted.indices, starts, left, right
    launch_unspecialized(_fill, device, chunks, lists + results, (WIDTH, DEEP), WARPS)
    return Matches(wanted, starts, left, right, longest)


# (kernel, device, constants, warps, which arguments are None) -> compiled kernel, which a launch through Triton's JIT
# takes 20 us to find.
