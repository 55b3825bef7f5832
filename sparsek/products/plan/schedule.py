"""The schedule of a product: the assignment of tiles to CTAs, made once per plan, on the host.

A *unit* is a row of tiles: a block row, a slice of a tall block row, or several short block rows joined. Its *steps*
are the block columns that it multiplies. `walk` lists units and steps of a pattern; `balance` assigns the tiles of
all units to CTAs.
"""

import heapq
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.storage import merged_keys

# What a group of twice the columns has to gain, because CTAs that walk more columns at once find less of B in L2. On an
# H100 hopper.bsr24 took 149 us in groups of 8 or 24 columns that were 2 % better balanced, and 94 us in groups of 4
# (6144 x 11008 to 4096, 10 % in blocks of 128, 2026-11-26). One part in GAIN for each doubling.
GAIN = 50
# A balance within one part in ENOUGH is not bought with wider groups.
ENOUGH = 33
# Units are lopsided where the longest tile costs more than this many times the mean. Rows of few blocks drawn at random
# are not: with 4 in a row, the longest costs 2.2 times the mean.
LOPSIDED = 3


class UnitSteps(NamedTuple):
    """Steps of every unit. Unit u has steps begin[u] to end[u] and owns rows of C from row[u].

    `cols` [steps] are block columns. `blocks` [steps, merge] are stored blocks, nnzb where a joined row has none.
    """

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    row: NDArray[np.int64]
    cols: NDArray[np.int32]
    blocks: NDArray[np.int32]


class ProductSchedule(NamedTuple):
    """Tiles of every CTA: CTA p computes tiles[starts[p]:starts[p+1]], each (first step, end step, row, column).

    The list ends with one spare tile, so that a kernel may read ahead. `unit` [tiles] is the unit of each other tile.
    `turns`: every other tile of a CTA walks its steps backwards, where the kernel can (spmm/load.py).
    """

    tiles: NDArray[np.int32]
    starts: NDArray[np.int32]
    ctas: int
    imbalance: float
    unit: NDArray[np.int64]
    turns: bool


class Cut(NamedTuple):
    """Long units in parts. `unit` [parts] is the unit of each part; the parts of a unit are adjacent.

    `slot` [parts] numbers the parts of units that have several, in order; -1 for a whole unit.
    """

    parts: UnitSteps
    unit: NDArray[np.int64]
    slot: NDArray[np.int64]


