"""The part of a mask between some tiles of queries and some blocks of keys, packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.data import PART, MaskPart
from sparsek.attn.mask.lists import BlockLists, exact_sizes
from sparsek.attn.mask.mask import BlockMask
from sparsek.distributed.deal import in_pairs, ranges


def submask(
    mask: BlockMask,
    tiles: Sequence[np.ndarray],
    blocks: Sequence[np.ndarray],
    q_len: int,
    kv_len: int,
    device: torch.device,
    exact: bool = False,
    dq: bool = True,
    ends: bool = True,
) -> BlockMask:
    """The mask of these query tiles and these key blocks, which stand one after the other in ascending order.

    Ascending blocks keep every interval of keys an interval: its ends are mapped by counting the kept keys before
    them. So full blocks, rules by interval, bits and members stay what they are, and a tile visits its blocks in the
    order of the whole mask.

    Args:
        mask: The whole mask; its lists are read on the host.
        tiles: For each of mask.batch * mask.heads rows of lists the kept tiles, ascending; shorter ones are padded
            with tiles that visit nothing.
        blocks: In the same way the kept blocks. Other blocks that a tile visits are dropped.
        q_len: Queries of the result, at most as many as the longest of `tiles` has.
        kv_len: Keys of the result.
        device: Where the result is made.
        exact: Whether calls with the result have the order of sums of calls with the whole mask, once its `sizes` are
            exact. Not where lists of tokens have blocks of 64 whose neighbours are cut off.
        dq: With `exact`, whether dQ has it too.
        ends: Whether queries see a window and sinks at the ends of their intervals. False leaves those of members out.
    """
    if exact:
        mask.verify(wait=True)  # sizes cut tiles, and are bounds until they are read
    bq, (whole_tiles, columns), host = mask.block[0], mask.grid, mask.host
    groups, rows = mask.batch * mask.heads, -(-q_len // bq)
    place = np.full((groups, columns), -1, np.int64)
    for group, kept in enumerate(blocks):
        place[group, kept] = np.arange(kept.size)
    at = np.concatenate([group * rows + np.arange(kept.size) for group, kept in enumerate(tiles)])
    of = np.concatenate([group * whole_tiles + kept for group, kept in enumerate(tiles)])
    members = mask.members if ends or mask.members is None else mask.members._replace(window=0, sinks=0)
    words = 1 if members is None else members.words(bq)
    made, entries = [], np.empty(0, np.int64)
    for given in (host.full, host.partial):
        counts = given.counts[of].astype(np.int64)
        entries = ranges(given.starts[of].astype(np.int64), counts)
        row = np.repeat(np.arange(of.size), counts)
        column = place[of[row] // max(whole_tiles, 1), given.indices[entries]]
        kept = column >= 0
        entries, found = entries[kept], np.zeros(groups * rows, np.int64)
        found[at] = np.bincount(row[kept], minlength=of.size)
        made.append((np.cumsum(found) - found, found, column[kept]))
    rules = None if host.rules is None else host.rules.reshape(-1, words)[entries].ravel()
    bits = host.bits
    if bits is not None and len(bits) and rules is not None:  # the first, and those that are used here
        used, rules = np.unique(np.append(rules, (-1, 0)), return_inverse=True)
        bits, rules = bits[used[1:]], rules[:-2] - 1
    lo, hi = _interval(mask, tiles, place, q_len)
    sizes = exact_sizes(made[0][1], made[1][1])

    def there(x: np.ndarray | None) -> Tensor | None:
        return None if x is None else torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(device)

    lists = [BlockLists(*(there(part) for part in parts)) for parts in made]  # pyright: ignore[reportArgumentType]
    part = BlockMask.unchecked(
        q_len=q_len, kv_len=kv_len, block=mask.block, batch=mask.batch, heads=mask.heads,
        full=lists[0], partial=lists[1], lo=there(lo), hi=there(hi), rules=there(rules),
        bits=there(bits), sizes=sizes, pure=mask.pure,
        label=f"part of {mask.label or 'blocks'}", members=members,
    )  # fmt: skip
    if exact and (not in_pairs(mask) or _are_beside(place)):
        tile = np.full((groups, whole_tiles), -1, np.int64)
        for group, kept in enumerate(tiles):
            tile[group, kept] = np.arange(kept.size)
        places = {"tiles": torch.from_numpy(tile).to(device), "blocks": torch.from_numpy(place).to(device)}
        within = MaskPart.of(mask) or MaskPart(on(mask, device))
        part._memo[PART] = replace(within, **places, dq=dq)
    return part


def _are_beside(place: np.ndarray) -> bool:
    """Whether kept blocks 2 i and 2 i + 1 stand beside each other at an even place, as kernels take them."""
    first, second = (
        np.pad(place, ((0, 0), (0, place.shape[1] % 2)), constant_values=-1)[:, at::2] for at in (0, 1)
    )
    beside = (second == first + 1) | ((second < 0) & (first >= 0))
    return bool(np.where(first < 0, second < 0, (first % 2 == 0) & beside).all())


def on(mask: BlockMask, device: torch.device) -> BlockMask:
    """The mask on a device, copied once."""
    return mask if mask.device == device else mask.derived(("on", device), lambda: mask.to(device))


def _interval(
    mask: BlockMask, tiles: Sequence[np.ndarray], place: np.ndarray, q_len: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """lo and hi [groups, q_len] of the kept queries, counted in kept keys, if the mask has intervals."""
    (bq, bk), groups = mask.block, len(tiles)
    host: Any = mask.host
    if mask.lo is None:  # partial blocks have bits
        return None, None
    lo, hi = np.zeros((groups, q_len), np.int64), np.zeros((groups, q_len), np.int64)
    for group, kept in enumerate(tiles):
        queries = (kept[:, None] * bq + np.arange(bq)).ravel()
        queries = queries[queries < mask.q_len][:q_len]
        stored = place[group] >= 0
        before = np.concatenate(([0], np.cumsum(stored))) * bk
        for made, given in ((lo, host.lo), (hi, host.hi)):
            ends = given[group if given.shape[0] > 1 else 0][queries].astype(np.int64)
            block, inside = ends // bk, ends % bk
            made[group, : queries.size] = before[block] + np.where(np.append(stored, False)[block], inside, 0)
    return lo, hi


def heads_part(
    mask: BlockMask, heads: np.ndarray, device: torch.device, within: tuple[int, int] | None = None
) -> BlockMask:
    """The mask with the lists of these heads, whose entries are those of the whole mask.

    `within`: of calls with the whole mask, how many heads of k there are, and the first of those here. Then calls have
    the order of sums of these.
    """
    (tiles, _), at = mask.grid, torch.from_numpy(heads).to(mask.device)

    def part(x: Tensor, width: int) -> Tensor:
        return x.view(mask.batch, mask.heads, width).index_select(1, at).reshape(-1, width)

    full, partial = (
        BlockLists(part(each.starts, tiles).flatten(), part(each.counts, tiles).flatten(), each.indices)
        for each in (mask.full, mask.partial)
    )
    lo, hi = (x if x is None or x.shape[0] == 1 else part(x, mask.q_len) for x in (mask.lo, mask.hi))
    lists = mask.host.full, mask.host.partial
    counts = (each.counts.reshape(mask.batch, mask.heads, tiles)[:, heads] for each in lists)
    made = BlockMask.unchecked(
        q_len=mask.q_len, kv_len=mask.kv_len, block=mask.block, batch=mask.batch, heads=heads.size,
        full=full, partial=partial, lo=lo, hi=hi, rules=mask.rules, bits=mask.bits, sizes=exact_sizes(*counts),
        pure=mask.pure, label=f"{heads.size} heads of {mask.label or 'blocks'}", members=mask.members,
    )  # fmt: skip
    made = made.to(device)
    if within is not None:
        made._memo[PART] = MaskPart(on(mask, device), None, None, *within)
    return made
