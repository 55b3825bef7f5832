"""The schedule of attention's forward pass by two kernels: record for record that of attn/plan/attention_schedule.py.

    _count    the table: of every group of heads that share lists, how many records have at least each length;
              and for every row of a group, how many equal records the rows before it have
    _place    every record: longer ones and equal ones before it, from these numbers, give its place

A *unit* is the tiles of one head (of a pack) of one batch item. Units of a group of the mask have the same lengths. In
each section records go by falling length, then by unit, then by position; so a record's rank is a sum over groups of
table entries, times the section's units or those before, and a count of equal tiles before it in its own unit. That
count is the same for all units of a group: rows are compared with those before them once for each group.
Nothing is sorted, and no result depends on the order in which programs run.

Counts of a mask with a fault are clamped, so nothing is written out of bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_schedule as plan
from sparsek.attn.plan.attention_schedule import FIELDS, MERGE_FIELDS, AttentionSchedule, TileShape
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core.memory import carved
from sparsek.engine.launch.launch import launch_unspecialized

LENGTHS = 16  # of the table, by a program of _count
RANKED = 8  # rows, by another program of _count
ROWS = 256  # of the mask, read together
GROUPS = 16  # of the table, read together; 1 where all heads share lists
TILES = 32  # by a program of _place; tiles that may be cut: CUT_TILES, with PARTS of their parts together
CUT_TILES, PARTS = 8, 8
UNUSED = 32  # entries of merges, cleared together
WARPS, PLACE_WARPS = 4, 1

_LISTS = ("p_starts", "p_counts", "f_starts", "f_counts")
_COUNTED = ("grid_rows", "unit_tiles", "subs", "longest", "part", "width", "chunks", "row_chunks", "programs")
_PLACED = (
    "groups", "grid_rows", "unit_tiles", "subs", "longest", "part", "width", "chunks", "units", "item_units", "period",
    "pack", "positions", "sections", "ctas", "capacity", "extra",
)  # fmt: skip


@triton.jit
def _lengths(p_counts, f_counts, at, live, longest, part, CUT: tl.constexpr):
    """Of rows of the mask: partial blocks, all blocks, parts, blocks of a shorter part, and parts of one more."""
    p = tl.minimum(tl.maximum(tl.load(p_counts + at, mask=live, other=0), 0), longest)
    n = p + tl.minimum(tl.maximum(tl.load(f_counts + at, mask=live, other=0), 0), longest - p)
    if CUT:
        k = tl.maximum((n + part - 1) // part, 1)
        least = n // k
        return p, n, k, least, n - least * k
    return p, n, n * 0 + 1, n, n * 0


@triton.jit
def _tabulate(
    p_counts, f_counts, table, program, grid_rows, unit_tiles, subs, longest, part, width, chunks,
    CUT: tl.constexpr, LENGTHS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Table [groups, width + 2]: records of at least 0, 1, ... blocks, then slots and cut tiles, of one unit."""
    group = program // chunks
    chunk = program % chunks
    length = chunk * LENGTHS + tl.arange(0, LENGTHS)
    found = tl.zeros((LENGTHS, ROWS), dtype=tl.int32)
    slots = tl.zeros((ROWS,), dtype=tl.int32)
    cuts = tl.zeros((ROWS,), dtype=tl.int32)
    for first in range(0, grid_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < grid_rows
        _, _, k, least, more = _lengths(p_counts, f_counts, group * grid_rows + row, live, longest, part, CUT)
        tiles = tl.where(live, tl.minimum(unit_tiles - row * subs, subs), 0)
        all_of = (k * tiles)[None, :]
        if CUT:
            some = tl.where(least[None, :] + 1 >= length[:, None], (more * tiles)[None, :], 0)
            slots += tl.where(k > 1, k * tiles, 0)
            cuts += tl.where(k > 1, tiles, 0)
        else:
            some = 0
        found += tl.where(least[None, :] >= length[:, None], all_of, some)
    table += group.to(tl.int64) * (width + 2)
    tl.store(table + length, tl.sum(found, 1), mask=length < width)
    if CUT:
        if chunk == 0:
            tl.store(table + width, tl.sum(slots, 0))
            tl.store(table + width + 1, tl.sum(cuts, 0))


@triton.jit
def _rank(
    p_counts, f_counts, before, program, grid_rows, subs, longest, part, row_chunks,
    CUT: tl.constexpr, RANKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`before` [rows of all groups, 1]: records with as many blocks as the row, in the rows of a unit before it.

    CUT: [rows of all groups, 4]: records of as many blocks as a shorter part of the row, records of one block more,
    slots, cut tiles.
    """
    group = program // row_chunks
    first = program % row_chunks * RANKED
    row = first + tl.arange(0, RANKED)
    live = row < grid_rows
    at = group * grid_rows + row
    p, n, k, least, more = _lengths(p_counts, f_counts, at, live, longest, part, CUT)
    equal = tl.zeros((RANKED, ROWS), dtype=tl.int32)
    equal_1 = tl.zeros((RANKED, ROWS), dtype=tl.int32)
    slots = tl.zeros((ROWS,), dtype=tl.int32)
    cuts = tl.zeros((ROWS,), dtype=tl.int32)
    for start in range(0, tl.minimum(first + RANKED, grid_rows), ROWS):
        other = start + tl.arange(0, ROWS)
        p_o, n_o, k_o, least_o, more_o = _lengths(
            p_counts, f_counts, group * grid_rows + other, other < grid_rows, longest, part, CUT
        )
        lower = other[None, :] < row[:, None]
        same = lower & (least_o[None, :] == least[:, None])
        if CUT:
            shorter = (k_o - more_o)[None, :]
            below = lower & (least_o[None, :] + 1 == least[:, None])
            above = lower & (least_o[None, :] == least[:, None] + 1)
            equal += tl.where(same, shorter, tl.where(below, more_o[None, :], 0))
            equal_1 += tl.where(same, more_o[None, :], tl.where(above, shorter, 0))
            is_cut = (other < first) & (k_o > 1)
            slots += tl.where(is_cut, k_o, 0)
            cuts += is_cut.to(tl.int32)
        else:
            equal += same.to(tl.int32)
    if CUT:
        own_slots = tl.where(k > 1, k, 0)
        own_cuts = (k > 1).to(tl.int32)
        tl.store(before + at * 4, tl.sum(equal, 1) * subs, mask=live)
        tl.store(before + at * 4 + 1, tl.sum(equal_1, 1) * subs, mask=live)
        slot = tl.sum(slots, 0) + tl.cumsum(own_slots, 0) - own_slots
        tl.store(before + at * 4 + 2, slot * subs, mask=live)
        cut = tl.sum(cuts, 0) + tl.cumsum(own_cuts, 0) - own_cuts
        tl.store(before + at * 4 + 3, cut * subs, mask=live)
    else:
        tl.store(before + at, tl.sum(equal, 1) * subs, mask=live)


@triton.jit(
    do_not_specialize=_COUNTED, do_not_specialize_on_alignment=("p_counts", "f_counts", "table", "before")
)
def _count(
    p_counts, f_counts, table, before, grid_rows, unit_tiles, subs, longest, part, width, chunks, row_chunks,
    programs, CUT: tl.constexpr, LENGTHS: tl.constexpr, RANKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first `programs` programs make the table; each other one ranks RANKED rows of a group."""
    program = tl.program_id(0)
    if program < programs:
        _tabulate(
            p_counts, f_counts, table, program, grid_rows, unit_tiles, subs, longest, part, width, chunks,
            CUT, LENGTHS, ROWS,
        )  # fmt: skip
    else:
        _rank(
            p_counts, f_counts, before, program - programs, grid_rows, subs, longest, part, row_chunks,
            CUT, RANKED, ROWS,
        )  # fmt: skip


@triton.jit
def _units_below(unit, group, period, of_group):
    """How many of the units before `unit` have the lists of `group`: in each `period`, `of_group` side by side."""
    within = tl.minimum(tl.maximum(unit % period - group * of_group, 0), of_group)
    return unit // period * of_group + within


@triton.jit
def _longer(table, n, live, first, last, groups, width, period, of_group, GROUPS: tl.constexpr):
    """Records of the units `first` to `last` - 1 with more blocks than `n`, and with at least as many; not cut."""
    more = n * 0
    enough = n * 0
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        times = _units_below(last, group, period, of_group) - _units_below(first, group, period, of_group)
        there = live[:, None] & ((group < groups) & (times > 0))[None, :]
        at = table + (group.to(tl.int64) * (width + 2))[None, :] + n[:, None]
        more += tl.sum(tl.load(at + 1, mask=there, other=0) * times[None, :], 1)
        enough += tl.sum(tl.load(at, mask=there, other=0) * times[None, :], 1)
    return more, enough


@triton.jit(
    do_not_specialize=_PLACED,
    do_not_specialize_on_alignment=(*_LISTS, "table", "before", "tiles", "count", "merges"),
)
def _place(
    p_starts, p_counts, f_starts, f_counts, table, before, tiles, count, merges,
    groups, grid_rows, unit_tiles, subs, longest, part, width, chunks, units, item_units, period, pack, positions,
    sections, ctas, capacity, extra,
    CUT: tl.constexpr, SECTIONS: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, UNUSED: tl.constexpr,
    GROUPS: tl.constexpr, FIELDS: tl.constexpr, MERGE_FIELDS: tl.constexpr,
):  # fmt: skip
    """The records of TILES tiles of one unit. SECTIONS: there is more than one section, and then nothing is cut.

    GROUPS: 1 if all units have the same lists.
    """
    unit = tl.program_id(0) // chunks
    tile = tl.program_id(0) % chunks * TILES + tl.arange(0, TILES)
    live = tile < unit_tiles
    of_group = period // groups
    own = unit % period // of_group
    row = tile // subs
    nth = tile % subs
    at = own * grid_rows + row
    p, n, k, least, more = _lengths(p_counts, f_counts, at, live, longest, part, CUT)

    # Records before these: of `least` blocks, and of one more.
    of_section = units // sections
    section = unit // of_section
    first = section * of_section
    longer = n * 0
    equal = n * 0
    longer_1 = n * 0
    equal_1 = n * 0
    slot = n * 0
    cut = n * 0
    alike = n * 0  # of the same section
    records = 0
    cuts = 0
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        under = _units_below(first, group, period, of_group)
        times = _units_below(first + of_section, group, period, of_group) - under
        earlier = (_units_below(unit, group, period, of_group) - under)[None, :]
        there = (group < groups) & (times > 0)
        line = table + group.to(tl.int64) * (width + 2)
        cell = line[None, :] + least[:, None]
        both = live[:, None] & there[None, :]
        of_0 = tl.load(cell, mask=both, other=0)
        of_1 = tl.load(cell + 1, mask=both, other=0)
        longer += tl.sum(of_1 * times[None, :], 1)
        equal += tl.sum((of_0 - of_1) * earlier, 1)
        if SECTIONS:
            alike += tl.sum((of_0 - of_1) * times[None, :], 1)
        if CUT:
            of_2 = tl.load(cell + 2, mask=both, other=0)
            longer_1 += tl.sum(of_2 * times[None, :], 1)
            equal_1 += tl.sum((of_1 - of_2) * earlier, 1)
            slots = tl.load(line + width, mask=there, other=0)[None, :]
            in_cuts = tl.load(line + width + 1, mask=there, other=0)
            slot += tl.sum(slots * earlier, 1)
            cut += tl.sum(in_cuts[None, :] * earlier, 1)
            records += tl.sum(tl.load(line, mask=there, other=0) * times, 0)
            cuts += tl.sum(in_cuts * times, 0)
    if CUT:
        equal += tl.load(before + at * 4, mask=live, other=0) + nth * (k - more)
        equal_1 += tl.load(before + at * 4 + 1, mask=live, other=0) + nth * more
        slot += tl.load(before + at * 4 + 2, mask=live, other=0) + tl.where(k > 1, nth * k, 0)
        cut += tl.load(before + at * 4 + 3, mask=live, other=0) + tl.where(k > 1, nth, 0)
    else:
        equal += tl.load(before + at, mask=live, other=0) + nth

    if not CUT:
        records = units * unit_tiles
    rank = longer + equal
    if SECTIONS:
        filled = of_section * unit_tiles // ctas * ctas
        behind = rank >= filled
        if GROUPS == 1:
            # Every section has the same lengths.
            enough = longer + alike
            late = rank - tl.maximum(longer, filled) + section * tl.maximum(enough - filled, 0)
            late += (sections - section) * tl.maximum(longer - filled, 0) + sections * filled
        elif tl.max((live & behind).to(tl.int32), 0) > 0:
            late = rank - tl.maximum(longer, filled)
            for each in range(sections):
                of_each = each * of_section
                over, enough = _longer(
                    table, n, live, of_each, of_each + of_section, groups, width, period, of_group, GROUPS
                )
                late += tl.maximum(tl.where(each < section, enough, over) - filled, 0)
            late += sections * filled
        else:
            late = rank
        rank = tl.where(behind, late, section * filled + rank)

    item = unit // item_units
    head = unit % item_units * pack
    p_start = tl.load(p_starts + at, mask=live, other=0)
    f_start = tl.load(f_starts + at, mask=live, other=0)
    last = records // ctas - 1
    most = 1
    if CUT:
        most = tl.max(k, 0)
    for i_0 in range(0, most, PARTS):
        i = (i_0 + tl.arange(0, PARTS))[None, :]
        ones = i * more[:, None] // k[:, None]  # parts of one block more, before
        begin = i * least[:, None] + ones
        end = (i + 1) * least[:, None] + (i + 1) * more[:, None] // k[:, None]
        one = end - begin > least[:, None]
        place = tl.where(one, (longer_1 + equal_1)[:, None] + ones, rank[:, None] + i - ones)
        turn = place // ctas
        back = (turn <= last) & ((last - turn) % 2 == 0)
        place = tl.where(back, turn * ctas + ctas - 1 - place % ctas, place)
        there = live[:, None] & (i < k[:, None]) & (place >= 0) & (place < capacity)
        p_begin = tl.minimum(begin, p[:, None])
        p_count = tl.minimum(end, p[:, None]) - p_begin
        empty = end == begin
        in_slot = slot[:, None] + i
        whole = (k[:, None] == 1) | (in_slot >= 2 * extra)
        where_p = tl.where(empty, -1, p_start[:, None] + p_begin)
        where_f = f_start[:, None] + begin - p_begin
        zero = place * 0
        even = tl.join(
            tl.join((tile * positions)[:, None] + zero, tl.where(empty, 1, p_count)),
            tl.join(head + zero, end - begin - p_count),
        )
        odd = tl.join(tl.join(item + zero, where_f), tl.join(where_p, tl.where(whole, -1, in_slot)))
        record = tl.reshape(tl.join(even, odd), (TILES, PARTS, FIELDS))
        r = (tiles + place.to(tl.int64) * FIELDS)[:, :, None] + tl.arange(0, FIELDS)[None, None, :]
        tl.store(tl.multiple_of(r, (1, 1, 16)), record, mask=there[:, :, None])
    if tl.program_id(0) == 0:
        tl.store(count, tl.minimum(records, capacity))
    if CUT:
        entry = merges + cut.to(tl.int64) * MERGE_FIELDS
        there = live & (k > 1) & (cut < extra)
        tl.store(entry, slot, mask=there)
        tl.store(entry + 1, tl.where(slot + k <= 2 * extra, k, 0), mask=there)
        tl.store(entry + 2, item + k * 0, mask=there)
        tl.store(entry + 3, head + k * 0, mask=there)
        tl.store(entry + 4, tile * positions, mask=there)
        field = tl.arange(0, 8)[None, :]
        for start in range(tl.program_id(0) * UNUSED, extra, tl.num_programs(0) * UNUSED):
            unused = start + tl.arange(0, UNUSED)
            spot = merges + unused.to(tl.int64)[:, None] * MERGE_FIELDS + field
            absent = (unused >= cuts) & (unused < extra)
            tl.store(
                spot, tl.zeros((UNUSED, 8), dtype=tl.int32), mask=absent[:, None] & (field < MERGE_FIELDS)
            )


def schedule(p: AttentionProblem, mask: BlockMask, shape: TileShape) -> AttentionSchedule:
    """The schedule of `mask` for `p`. No sync on a GPU."""
    if plan.tiles_of(p, shape) and mask.full.starts.is_cuda:
        return launched(p, mask, shape)
    return plan.schedule(p, mask, shape)


def launched(p: AttentionProblem, mask: BlockMask, shape: TileShape) -> AttentionSchedule:
    """The schedule of at least one tile: two launches and one allocation. `tiles` beyond `count` hold anything."""
    device, tiles = mask.device, plan.tiles_of(p, shape)
    cut = plan.is_cut(p, shape)
    part = plan.part_blocks(p, shape)
    extra = plan.room_for_parts(p, mask, shape) if cut else 0
    sections = 1 if cut else plan.sections(p)
    longest = min(p.longest, part) if cut else p.longest
    groups, grid_rows = mask.batch * mask.heads, mask.grid[0]
    item_units = p.q_heads // shape.pack
    units = p.batch * item_units
    unit_tiles = tiles // units
    width = longest + 3  # a part may be one block longer than the shortest; nothing is longer than that
    lines = -(-width // LENGTHS)
    numbers = groups * grid_rows * (4 if cut else 1)
    merged = (extra, MERGE_FIELDS) if cut else None
    _, (made, count, merges, table, before) = carved(
        [(tiles + extra, FIELDS), 1, merged, groups * (width + 2), numbers], device
    )

    subs = mask.block[0] // shape.positions
    sizes = (grid_rows, unit_tiles, subs, p.longest, part, width)
    (p_starts, p_counts, _), (f_starts, f_counts, _) = mask.partial, mask.full
    programs, row_chunks = groups * lines, -(-grid_rows // RANKED)
    args = (p_counts, f_counts, table, before, *sizes, lines, row_chunks, programs)
    constants = (cut, LENGTHS, RANKED, ROWS)
    launch_unspecialized(_count, device, programs + groups * row_chunks, args, constants, WARPS)

    together = CUT_TILES if cut else TILES
    chunks = -(-unit_tiles // together)
    args = (
        p_starts, p_counts, f_starts, f_counts, table, before, made, count, count if merges is None else merges,
        groups, *sizes, chunks, units, item_units, units if mask.batch > 1 else item_units, shape.pack,
        shape.positions, sections, shape.ctas, len(made), extra,
    )  # fmt: skip
    parts, lists = PARTS if cut else 1, GROUPS if groups > 1 else 1
    constants = (cut, sections > 1, together, parts, UNUSED, lists, FIELDS, MERGE_FIELDS)
    launch_unspecialized(_place, device, units * chunks, args, constants, PLACE_WARPS)
    return AttentionSchedule(made, count, shape.ctas, merges, 2 * extra)