def walk(pattern: BlockPattern, tile_rows: int, merge: int = 1) -> UnitSteps:
    """Units and steps of a pattern for tiles of `tile_rows` rows.

    A block row taller than a tile becomes several units with the same steps; the last one overlaps its neighbour so
    that all have full height, and both write the same bits.
    """
    rows = pattern.grid[0]
    bm = pattern.block[0]
    indptr = pattern.host.indptr.astype(np.int64)
    if merge == 1:
        cols = pattern.host.indices
        blocks = np.arange(pattern.nnzb, dtype=np.int32)
        begin, end = indptr[:-1], indptr[1:]
        row = np.arange(rows, dtype=np.int64) * bm
        slices = -(-bm // tile_rows)
        if slices > 1:
            offset = np.minimum(np.arange(slices) * tile_rows, bm - tile_rows)
            begin, end = np.repeat(begin, slices), np.repeat(end, slices)
            row = (row[:, None] + offset[None, :]).ravel()
    else:
        keys, place = np.unique(merged_keys(pattern, merge), return_inverse=True)
        units = -(-rows // merge)
        width = max(pattern.grid[1], 1)
        cols = (keys % width).astype(np.int32)
        blocks = np.full((len(keys), merge), pattern.nnzb, dtype=np.int32)
        member = np.repeat(np.arange(rows), np.diff(indptr)) % merge
        blocks[place, member] = np.arange(pattern.nnzb, dtype=np.int32)
        bounds = np.searchsorted(keys // width, np.arange(units + 1))
        begin, end = bounds[:-1].astype(np.int64), bounds[1:].astype(np.int64)
        row = np.arange(units, dtype=np.int64) * bm * merge
    inside = row < pattern.shape[0]
    return UnitSteps(begin[inside], end[inside], row[inside], cols, blocks)


def cut(units: UnitSteps, limit: int) -> Cut:
    """Splits units of more than `limit` steps into parts of about equal length, none longer than that."""
    steps = units.end - units.begin
    counts = np.maximum(1, -(-steps // limit))
    unit = np.repeat(np.arange(len(steps)), counts)
    nth = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = units.begin[unit] + nth * steps[unit] // counts[unit]
    end = units.begin[unit] + (nth + 1) * steps[unit] // counts[unit]
    several = counts[unit] > 1
    slot = np.where(several, np.cumsum(several) - 1, -1)
    return Cut(UnitSteps(begin, end, units.row[unit], units.cols, units.blocks), unit, slot)


def part_limit(steps: float, workers: int) -> int:
    """The longest part, in steps, where `workers` CTAs share `steps`: half of what each has, but at least 4."""
    return max(4, int(steps / workers / 2))


def balance(units: UnitSteps, n: int, tile_cols: int, workers: int) -> ProductSchedule:
    """Assigns the tiles of all units over the columns of a [K, n] operand to at most `workers` CTAs.

    List scheduling: tiles in a fixed order, each to the CTA with the least work so far, where a tile costs its steps
    plus one. The order goes through groups of column tiles, so that concurrent CTAs read the same columns of B,
    and lets long tiles of a later group begin early enough to end with it. Groups are as narrow as balance allows; a
    wider one has to gain 2 % for each doubling. On an H200 a Zipf pattern lost 10 % in groups of 4 and 6 % in groups
    of 16, and 25 % and 8 % when all tiles of a group waited for those of the group before (2026-11-26). Of equal finish
    times the fewest CTAs are used, because they stay in step (2026-11-20: 128 beat 132 by 1 to 2 % where both need 16
    rounds).

    In integers, so that products/kernels/spmm/tiles.py makes the same schedule on a GPU.
    """
    column_tiles = -(-n // tile_cols)
    steps = units.end - units.begin + 1
    count = len(steps) * column_tiles
    if count == 0:
        return ProductSchedule(
            np.zeros((1, 4), np.int32), np.zeros(2, np.int32), 1, 1.0, np.zeros(0, np.int64), False
        )
    ctas, total = min(workers, count), int(steps.sum()) * column_tiles
    bound = max(int(steps.max()) * ctas, total)
    best: tuple[int, int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = None
    groups = groups_of(len(steps), column_tiles, workers)
    for group in groups:
        unit, column = _tile_order(steps, column_tiles, group, ctas)
        who, span = _deal(steps[unit], ctas)
        rated = span * weight_of(group, groups[0])
        if best is None or rated < best[0]:
            best = (rated, span, unit, column, who)
        if ENOUGH * span * ctas <= (ENOUGH + 1) * bound:
            break
    assert best is not None
    _, span, unit, column, who = best
    fewer = fewest(count, ctas)
    if fewer < ctas:
        who_fewer, span_fewer = _deal(steps[unit], fewer)
        if span_fewer <= span:
            who, ctas = who_fewer, fewer
    by_cta = np.argsort(who, kind="stable")
    unit, column = unit[by_cta], column[by_cta]
    tiles = np.zeros((count + 1, 4), np.int32)
    tiles[:-1, 0], tiles[:-1, 1] = units.begin[unit], units.end[unit]
    tiles[:-1, 2], tiles[:-1, 3] = units.row[unit], column * tile_cols
    starts = np.zeros(ctas + 1, np.int32)
    np.cumsum(np.bincount(who, minlength=ctas), out=starts[1:])
    turns = int(steps.max()) * len(steps) <= LOPSIDED * int(steps.sum())
    return ProductSchedule(tiles, starts, ctas, span / (total / ctas), unit, turns)


def groups_of(units: int, column_tiles: int, workers: int) -> list[int]:
    """Widths of column groups to try: powers of two from the narrowest with a tile per CTA, then all columns."""
    width = 1
    while width * units < workers * 0.9:
        width *= 2
    widths = []
    while width < column_tiles:
        widths.append(width)
        width *= 2
    return [*widths, column_tiles]


def fewest(tiles: int, ctas: int) -> int:
    """As few CTAs as have no more tiles than `ctas` have."""
    return -(-tiles // -(-tiles // ctas))


def weight_of(group: int, narrowest: int) -> int:
    """The factor of a span in groups of so many columns."""
    return (GAIN << 16) + round(65536 * math.log2(group / narrowest))


def _tile_order(
    steps: NDArray[np.int64], column_tiles: int, group: int, workers: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Unit and column of every tile, in the order in which they should begin.

    Groups of columns share the time of all workers. A tile should end with its group, so the longest begin first, some
    of them while an earlier group is walked. Equal tiles go by units, in a unit by columns.
    """
    unit = np.repeat(np.arange(len(steps)), column_tiles)
    column = np.tile(np.arange(column_tiles), len(steps))
    columns_done = np.minimum((column // group + 1) * group, column_tiles)
    begin = columns_done * steps.sum() - steps[unit] * workers
    order = np.argsort(begin, kind="stable")
    return unit[order], column[order]


def _deal(costs: NDArray[np.int64], workers: int) -> tuple[NDArray[np.int64], int]:
    """The worker of every tile, and the load of the fullest worker."""
    if (costs == costs[0]).all():
        return np.arange(len(costs)) % workers, int(costs[0]) * -(-len(costs) // workers)
    heap = [(0, worker) for worker in range(workers)]
    who = np.empty(len(costs), np.int64)
    for tile, cost in enumerate(costs.tolist()):
        load, worker = heap[0]
        heapq.heapreplace(heap, (load + cost, worker))
        who[tile] = worker
    return who, max(load for load, _ in heap)
