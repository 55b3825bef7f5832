"""Ranks the tiles of every group of heads by their blocks, longest first, in one launch.

A tile's place is the number of tiles, or parts of tiles, that are longer, or as long and before it: every program
compares its tiles with all of the group. So nothing is sorted, and ties go by position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.forward.parts import FIELDS, Walk, sizes_of, walk
from sparsek.engine.launch.launch import launch_unspecialized

TILES = 32  # by a program; tiles that may be cut: CUT_TILES, with PARTS of their parts together
CUT_TILES, PARTS = 8, 16
STREAM = 256  # tiles that others are compared with together
WARPS = 4


class Lengths(NamedTuple):
    """The blocks of tiles, `times` the sum of both counts of a group's `members`; a group has its own lists.

    p_counts, f_counts: int32 [at least groups * members * tiles], contiguous. No tile has more than `most` blocks.
    """

    p_counts: Tensor
    f_counts: Tensor
    groups: int
    tiles: int
    most: int
    members: int = 1
    times: int = 1

    @property
    def costs(self) -> Tensor:
        """[groups, tiles]."""
        counts = self.groups * self.members * self.tiles
        both = self.p_counts[:counts] + self.f_counts[:counts]
        return both.view(self.groups, self.members, self.tiles).sum(1) * self.times


_SIZES = ("groups", "tiles", "members", "times", "most", "part", "capacity", "slots", "cuts", "chunks")


@triton.jit
def _cost(p_counts, f_counts, at, live, tiles, members, times, most):
    """The blocks of tiles, summed over the members of their groups: tile `at` % tiles of group `at` / tiles."""
    first = at // tiles * members * tiles + at % tiles
    found = at * 0
    for member in range(members):
        found += tl.load(p_counts + first + member * tiles, mask=live, other=0)
        found += tl.load(f_counts + first + member * tiles, mask=live, other=0)
    return tl.minimum(tl.maximum(found * times, 0), most)


@triton.jit(
    do_not_specialize=_SIZES, do_not_specialize_on_alignment=("p_counts", "f_counts", "order", "merges")
)
def _line_up(
    p_counts, f_counts, order, merges, groups, tiles, members, times, most, part, capacity, slots, cuts, chunks,
    CUT: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, STREAM: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Entries of TILES tiles of one group, at their ranks: longer parts and equal ones before them come first.

    With one field an entry is only the tile. The entries after a group's parts have no tile.
    """
    group = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    tile = chunk * TILES + tl.arange(0, TILES)
    live = tile < tiles
    at = group * tiles + tile
    n = _cost(p_counts, f_counts, at, live, tiles, members, times, most)
    k = n * 0 + 1
    if CUT:
        k = tl.maximum((n + part - 1) // part, 1)
    least = n // k
    more = n - least * k
    place = n * 0
    place_1 = n * 0
    slot = n * 0
    cut = n * 0
    parts = 0
    for start in range(0, tiles, STREAM):
        other = start + tl.arange(0, STREAM)
        there = other < tiles
        n_o = _cost(p_counts, f_counts, group * tiles + other, there, tiles, members, times, most)
        before = other[None, :] < tile[:, None]
        if CUT:
            k_o = tl.where(there, tl.maximum((n_o + part - 1) // part, 1), 0)
            least_o = n_o // tl.maximum(k_o, 1)
            more_o = (n_o - least_o * k_o)[None, :]
            apart = least_o[None, :] - least[:, None]
            all_o = k_o[None, :]
            # Parts of at least `least` + 1 blocks, and of `least`.
            longer = tl.where(apart >= 1, all_o, tl.where(apart == 0, more_o, 0))
            equal = tl.where(apart == 0, all_o - more_o, tl.where(apart == -1, more_o, 0))
            place += tl.sum(longer + tl.where(before, equal, 0), 1)
            longer = tl.where(apart >= 2, all_o, tl.where(apart == 1, more_o, 0))
            equal = tl.where(apart == 1, all_o - more_o, tl.where(apart == 0, more_o, 0))
            place_1 += tl.sum(longer + tl.where(before, equal, 0), 1)
            parts += tl.sum(k_o, 0)
        else:
            ahead = (n_o[None, :] > n[:, None]) | ((n_o[None, :] == n[:, None]) & before)
            place += tl.sum((ahead & there[None, :]).to(tl.int32), 1)
    if CUT:
        for start in range(0, tl.minimum(group * tiles + (chunk + 1) * TILES, groups * tiles), STREAM):
            other = start + tl.arange(0, STREAM)
            n_o = _cost(p_counts, f_counts, other, other < groups * tiles, tiles, members, times, most)
            k_o = (n_o + part - 1) // part
            before = (other[None, :] < at[:, None]) & (k_o > 1)[None, :]
            slot += tl.sum(tl.where(before, k_o[None, :], 0), 1)
            cut += tl.sum(before.to(tl.int32), 1)
    longest = 1
    if CUT:
        longest = tl.max(k, 0)
    for start in range(0, longest, PARTS):
        i = (start + tl.arange(0, PARTS))[None, :]
        ones = i * more[:, None] // k[:, None]  # parts of one block more, before
        begin = i * least[:, None] + ones
        end = (i + 1) * least[:, None] + (i + 1) * more[:, None] // k[:, None]
        one = end - begin > least[:, None]
        own = tl.where(one, place_1[:, None] + ones, place[:, None] + i - ones)
        there = live[:, None] & (i < k[:, None]) & (own < capacity)
        entry = order + (group.to(tl.int64) * capacity + own) * FIELDS
        tl.store(entry, tile[:, None] + i * 0, mask=there)
        if FIELDS > 1:
            in_slot = slot[:, None] + i
            whole = (k[:, None] == 1) | (in_slot >= slots)
            tl.store(entry + 1, begin, mask=there)
            tl.store(entry + 2, end, mask=there)
            tl.store(entry + 3, tl.where(whole, -1, in_slot), mask=there)
    if CUT:
        for start in range(parts + chunk * STREAM, capacity, chunks * STREAM):
            absent = start + tl.arange(0, STREAM)
            entry = order + (group.to(tl.int64) * capacity + absent) * FIELDS
            for field in tl.static_range(FIELDS):
                tl.store(entry + field, absent * 0 - (1 if field == 0 else 0), mask=absent < capacity)
        entry = merges + cut * FIELDS
        there = live & (k > 1) & (cut < cuts)
        tl.store(entry, tile * 0 + group, mask=there)
        tl.store(entry + 1, tile, mask=there)
        tl.store(entry + 2, slot, mask=there)
        tl.store(entry + 3, tl.where(slot + k <= slots, k, 0), mask=there)


def _launched(lengths: Lengths, order: Tensor, merges: Tensor, part: int, slots: int) -> None:
    """Writes `order` [groups, capacity, fields], and `merges` if it has entries."""
    cut = len(merges) > 0
    together = CUT_TILES if cut else TILES
    chunks = -(-lengths.tiles // together)
    args = (
        lengths.p_counts, lengths.f_counts, order, merges, lengths.groups, lengths.tiles, lengths.members,
        lengths.times, lengths.most, part, order.shape[1], slots, len(merges), chunks,
    )  # fmt: skip
    constants = (cut, together, PARTS if cut else 1, STREAM, order.shape[2])
    launch_unspecialized(_line_up, order.device, lengths.groups * chunks, args, constants, WARPS)


def longest_first(lengths: Lengths) -> Tensor:
    """The tiles of every group, longest first, ties by position: int32 [groups, tiles]. No sync."""
    if lengths.p_counts.is_cuda and lengths.tiles:
        return launched_order(lengths)
    return torch.argsort(lengths.costs, dim=1, descending=True, stable=True).int()


def launched_order(lengths: Lengths) -> Tensor:
    """As `longest_first`, by a launch."""
    device = lengths.p_counts.device
    order = torch.empty((lengths.groups, lengths.tiles, 1), dtype=torch.int32, device=device)
    _launched(lengths, order, order[:0], 1, 0)
    return order.squeeze(2)


def walked(lengths: Lengths, visited: int, part: int, section: int, heads: int) -> Walk:
    """`walk` of tiles with these lengths. No sync."""
    if lengths.p_counts.is_cuda and lengths.tiles:
        return launched_walk(lengths, visited, part, section, heads)
    return walk(lengths.costs, lengths.most, visited, part, section, heads)


def launched_walk(lengths: Lengths, visited: int, part: int, section: int, heads: int) -> Walk:
    """As `walked`, by a launch."""
    groups, tiles, most = lengths.groups, lengths.tiles, lengths.most
    device = lengths.p_counts.device
    replicas, lead, extra, cuts, slots = sizes_of(groups, tiles, most, visited, part, heads)
    if most <= part:
        extra = cuts = slots = 0
    order = torch.empty((groups, tiles + extra, FIELDS), dtype=torch.int32, device=device)
    merges = torch.zeros((cuts, FIELDS), dtype=torch.int32, device=device)
    _launched(lengths, order, merges, part, slots)
    return Walk(order, lead, section, replicas, slots, None if most <= part else merges)
