"""The schedule of attention's backward pass by five kernels: number for number that of
attn/plan/attention_grad_schedule.py.

    tally     every entry of the mask: a count for its key block's list, and a slot of its own
    _measure  visits of every key tile, and the most; room for every list; the widest row's span; tiles with visits
    _line_up  the place of every key tile in the line, longest first; the rows that every list has, in any order
    _deal     the CTA and start of every key tile; the rank of every entry in its list
    _visit    the records of key tiles, and the visits of every query tile with their tickets

Slots and room are given out by atomic additions, so they vary from run to run, but nothing that leaves these kernels
depends on them: an entry's rank in its list is the number of smaller query tiles there. A key tile's place is counted
by comparing it with all others; where all heads share lists, with those of one head.

To deal is to give the next tile to the CTA that finishes first. `_deal` gives many at once: with CTAs sorted by the
end of their work, tile i goes to CTA i as long as none of those before would be free again by then.

Where key tiles are cut into parts, all of this is about parts, `kv_heads` counts those of a key block of all heads,
and `group` the query heads of one. Lists are of ranges of query tiles. Parts without a visit come last in the line,
and no CTA takes them.

Counts and columns of a mask with a fault are clamped or left out, so nothing is written out of bounds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.backward.transposed import (
    ENTRIES,
    LISTED,
    LISTS,
    MASK,
    ROWS,
    column_of,
    fill_lists,
    rank_list,
    reserve_lists,
    rows_of,
    tally,
)
from sparsek.attn.kernels.forward.schedule_line import band_sections, place_alike, place_tiles
from sparsek.attn.mask.data import MaskPart
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_grad_schedule as plan
from sparsek.attn.plan.attention_grad_schedule import (
    FULL,
    GOLDEN,
    GOLDEN_BITS,
    NO_TICKET,
    TILE_FIELDS,
    TILE_TICKS,
    VISIT_FIELDS,
    GradSchedule,
    TileParts,
)
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core import env
from sparsek.core.memory import carved
from sparsek.engine.launch.launch import launch_unspecialized

# Entries of the mask, visits, entries of lists, the widest row's span, the most visits of a tile, tiles with visits.
TOTALS = 6
TILES = 32  # of keys, by a program
STREAM = 128  # key tiles that others are compared with together
ALIKE_TILES, ALIKE_STREAM = 8, 256  # the same where all heads share lists
HEADS = 16  # of those, written together
BOUNDS = 1024  # by a program
VISITS = 128  # of a query tile, at most, that are held in registers
WARPS = 4
DEAL_WARPS = 8  # a lane for every CTA

_SCRATCH = (
    "base", "nth", "counts", "totals", "n", "partial", "room", "listed", "whose", "rank", "first", "ticks", "taker",
    "began", "turn", "has", "starts", "tiles", "visits", "clocks",
)  # fmt: skip
_SIZES = (
    "rows", "grid_rows", "ranges", "per_range", "columns", "lists", "p_size", "f_size", "longest", "capacity",
    "key_tiles", "kv_heads", "group", "share", "item_lists", "shared", "sections", "heads", "parts", "band_room",
    "programs", "row_programs", "ctas", "q_heads", "absent", "walks",
)  # fmt: skip


@triton.jit
def _lengths(
    counts, totals, n, partial, ranges, columns, lists, key_tiles, kv_heads, group, share, item_lists,
    TILES: tl.constexpr
):  # fmt: skip
    """Visits of key tiles, and those of partial blocks."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    live = tile < key_tiles
    part = tile // columns % kv_heads
    head = part // ranges * group
    item = tile // (columns * kv_heads) * item_lists + part % ranges * columns + tile % columns
    of_p = tl.zeros((TILES,), dtype=tl.int32)
    of_f = tl.zeros((TILES,), dtype=tl.int32)
    for each in range(group):
        at = counts + item + (head + each) // share * (ranges * columns)
        of_p += tl.load(at, mask=live, other=0)
        of_f += tl.load(at + lists, mask=live, other=0)
    tl.store(partial + tile, of_p, mask=live)
    tl.store(n + tile, of_p + of_f, mask=live)
    tl.atomic_add(totals + 1, tl.sum(of_p + of_f, 0), sem="relaxed")
    tl.atomic_max(totals + 4, tl.max(of_p + of_f, 0), sem="relaxed")
    tl.atomic_add(totals + 5, tl.sum((of_p + of_f > 0).to(tl.int32), 0), sem="relaxed")


