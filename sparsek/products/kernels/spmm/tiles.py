"""The tiles of C = A @ B for a BSR A, made on its device in plain Triton: those of `plan.schedule.balance`, bit by bit.

    rank     units by their steps, longest first                                            ranked
    order    for every width of column groups: each tile's place in the order of beginning  tile_of, cost_of
    deal     one program for each width and number of CTAs: the next tile to the least load who, spans
    place    the best of these; one program for each CTA lists its tiles                    tiles, starts

No sync: what the host needs to know are sizes. Block rows of one length, as of `scope="row"`, have one width and take
turns, so `deal` has nothing to do. Otherwise it takes 30 ns a tile, one after the other, on one SM for each of its
programs: a tile of 8192 x 8192 x 8192 takes a CTA some 13 us.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.kernels.spmm.multiply import RECORD
from sparsek.products.plan.schedule import ENOUGH, GAIN, LOPSIDED, fewest, groups_of, weight_of

# Units, tiles and blocks of one program; what it compares or lists at once.
RANKED, COMPARED, ORDERED, LISTED = 128, 32, 128, 512
# `deal` keeps the load of a CTA and its number in 31 bits.
LOAD_BITS = 20


@triton.jit
def _costs(indptr, unit, live, slices):
    """The steps of units, and one for each tile; 0 for those that are not live."""
    row = unit // slices
    first = tl.load(indptr + row, mask=live, other=0)
    last = tl.load(indptr + row + 1, mask=live, other=-1)
    return last - first + 1


@triton.jit(do_not_specialize=["units", "slices"], do_not_specialize_on_alignment=["indptr", "ranked"])
def _rank(indptr, ranked, units, slices, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """ranked: the units, longest first; their costs; the sum of these."""
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = unit < units
    cost = _costs(indptr, unit, live, slices)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    total = 0
    for done in range(0, units, STEP):
        other = done + tl.arange(0, STEP)
        costs = _costs(indptr, other, other < units, slices)
        more = costs[:, None] - cost[None, :]
        ahead = (more > 0) | ((more == 0) & (other[:, None] < unit[None, :]))
        place += tl.sum(ahead.to(tl.int32), 0)
        total += tl.sum(costs, 0)
    tl.store(ranked + place, unit, mask=live)
    tl.store(ranked + units + place, cost, mask=live)
    if tl.program_id(0) == 0:
        tl.store(ranked + 2 * units, total)


@triton.jit
def _is_even(ranked, units):
    """Whether all units have as many steps."""
    return tl.load(ranked + units) == tl.load(ranked + 2 * units - 1)


_ORDER = ("units", "columns", "count", "workers", "fewer", "base", "widths", "depth")


@triton.jit(do_not_specialize=_ORDER, do_not_specialize_on_alignment=["ranked", "tile_of", "cost_of", "who"])
def _order(
    ranked, tile_of, cost_of, who, units, columns, count, workers, fewer, base, widths, depth, BLOCK: tl.constexpr
):  # fmt: skip
    """Row `option` of tile_of and cost_of: tiles, unit * columns + column, in the order in which they begin.

    A tile's key is the cost of all groups up to its own, over the CTAs, less its own cost. The tiles of a group are
    sorted like the units; so those of another group that come before are found by bisection. Groups further away than
    the longest and the shortest tile differ lie before or behind as a whole.
    """
    option = tl.program_id(0) % widths
    even = _is_even(ranked, units)
    if (option == 0) | (even == 0):
        longest = tl.load(ranked + units)
        shortest = tl.load(ranked + 2 * units - 1)
        total = tl.load(ranked + 2 * units).to(tl.int64)
        width = tl.where(option == widths - 1, columns, base << option)
        full = units * width
        groups = (columns + width - 1) // width
        at = tl.program_id(0) // widths * BLOCK + tl.arange(0, BLOCK)
        live = at < count
        group = tl.minimum(at // full, groups - 1)
        wide = tl.minimum(width, columns - group * width)
        within = at - group * full
        rank = within // wide
        unit = tl.load(ranked + rank, mask=live, other=0)
        cost = tl.load(ranked + units + rank, mask=live, other=0)
        column = group * width + within % wide
        ends = tl.minimum((group + 1) * width, columns)

        reach = ((longest - shortest) * workers // (total * width)).to(tl.int32) + 2
        first = tl.maximum(group - reach, 0)
        place = within + first * full
        for step in range(2 * reach + 1):
            other = first + step
            there = live & (other != group) & (other < groups) & (other <= group + reach)
            other_ends = tl.minimum((other + 1) * width, columns)
            bound = cost.to(tl.int64) * workers + (other_ends - ends).to(tl.int64) * total
            low = tl.zeros((BLOCK,), dtype=tl.int32)
            high = tl.where(there, units, 0)
            for _ in range(depth):
                middle = (low + high) // 2
                open_ = low < high
                its = tl.load(ranked + units + middle, mask=open_, other=0).to(tl.int64) * workers
                which = tl.load(ranked + middle, mask=open_, other=0)
                before = (its > bound) | ((its == bound) & (which < unit))
                low = tl.where(open_ & before, middle + 1, low)
                high = tl.where(open_ & (before == 0), middle, high)
            place += tl.where(there, low * tl.minimum(width, columns - other * width), 0)
        tl.store(tile_of + option * count + place, unit * columns + column, mask=live)
        tl.store(cost_of + option * count + place, cost, mask=live)
        if even:
            tl.store(who + count + place, place % fewer, mask=live)


@triton.jit(
    do_not_specialize=["units", "count", "workers", "fewer"],
    do_not_specialize_on_alignment=["ranked", "cost_of", "who", "spans"],
)
def _deal(ranked, cost_of, who, spans, units, count, workers, fewer, LANES: tl.constexpr):
    """Row 2 * option + variant of who: the CTA of each tile; variant 1 has fewer CTAs. `spans`: the fullest one's load.

    A load times LANES plus the number of the CTA: the least of these is the least load of the first CTA.
    """
    row = tl.program_id(0)
    if (_is_even(ranked, units) == 0) & ((row % 2 == 0) | (fewer < workers)):
        ctas = tl.where(row % 2 == 0, workers, fewer)
        lane = tl.arange(0, LANES)
        load = tl.where(lane < ctas, lane, 2147483647)
        cost_of += row // 2 * count
        who += row * count
        following = tl.load(cost_of)
        for i in range(count):
            cost = following
            following = tl.load(cost_of + tl.minimum(i + 1, count - 1))
            least = tl.min(load, 0)
            tl.store(who + i, least & (LANES - 1))
            load += tl.where(load == least, cost * LANES, 0)
        tl.store(spans + row, tl.max(tl.where(lane < ctas, load // LANES, 0), 0))


_PLACE = (
    "units", "columns", "count", "workers", "fewer", "widths", "last_weight", "slices", "bm", "tile_rows", "tile_cols",
    "nnzb", "share",
)  # fmt: skip
_PLACED = ("indptr", "ranked", "tile_of", "who", "spans", "tiles", "starts", "blocks")


@triton.jit(do_not_specialize=_PLACE, do_not_specialize_on_alignment=_PLACED)
def _place(
    indptr, ranked, tile_of, who, spans, tiles, starts, blocks,
    units, columns, count, workers, fewer, widths, last_weight, slices, bm, tile_rows, tile_cols, nnzb, share,
    GAIN: tl.constexpr, ENOUGH: tl.constexpr, LOPSIDED: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The records of one CTA, in their order, and its share of the numbers of the stored blocks."""
    option, variant = 0, 1
    if _is_even(ranked, units) == 0:
        total = tl.load(ranked + 2 * units).to(tl.int64)
        bound = tl.maximum(tl.load(ranked + units).to(tl.int64) * workers, total * columns)
        best = tl.cast(9223372036854775807, tl.int64)
        going = 1
        for each in range(widths):
            span = tl.load(spans + 2 * each).to(tl.int64)
            weight = tl.where(each == widths - 1, last_weight, (GAIN + each) * 65536)
            rated = span * weight
            better = (going != 0) & (rated < best)
            option = tl.where(better, each, option)
            best = tl.where(better, rated, best)
            going = tl.where(span * workers * ENOUGH <= bound * (ENOUGH + 1), 0, going)
        wide, narrow = tl.load(spans + 2 * option), tl.load(spans + 2 * option + 1)
        variant = tl.where((fewer < workers) & (narrow <= wide), 1, 0)
    who += (2 * option + variant) * count
    tile_of += option * count
    longest = tl.load(ranked + units).to(tl.int64)
    turns = (longest * units <= LOPSIDED * tl.load(ranked + 2 * units).to(tl.int64)).to(tl.int32)
    me = tl.program_id(0)
    lane = tl.arange(0, LISTED)
    begin = 0
    for done in range(0, count, LISTED):
        each = tl.load(who + done + lane, mask=done + lane < count, other=2147483647)
        begin += tl.sum((each < me).to(tl.int32), 0)
    tl.store(starts + me, begin)
    mine_from = begin
    field = tl.arange(0, 8)[None, :]
    for done in range(0, count, LISTED):
        each = tl.load(who + done + lane, mask=done + lane < count, other=2147483647)
        mine = each == me
        held = tl.cumsum(mine.to(tl.int32), 0)
        tile = tl.load(tile_of + done + lane, mask=mine, other=0)
        unit = tile // columns
        row = unit // slices
        inside = tl.minimum(unit % slices * tile_rows, tl.maximum(bm - tile_rows, 0))
        first = tl.load(indptr + row, mask=mine, other=0)
        last = tl.load(indptr + row + 1, mask=mine, other=0)
        record = tl.where(field == 0, first[:, None], tl.where(field == 1, last[:, None], 0))
        record = tl.where(field == 2, (row * bm + inside)[:, None], record)
        record = tl.where((field == 3) | (field == 4), (tile % columns * tile_cols)[:, None], record)
        record = tl.where(field == 5, -1, tl.where(field == 6, inside[:, None], record))
        nth = begin + held - 1
        record = tl.where(field == 7, ((nth - mine_from) % 2 * turns)[:, None], record)
        to = nth.to(tl.int64) * 8
        tl.store(tiles + to[:, None] + field, record, mask=mine[:, None])
        begin += tl.sum(mine.to(tl.int32), 0)
    if me == workers - 1:
        tl.store(starts + workers, count)
        spare = tl.arange(0, 16)
        tl.store(tiles + tl.cast(count, tl.int64) * 8 + spare, tl.where(spare == 5, -1, 0))
    for done in range(0, share, LISTED):
        at = me * share + done + lane
        tl.store(blocks + at, at, mask=(done + lane < share) & (at < nnzb))


