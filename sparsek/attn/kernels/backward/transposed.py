"""The lists of key blocks, built from a mask's rows by kernels: which query tiles visit each key block.

    tally     every entry of the mask: a count for its key block's list, and a slot of its own
    reserve   room for every list
    fill      the query tiles and entries of every list, in any order
    rank      of every entry in its list: the number of smaller query tiles there

List (b * heads + h) * Nb + j has the partial blocks of key block j; as many lists later come those of full blocks.
With `ranges` of `per_range` query tiles each, h counts the ranges of every head.
Slots and room are given out by atomic additions, so they vary from run to run; ranks do not.

Counts and columns of a mask with a fault are clamped or left out, so nothing is read or written out of bounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsek.attn.mask.lists import BlockLists, TransposedLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.streams import captured
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.engine.launch.recorder import recorder

ROWS, ENTRIES = 8, 32  # of the mask, by a program, and entries of each read together
LISTS = 256  # by a program that reserves
LISTED = 64  # rows of a list, read together
WARPS = 4

MASK = ("p_starts", "p_counts", "p_indices", "f_starts", "f_counts", "f_indices")
_SIZES = (
    "rows", "grid_rows", "ranges", "per_range", "columns", "lists", "p_size", "f_size", "longest", "capacity",
)  # fmt: skip
_SCRATCH = ("base", "nth", "counts", "totals", "room", "listed", "whose", "tiles", "entries")


@triton.jit
def rows_of(p_starts, p_counts, f_starts, f_counts, row, live, p_size, f_size, longest):
    """Of rows of the mask: first entry and entries of their partial and full lists, as far as `indices` reach."""
    p_first = tl.minimum(tl.maximum(tl.load(p_starts + row, mask=live, other=0), 0), p_size)
    f_first = tl.minimum(tl.maximum(tl.load(f_starts + row, mask=live, other=0), 0), f_size)
    p = tl.minimum(tl.load(p_counts + row, mask=live, other=0), longest)
    p = tl.maximum(tl.minimum(p, p_size - p_first), 0)
    f = tl.minimum(tl.load(f_counts + row, mask=live, other=0), longest - p)
    return p_first, p, f_first, tl.maximum(tl.minimum(f, f_size - f_first), 0)


@triton.jit
def column_of(p_indices, f_indices, p_first, p, f_first, m, e):
    """The column of entry e of a row, partial ones first; negative beyond its m entries."""
    of_p = tl.load(p_indices + p_first + e, mask=e < p, other=-1)
    return tl.where(e < p, of_p, tl.load(f_indices + f_first + e - p, mask=(e >= p) & (e < m), other=-1))


@triton.jit
def list_of(row, grid_rows, ranges, per_range, columns):
    """The first list of a row's head, or range of it."""
    return (row // grid_rows * ranges + row % grid_rows // per_range) * columns


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=MASK + _SCRATCH)
def tally(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, counts, totals,
    rows, grid_rows, ranges, per_range, columns, lists, p_size, f_size, longest, capacity,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    p_first, p, f_first, f = rows_of(
        p_starts, p_counts, f_starts, f_counts, row, live, p_size, f_size, longest
    )
    m = p + f
    slot = tl.cumsum(m, 0) - m + tl.atomic_add(totals, tl.sum(m, 0), sem="relaxed")
    tl.store(base + row, slot, mask=live)
    for start in range(0, tl.max(m, 0), ENTRIES):
        e = start + tl.arange(0, ENTRIES)[None, :]
        own = slot[:, None] + e
        there = (e < m[:, None]) & (own >= 0) & (own < capacity)
        column = column_of(
            p_indices, f_indices, p_first[:, None], p[:, None], f_first[:, None], m[:, None], e
        )
        own_lists = list_of(row, grid_rows, ranges, per_range, columns)[:, None]
        listing = own_lists + column + tl.where(e < p[:, None], 0, lists)
        known = there & (column >= 0) & (column < columns)
        at = tl.atomic_add(counts + listing, tl.full((ROWS, ENTRIES), 1, tl.int32), mask=known, sem="relaxed")
        tl.store(nth + own, tl.where(known, at, -1), mask=there)


@triton.jit
def reserve_lists(counts, totals, room, lists, program, LISTS: tl.constexpr):
    """Where the lists begin."""
    at = program * LISTS + tl.arange(0, LISTS)
    count = tl.load(counts + at, mask=at < 2 * lists, other=0)
    first = tl.atomic_add(totals + 2, tl.sum(count, 0), sem="relaxed")
    tl.store(room + at, first + tl.cumsum(count, 0) - count, mask=at < 2 * lists)


@triton.jit
def fill_lists(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, room, listed, whose, rows,
    grid_rows, ranges, per_range, columns, lists, p_size, f_size, longest, capacity, program,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The rows that every list has, and whose they are: the slots of these entries, or else the entries."""
    row = program * ROWS + tl.arange(0, ROWS)
    live = row < rows
    p_first, p, f_first, f = rows_of(
        p_starts, p_counts, f_starts, f_counts, row, live, p_size, f_size, longest
    )
    m = p + f
    slot = tl.load(base + row, mask=live, other=0)
    for start in range(0, tl.max(m, 0), ENTRIES):
        e = start + tl.arange(0, ENTRIES)[None, :]
        own = slot[:, None] + e
        there = (e < m[:, None]) & (own >= 0) & (own < capacity)
        column = column_of(
            p_indices, f_indices, p_first[:, None], p[:, None], f_first[:, None], m[:, None], e
        )
        at = tl.load(nth + own, mask=there, other=-1)
        there = there & (at >= 0)
        own_lists = list_of(row, grid_rows, ranges, per_range, columns)[:, None]
        listing = own_lists + column + tl.where(e < p[:, None], 0, lists)
        at += tl.load(room + listing, mask=there, other=0)
        there = there & (at >= 0) & (at < capacity)  # sums of a mask with a fault may have wrapped around
        tl.store(listed + at, (row % grid_rows)[:, None] + e * 0, mask=there)
        if SLOTS:
            tl.store(whose + at, own, mask=there)
        else:
            entry = tl.where(e < p[:, None], p_first[:, None] + e, (f_first - p)[:, None] + e)
            tl.store(whose + at, entry, mask=there)


@triton.jit
def rank_list(counts, room, listed, whose, nth, tiles, listing, SLOTS: tl.constexpr, LISTED: tl.constexpr):
    """The rank of every entry of a list into its slot; or else the list in order: entries to `nth`, rows to `tiles`."""
    length = tl.load(counts + listing)
    first = tl.load(room + listing)
    for start in range(0, length, LISTED):
        at = start + tl.arange(0, LISTED)
        row = tl.load(listed + first + at, mask=at < length, other=0)
        own = tl.load(whose + first + at, mask=at < length, other=0)
        place = tl.zeros((LISTED,), dtype=tl.int32)
        for start_of_others in range(0, length, LISTED):
            other = start_of_others + tl.arange(0, LISTED)
            smaller = tl.load(listed + first + other, mask=other < length, other=2147483647)[None, :]
            earlier = tl.load(whose + first + other, mask=other < length, other=0)[None, :] < own[:, None]
            ahead = (smaller < row[:, None]) | ((smaller == row[:, None]) & earlier)
            place += tl.sum(ahead.to(tl.int32), 1)
        if SLOTS:
            tl.store(nth + own, place, mask=at < length)
        else:
            tl.store(nth + first + place, own, mask=at < length)
            tl.store(tiles + first + place, row, mask=at < length)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SCRATCH)
def _open(counts, totals, room, lists, LISTS: tl.constexpr):
    reserve_lists(counts, totals, room, lists, tl.program_id(0), LISTS)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=MASK + _SCRATCH)
def _fill(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, room, listed, whose,
    rows, grid_rows, ranges, per_range, columns, lists, p_size, f_size, longest, capacity,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    fill_lists(
        p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, room, listed, whose,
        rows, grid_rows, ranges, per_range, columns, lists, p_size, f_size, longest, capacity, tl.program_id(0),
        False, ROWS, ENTRIES,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_SCRATCH)
def _order(counts, room, listed, whose, entries, tiles, LISTED: tl.constexpr):
    rank_list(counts, room, listed, whose, entries, tiles, tl.program_id(0), False, LISTED)


def transposed(mask: BlockMask) -> TransposedLists:
    """`mask.transposed`. On a GPU by four launches and kept as that is, where lists follow each other in any order."""
    if not (mask.full.starts.is_cuda and mask.rows and mask.grid[1]):
        return mask.transposed
    if captured(mask.full.starts) and mask.known("transposed") is None:
        return launched(mask)
    # A recorded call may be repeated for other masks of this kind, for which lists that are kept would be constants.
    if recorder() is not None:
        return launched(mask)
    return mask.derived("transposed", lambda: launched(mask))


def launched(mask: BlockMask) -> TransposedLists:
    """The lists of a mask with query tiles and key blocks. `full` and `partial` share one tensor of tiles."""
    device, (grid_rows, columns), sizes = mask.device, mask.grid, mask.sizes
    lists = mask.batch * mask.heads * columns
    capacity = sizes.stored
    counted = torch.zeros(2 * lists + 3, dtype=torch.int32, device=device)
    counts, totals = counted[: 2 * lists], counted[2 * lists :]
    base = torch.empty(mask.rows, dtype=torch.int32, device=device)
    room = torch.empty(2 * lists, dtype=torch.int32, device=device)
    scratch = torch.empty((3, max(1, capacity)), dtype=torch.int32, device=device)
    nth, listed, whose = scratch[0], scratch[1], scratch[2]
    tiles = torch.empty(max(1, capacity), dtype=torch.int32, device=device)
    entries = torch.empty(max(1, capacity), dtype=torch.int32, device=device)
    of_mask = (*mask.partial, *mask.full)
    numbers = (
        mask.rows, grid_rows, 1, grid_rows, columns, lists, len(mask.partial.indices), len(mask.full.indices),
        sizes.longest, capacity,
    )  # fmt: skip
    programs = -(-mask.rows // ROWS)
    args = (*of_mask, base, nth, counts, totals, *numbers)
    launch_unspecialized(tally, device, programs, args, (ROWS, ENTRIES), WARPS)
    args = (counts, totals, room, lists)
    launch_unspecialized(_open, device, -(-2 * lists // LISTS), args, (LISTS,), WARPS)
    args = (*of_mask, base, nth, room, listed, whose, *numbers)
    launch_unspecialized(_fill, device, programs, args, (ROWS, ENTRIES), WARPS)
    args = (counts, room, listed, whose, entries, tiles)
    launch_unspecialized(_order, device, 2 * lists, args, (LISTED,), WARPS)
    full = BlockLists(room[lists:], counts[lists:], tiles)
    partial = BlockLists(room[:lists], counts[:lists], tiles)
    return TransposedLists(full, partial, entries, entries)
