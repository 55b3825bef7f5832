"""The schedule of attention's backward pass: key tiles, the query tiles that visit each, and the order of adding dQ.

A CTA holds a tile of keys and walks its *visits*: the query tiles of every query head of the group that see it. Key
tiles are ordered longest first, in sections of heads whose queries and dQ fit in L2 together. The CTA that finishes
first takes the next tile (Graham 1966), by the schedule's own clock: a tick per visit, and TILE_TICKS per tile. CTAs
start in their lists a golden section apart, so that their sums do not collide in the same rows. If order does not
matter and no head fits in L2, all CTAs start at the same rows, to share their reads and additions.

Where the visits of one query tile are all of neighbouring key tiles, as in a window, CTAs that take these together wait
for each other's additions. `band_sections` then makes larger sections, whose heads take each column in turn.

A query tile's dQ is a sum over visits of many CTAs. For reproducible bits it is added in the order of that clock.
Each CTA processes its visits in the same order, so no wait can deadlock while all CTAs run.

This is the specification, and makes the schedules of masks on the CPU; attn/kernels/backward/schedule_bwd.py makes the
same on a GPU.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.problems import AttentionProblem

TILE_FIELDS = 8
VISIT_FIELDS = 4
FULL = -1  # entry of a full block
NO_TICKET = -1
TILE_TICKS = 2  # begin and end of a tile, in visits
SECTION = 0.4  # of L2, for what the CTAs of a section read and add to
BAND = 0.7  # of L2, for the rows in use where the heads of a section take each column in turn
GOLDEN_BITS = 16
GOLDEN = 25033  # 2^16 times the golden section of a list, between the starts of two CTAs: no two of many come close


class GradSchedule(NamedTuple):
    """CTA p computes tiles starts[p] to starts[p + 1] - 1.

    `tiles` int32 [tiles, TILE_FIELDS]: batch item, head of keys, first key, first visit, pairs of steps that hold all
    visits of partial blocks, pairs of steps, visits. Visits of partial blocks come first. `visits` int32 [capacity,
    VISIT_FIELDS]: first query, query head, entry of the mask's partial list or FULL, ticket. Query rows are padded to
    `rows`; if a visit is one step, the last 64 stand for absent visits.
    """

    tiles: Tensor
    starts: Tensor
    visits: Tensor
    ctas: int
    rows: int

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


def schedule(p: AttentionProblem, mask: BlockMask, ctas: int, *, ordered: bool = True) -> GradSchedule:
    """The key tiles and visits of `mask` for `p`. Without `ordered` no visit has a ticket. Syncs on a GPU."""
    device, (tiles, columns), group = mask.device, mask.grid, p.group
    single = p.block[0] == 64
    listed = by_key_block(mask)
    lists = _lists_of(p, mask)  # [B, Hkv, Nb, 2, group]
    counts = listed.edges.diff()[lists]
    n, partial = counts.sum((-1, -2)).flatten(), counts[..., 0, :].sum(-1).flatten()
    odd = n % 2 if single else torch.zeros_like(n)
    band = band_sections(p, n, span_of_rows(mask), ctas) if ordered and mask.rows and len(n) else 0
    line = _lined_up(p, n, band or sections(p, ctas), in_turn=band > 0)
    taker, began = deal((n + odd + TILE_TICKS)[line].int(), ctas)
    cta, start = torch.empty_like(n), torch.empty_like(n)
    cta[line], start[line] = taker.long(), began.long()

    own = counts.flatten().clone()
    own[2 * group - 1 :: 2 * group] += odd
    ends = own.cumsum(0)
    capacity = p.visited + (len(n) if single else 0)
    number = torch.arange(capacity, device=device)
    listing = torch.searchsorted(ends, number, right=True).clamp(max=len(own) - 1)
    tile = listing // (2 * group)
    within = number - (ends - own)[listing]
    length = counts.flatten()[listing]
    there = within < length
    begin = listed.edges[lists.flatten()[listing]]
    apart = cta[tile] * GOLDEN % (1 << GOLDEN_BITS) * length >> GOLDEN_BITS
    turned = apart if ordered or heads_in_section(p) else torch.zeros_like(length)
    at = torch.where(there, begin + (within + turned) % length.clamp(min=1), 0)
    query = listed.tile[at]
    item, kv_head = tile // (p.kv_heads * columns), tile // columns % p.kv_heads
    head = kv_head * group + listing % group

    rows = padded_rows(p)
    visits = torch.empty(capacity, VISIT_FIELDS, dtype=torch.int32, device=device)
    visits[:, 0] = torch.where(there, query * p.block[0], rows - 64)
    visits[:, 1] = head
    visits[:, 2] = torch.where(there, listed.entry[at], FULL)
    visits[:, 3] = NO_TICKET
    firsts = (n + odd).cumsum(0) - n - odd
    if ordered:
        clock = start[tile] + number - firsts[tile]
        queue = torch.where(there, (item * p.q_heads + head) * tiles + query, p.batch * p.q_heads * tiles)
        visits[:, 3] = torch.where(there, _tickets(queue, clock), NO_TICKET)

    records = torch.zeros(len(n), TILE_FIELDS, dtype=torch.int32, device=device)
    every = torch.arange(len(n), device=device)
    masked, pairs = ((partial + 1) // 2, (n + odd) // 2) if single else (partial, n)
    fields = (every // (p.kv_heads * columns), every // columns % p.kv_heads, every % columns * p.block[1])
    for field, part in enumerate((*fields, firsts, masked, pairs, n + odd)):
        records[:, field] = part
    own, order = torch.sort(taker, stable=True)
    starts = torch.searchsorted(own, torch.arange(ctas + 1, dtype=torch.int32, device=device), out_int32=True)
    return GradSchedule(records[line[order]], starts, visits, ctas, rows)


def by_key_block(mask: BlockMask) -> KeyBlockLists:
    """Blocks of every list of the transposed mask, by query tile."""
    sizes = mask.sizes
    whole = sizes.stored - sizes.partial if sizes.exact else sizes.stored
    tiles, columns = mask.grid
    lists = mask.batch * mask.heads * columns
    partial, entries = _keyed(mask, mask.partial, sizes.partial, 0)
    full, _ = _keyed(mask, mask.full, whole, lists)
    key, order = torch.sort(torch.cat((partial, full)))
    entry = torch.cat((entries, torch.full_like(full, FULL)))[order]
    bounds = torch.arange(2 * lists + 1, device=mask.device) * max(tiles, 1)
    # One more, so that an empty list has a first entry too.
    tile = torch.cat((key % max(tiles, 1), key.new_zeros(1)))
    return KeyBlockLists(torch.searchsorted(key, bounds), tile, torch.cat((entry, entry.new_zeros(1))))


def _keyed(mask: BlockMask, lists: BlockLists, most: int, first: int) -> tuple[Tensor, Tensor]:
    """(list * Mb + query tile, entry) of every block, lists counted from `first`; absent ones come last."""
    (tiles, columns), device = mask.grid, mask.device
    ends = lists.counts.cumsum(0)
    number = torch.arange(most if len(lists.indices) else 0, device=device)
    row = torch.searchsorted(ends, number, right=True).clamp(max=max(mask.rows - 1, 0))
    there = number < (ends[-1:] if mask.rows else 0)
    position = torch.where(there, lists.starts[row] + number - (ends - lists.counts)[row], 0)
    list_number = first + row // max(tiles, 1) * columns + lists.indices[position].long()
    beyond = (2 * mask.rows * columns + 1) * max(tiles, 1)
    return torch.where(there, list_number * tiles + row % max(tiles, 1), beyond), position


def _lists_of(p: AttentionProblem, mask: BlockMask) -> Tensor:
    """The lists that key block j of head g of item b has for the query heads of its group: [B, Hkv, Nb, 2, group]."""

    def upto(n: int) -> Tensor:
        return torch.arange(n, device=mask.device)

    head = upto(p.q_heads).view(p.kv_heads, 1, 1, p.group) // (p.q_heads // mask.heads)
    item = upto(p.batch).view(-1, 1, 1, 1, 1) * (1 if mask.batch > 1 else 0)
    columns = mask.grid[1]
    whole = upto(2).view(-1, 1) * (mask.batch * mask.heads * columns)
    return (item * mask.heads + head) * columns + upto(columns).view(1, 1, -1, 1, 1) + whole


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


def _tickets(queue: Tensor, clock: Tensor) -> Tensor:
    """The position of every visit in its queue, by the clock."""
    _, order = torch.sort(queue * (1 << 32) + clock, stable=True)
    lined = queue[order]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(lined, lined)
    tickets = torch.empty_like(rank)
    tickets[order] = rank
    return tickets