class DeviceTiles(NamedTuple):
    """CTA p computes records starts[p] to starts[p + 1] - 1 of `tiles` int32 [tiles + 2, RECORD]. `blocks` int32 [nnzb]
    are the numbers of the stored blocks.
    """

    tiles: Tensor
    starts: Tensor
    blocks: Tensor


def device_tiles(
    pattern: BlockPattern, n: int, tile_rows: int, tile_cols: int, workers: int
) -> DeviceTiles | None:
    """The tiles of a [M, n] product on the pattern's device, without a sync.

    None on a CPU, unless Triton's interpreter runs, and where there are none, or so many that `deal` cannot count them.
    """
    indptr, bm, rows = pattern.indptr, pattern.block[0], pattern.grid[0]
    slices, columns = max(1, -(-bm // tile_rows)), -(-n // tile_cols)
    units, reached = rows * slices, pattern.shape[0] - (rows - 1) * bm
    if reached < bm:  # slices of the last block row that lie below the matrix
        units -= sum(min(each * tile_rows, max(bm - tile_rows, 0)) >= reached for each in range(slices))
    count = units * columns
    ctas, lanes = min(workers, count), 1 << max(0, workers - 1).bit_length()
    if not (indptr.is_cuda or env.interpreting()) or not count or lanes > 1 << (31 - LOAD_BITS):
        return None
    if (slices * pattern.nnzb + units) * columns // ctas + pattern.grid[1] + 1 >= 1 << LOAD_BITS:
        return None
    fewer, groups = fewest(count, ctas), groups_of(units, columns, workers)
    widths, nnzb = len(groups), pattern.nnzb
    tiles, starts = _split(indptr, (count + 2) * RECORD.value, ctas + 1)
    blocks = torch.empty(nnzb, dtype=torch.int32, device=indptr.device)
    ranked, tile_of, cost_of, who, spans = _split(
        indptr, 2 * units + 1, widths * count, widths * count, 2 * widths * count, 2 * widths
    )
    sizes, device = (units, columns, count, ctas, fewer), indptr.device
    ordered = (*sizes, groups[0], widths, units.bit_length() + 1)
    shape = (
        widths,
        weight_of(groups[-1], groups[0]),
        slices,
        bm,
        tile_rows,
        tile_cols,
        nnzb,
        -(-nnzb // ctas),
    )
    launch_unspecialized(
        _rank, device, -(-units // RANKED), (indptr, ranked, units, slices), (RANKED, COMPARED), 4
    )
    chunks = -(-count // ORDERED)
    launch_unspecialized(
        _order, device, widths * chunks, (ranked, tile_of, cost_of, who, *ordered), (ORDERED,), 4
    )
    dealt = ranked, cost_of, who, spans, units, count, ctas, fewer
    launch_unspecialized(_deal, device, 2 * widths, dealt, (lanes,), 1)
    lists = indptr, ranked, tile_of, who, spans, tiles, starts, blocks
    launch_unspecialized(_place, device, ctas, (*lists, *sizes, *shape), (GAIN, ENOUGH, LOPSIDED, LISTED), 4)
    return DeviceTiles(tiles.view(-1, RECORD.value), starts, blocks)


def _split(like: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Uninitialised int32 tensors of these sizes, in one allocation."""
    return torch.empty(sum(sizes), dtype=torch.int32, device=like.device).split(sizes)
