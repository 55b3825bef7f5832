"""Masks of chosen blocks in plain torch, which is the specification: from a `Selection` to lists, rules and bits.

Rows have a fixed capacity: row r has the entries r * capacity to (r + 1) * capacity of one list that full and partial
blocks share. Full blocks come first, then partial ones, each ascending; entries that no block uses are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build import selection
from sparsek.attn.mask.build.selection import MASS_BITS, LocalBlocks, Selection, by_a_kernel
from sparsek.attn.mask.build.structured import every_key, up_to_itself
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.lists import BY_INTERVAL, WORD, BlockLists, Place, Sizes, check_stored, exact_sizes
from sparsek.attn.mask.readback import Fault, faults, with_readbacks


class Visible(NamedTuple):
    """The blocks that a tile may keep, and what its queries see of them.

    Attributes:
        there: bool [1 or B, 1, Mb, Nb]: some query of the tile sees a key of the block.
        whole: bool like `there`: every query sees all keys of the block.
        lengths: int64 [1 or B, Nb]: how many keys of each block exist; None where only kv_len cuts the last one.
    """

    there: Tensor
    whole: Tensor
    lengths: Tensor | None


def chosen_mask(cls: type[Mask], c: Selection) -> Mask:
    """The mask of a choice: by a kernel on a GPU, where there is one; else in torch. Of fake tensors, its layout."""
    made = by_a_kernel(cls, c)
    return specified(cls, c) if made is None else made


def specified(cls: type[Mask], c: Selection) -> Mask:
    """The mask of a choice, in torch on any device. On a GPU without a sync."""
    found: list[Fault] = []
    lengths = None
    if c.lengths is not None:
        _note(found, c, selection.LENGTH, ((c.lengths < 0) | (c.lengths > c.place.block[1]))[:, None, None])
        lengths = c.lengths.long().clamp(0, c.place.block[1])
    seen = _visible(c.place, c.causal, lengths)
    by_scores = c.kind in ("topk", "mass")
    kept = _by_scores(c, seen.there, found) if by_scores else _as_listed(c, found)
    if c.stored != c.place:
        kept, lengths = _halves(c, kept, lengths)
        seen = _visible(c.stored, c.causal, lengths)
    batch, heads, grid = *c.given.shape[:2], c.stored.grid
    kept = (kept & seen.there).expand(batch, heads, *grid)
    rows = rows_of(kept & seen.whole, kept & ~seen.whole, c.room)
    rules = bits = None
    if seen.lengths is not None:
        codes, bits = _rules_and_bits(c, seen.lengths)
        rules = codes.expand(batch, heads, *grid).gather(-1, rows.columns.long()).flatten()
    lo, hi = (up_to_itself(c.stored) if c.causal else every_key(c.stored)) or (None, None)
    mask = cls.unchecked(
        q_len=c.place.q_len, kv_len=c.place.kv_len, block=c.stored.block, batch=batch, heads=heads,
        full=rows.full, partial=rows.partial, lo=lo, hi=hi, rules=rules, bits=bits,
        sizes=rows.sizes(c.bounds()), pure=rules is None, label=c.label,
    )  # fmt: skip
    return with_readbacks(mask, found)


def _note(found: list[Fault], c: Selection, kind: int, wrong: Tensor) -> None:
    """Notes a fault where `wrong` [batch, heads, tiles, columns], each of which may be 1, is True."""
    shape = tuple(wrong.shape)
    found += faults(wrong, lambda at: c.fault(kind, [int(each) for each in np.unravel_index(at, shape)]))


def _halves(c: Selection, kept: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The stored blocks that the blocks of the choice consist of, and how many keys each of these has."""
    (rows, parts), (tiles, columns), side = c.split, c.stored.grid, c.stored.block[1]
    kept = kept.repeat_interleave(rows, 2)[:, :, :tiles].repeat_interleave(parts, 3)[..., :columns]
    if lengths is not None:
        before = torch.arange(columns, dtype=torch.int64, device=kept.device) % parts * side
        lengths = (lengths.repeat_interleave(parts, 1)[:, :columns] - before).clamp(0, side)
    return kept, lengths


def _visible(place: Place, causal: bool, lengths: Tensor | None) -> Visible:
    """The blocks that exist; `lengths` int64 [1 or B, Nb], in range."""
    edge, end = edges(place, causal)
    column = torch.arange(place.grid[1], dtype=torch.int64, device=place.device)
    there, whole = (column < end)[None, None], (column < edge)[None, None]
    if lengths is None:
        return Visible(there, whole, None)
    bk = place.block[1]
    lengths = torch.minimum(lengths, (place.kv_len - column * bk).clamp(max=bk))
    there = there & (lengths > 0)[:, None, None]
    return Visible(there, whole & (lengths == bk)[:, None, None], lengths)


