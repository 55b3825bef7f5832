"""The tiles of C = A @ B for two BSR matrices in one launch of plain Triton. products/plan/spgemm_schedule.py on a GPU.

One program assigns the tiles of one window to CTAs: as many consecutive tiles as there are CTAs.

    window 1    tiles      132   133   134  ...   263       pairs of each: from the matches, a bisection if C is dense
                pairs        3     1     5  ...     3
                rank         8    97     0  ...     9       how many come before: more pairs, or as many, further left
                place      123    34   131  ...   122       alternating directions, shifted every two windows
                record   starts[place] + window

Every full window gives each CTA one tile, and only the last window may be shorter. So starts[place] is known before
any other program has run: no scan, no atomics, no sync.

In several sweeps over the columns of a BSR C, tiles follow a list of its blocks that two more launches make: the stored
blocks of one block row in one sweep are a run, whose end is found by bisection.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.products.plan import spgemm_schedule as schedule
from sparsek.products.plan.matches import Matches
from sparsek.products.plan.spgemm_schedule import FIELDS, SpgemmTiles, counts_of, turn

# Tiles of a window that are compared with all of it at once: 16 comparisons a thread for 132 CTAs, 32 for 264.
STEP, WARPS = 16, 8
# Runs that one program counts at once, and blocks of a run that are listed at once.
RUNS, LISTED = 1024, 128


@triton.jit
def _run(c_indptr, c_indices, row, sweep, live, width, depth):
    """First and end block of the run of a block row in a sweep over `width` columns."""
    first = tl.load(c_indptr + row, mask=live, other=0)
    last = tl.load(c_indptr + row + 1, mask=live, other=0)
    return _reaching(c_indices, first, last, sweep * width, depth), _reaching(
        c_indices, first, last, (sweep + 1) * width, depth
    )


@triton.jit
def _reaching(c_indices, at, end, column, depth):
    """The first of the blocks from `at` to `end` whose column is `column` or further right."""
    for _ in range(depth):
        middle = at + (end - at) // 2
        before = tl.load(c_indices + middle, mask=at < end, other=2147483647) < column
        at = tl.where(before, middle + 1, at)
        end = tl.where(before, end, middle)
    return at


_SWEPT = ("rows", "sweeps", "width", "depth")


@triton.jit(do_not_specialize=_SWEPT, do_not_specialize_on_alignment=("c_indptr", "c_indices", "begins"))
def _count_runs(c_indptr, c_indices, begins, rows, sweeps, width, depth, RUNS: tl.constexpr):
    """begins[sweep * rows + row]: how many blocks come before that run. One program."""
    before = 0
    for begin in range(0, rows * sweeps, RUNS):
        at = begin + tl.arange(0, RUNS)
        live = at < rows * sweeps
        first, end = _run(c_indptr, c_indices, at % rows, at // rows, live, width, depth)
        scan = tl.cumsum(end - first, 0)
        tl.store(begins + at, before + scan - (end - first), mask=live)
        before += tl.sum(end - first, 0)


@triton.jit(
    do_not_specialize=_SWEPT, do_not_specialize_on_alignment=("c_indptr", "c_indices", "begins", "order")
)
def _list_runs(
    c_indptr, c_indices, begins, order, rows, sweeps, width, depth, LISTED: tl.constexpr
):  # fmt: skip
    """The blocks of one run."""
    row, sweep = tl.program_id(0) % rows, tl.program_id(0) // rows
    first, end = _run(c_indptr, c_indices, row, sweep, True, width, depth)
    to = tl.load(begins + tl.program_id(0))
    for done in range(0, end - first, LISTED):
        lane = done + tl.arange(0, LISTED)
        tl.store(order + to + lane, first + lane, mask=lane < end - first)


@triton.jit
def _pairs(tile, live, indptr, c_indptr, c_indices, order, per_block, columns, depth):
    """First and end pair of each tile's block. Dead tiles, and blocks of a dense C without a pair, have 0 and 0."""
    at = tile // per_block
    if order is not None:
        at = tl.load(order + at, mask=live, other=0)
    if c_indptr is not None:
        row, column = at // columns, at % columns
        last = tl.load(c_indptr + row + 1, mask=live, other=0)
        at = _reaching(c_indices, tl.load(c_indptr + row, mask=live, other=0), last, column, depth)
        live = (at < last) & (tl.load(c_indices + at, mask=at < last, other=-1) == column)
    return tl.load(indptr + at, mask=live, other=0), tl.load(indptr + at + 1, mask=live, other=0)


