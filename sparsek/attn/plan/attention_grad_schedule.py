"""The schedule of attention's backward pass: key tiles, the query tiles that visit each, and the order of adding dQ.

A CTA holds a tile of keys and walks its *visits*: the query tiles of every query head of the group that see it. Key
tiles are ordered longest first, in sections of heads whose queries and dQ fit in L2 together. The CTA that finishes
first takes the next tile (Graham 1966), by the schedule's own clock: a tick per visit, and TILE_TICKS per tile. CTAs
start in their lists a golden section apart, so that their sums do not collide in the same rows. If order does not
matter and no head fits in L2, all CTAs start at the same rows, to share their reads and additions.

Where every query tile sees all key tiles, or those up to its own, CTAs start one visit apart instead (`walk_of`): they
follow each other through few rows, which stay in L2. Of a triangle, every second wave of tiles is walked backwards:
CTAs become free one after the other, and all start at the last query tile.

Where the visits of one query tile are all of neighbouring key tiles, as in a window, CTAs that take these together wait
for each other's additions. `band_sections` then makes larger sections, whose heads take each column in turn.

A key tile may be cut into parts (`tile_parts`). Each has the visits of some of the group's heads, or of a range of
query tiles of one head, and sums dK and dV of its own. Parts are assigned as key tiles of more heads are. So those of
the same heads and range share a section, whose queries and dQ fit in L2 where those of a whole group do not. A tile
that every query sees, such as a sink, is spread over many CTAs. Parts without a visit are left out.

A query tile's dQ is a sum over visits of many CTAs. For reproducible bits it is added in the order of that clock.
Each CTA processes its visits in the same order, so no wait can deadlock while all CTAs run.

This is the specification, and makes the schedules of masks on the CPU; attn/kernels/backward/schedule_bwd.py makes the
same on a GPU.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.data import MaskPart
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import padded_heads
from sparsek.attn.plan.problems import TILE_ROWS, AttentionProblem

TILE_FIELDS = 8
VISIT_FIELDS = 4
FULL = -1  # entry of a full block
NO_TICKET = -1
TILE_TICKS = 2  # begin and end of a tile, in visits
NEVER = 1 << 40  # in ticks
SECTION = 0.4  # of L2, for what the CTAs of a section read and add to
BAND = 0.7  # of L2, for the rows in use where the heads of a section take each column in turn
SHORTEST = 8  # visits of a part of a tile that every query sees
ROOM = 1 << 27  # bytes of the sums of parts, at least
CHOSEN = 16  # blocks of a token, as far as parts depend on them
GOLDEN_BITS = 16
GOLDEN = 25033  # 2^16 times the golden section of a list, between the starts of two CTAs: no two of many come close


class GradSchedule(NamedTuple):
    """CTA p computes tiles starts[p] to starts[p + 1] - 1.

    `tiles` int32 [tiles, TILE_FIELDS]: batch item, head of keys, first key, first visit, pairs of steps that hold all
    visits of partial blocks, pairs of steps, visits, number of the tile or part. Visits of partial blocks come first.
    `visits` int32 [capacity, VISIT_FIELDS]: first query, query head, entry of the mask's partial list or FULL, ticket.
    Query rows are padded to `rows`; if a visit is one step, the last 64 stand for absent visits. Where each tile is cut
    into `parts`, part i of key block j of head g of item b has number ((b * kv_heads + g) * parts + i) * columns + j,
    and `lengths`, int32 by number, has its visits; of `tiles` only the first starts[ctas] are there.
    """

    tiles: Tensor
    starts: Tensor
    visits: Tensor
    ctas: int
    rows: int
    lengths: Tensor
    parts: int = 1

    def imbalance(self) -> float:
        """Ticks of the fullest CTA over the mean. Syncs."""
        if not len(self.tiles):
            return 1.0
        done = torch.cat((self.tiles.new_zeros(1), (self.tiles[:, 6] + TILE_TICKS).cumsum(0)))
        load = done[self.starts.long()].diff().double()
        return float(load.max() / load.mean())


class KeyBlockLists(NamedTuple):
    """The mask's blocks by key block: `edges` [2 * lists + 1], and for each block its query tile and partial entry.

    List (b * heads + h) * Nb + j has the partial blocks of key block j; `lists` later are its full ones.
    """

    edges: Tensor
    tile: Tensor
    entry: Tensor


class TileParts(NamedTuple):
    """How key tiles are cut: a part has `heads` query heads of the group, and one of `ranges` of query tiles."""

    heads: int
    ranges: int

    def count(self, p: AttentionProblem) -> int:
        return p.group // self.heads * self.ranges

    def tiles(self, p: AttentionProblem) -> int:
        """Query tiles of a range; the last may have fewer."""
        return -(-p.grid[0] // self.ranges) if self.ranges > 1 else max(1, p.grid[0])

    def of(self, p: AttentionProblem) -> AttentionProblem:
        """The problem whose heads of keys have one part each."""
        heads = p.kv_heads * self.count(p)
        length = self.tiles(p) * p.block[0] if self.ranges > 1 else p.q_len
        return replace(p, q_heads=heads * self.heads, kv_heads=heads, q_len=length)


def tile_parts(p: AttentionProblem, ctas: int) -> TileParts:
    """The parts of key tiles: one, but more in a mask by members.

    There a group is one packed head or few, and its rows may be far more than fit in L2. Its tokens' lists have sinks.
    The parts depend on shapes only: sizes are bounds first and true ones later, and the order of sums stays. The parts
    are so many that the rows of CTAs that run together fit in L2. A part of a tile that every query sees is at most
    half a CTA's share, if tiles have as many blocks as lists of CHOSEN. It has at least SHORTEST visits. There are no
    more float32 sums of keys than of queries, or than ROOM bytes.
    """
    p = p.leading
    (tiles, columns), heads = p.grid, p.batch * p.kv_heads
    visits = p.group * tiles if heads else 0
    if not (p.members and visits and columns):
        return TileParts(p.group, 1)
    together = -(-19 * ctas // (10 * columns))  # heads of a section at least, as in `sections`
    in_l2 = -(-visits * together // max(1, band_room(replace(p, kv_heads=p.q_heads))))
    listed = min(columns, CHOSEN * TILE_ROWS // p.members)  # prose: allow
    even = -(-2 * ctas // (heads * max(1, listed * p.members // p.block[0])))
    dim, v_dim = padded_heads(p)
    one = 4 * heads * columns * p.block[1] * (dim + v_dim)  # bytes of sums of all keys
    room = max(ROOM, 4 * p.batch * p.q_heads * p.q_len * dim) // one
    most = max(1, min(max(in_l2, even), room, visits // SHORTEST))
    if most <= p.group:
        of_part = max(
            each for each in range(1, p.group + 1) if p.group % each == 0 and p.group // each >= most
        )
        return TileParts(of_part, 1)
    ranges = min(-(-most // p.group), tiles)
    return TileParts(1, -(-tiles // -(-tiles // ranges)))


def padded_rows(p: AttentionProblem) -> int:
    """Query rows with the ends of tiles, plus 64 for absent visits if a visit is one step."""
    return p.grid[0] * p.block[0] + (64 if p.block[0] == 64 else 0)


def heads_in_section(p: AttentionProblem) -> int:
    """Number of key heads whose q and grad, of two bytes, and dq, of four, fit in a section's share of L2."""
    return int(SECTION * p.card.l2_bytes / (2 * (3 * p.dim + p.v_dim) * max(1, p.q_len) * p.group))