def edges(place: Place, causal: bool) -> tuple[Tensor, Tensor]:
    """`structured.visible` on the device, int64 [Mb, 1]: the leading blocks seen whole, and those seen at all."""
    bk, device = place.block[1], place.device
    if not causal:
        keys = torch.full((place.grid[0], 1), place.kv_len, dtype=torch.int64, device=device)
        return keys // bk, (keys + bk - 1) // bk
    first, last = tile_ends(place)
    first, last = (each.clamp(0, place.kv_len) for each in (first + 1, last + 1))
    return first // bk, (last + bk - 1) // bk


def tile_ends(place: Place) -> tuple[Tensor, Tensor]:
    """The positions of each tile's first and last query, int64 [Mb, 1]."""
    tile = torch.arange(place.grid[0], dtype=torch.int64, device=place.device)[:, None]
    first = tile * place.block[0] + place.q_offset
    return first, (first + place.block[0]).clamp(max=place.q_len + place.q_offset) - 1


def _as_listed(c: Selection, found: list[Fault]) -> Tensor:
    """The blocks of a map or of indices, bool [batch, heads, Mb, Nb]."""
    if c.kind == "map":
        return c.given
    columns, each = c.place.grid[1], c.given.shape[-1]
    used = c.given != -1
    if c.counts is not None:
        counts = c.counts[..., None]
        _note(found, c, selection.NUMBER, (counts < 0) | (counts > each))
        entry = torch.arange(each, dtype=torch.int64, device=c.place.device)
        used = (entry < counts).expand(c.given.shape)
    outside = used & ((c.given < 0) | (c.given >= columns))
    _note(found, c, selection.VALUE, outside)
    # Entries that do not count go to one more column, which is cut off.
    at = torch.where(used & ~outside, c.given, columns).long()
    marks = torch.zeros((*at.shape[:3], columns + 1), dtype=torch.int32, device=c.place.device)
    marks.scatter_add_(-1, at, torch.ones_like(at, dtype=torch.int32))
    often = marks[..., :columns]
    _note(found, c, selection.CROWDED, often > 1)
    return often > 0


def _by_scores(c: Selection, there: Tensor, found: list[Fault]) -> Tensor:
    """The blocks with the highest scores, bool [batch, heads, Mb, Nb]."""
    numbers = isinstance(c.limit, Tensor)
    limit: Any = c.limit
    if c.kind == "topk":
        wrong = c.given.isnan()
        if numbers:
            _note(found, c, selection.NUMBER, limit < 1)
            limit = limit.clamp(1, c.capacity)
    else:
        wrong = ~((c.given >= 0) & (c.given < torch.inf))
        if numbers:
            right = (limit > 0) & (limit <= 1)
            _note(found, c, selection.NUMBER, ~right)
            limit = torch.where(right, limit.double(), 1.0)
    if not c.every:
        _note(found, c, selection.VALUE, wrong & there)
    ranked = c.given.masked_fill(wrong | ~there, -torch.inf)
    first = None if c.always is None else _always(c) & there
    if first is not None and not c.every:
        most = limit if c.kind == "topk" else c.capacity
        _note(found, c, selection.CROWDED, first.sum(-1, keepdim=True) > most)
    if c.kind == "mass":
        return _reaching(ranked, first, limit, c.least, c.capacity)
    rank, able = highest(ranked, first), ranked != -torch.inf
    kept = (rank < limit) & (able if first is None else able | first)
    return kept | first if c.every and first is not None else kept


def _always(c: Selection) -> Tensor:
    """The blocks that come first, bool that broadcasts to the scores."""
    if isinstance(c.always, Tensor):
        return c.always
    near: Any = c.always
    return near_blocks(c.place, near)