@triton.jit
def _span(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, totals, rows, p_size, f_size, longest, program,
    LISTS: tl.constexpr
):  # fmt: skip
    """The most columns from the first to the last of a row, whose partial and full entries ascend."""
    row = program * LISTS + tl.arange(0, LISTS)
    p_first, p, f_first, f = rows_of(
        p_starts, p_counts, f_starts, f_counts, row, row < rows, p_size, f_size, longest
    )
    first = tl.minimum(
        tl.load(p_indices + p_first, mask=p > 0, other=2147483647),
        tl.load(f_indices + f_first, mask=f > 0, other=2147483647),
    )
    last = tl.maximum(
        tl.load(p_indices + p_first + p - 1, mask=p > 0, other=-1),
        tl.load(f_indices + f_first + f - 1, mask=f > 0, other=-1),
    )
    tl.atomic_max(totals + 3, tl.max(tl.where(p + f > 0, last - first + 1, 0), 0), sem="relaxed")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=MASK + _SCRATCH)
def _measure(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, counts, totals, n, partial, room, rows, ranges,
    columns, lists, p_size, f_size, longest, key_tiles, kv_heads, group, share, item_lists, programs, row_programs,
    TILES: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < programs:
        _lengths(
            counts, totals, n, partial, ranges, columns, lists, key_tiles, kv_heads, group, share, item_lists, TILES,
        )  # fmt: skip
    elif tl.program_id(0) < programs + row_programs:
        _span(
            p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, totals, rows, p_size, f_size, longest,
            tl.program_id(0) - programs, LISTS,
        )  # fmt: skip
    else:
        reserve_lists(counts, totals, room, lists, tl.program_id(0) - programs - row_programs, LISTS)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=MASK + _SCRATCH)
def _line_up(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, totals, n, room, listed, whose,
    rank, first, ticks, rows, grid_rows, ranges, per_range, columns, lists, p_size, f_size, longest, capacity,
    key_tiles, sections, heads, parts, band_room, ctas, programs,
    SINGLE: tl.constexpr, ALIKE: tl.constexpr, TILE_TICKS: tl.constexpr, TILES: tl.constexpr, STREAM: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """ALIKE: all heads have the same lists."""
    if tl.program_id(0) < programs:
        band = band_sections(totals, key_tiles, sections, heads, ctas, band_room)
        in_turn = band > 0
        sections = tl.where(in_turn, band, sections)
        if ALIKE:
            place_alike(
                totals, n, rank, first, ticks, columns, key_tiles, sections, heads, in_turn, SINGLE, TILE_TICKS,
                TILES, STREAM, HEADS,
            )  # fmt: skip
        else:
            place_tiles(
                totals, n, rank, first, ticks, columns, key_tiles, sections, heads, parts, in_turn, SINGLE, TILE_TICKS,
                TILES, STREAM,
            )  # fmt: skip
    else:
        fill_lists(
            p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, room, listed, whose,
            rows, grid_rows, ranges, per_range, columns, lists, p_size, f_size, longest, capacity,
            tl.program_id(0) - programs, True, ROWS, ENTRIES,
        )  # fmt: skip


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _give(ticks, taker, began, turn, has, starts, key_tiles, ctas, LANES: tl.constexpr):
    """The CTA of every key tile of the line, its start, and how many tiles the CTA had before."""
    lane = tl.arange(0, LANES)
    # Of every CTA: the end of its work, its number, and its tiles, in 27, 12 and 24 bits. Absent ones come last.
    free = tl.where(lane < ctas, lane.to(tl.int64) << 24, 9223372036854775807)
    done = 0
    while done < key_tiles:
        free = tl.sort(free)
        there = done + lane < key_tiles
        took = tl.load(ticks + done + lane, mask=there, other=0)
        again = free + tl.where(lane < ctas, (took.to(tl.int64) << 36) + 1, 0)
        given = there & (free < tl.associative_scan(again, 0, _least))
        tl.store(taker + done + lane, (free >> 24 & 4095).to(tl.int32), mask=given)
        tl.store(began + done + lane, (free >> 36).to(tl.int32), mask=given)
        tl.store(turn + done + lane, (free & 16777215).to(tl.int32), mask=given)
        free = tl.where(given, again, free)
        done += tl.sum(given.to(tl.int32), 0)
    there = free < 9223372036854775807
    tl.store(has + (free >> 24 & 4095).to(tl.int32), (free & 16777215).to(tl.int32), mask=there)
    tl.debug_barrier()
    count = tl.load(has + lane, mask=lane < ctas, other=0, cache_modifier=".cg")
    tl.store(starts + lane + 1, tl.cumsum(count, 0), mask=lane < ctas)
    tl.store(starts, 0)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SCRATCH)
