"""The order of tiles of portable.attention_bwd, and the sum of tiles that several programs share.

Tiles are ordered longest first. The longest few of every head come before all others, so that a column which all
queries visit does not start last. Then the heads follow in sections whose operands fit in L2:

    | lead: all heads, tile by tile | section 0: heads 0, 1, tile by tile | section 1: heads 2, 3 | ...

A tile with more blocks than an SM's share of all blocks is split into parts of equal length. Each part writes its
float32 sums to a slot of its own; `add_parts` adds the slots of a tile in order, so the bits repeat. Anything that
depends on the mask's lists stays on its device; the host allocates by upper bounds.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.engine.launch.launch import launch

# Fields of `order`: tile (-1: none), first block, end of its blocks, slot (-1: the tile is whole). Fields of
# `merges`: group of heads, tile, first slot, slots (0: none).
FIELDS = 4
# In blocks of 128 x 128: a slot of that many rows costs about as much as one of them.
SHORTEST_PART = 8
ROWS = 16


@dataclass(frozen=True, eq=False)
class Walk:
    """`order` int32 [groups of heads with lists of their own, capacity, FIELDS], longest first, ties by position.

    `lead` entries of all heads come first, then `section` heads side by side. If `slots` is 0, no tile is split.
    Otherwise each of `replicas`, the heads that share a group, has `slots` slots, and `merges` int32 [at most,
    FIELDS] lists the split tiles.
    """

    order: Tensor
    lead: int
    section: int
    replicas: int
    slots: int = 0
    merges: Tensor | None = None


@triton.jit
def turn(entries, lead, section, all_heads, SUBS: tl.constexpr):
    """Head, order entry and tile part of this program; SUBS programs share an entry."""
    pid = tl.program_id(0)
    before = lead * SUBS * all_heads
    leads = pid < before
    rest = tl.maximum(pid - before, 0)
    in_section = tl.maximum((entries - lead) * SUBS * section, 1)
    first_head = tl.where(leads, 0, rest // in_section * section)
    width = tl.where(leads, all_heads, min(all_heads - first_head, section))
    within = tl.where(leads, pid, rest % in_section)
    place = within // width
    return first_head + within % width, tl.where(leads, 0, lead) + place // SUBS, place % SUBS


@triton.jit
def share(partial, full, begin, end, before):
    """Of a list's `partial` and `full` blocks, after `before` others: first and number of those from `begin` to
    `end`, of each kind.
    """
    first = tl.minimum(tl.maximum(begin - before, 0), partial + full)
    last = tl.minimum(tl.maximum(end - before, 0), partial + full)
    of_partial, of_full = tl.minimum(first, partial), tl.maximum(first - partial, 0)
    return (
        of_partial,
        tl.minimum(last, partial) - of_partial,
        of_full,
        tl.maximum(last - partial, 0) - of_full,
    )


def longest_part(visited: int, block: tuple[int, int], sm_count: int) -> int:
    """The most blocks per program: a quarter over an SM's share, but enough that adding parts does not dominate."""
    least = SHORTEST_PART * 128 * 128 // (block[0] * block[1])
    return max(least, -(-5 * visited // (4 * sm_count)))


def sizes_of(
    groups: int, tiles: int, most: int, visited: int, part: int, heads: int
) -> tuple[int, int, int, int, int]:
    """Heads of a group, entries of all heads that lead, entries that parts add to a group, split tiles, and slots."""
    replicas = heads // groups
    bound = visited // replicas // part
    longest = -(-most // part)
    extra = min(bound, tiles * (longest - 1))
    cuts, slots = min(bound, groups * tiles), min(2 * bound, groups * tiles * longest)
    return replicas, -(-tiles // 32), extra, cuts, slots


def walk(costs: Tensor, most: int, visited: int, part: int, section: int, heads: int) -> Walk:
    """`costs` [groups, tiles]: the blocks of every tile, at most `most`; split into parts of `part` blocks. No sync.

    `visited` bounds their sum over all `heads` heads, so that the host knows how much to allocate. On a GPU `walked`
    makes the same.
    """
    groups, tiles = costs.shape
    replicas, lead, extra, cuts, slots = sizes_of(groups, tiles, most, visited, part, heads)
    costs = costs.long()
    if most <= part:
        order = torch.argsort(costs, dim=1, descending=True, stable=True)
        whole = torch.zeros_like(order)
        return Walk(
            torch.stack((order, whole, costs.gather(1, order), whole - 1), 2).int(), lead, section, replicas
        )

    parts = torch.clamp((costs + part - 1) // part, min=1)
    in_slots = torch.where(parts > 1, parts, 0).flatten()
    first_slot = (in_slots.cumsum(0) - in_slots).view(groups, tiles)
    last = parts.cumsum(1)
    item = torch.arange(tiles + extra, device=costs.device).expand(groups, -1).contiguous()
    tile = torch.searchsorted(last, item, right=True).clamp(max=tiles - 1)
    k, cost = parts.gather(1, tile), costs.gather(1, tile)
    i = item - (last.gather(1, tile) - k)
    there = item < last[:, -1:]
    begin, end = cost * i // k, cost * (i + 1) // k
    slot = torch.where(k > 1, first_slot.gather(1, tile) + i, -1)
    fields = torch.stack((torch.where(there, tile, -1), begin, end, slot), 2).int()
    by_length = torch.argsort(torch.where(there, end - begin, -1), dim=1, descending=True, stable=True)
    order = fields.gather(1, by_length[..., None].expand_as(fields))

    cut = (parts > 1).flatten()
    at = torch.arange(groups * tiles, device=costs.device)
    entry = torch.stack((at // tiles, at % tiles, first_slot.flatten(), parts.flatten()), 1).int()
    merges = entry.new_zeros((cuts + 1, FIELDS))
    # Whole tiles are all written to the last row, which is dropped.
    merges.index_copy_(0, torch.where(cut, cut.cumsum(0) - 1, cuts).clamp(max=cuts), entry)
    return Walk(order, lead, section, replicas, slots, merges[:-1])


@triton.jit(do_not_specialize=("length", "slots", "shared", "group_heads", "entries"))
def _add_parts(
    parts, merges, out, scale, length, slots, shared, group_heads, entries,
    so_b, so_h, so_m, so_d,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = triton.next_power_of_2(COLS)
    replica = tl.program_id(0) // entries
    merges += tl.program_id(0) % entries * FIELDS
    group = tl.load(merges)
    tile = tl.load(merges + 1)
    slot = replica.to(tl.int64) * slots + tl.load(merges + 2)
    count = tl.load(merges + 3)
    h = (group % group_heads * shared + replica % shared).to(tl.int64)
    b = (group // group_heads + replica // shared).to(tl.int64)

    inside = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tile.to(tl.int64) * BLOCK + inside
    col = tl.arange(0, PADDED)
    live = (row < length)[:, None] & (col < COLS)[None, :] & (count > 0)
    acc = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    parts += slot * (BLOCK * WIDTH) + FIRST + ((inside * WIDTH)[:, None] + col[None, :])
    for _ in range(count):
        acc += tl.load(parts, mask=live, other=0.0)
        parts += BLOCK * WIDTH
    out += b * so_b + h * so_h + (row * so_m)[:, None] + (col.to(tl.int64) * so_d)[None, :]
    tl.store(out, (acc * scale).to(out.dtype.element_ty), mask=live)


def add_parts(parts: Tensor, first: int, walk: Walk, mask_batch: int, scale: float, out: Tensor) -> None:
    """Writes scale times the sums of the tiles that `walk` has split into `out` [B, H, L, E], any strides. No sync.

    parts: float32 [walk.replicas * walk.slots, rows of a tile, width], contiguous. The columns from `first` on are
    added.
    """
    merges = walk.merges
    if merges is None or not len(merges):
        return
    group_heads = walk.order.shape[0] // mask_batch
    rows, width = parts.shape[1:]
    with torch.cuda.device_of(out):
        launch(
            _add_parts, (walk.replicas * len(merges), rows // ROWS),
            parts, merges, out, scale, out.shape[2], walk.slots,
            out.shape[1] // group_heads, group_heads, len(merges), *out.stride(),
            WIDTH=width, FIRST=first, COLS=out.shape[3], BLOCK=rows, ROWS=ROWS, FIELDS=FIELDS, num_warps=4,
        )  # fmt: skip