def near_blocks(place: Place, near: LocalBlocks) -> Tensor:
    """The blocks of `LocalBlocks`, bool [Mb, Nb]."""
    column = torch.arange(place.grid[1], dtype=torch.int64, device=place.device)
    early = (column < near.sinks).expand(place.grid)
    if near.back is None:
        return early
    first, last = tile_ends(place)
    bk = place.block[1]
    return early | ((column >= (first - near.back) // bk) & (column <= (last + near.fore) // bk))


class Rows(NamedTuple):
    """Lists of rows with a fixed capacity, and their entries: int32 [batch, heads, Mb, capacity]."""

    columns: Tensor
    full: BlockLists
    partial: BlockLists

    def sizes(self, most: tuple[int, int, int]) -> Sizes:
        """The sizes of the lists; on a GPU, where counting would need a sync, these bounds."""
        if self.columns.device.type != "cpu":
            return Sizes(*most, exact=False)
        return exact_sizes(self.full.counts.numpy(), self.partial.counts.numpy())


def rows_of(whole: Tensor, cut: Tensor, capacity: int) -> Rows:
    """Lists of the full and the partial blocks, bool [batch, heads, Mb, Nb] each."""
    columns = whole.shape[-1]
    column = torch.arange(columns, dtype=torch.int32, device=whole.device)
    key = torch.where(whole, column, torch.where(cut, column + columns, 2 * columns))
    chosen = key.to(torch.int32).sort(-1).values[..., :capacity] % max(columns, 1)
    full, partial = (each.sum(-1, dtype=torch.int32).flatten() for each in (whole, cut))
    check_stored(full.numel() * capacity)
    starts = torch.arange(full.numel(), dtype=torch.int32, device=whole.device) * capacity
    indices = chosen.flatten()
    return Rows(chosen, BlockLists(starts, full, indices), BlockLists(starts + full, partial, indices))


def _rules_and_bits(c: Selection, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The rule of each block, int32 [1 or B, 1, Mb, Nb], and the bits, int32 [n, bq, bk / 32].

    Blocks that lack keys have bits: entry b * Nb + j is key block j of batch item b, for all tiles that see every key
    it has. If causal, tiles that see block `edge` + d only in part have the entry B * Nb + (b * Mb + i) * D + d.
    """
    place, (batch, columns) = c.stored, lengths.shape
    (bq, bk), tiles, device = place.block, place.grid[0], place.device
    words = torch.arange(bk // WORD, dtype=torch.int64, device=device) * WORD
    column = torch.arange(columns, dtype=torch.int64, device=device)
    item = torch.arange(batch, dtype=torch.int64, device=device)[:, None, None]
    codes = (item * columns + column).expand(batch, tiles, columns)
    bits = [_words(lengths[:, :, None, None] - words).expand(batch, columns, bq, -1).flatten(0, 1)]
    if c.causal:
        deep, first = c.deep, edges(place, True)[0]
        tile = torch.arange(tiles, dtype=torch.int64, device=device)[:, None]
        own = batch * columns + (item * tiles + tile) * deep + column - first
        codes = torch.where(column < first, codes, own)
        block = (first + torch.arange(deep, dtype=torch.int64, device=device)).clamp(max=max(columns - 1, 0))
        queries = torch.arange(tiles * bq, dtype=torch.int64, device=device).view(tiles, 1, bq)
        ahead = queries + place.q_offset + 1 - block[:, :, None] * bk  # keys of the block up to the query
        keys = torch.minimum(lengths[:, block][..., None], ahead)
        bits.append(_words(keys[..., None] - words).flatten(0, 2))
    natural = (place.kv_len - column * bk).clamp(max=bk)
    codes = torch.where((lengths < natural)[:, None], codes, BY_INTERVAL)
    return codes[:, None].to(torch.int32), torch.cat(bits)[: None if tiles else 0]


def _words(keys: Tensor) -> Tensor:
    """int32 words whose first bits are set, as many as these numbers, at least 0 and at most 32."""
    ones = (1 << keys.clamp(0, WORD)) - 1
    return torch.where(ones >= 1 << (WORD - 1), ones - (1 << WORD), ones).to(torch.int32)


def highest(scores: Tensor, first: Tensor | None) -> Tensor:
    """The rank of every block in its row, int64: 0 for the highest score, and those of `first` before all others.

    Equal scores rank by column, the lower one first, and so do those of `first`. No other score is NaN.
    """
    if first is not None:
        scores = scores.masked_fill(first, torch.inf)
    order = scores.sort(stable=True, dim=-1, descending=True).indices
    if first is not None:
        ahead = first.expand(scores.shape).gather(-1, order).to(torch.uint8)
        order = order.gather(-1, ahead.sort(stable=True, dim=-1, descending=True).indices)
    rank = torch.arange(scores.shape[-1], dtype=torch.int64, device=scores.device).expand(scores.shape)
    return torch.empty_like(order).scatter_(-1, order, rank)


def _reaching(ranked: Tensor, first: Tensor | None, share: Any, least: int, most: int) -> Tensor:
    """The blocks that hold the share of a row's mass, bool like `ranked`; a block of -inf has none and is not kept."""
    there = ranked != -torch.inf
    mass = masses(ranked.masked_fill(~there, 0))
    there = there if first is None else there | first
    rank = highest(ranked.masked_fill(~there, -torch.inf), first)
    sums = torch.zeros_like(mass).scatter_(-1, rank, mass).cumsum(-1)
    goal = (mass.sum(-1, keepdim=True).double() * share).ceil().long()
    count = (sums < goal).sum(-1, keepdim=True) + (goal > 0)
    if first is not None:
        count = torch.maximum(count, first.sum(-1, keepdim=True))
    return there & (rank < count.clamp(min=least, max=most))


def masses(scores: Tensor) -> Tensor:
    """The masses of each row as int64 of at most MASS_BITS bits: multiples, rounded down, of a power of two.

    The scores are finite and not negative. The power is chosen by the highest one of a row, with
    MASS_BITS bits left; below 2^-900 it is that of 2^-900.
    """
    scores = scores.double()
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
    exponent = ((top.view(torch.int64) >> 52) - 1022).clamp(min=-900)  # top < 2^exponent
    power = (MASS_BITS - exponent + 1023) << 52
    return (scores * power.view(torch.float64)).long()