def sections(p: AttentionProblem, ctas: int) -> int:
    """The number of sections of heads. They are even, with at least nearly two tiles per CTA: a small one at the end
    leaves CTAs idle.
    """
    heads, columns = p.batch * p.kv_heads, max(1, p.grid[1])
    return -(-heads // max(heads_in_section(p), -(-19 * ctas // (10 * columns))))


def band_room(p: AttentionProblem) -> int:
    """Query tiles whose q, grad and dq fit in the share of L2 for rows in use, of every query head of a group."""
    return int(BAND * p.card.l2_bytes / (2 * (3 * p.dim + p.v_dim) * p.block[0] * p.group))


def band_sections(p: AttentionProblem, n: Tensor, span: int, ctas: int) -> int:
    """The number of sections whose heads take each column in turn, or 0 for a mask that does not gain.

    The CTAs then work on ctas / heads neighbouring key tiles of each head of a section. Let `span` be the most key
    blocks from the first to the last of a query tile. With about `span` tiles of a head or fewer, a query tile's
    visits are spread over more than one tile of a CTA, and wait less for each other. Where all heads are too few for
    that, up to twice as many tiles still gain. The rows in use, ctas + heads * span query tiles, must fit in L2. Tiles
    must be about equally long, or else those next in line are no neighbours. Syncs.
    """
    heads = max(1, p.batch * p.kv_heads)
    count = max(1, heads * (span + 1) // ctas)
    reach = -(-heads // count) * span
    fits = ctas <= 2 * reach and ctas + reach <= band_room(p)
    even = 4 * int(n.max()) * len(n) <= 5 * int(n.sum())
    return count if fits and even and count < sections(p, ctas) else 0


def walks(p: AttentionProblem) -> bool:
    """Whether a visit is long beside handing over a turn: two steps of wide heads."""
    return p.block == (128, 128) and max(padded_heads(p)) > 64


def walk_of(p: AttentionProblem, n: Tensor) -> tuple[bool, bool]:
    """Whether the tiles of a wave start one visit apart, and whether those of every second wave go backwards. Syncs.

    A wave is as many tiles of a section as there are CTAs. Counts decide: all query tiles visit every tile, or, of a
    square mask, those from its own on. In such masks no tile is far longer than the mean, and `band_sections` are none.
    """
    most, visits = p.group * p.grid[0], int(n.sum())
    if not walks(p) or not len(n) or int(n.max()) != most:
        return False, False
    triangle = p.grid[0] == p.grid[1] and 2 * visits == (most + p.group) * len(n)
    return triangle or visits == most * len(n), triangle


def deal(ticks: Tensor, ctas: int) -> tuple[Tensor, Tensor]:
    """The CTA and start time of every tile, int32: the first CTA to finish takes the next tile. Syncs."""
    free = [(0, cta) for cta in range(ctas)]
    dealt = []
    for each in ticks.tolist():
        began, cta = free[0]
        dealt.append((cta, began))
        heapq.heapreplace(free, (began + each, cta))
    made = torch.tensor(dealt, dtype=torch.int32, device=ticks.device).view(-1, 2)
    return made[:, 0], made[:, 1]


def schedule(
    p: AttentionProblem, mask: BlockMask, ctas: int, *, ordered: bool = True, cut: TileParts | None = None
) -> GradSchedule:
    """The key tiles and visits of `mask` for `p`, whose tiles are whole or `cut`. Without `ordered` no visit has a
    ticket. Syncs on a GPU.
    """
    device, (tiles, columns), rows = mask.device, mask.grid, padded_rows(p)
    cut = cut or TileParts(p.group, 1)
    group, ranges, parts, q_heads, visited = cut.heads, cut.ranges, cut.count(p), p.q_heads, p.visited
    given, p = p, cut.of(p)
    single = p.block[0] == 64
    listed = by_key_block(mask, cut)
    lists = _lists_of(p, mask, q_heads, ranges)  # [B, parts of all heads, Nb, 2, group]
    counts = listed.edges.diff()[lists]
    n, partial = counts.sum((-1, -2)).flatten(), counts[..., 0, :].sum(-1).flatten()
    odd = n % 2 if single else torch.zeros_like(n)
    band = (
        band_sections(p, n, span_of_rows(mask), ctas)
        if ordered and parts == 1 and mask.rows and len(n)
        else 0
    )
    line = _lined_up(p, n, band or sections(p, ctas), in_turn=band > 0)
    line = line if parts == 1 else line[n[line] > 0]
    taker, began = deal((n + odd + TILE_TICKS)[line].int(), ctas)
    cta, start = torch.zeros_like(n), torch.zeros_like(n)
    cta[line], start[line] = taker.long(), began.long()

    own = counts.flatten().clone()
    own[2 * group - 1 :: 2 * group] += odd
    ends = own.cumsum(0)
    capacity = visited + (len(n) if single else 0)
    number = torch.arange(capacity, device=device)
    listing = torch.searchsorted(ends, number, right=True).clamp(max=len(own) - 1)
    tile = listing // (2 * group)
    within = number - (ends - own)[listing]
    length = counts.flatten()[listing]
    there = within < length
    begin = listed.edges[lists.flatten()[listing]]
    apart = cta[tile] * GOLDEN % (1 << GOLDEN_BITS) * length >> GOLDEN_BITS
    turned = apart if ordered or heads_in_section(p) else torch.zeros_like(length)
    at = (within + turned) % length.clamp(min=1)
    follow, back = walk_of(p, n) if ordered and parts == 1 else (False, False)
    if follow:
        nth = _places(p, line, sections(p, ctas))[tile]
        at = (within + nth % ctas) % length.clamp(min=1)
        at = torch.where(back & (nth // ctas % 2 == 1), length - 1 - within, at)
    at = torch.where(there, begin + at, 0)
    query = listed.tile[at]
    item, kv_head = tile // (p.kv_heads * columns), tile // columns % p.kv_heads
    head = kv_head // ranges * group + listing % group

    visits = torch.empty(capacity, VISIT_FIELDS, dtype=torch.int32, device=device)
    visits[:, 0] = torch.where(there, query * p.block[0], rows - 64)
    visits[:, 1] = head
    visits[:, 2] = torch.where(there, listed.entry[at], FULL)
    visits[:, 3] = NO_TICKET
    firsts = (n + odd).cumsum(0) - n - odd
    if ordered:
        clock = start[tile] + number - firsts[tile]
        queue = torch.where(there, (item * q_heads + head) * tiles + query, p.batch * q_heads * tiles)
        visits[:, 3] = torch.where(there, _tickets(queue, clock), NO_TICKET)

    return _of_tiles(given, line, taker, (n, partial), visits, ctas, parts)


def _of_tiles(
    p: AttentionProblem, line: Tensor, taker: Tensor, counts: Any, visits: Tensor, ctas: int, parts: int
) -> GradSchedule:
    """The schedule with the tiles of `line`, or their parts, each by its taker. `counts`: visits of all by number, and
    those of partial blocks.
    """
    (n, partial), columns, single, device = counts, p.grid[1], p.block[0] == 64, visits.device
    ticks = n + n % 2 if single else n
    records = torch.zeros(len(n), TILE_FIELDS, dtype=torch.int32, device=device)
    every = torch.arange(len(n), device=device)
    masked, pairs = ((partial + 1) // 2, ticks // 2) if single else (partial, n)
    fields = (
        every // (p.kv_heads * parts * columns),
        every // (parts * columns) % p.kv_heads,
        every % columns * p.block[1],
    )
    for field, each in enumerate((*fields, ticks.cumsum(0) - ticks, masked, pairs, ticks, every)):
        records[:, field] = each
    own, order = torch.sort(taker, stable=True)
    starts = torch.searchsorted(own, torch.arange(ctas + 1, dtype=torch.int32, device=device), out_int32=True)
    return GradSchedule(records[line[order]], starts, visits, ctas, padded_rows(p), n.int(), parts)


class WholeTiles(NamedTuple):
    """Key tiles of the schedule of a whole mask that a part has, or their parts, in the order of CTAs.

    `item`: the batch item of their lists. `column`, `number`: those of the part. `first`, `ticks`: their visits in the
    schedule of the whole, and `began` their start by its clock.
    """

    item: Tensor
    column: Tensor
    number: Tensor
    first: Tensor
    ticks: Tensor
    began: Tensor

    @classmethod
    def of(cls, p: AttentionProblem, mask: BlockMask, part: MaskPart, whole: GradSchedule) -> WholeTiles:
        records = whole.tiles[: int(whole.starts[-1])].long()
        item, head, key, first, _, _, ticks, number = records.unbind(1)
        head, column, lists = head - part.first, key // p.block[1], item * (mask.batch > 1)
        known = head.clamp(0, p.kv_heads - 1)
        if part.blocks is not None:
            column = part.blocks[lists * mask.heads + known * p.group // (p.q_heads // mask.heads), column]
        nth = number // p.leading.grid[1] % whole.parts
        number = ((item * p.kv_heads + known) * whole.parts + nth) * mask.grid[1] + column
        ends = (ticks + TILE_TICKS).cumsum(0)
        began = ends - ticks - TILE_TICKS
        every = torch.arange(len(ticks), device=ticks.device)
        first_of = whole.starts.long()[torch.searchsorted(whole.starts[1:].long(), every, right=True)]
        here = (head == known) & (column >= 0)
        return cls(*(x[here] for x in (lists, column, number, first, ticks, began - began[first_of])))


def restricted(p: AttentionProblem, mask: BlockMask, part: MaskPart, whole: GradSchedule) -> GradSchedule:
    """The schedule of a part of a mask from that of the whole: the visits that the part has, in the same order.

    A key tile whose visits are all here sums dK and dV as in the whole, in as many parts. So does a query tile with
    dQ: tickets count the visits that are here. Then tiles of one CTA do not overlap by the clock of the whole, which
    both orders follow, so no wait can deadlock. Without `part.dq` tiles and tickets are as in `schedule`. Key tiles
    that the whole lacks visit nothing. Syncs.
    """
    q_tiles, device, rows = mask.grid[0], mask.device, padded_rows(p)
    there = WholeTiles.of(p, mask, part, whole)
    tile = torch.repeat_interleave(there.ticks)
    before = there.ticks.cumsum(0) - there.ticks
    place = torch.arange(len(tile), device=device) + (there.first - before)[tile]
    query, head, entry, ticket = whole.visits[place].long().unbind(1)
    query, head = query // p.block[0], head - part.first * p.group
    lists = there.item[tile] * mask.heads + head // (p.q_heads // mask.heads)
    known = query < p.leading.grid[0]  # others fill up a step
    if part.tiles is not None:
        query = part.tiles[lists, torch.where(known, query, 0)]
        known &= query >= 0
    # By the numbers of key tiles; the visits of each stay in their order.
    kept = known.nonzero().flatten()
    kept = kept[torch.sort(there.number[tile[kept]], stable=True)[1]]
    tile, query, head, entry, ticket, lists = (x[kept] for x in (tile, query, head, entry, ticket, lists))

    number, masked, single = there.number[tile], entry != FULL, p.block[0] == 64
    count = p.batch * p.kv_heads * whole.parts * mask.grid[1]
    n, partial = torch.bincount(number, minlength=count), torch.bincount(number[masked], minlength=count)
    ticks = n + (n % 2 if single else 0)
    every = torch.arange(len(number), device=device)
    place = every + (ticks.cumsum(0) - ticks - n.cumsum(0) + n)[number]
    if part.dq:
        began = torch.full_like(n, NEVER)
        began[there.number] = there.began
        ended = began.index_add(0, there.number, there.ticks + TILE_TICKS)
        line = torch.sort(began, stable=True)[1]
    else:
        heads = replace(p, kv_heads=p.kv_heads * whole.parts, q_heads=p.q_heads * whole.parts)
        line = _lined_up(heads, n, sections(heads, whole.ctas), in_turn=False)
    line = line if whole.parts == 1 else line[n[line] > 0]
    if part.dq:
        clock = ticket
        taker = _shared_out(began[line], ended[line], (ticks + TILE_TICKS)[line], whole.ctas)
    else:
        taker, start = deal((ticks + TILE_TICKS)[line], whole.ctas)
        clock = (
            torch.zeros_like(n).index_copy(0, line, start.long())[number] + every - (n.cumsum(0) - n)[number]
        )

    row = lists * q_tiles + query
    entry[masked] = _partial_entries(mask, row[masked], there.column[tile[masked]])
    queue = (number // max(1, count // max(1, p.batch)) * p.q_heads + head) * q_tiles + query
    ticket = torch.where(ticket < 0, ticket, _tickets(queue, clock))
    capacity = p.visited + (count if single else 0)
    visits = torch.tensor((rows - 64, 0, FULL, NO_TICKET), dtype=torch.int32, device=device).repeat(
        capacity, 1
    )
    visits[place] = torch.stack((query * p.block[0], head, entry, ticket), 1).int()
    return _of_tiles(p, line, taker, (n, partial), visits, whole.ctas, whole.parts)


def _partial_entries(mask: BlockMask, row: Tensor, column: Tensor) -> Tensor:
    """The entries of the partial blocks at these rows and columns."""
    counts = mask.partial.counts.long()
    rows = torch.repeat_interleave(counts)
    first = mask.partial.starts - counts.cumsum(0) + counts
    entry = torch.arange(len(rows), device=rows.device) + first[rows]
    blocks = rows * mask.grid[1] + mask.partial.indices[entry]
    return entry[torch.searchsorted(blocks, row * mask.grid[1] + column)]


def _shared_out(began: Tensor, ended: Tensor, ticks: Tensor, ctas: int) -> Tensor:
    """The CTA of every tile: of those whose tiles have ended when it begins, the one with the fewest ticks. Syncs.

    `began`, `ended`: by a clock on which at most `ctas` tiles overlap; ascending starts.
    """
    free, busy, taken = [(0, cta) for cta in range(ctas)], [], []
    for begin, end, own in zip(began.tolist(), ended.tolist(), ticks.tolist(), strict=True):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1:])
        load, cta = heapq.heappop(free)
        heapq.heappush(busy, (end, load + own, cta))
        taken.append(cta)
    return torch.tensor(taken, dtype=torch.int32, device=began.device)


def by_key_block(mask: BlockMask, cut: TileParts) -> KeyBlockLists:
    """Blocks of every list of the transposed mask, by query tile; of every range, if tiles are cut into some."""
    sizes = mask.sizes
    whole = sizes.stored - sizes.partial if sizes.exact else sizes.stored
    tiles, columns = mask.grid
    lists = mask.batch * mask.heads * cut.ranges * columns
    partial, entries = _keyed(mask, mask.partial, sizes.partial, 0, cut.ranges)
    full, _ = _keyed(mask, mask.full, whole, lists, cut.ranges)
    key, order = torch.sort(torch.cat((partial, full)))
    entry = torch.cat((entries, torch.full_like(full, FULL)))[order]
    bounds = torch.arange(2 * lists + 1, device=mask.device) * max(tiles, 1)
    # One more, so that an empty list has a first entry too.
    tile = torch.cat((key % max(tiles, 1), key.new_zeros(1)))
    return KeyBlockLists(torch.searchsorted(key, bounds), tile, torch.cat((entry, entry.new_zeros(1))))


def _keyed(mask: BlockMask, lists: BlockLists, most: int, first: int, ranges: int) -> tuple[Tensor, Tensor]:
    """(list * Mb + query tile, entry) of every block, lists counted from `first`; absent ones come last."""
    (tiles, columns), device = mask.grid, mask.device
    ends = lists.counts.cumsum(0)
    number = torch.arange(most if len(lists.indices) else 0, device=device)
    row = torch.searchsorted(ends, number, right=True).clamp(max=max(mask.rows - 1, 0))
    there = number < (ends[-1:] if mask.rows else 0)
    position = torch.where(there, lists.starts[row] + number - (ends - lists.counts)[row], 0)
    of_range = row % max(tiles, 1) // max(-(-tiles // ranges), 1)
    list_number = (row // max(tiles, 1) * ranges + of_range) * columns + lists.indices[position].long()
    list_number += first
    beyond = (2 * mask.rows * columns + 1) * max(tiles, 1)
    return torch.where(there, list_number * tiles + row % max(tiles, 1), beyond), position


def _lists_of(p: AttentionProblem, mask: BlockMask, q_heads: int, ranges: int) -> Tensor:
    """The lists that key block j of head or part g of item b has for its query heads: [B, Hkv, Nb, 2, group]."""

    def upto(n: int) -> Tensor:
        return torch.arange(n, device=mask.device)

    part = upto(p.kv_heads).view(-1, 1, 1, 1)
    head = (part // ranges * p.group + upto(p.group)) // (q_heads // mask.heads) * ranges + part % ranges
    item = upto(p.batch).view(-1, 1, 1, 1, 1) * (1 if mask.batch > 1 else 0)
    columns = mask.grid[1]
    heads = mask.heads * ranges
    whole = upto(2).view(-1, 1) * (mask.batch * heads * columns)
    return (item * heads + head) * columns + upto(columns).view(1, 1, -1, 1, 1) + whole


def span_of_rows(mask: BlockMask) -> int:
    """The most key blocks from the first to the last that a query tile sees. Syncs."""
    first = torch.full((mask.rows,), mask.grid[1], dtype=torch.int32, device=mask.device)
    last = torch.full_like(first, -1)
    for lists in (mask.partial, mask.full):
        there = lists.counts > 0
        begin, end = lists.starts[there].long(), (lists.starts + lists.counts)[there].long()
        first[there] = torch.minimum(first[there], lists.indices[begin])
        last[there] = torch.maximum(last[there], lists.indices[end - 1])
    return int((last - first + 1).clamp(min=0).max())


def _lined_up(p: AttentionProblem, n: Tensor, sections: int, *, in_turn: bool) -> Tensor:
    """Tiles section by section, longest first; those far longer than the mean, such as sinks, come before all
    sections. Of equally long ones those of a head come together, or with `in_turn` those of a column.
    """
    heads, columns = max(1, p.batch * p.kv_heads), max(1, p.grid[1])
    every = torch.arange(len(n), device=n.device)
    section = torch.where(n * len(n) > 4 * n.sum(), 0, every // columns * sections // heads + 1)
    line = every.view(-1, columns).T.flatten() if in_turn else every
    return line[torch.argsort((section * (1 << 32) - n)[line], stable=True)]


def _places(p: AttentionProblem, line: Tensor, sections: int) -> Tensor:
    """How many tiles of its section come before each tile, where none is far longer than the mean."""
    section = line // p.grid[1] * sections // (p.batch * p.kv_heads)
    places = torch.empty_like(line)
    places[line] = torch.arange(len(line), device=line.device) - torch.searchsorted(section, section)
    return places


def _tickets(queue: Tensor, clock: Tensor) -> Tensor:
    """The position of every visit in its queue, by the clock."""
    _, order = torch.sort(queue * (1 << 32) + clock, stable=True)
    lined = queue[order]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(lined, lined)
    tickets = torch.empty_like(rank)
    tickets[order] = rank
    return tickets
