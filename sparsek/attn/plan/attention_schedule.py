"""The schedule of attention's forward pass, made on the mask's device without a host sync: tiles, visits and CTAs.

Tiles are assigned to CTAs in rounds, longest first, in alternating directions, so that every CTA has about equal work.
Where the keys and values of all heads exceed L2, sections of heads follow one another. A tile far longer than the
others is split into parts, which are merged in a fixed order. Anything that depends on the mask's lists stays on the
device; the host allocates by upper bounds (`BlockMask.sizes`). This is the specification, and makes the schedules of
masks on the CPU; attn/kernels/forward/schedule_fwd.py makes the same on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.problems import AttentionProblem

# Fields of a record: first query, batch item, first head, first partial entry (-1: none) and partial blocks, first
# full entry and full blocks, slot of the part (-1: the tile is whole).
FIELDS = 8
MERGE_FIELDS = 5
SHORTEST_PART = 8
NO_SLOT = -1
SLOT_ROWS = 128  # of a slot; a tile has at most as many
SECTION = 2 / 3  # of L2, for the keys and values of a section of heads


class TileShape(NamedTuple):
    """A tile: `positions` query positions of `pack` heads; and the number of CTAs."""

    positions: int
    pack: int
    ctas: int


class AttentionSchedule(NamedTuple):
    """`tiles` int32 [capacity, FIELDS]; the first count[0] are live; CTA p computes p, p + ctas, ...

    `merges` int32 [capacity, MERGE_FIELDS]: first slot, slots, batch item, first head, first query of every split
    tile; 0 slots in unused entries. `slots`: the most slots that parts need.
    """

    tiles: Tensor
    count: Tensor
    ctas: int
    merges: Tensor | None = None
    slots: int = 0

    def imbalance(self) -> float:
        """Blocks of the fullest CTA over the mean. Syncs."""
        tiles = self.tiles[: int(self.count)]
        cost = (tiles[:, 4] + tiles[:, 6]).double() + 1.0
        load = torch.zeros(self.ctas, dtype=torch.float64, device=cost.device)
        load.index_add_(0, torch.arange(len(cost), device=cost.device) % self.ctas, cost)
        return float(load.max() / load.mean()) if len(cost) else 1.0


def tiles_of(p: AttentionProblem, shape: TileShape) -> int:
    """Number of query tiles, not counting parts."""
    return p.batch * (p.q_heads // shape.pack) * -(-p.q_len // shape.positions)


def part_blocks(p: AttentionProblem, shape: TileShape) -> int:
    """Blocks of the longest part; a longer tile is split. At least the longest tile if nothing is split. Of a part of a
    mask, as in one process.

    If the host knows only bounds, the longest tile may not exist; then tiles are split only for idle CTAs. With fewer
    tiles than half the CTAs, tiles are split until every CTA has a part. Otherwise tiles more than twice as long as
    the mean are split: half of a causal mask's tiles are longer than the mean, none twice as long.
    """
    p = p.leading
    tiles = tiles_of(p, shape)
    if not tiles or not p.longest:
        return max(1, p.longest)
    if 2 * tiles <= shape.ctas:
        return max(SHORTEST_PART, -(-p.longest // (shape.ctas // tiles)))
    mean = p.stored / (p.mask_batch * p.mask_heads * p.grid[0])
    return max(SHORTEST_PART, round(2 * mean) + 1) if p.exact else p.longest


def extra_tiles(p: AttentionProblem, blocks: int, shape: TileShape) -> int:
    """The most records that parts add, if split rows hold `blocks` blocks of the mask. Slots: twice that."""
    lists = (p.batch // p.mask_batch) * (p.q_heads // p.mask_heads)
    return blocks * lists * -(-p.block[0] // shape.positions) // shape.pack // part_blocks(p, shape)


def room_for_parts(p: AttentionProblem, mask: BlockMask, shape: TileShape) -> int:
    """The most records that the parts of `mask` add: only tiles longer than a part are split."""
    mean = p.stored / (p.mask_batch * p.mask_heads * p.grid[0])
    return extra_tiles(p, mask.heavy_blocks if part_blocks(p, shape) >= 2 * mean else p.stored, shape)


def is_cut(p: AttentionProblem, shape: TileShape) -> bool:
    return p.longest > part_blocks(p, shape)


def schedule(p: AttentionProblem, mask: BlockMask, shape: TileShape) -> AttentionSchedule:
    """The tiles of `mask` for `p`, in the order of CTAs. No sync."""
    where, lists = _tiles(p, mask, shape)
    whole = torch.full_like(where[:, :1], NO_SLOT)
    if not is_cut(p, shape):
        records = torch.cat((where, lists, whole), 1)
        count = torch.full((1,), len(records), dtype=torch.int32, device=mask.device)
        blocks = lists[:, 1] + lists[:, 3]
        rounds = sections(p) if len(records) else 1  # a batch without items has no sections
        return AttentionSchedule(_dealt(records, blocks, shape.ctas, rounds), count, shape.ctas)
    return _cut(p, mask, where, lists, shape)


def _tiles(p: AttentionProblem, mask: BlockMask, shape: TileShape) -> tuple[Tensor, Tensor]:
    """Position, batch item and first head of every tile [tiles, 3], and starts and counts of its lists [tiles, 4]."""
    device, rows = mask.device, mask.grid[0]

    def upto(n: int) -> Tensor:
        return torch.arange(n, dtype=torch.int32, device=device)

    pos = upto(-(-p.q_len // shape.positions)) * shape.positions
    head = upto(p.q_heads // shape.pack) * shape.pack
    item = upto(p.batch)
    mask_head = head // (p.q_heads // mask.heads) if mask.heads > 1 else head * 0
    mask_item = item if mask.batch > 1 else item * 0
    of_head = (mask_item[:, None] * mask.heads + mask_head) * rows
    row = (of_head[:, :, None] + pos // mask.block[0]).flatten()
    partial, full = mask.partial, mask.full
    lists = torch.stack((partial.starts, partial.counts, full.starts, full.counts), 1)[row]
    where = torch.stack(torch.broadcast_tensors(pos, item[:, None, None], head[:, None]), -1)
    return where.reshape(-1, 3), lists


def sections(p: AttentionProblem) -> int:
    """The number of sections, each of equally many key heads, whose keys and values fit in their share of L2."""
    heads = p.batch * p.kv_heads
    fitting = int(SECTION * p.card.l2_bytes / (2 * (p.dim + p.v_dim) * max(1, p.kv_len)))
    return min(each for each in range(1, heads + 1) if heads % each == 0 and heads // each <= max(1, fitting))


def _dealt(records: Tensor, blocks: Tensor, ctas: int, sections: int = 1) -> Tensor:
    """Records in rounds of one for each CTA: section by section, in each section longest first.

    Sections have equally many records. Those that do not fill a round of their section follow after all sections,
    longest first. Every second full round is reversed, always the last one: CTAs with a record of the incomplete round
    had the shortest of the round before. Records of -1 blocks are absent and come last. A record of no blocks becomes
    one of a partial block without an entry.
    """
    empty = blocks == 0
    records[:, 3] = records[:, 3].masked_fill(empty, -1)
    records[:, 4] = records[:, 4].masked_fill(empty, 1)
    order = torch.argsort(blocks.view(sections, -1), dim=1, descending=True, stable=True)
    if sections > 1:
        order += torch.arange(sections, device=order.device)[:, None] * order.shape[1]
        filled = order.shape[1] // ctas * ctas
        rest = order[:, filled:].flatten()
        rest = rest[torch.argsort(blocks[rest], descending=True, stable=True)]
        order = torch.cat((order[:, :filled].flatten(), rest))
    order = order.flatten()
    if rounds := len(order) // ctas:
        number = torch.arange(rounds, device=order.device)
        last = (blocks >= 0).sum() // ctas - 1
        turn = (number <= last) & ((last - number) % 2 == 0)
        head = order[: rounds * ctas].view(rounds, ctas)
        order = torch.cat((torch.where(turn[:, None], head.flip(1), head).flatten(), order[rounds * ctas :]))
    return records[order]


def _cut(
    p: AttentionProblem, mask: BlockMask, where: Tensor, lists: Tensor, shape: TileShape
) -> AttentionSchedule:
    """The same with long tiles split. A tile of n blocks in k parts: part i has blocks n i / k to n (i + 1) / k."""
    longest = part_blocks(p, shape)
    partial, n = lists[:, 1].long(), (lists[:, 1] + lists[:, 3]).long()
    parts = torch.clamp((n + longest - 1) // longest, min=1)
    last = torch.cumsum(parts, 0)
    extra = room_for_parts(p, mask, shape)
    capacity = len(n) + extra
    item = torch.arange(capacity, device=n.device)
    tile = torch.searchsorted(last, item, right=True).clamp(max=len(n) - 1)
    k = parts[tile]
    i = item - (last[tile] - k)
    there = item < last[-1]
    begin, end = n[tile] * i // k, n[tile] * (i + 1) // k
    p_begin, p_end = torch.minimum(begin, partial[tile]), torch.minimum(end, partial[tile])
    f_begin, f_end = begin - p_begin, end - p_end
    in_slots = torch.where(parts > 1, parts, 0)
    first_slot = torch.cumsum(in_slots, 0) - in_slots
    slot = torch.where(k > 1, first_slot[tile] + i, NO_SLOT)
    starts = lists[:, 0::2].long()[tile]
    fields = (starts[:, 0] + p_begin, p_end - p_begin, starts[:, 1] + f_begin, f_end - f_begin, slot)
    records = torch.cat((where[tile], torch.stack(fields, 1).int()), 1)
    tiles = _dealt(records, torch.where(there, end - begin, -1), shape.ctas)
    cut = parts > 1
    entry = torch.stack((first_slot, parts, where[:, 1], where[:, 2], where[:, 0]), 1).int()
    merges = entry.new_zeros((extra + 1, MERGE_FIELDS))
    # Whole tiles are all written to the last row, which is dropped.
    row = torch.where(cut, torch.cumsum(cut, 0) - 1, extra)
    merges.index_copy_(0, row, entry)
    return AttentionSchedule(tiles, last[-1:].clamp(max=capacity).int(), shape.ctas, merges[:-1], 2 * extra)