@triton.jit
def _first(place, count, ctas, shift):
    """starts[place]: one tile per full window for each CTA before it, and those of the last window."""
    full, rest = count // ctas, count % ctas
    # The tiles of the last window, which may be none, have `rest` places from `low` on, cyclically.
    low = (full // 2 * shift + full % 2 * (ctas - rest)) % ctas
    around = tl.minimum(place + ctas - low, rest) - tl.minimum(ctas - low, rest)
    return place * full + tl.minimum(tl.maximum(place - low, 0), rest) + around


_SIZES = (
    "count", "ctas", "shift", "columns", "depth", "down", "across", "rows", "cols", "bm", "bn", "last_row",
)  # fmt: skip
_LISTS = ("indptr", "c_indptr", "c_indices", "order")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_LISTS)
def _deal(
    indptr, c_indptr, c_indices, order, tiles, starts, count, ctas, shift, columns, depth,
    down, across, rows, cols, bm, bn, last_row,
    LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    per_block = down * across
    lane = tl.arange(0, LANES)
    tile = window * ctas + lane
    live = (lane < ctas) & (tile < count)
    begin, end = _pairs(tile, live, indptr, c_indptr, c_indices, order, per_block, columns, depth)
    steps = end - begin

    rank = tl.zeros((LANES,), dtype=tl.int32)
    for done in range(0, ctas, STEP):
        lane_of = done + tl.arange(0, STEP)
        tile_of = window * ctas + lane_of
        there = (lane_of < ctas) & (tile_of < count)
        first, last = _pairs(tile_of, there, indptr, c_indptr, c_indices, order, per_block, columns, depth)
        more = tl.where(there, last - first, -1)[:, None] - steps[None, :]
        ahead = (more > 0) | ((more == 0) & (lane_of[:, None] < lane[None, :]))
        rank += tl.sum(ahead.to(tl.int32), 0)

    place = tl.where(window % 2 == 0, rank, ctas - 1 - rank)
    place = (place + window // 2 * shift) % ctas
    block = tile // per_block
    row = tl.minimum(tile // across % down * rows, last_row)
    col = tile % across * cols
    if order is not None:
        block = tl.load(order + block, mask=live, other=0)
    if c_indptr is None:
        c_row, c_col = block * bm + row, col
    else:
        c_row, c_col = block // columns * bm + row, block % columns * bn + col
    field = tl.arange(0, 8)[None, :]
    record = tl.where(field == 0, begin[:, None], tl.where(field == 1, end[:, None], 0))
    record = tl.where(field == 2, c_row[:, None], tl.where(field == 3, c_col[:, None], record))
    record = tl.where(field == 4, col[:, None], tl.where(field == 6, row[:, None], record))
    record = tl.where(field == 5, -1, record)
    at = (_first(place, count, ctas, shift) + window).to(tl.int64) * 8
    tl.store(tiles + at[:, None] + field, record, mask=live[:, None])

    if window == 0:
        tl.store(starts + lane, _first(lane, count, ctas, shift), mask=lane < ctas)
        tl.store(starts + ctas, count)
        spare = tl.arange(0, 16)
        tl.store(tiles + tl.cast(count, tl.int64) * 8 + spare, tl.where(spare % 8 == 5, -1, 0))


def spgemm_tiles(
    matches: Matches, dense: bool, rows: int, cols: int, ctas: int, sweeps: int = 1
) -> SpgemmTiles:
    """The tiles of `plan.spgemm_schedule.spgemm_tiles`, bit for bit. No sync. On the CPU that function runs."""
    indptr, pattern = matches.indptr, matches.pattern
    if not indptr.is_cuda and not env.interpreting():
        return schedule.spgemm_tiles(matches, dense, rows, cols, ctas, sweeps)
    (bm, bn), columns = pattern.block, max(pattern.grid[1], 1)
    blocks, down, across = counts_of(matches, dense, rows, cols)
    count = blocks * down * across
    tiles, starts = indptr.new_empty((count + 2, FIELDS)), indptr.new_empty(ctas + 1)
    order = _swept(matches, sweeps) if sweeps > 1 and not dense else None
    lists = indptr, *((pattern.indptr, pattern.indices) if dense else (None, None)), order, tiles, starts
    shape = down, across, rows, cols, bm, bn, max(bm - rows, 0)
    args = (*lists, count, ctas, turn(ctas), columns, columns.bit_length(), *shape)
    lanes = 1 << (ctas - 1).bit_length()
    launch_unspecialized(_deal, indptr.device, max(1, -(-count // ctas)), args, (lanes, STEP), WARPS)
    return SpgemmTiles(tiles, starts)


def _swept(matches: Matches, sweeps: int) -> Tensor:
    """`schedule.swept`, bit for bit."""
    pattern = matches.pattern
    rows, columns = pattern.grid
    begins, order = (matches.indptr.new_empty(size) for size in (rows * sweeps, pattern.nnzb))
    sizes = rows, sweeps, schedule.width_of(pattern, sweeps), columns.bit_length()
    lists = pattern.indptr, pattern.indices, begins
    launch_unspecialized(_count_runs, order.device, 1, (*lists, *sizes), (RUNS,), WARPS)
    launch_unspecialized(_list_runs, order.device, rows * sweeps, (*lists, order, *sizes), (LISTED,), 1)
    return order