def _deal(
    counts, totals, room, listed, whose, nth, ticks, taker, began, turn, has, starts, lists, key_tiles, parts, ctas,
    LANES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The first program deals; each other one ranks the rows of a list."""
    if tl.program_id(0) == 0:
        line = tl.where(parts > 1, tl.load(totals + 5), key_tiles)
        _give(ticks, taker, began, turn, has, starts, line, ctas, LANES)
    else:
        rank_list(counts, room, listed, whose, nth, nth, tl.program_id(0) - 1, True, LISTED)


@triton.jit
def _record(
    n, partial, rank, first, taker, turn, starts, tiles, visits, ranges, columns, key_tiles, kv_heads, group, parts,
    absent,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, TILE_FIELDS: tl.constexpr,
    VISIT_FIELDS: tl.constexpr, FULL: tl.constexpr, NO_TICKET: tl.constexpr
):  # fmt: skip
    """The records of key tiles, and the visits that make odd numbers of single steps even."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    live = tile < key_tiles
    live &= (tl.load(n + tile, mask=live, other=0) > 0) | (parts == 1)
    place = tl.load(rank + tile, mask=live, other=0)
    cta = tl.load(taker + place, mask=live, other=0)
    at = tl.load(starts + cta, mask=live, other=0) + tl.load(turn + place, mask=live, other=0)
    own = tl.load(n + tile, mask=live, other=0)
    masked = tl.load(partial + tile, mask=live, other=0)
    begin = tl.load(first + tile, mask=live, other=0)
    head = tile // columns % kv_heads
    pairs = own
    if BLOCK_Q == 64:
        v = visits + (begin + own).to(tl.int64) * VISIT_FIELDS
        odd = live & (own % 2 == 1)
        tl.store(v, absent + own * 0, mask=odd)
        tl.store(v + 1, head // ranges * group + group - 1, mask=odd)
        tl.store(v + 2, FULL + own * 0, mask=odd)
        tl.store(v + 3, NO_TICKET + own * 0, mask=odd)
        own += own % 2
        masked = (masked + 1) // 2
        pairs = own // 2
    r = tiles + at.to(tl.int64) * TILE_FIELDS
    tl.store(r, tile // (columns * kv_heads), mask=live)
    tl.store(r + 1, head // parts, mask=live)
    tl.store(r + 2, tile % columns * BLOCK_K, mask=live)
    tl.store(r + 3, begin, mask=live)
    tl.store(r + 4, masked, mask=live)
    tl.store(r + 5, pairs, mask=live)
    tl.store(r + 6, own, mask=live)
    tl.store(r + 7, tile, mask=live)


@triton.jit
def _walk_of(totals, key_tiles, grid_rows, columns, group, walks):
    """As in the plan: whether the tiles of a wave start one visit apart, and whether every second wave goes back."""
    most = group * grid_rows
    visits = tl.load(totals + 1).to(tl.int64)
    there = (walks > 0) & (tl.load(totals + 4) == most)
    full = visits == most.to(tl.int64) * key_tiles
    triangle = (grid_rows == columns) & (2 * visits == (most + group).to(tl.int64) * key_tiles)
    return there & (full | triangle), there & triangle


@triton.jit
def _visits_of(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, counts, partial, rank, first,
    taker, began, totals, visits, clocks, grid_rows, ranges, per_range, columns, lists, p_size, f_size, longest,
    capacity, key_tiles, kv_heads, group, share, item_lists, shared, sections, heads, programs, ctas, q_heads, walks,
    BLOCK_Q: tl.constexpr, ORDERED: tl.constexpr, TURNED: tl.constexpr, SHARED: tl.constexpr, LONG: tl.constexpr,
    VISITS: tl.constexpr, GOLDEN: tl.constexpr, BITS: tl.constexpr, VISIT_FIELDS: tl.constexpr, FULL: tl.constexpr,
    NO_TICKET: tl.constexpr
):  # fmt: skip
    """The visits of one query tile of one head, with their tickets."""
    unit = tl.program_id(0) - programs
    query = unit % grid_rows
    head = unit // grid_rows % q_heads
    item = unit // (grid_rows * q_heads)
    of_range = query // per_range
    own_lists = item * item_lists + (head // share * ranges + of_range) * columns
    row = own_lists // (ranges * columns) * grid_rows + query
    p_first, p, f_first, f = rows_of(
        p_starts, p_counts, f_starts, f_counts, row, True, p_size, f_size, longest
    )
    m = p + f
    base_slot = tl.load(base + row)
    own_tiles = (item * kv_heads + head // group * ranges + of_range) * columns
    # As many rows of clocks as heads and items share lists.
    copy = item * shared * share + head % share
    line = clocks + (copy.to(tl.int64) * capacity + base_slot) * 2
    m = tl.minimum(m, tl.maximum(capacity - base_slot, 0))
    follow, back = _walk_of(totals, key_tiles, grid_rows, columns, group, walks)
    section = (item * kv_heads + head // group) * sections // heads
    tiles_before = (section * heads + sections - 1) // sections * columns
    for start in range(0, m, VISITS):
        e = start + tl.arange(0, VISITS)
        column = column_of(p_indices, f_indices, p_first, p, f_first, m, e)
        known = (e < m) & (column >= 0) & (column < columns)
        kind = tl.where(e < p, 0, lists)
        tile = own_tiles + column
        length = tl.load(counts + own_lists + column + kind, mask=known, other=1)
        within = tl.load(nth + base_slot + e, mask=known, other=0)
        place = tl.load(rank + tile, mask=known, other=0)
        if TURNED:
            cta = tl.load(taker + place, mask=known, other=0)
            share_of = (cta * GOLDEN & ((1 << BITS) - 1)).to(tl.int64)
            apart = (share_of * length >> BITS).to(tl.int32)
            in_section = place - tiles_before
            at = within - tl.where(follow, in_section % ctas % length, apart)
            at += tl.where(at < 0, length, 0)
            within = tl.where(back & (in_section // ctas % 2 == 1), length - 1 - within, at)
        within += tl.load(partial + tile, mask=known & (e >= p), other=0)
        if SHARED:
            within += head % group * length
        else:
            for other in range(head // group * group, head):
                of_other = item * item_lists + (other // share * ranges + of_range) * columns
                within += tl.load(counts + of_other + column + kind, mask=known, other=0)
        number = tl.load(first + tile, mask=known, other=0) + within
        v = visits + number.to(tl.int64) * VISIT_FIELDS
        tl.store(v, query * BLOCK_Q + e * 0, mask=known)
        tl.store(v + 1, head + e * 0, mask=known)
        tl.store(v + 2, tl.where(e < p, p_first + e, FULL), mask=known)
        if ORDERED:
            clock = tl.load(began + place, mask=known, other=0) + within
            if LONG:
                tl.store(line + 2 * e, tl.where(known, number, -1), mask=e < m)
                tl.store(line + 2 * e + 1, clock, mask=e < m)
            else:
                same = clock[None, :] == clock[:, None]
                sooner = (clock[None, :] < clock[:, None]) | (same & (number[None, :] < number[:, None]))
                tl.store(v + 3, tl.sum((sooner & known[None, :]).to(tl.int32), 1), mask=known)
        else:
            tl.store(v + 3, NO_TICKET + e * 0, mask=known)
    if LONG:
        tl.debug_barrier()
        for start in range(0, m, VISITS):
            e = start + tl.arange(0, VISITS)
            number = tl.load(line + 2 * e, mask=e < m, other=-1, cache_modifier=".cg")
            clock = tl.load(line + 2 * e + 1, mask=e < m, other=0, cache_modifier=".cg")[:, None]
            ticket = tl.zeros((VISITS,), dtype=tl.int32)
            for start_of_others in range(0, m, VISITS // 4):
                o = start_of_others + tl.arange(0, VISITS // 4)
                of_o = tl.load(line + 2 * o, mask=o < m, other=-1, cache_modifier=".cg")[None, :]
                at_o = tl.load(line + 2 * o + 1, mask=o < m, other=0, cache_modifier=".cg")[None, :]
                sooner = (at_o < clock) | ((at_o == clock) & (of_o < number[:, None]))
                ticket += tl.sum((sooner & (of_o >= 0)).to(tl.int32), 1)
            tl.store(visits + number.to(tl.int64) * VISIT_FIELDS + 3, ticket, mask=number >= 0)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=MASK + _SCRATCH)
def _visit(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, counts, n, partial, rank, first,
    taker, began, totals, turn, starts, tiles, visits, clocks, grid_rows, ranges, per_range, columns, lists, p_size,
    f_size, longest, capacity, key_tiles, kv_heads, group, share, item_lists, shared, sections, heads, parts, programs,
    ctas, q_heads, absent, walks,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ORDERED: tl.constexpr, TURNED: tl.constexpr, SHARED: tl.constexpr,
    LONG: tl.constexpr, TILES: tl.constexpr, VISITS: tl.constexpr, GOLDEN: tl.constexpr, BITS: tl.constexpr,
    TILE_FIELDS: tl.constexpr, VISIT_FIELDS: tl.constexpr, FULL: tl.constexpr, NO_TICKET: tl.constexpr,
):  # fmt: skip
    """The first programs write records of key tiles; each other one the visits of a query tile of one head.

    SHARED: all heads of a group have the same lists. LONG: a query tile may have more than VISITS visits, and keeps
    their numbers and times in `clocks`.
    """
    if tl.program_id(0) < programs:
        _record(
            n, partial, rank, first, taker, turn, starts, tiles, visits, ranges, columns, key_tiles, kv_heads,
            group, parts, absent, BLOCK_Q, BLOCK_K, TILES, TILE_FIELDS, VISIT_FIELDS, FULL, NO_TICKET,
        )  # fmt: skip
    else:
        _visits_of(
            p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, base, nth, counts, partial, rank, first,
            taker, began, totals, visits, clocks, grid_rows, ranges, per_range, columns, lists, p_size, f_size, longest,
            capacity, key_tiles, kv_heads, group, share, item_lists, shared, sections, heads, programs, ctas, q_heads,
            walks, BLOCK_Q, ORDERED, TURNED, SHARED, LONG, VISITS, GOLDEN, BITS, VISIT_FIELDS, FULL, NO_TICKET,
        )  # fmt: skip


@triton.jit(do_not_specialize=("q_len", "rows", "lists"), do_not_specialize_on_alignment=("lo", "hi", "out"))
def _pad(lo, hi, out, q_len, rows, lists, BOUNDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BOUNDS + tl.arange(0, BOUNDS)
    query = at % rows
    listing = at // rows
    end = listing >= lists
    own = tl.where(end, listing - lists, listing) * q_len + query
    there = (query < q_len) & (listing < 2 * lists)
    found = tl.where(
        end, tl.load(hi + own, mask=there & end, other=0), tl.load(lo + own, mask=there & ~end, other=0)
    )
    tl.store(out + at, found, mask=listing < 2 * lists)


def padded_bounds(lo: Tensor, hi: Tensor, rows: int) -> Tensor:
    """The bounds of a mask with zeros up to `rows` queries: int32 [2, lists, rows], viewed as float32. No sync.

    lo, hi: int32 [lists, q_len], contiguous.
    """
    lists, q_len = lo.shape
    out = torch.empty((2, lists, rows), dtype=torch.int32, device=lo.device)
    if lo.is_cuda or env.interpreting():
        args = (lo, hi, out, q_len, rows, lists)
        launch_unspecialized(_pad, lo.device, -(-out.numel() // BOUNDS), args, (BOUNDS,), WARPS)
    else:
        out.zero_()
        out[0, :, :q_len], out[1, :, :q_len] = lo, hi
    return out.view(torch.float32)


def schedule(
    p: AttentionProblem, mask: BlockMask, ctas: int, *, ordered: bool = True, cut: TileParts | None = None
) -> GradSchedule:
    """The schedule of `mask` for `p`, whose tiles are whole or `cut`. Without `ordered` no visit has a ticket. No sync
    on a GPU, unless the mask is part of a whole one.
    """
    part = MaskPart.of(mask)
    if part is not None and p.whole is not None:
        whole = schedule(p.whole, part.whole, ctas, ordered=ordered, cut=cut)
        return plan.restricted(p, mask, part, whole)
    if mask.full.starts.is_cuda and mask.rows and mask.grid[1]:
        return launched(p, mask, ctas, ordered=ordered, cut=cut)
    return plan.schedule(p, mask, ctas, ordered=ordered, cut=cut)


def launched(
    p: AttentionProblem, mask: BlockMask, ctas: int, *, ordered: bool = True, cut: TileParts | None = None
) -> GradSchedule:
    """The schedule of at least one query and key tile: five launches and a few allocations.

    Only as many `visits` as the key tiles have are written.
    """
    device, (grid_rows, columns), capacity, rows = mask.device, mask.grid, p.stored, plan.padded_rows(p)
    cut = cut or TileParts(p.group, 1)
    q_heads, ranges, per_range, parts, visited = p.q_heads, cut.ranges, cut.tiles(p), cut.count(p), p.visited
    p = cut.of(p)
    lists = mask.batch * mask.heads * ranges * columns
    key_tiles = p.batch * p.kv_heads * columns
    single = p.block[0] == 64
    share = q_heads // mask.heads
    items = mask.heads * ranges * columns if mask.batch > 1 else 0
    long = ordered and p.longest > VISITS

    counted = torch.zeros(2 * lists + TOTALS, dtype=torch.int32, device=device)
    counts, totals = counted[: 2 * lists], counted[2 * lists :]
    lanes = triton.next_power_of_2(ctas)
    room = max(1, capacity)
    sizes = 7 * key_tiles, room, room, room, mask.rows, 2 * lists, lanes, 2 * visited if long else 0
    _, (of_tiles, nth, listed, whose, base, bases, has, clocks) = carved(sizes, device)
    partial, rank, first, ticks, taker, began, turn = of_tiles.view(7, key_tiles).unbind()
    clocks = clocks if long else has
    # What the plan keeps is apart from what is only needed here.
    records = visited + (key_tiles if single else 0)
    sizes = ctas + 1, (key_tiles, TILE_FIELDS), (records, VISIT_FIELDS), key_tiles
    _, (starts, made, visits, n) = carved(sizes, device)
    entries = (*mask.partial, *mask.full)
    p_size, f_size = len(mask.partial.indices), len(mask.full.indices)
    of_mask = (grid_rows, ranges, per_range, columns, lists, p_size, f_size, p.longest, capacity)
    row_programs = -(-mask.rows // ROWS)

    def launch(
        kernel: Any, programs: int, args: tuple[Any, ...], constants: tuple[Any, ...], warps: int
    ) -> None:
        launch_unspecialized(kernel, device, programs, args, constants, warps)

    args = (*entries, base, nth, counts, totals, mask.rows, *of_mask)
    launch(tally, row_programs, args, (ROWS, ENTRIES), WARPS)

    programs, of_rows = -(-key_tiles // LISTS), -(-mask.rows // LISTS)
    args = (
        *entries, counts, totals, n, partial, bases, mask.rows, ranges, columns, lists, p_size, f_size, p.longest,
        key_tiles, p.kv_heads, p.group, share, items, programs, of_rows,
    )  # fmt: skip
    launch(_measure, programs + of_rows + -(-2 * lists // LISTS), args, (LISTS, LISTS), WARPS)

    alike = mask.batch == mask.heads == 1 and parts == 1
    together, stream = (ALIKE_TILES, ALIKE_STREAM) if alike else (TILES, STREAM)
    line_programs = -(-(columns if alike else key_tiles) // together)
    args = (
        *entries, base, nth, totals, n, bases, listed, whose, rank, first, ticks, mask.rows, *of_mask, key_tiles,
        plan.sections(p, ctas), p.batch * p.kv_heads, parts, plan.band_room(p) if ordered and parts == 1 else 0, ctas,
        line_programs,
    )  # fmt: skip
    constants = (single, alike, TILE_TICKS, together, stream, HEADS, ROWS, ENTRIES)
    launch(_line_up, line_programs + row_programs, args, constants, WARPS)

    args = (
        counts, totals, bases, listed, whose, nth, ticks, taker, began, turn, has, starts, lists, key_tiles, parts,
        ctas,
    )  # fmt: skip
    launch(_deal, 1 + 2 * lists, args, (lanes, LISTED), DEAL_WARPS)

    programs = -(-key_tiles // TILES)
    args = (
        *entries, base, nth, counts, n, partial, rank, first, taker, began, totals, turn, starts, made, visits, clocks,
        *of_mask, key_tiles, p.kv_heads, p.group, share, items, int(mask.batch == 1), plan.sections(p, ctas),
        p.batch * p.kv_heads, parts, programs, ctas, q_heads, rows - 64, int(ordered and parts == 1 and plan.walks(p)),
    )  # fmt: skip
    constants = (
        *p.block, ordered, ordered or plan.heads_in_section(p) > 0, share % p.group == 0, long, TILES,
        min(VISITS, max(16, triton.next_power_of_2(p.longest))), GOLDEN, GOLDEN_BITS, TILE_FIELDS, VISIT_FIELDS, FULL,
        NO_TICKET,
    )  # fmt: skip
    launch(_visit, programs + p.batch * q_heads * grid_rows, args, constants, WARPS)
    return GradSchedule(made, starts, visits, ctas, rows, n, parts)
