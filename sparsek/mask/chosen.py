"""Masks of chosen blocks: from which blocks are kept, bool [batch, heads, Mb, Nb], to lists, rules and bits.

Rows have a fixed capacity: row r has the entries r * capacity to (r + 1) * capacity of one list that full and partial
blocks share. Full blocks come first, then partial ones, each ascending; entries that no block uses are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.mask.lists import BY_INTERVAL, WORD, BlockLists, Place, Sizes, check_stored, exact_sizes
from sparsek.mask.readback import Fault, TrueSizes, faults, index, with_readbacks
from sparsek.mask.structured import every_key, up_to_itself, visible

if TYPE_CHECKING:
    from sparsek.mask.mask import BlockMask

INTS = (torch.int32, torch.int64)


class Visible(NamedTuple):
    """The blocks that a tile may keep, and what its queries see of them.

    Attributes:
        place: Lengths, block, device and offset.
        causal: Whether a query sees no keys after its own.
        there: bool [1 or B, 1, Mb, Nb]: some query of the tile sees a key of the block.
        whole: bool like `there`: every query sees all keys of the block.
        lengths: int32 [1 or B, Nb]: how many keys of each block exist; None where only kv_len cuts the last one.
        faults: The readbacks of wrong `kv_lengths`.
    """

    place: Place
    causal: bool
    there: Tensor
    whole: Tensor
    lengths: Tensor | None
    faults: list[Fault]

    @property
    def batch(self) -> int:
        """Batch items with blocks of their own."""
        return self.there.shape[0]


def visible_blocks(place: Place, causal: bool, kv_lengths: Any) -> Visible:
    """The blocks that exist; `kv_lengths` is an unchecked argument, or None."""
    causal = arguments.flag("causal", causal)
    edge, end = edges(place, causal)
    column = torch.arange(place.grid[1], dtype=torch.int64, device=place.device)
    there, whole = (column < end)[None, None], (column < edge)[None, None]
    if kv_lengths is None:
        return Visible(place, causal, there, whole, None, [])
    given, bk = _as_kv_lengths(kv_lengths, place), place.block[1]
    shape = tuple(kv_lengths.shape)
    found = faults(
        (given < 0) | (given > bk),
        lambda at: f"kv_lengths{index(at, shape)} is out of range; a block has 0 to {bk} keys",
    )
    natural = (place.kv_len - column * bk).clamp(max=bk)
    lengths = torch.minimum(given.clamp(0, bk), natural).to(torch.int32)
    there = there & (lengths > 0)[:, None, None]
    return Visible(place, causal, there, whole & there & (lengths == bk)[:, None, None], lengths, found)


def edges(place: Place, causal: bool) -> tuple[Tensor, Tensor]:
    """`structured.visible` on the device, int64 [Mb, 1]: the leading blocks seen whole, and those seen at all."""
    (bq, bk), device = place.block, place.device
    if not causal:
        keys = torch.full((place.grid[0], 1), place.kv_len, dtype=torch.int64, device=device)
        return keys // bk, (keys + bk - 1) // bk
    first = torch.arange(place.grid[0], dtype=torch.int64, device=device)[:, None] * bq + place.q_offset
    last = (first + bq).clamp(max=place.q_len + place.q_offset)
    first, last = ((each).clamp(0, place.kv_len) for each in (first + 1, last))
    return first // bk, (last + bk - 1) // bk


def _as_kv_lengths(kv_lengths: Any, place: Place) -> Tensor:
    """int64 [1 or B, Nb], not checked for its values."""
    given = arguments.tensor("kv_lengths", kv_lengths, INTS)
    arguments.one_device("kv_lengths is", given.device, "the mask is made", place.device)
    if given.ndim not in (1, 2) or given.shape[-1] != place.grid[1] or 0 in given.shape[:-1]:
        raise InvalidInput(
            f"kv_lengths is {list(given.shape)}; {place.kv_len} keys in blocks of {place.block[1]} need "
            f"[{place.grid[1]}] or [batch, {place.grid[1]}]"
        )
    return (given if given.ndim == 2 else given[None]).detach().long()


def joined_batch(seen: Visible, batch: int) -> int:
    """The batch items of a mask whose blocks are chosen for `batch` items. InvalidInput if kv_lengths has others."""
    if 1 not in (seen.batch, batch) and seen.batch != batch:
        raise InvalidInput(
            f"kv_lengths has {seen.batch} batch items and the blocks have {batch}; give 1 or {batch}"
        )
    return max(seen.batch, batch)


def mask_of(
    cls: type[BlockMask],
    kept: Tensor,
    seen: Visible,
    capacity: int,
    label: str,
    readbacks: Sequence[Fault | TrueSizes] = (),
) -> BlockMask:
    """The mask of the blocks that are kept and exist: bool [batch, heads, Mb, Nb], at most `capacity` in a row."""
    place = seen.place
    batch, heads = joined_batch(seen, kept.shape[0]), kept.shape[1]
    kept = (kept & seen.there).expand(batch, heads, *place.grid)
    rows = rows_of(kept & seen.whole, kept & ~seen.whole, capacity)
    rules = bits = None
    if seen.lengths is not None:
        codes, bits = _rules_and_bits(seen, seen.lengths)
        rules = codes.expand(batch, heads, *place.grid).gather(-1, rows.chosen.long()).flatten()
    lo, hi = (up_to_itself(place) if seen.causal else every_key(place)) or (None, None)
    mask = cls.unchecked(
        q_len=place.q_len, kv_len=place.kv_len, block=place.block, batch=batch, heads=heads,
        full=rows.full, partial=rows.partial, lo=lo, hi=hi, rules=rules, bits=bits,
        sizes=rows.sizes(bounds(seen, batch * heads, capacity)), pure=rules is None, label=label,
    )  # fmt: skip
    return with_readbacks(mask, [*seen.faults, *readbacks])


def bounds(seen: Visible, groups: int, capacity: int) -> tuple[int, int, int]:
    """The most stored and partial blocks of `groups` heads, and of the longest row."""
    edge, end = visible(seen.place, seen.causal)
    most = np.minimum(capacity, end)
    cut = most if seen.lengths is not None else np.minimum(capacity, end - edge)
    return groups * int(most.sum()), groups * int(cut.sum()), int(most.max(initial=0))


class Rows(NamedTuple):
    """Lists of rows with a fixed capacity, and their entries: int32 [batch, heads, Mb, capacity]."""

    chosen: Tensor
    full: BlockLists
    partial: BlockLists

    def sizes(self, most: tuple[int, int, int]) -> Sizes:
        """The sizes of the lists; on a GPU, where counting would need a sync, these bounds."""
        if self.chosen.device.type != "cpu":
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


def _rules_and_bits(seen: Visible, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The rule of each block, int32 [1 or B, 1, Mb, Nb], and the bits, int32 [n, bq, bk / 32].

    Blocks that lack keys have bits: entry b * Nb + j is key block j of batch item b, for all tiles that see every key
    it has. If causal, tiles that see block `edge` + d only in part have the entry B * Nb + (b * Mb + i) * D + d.
    """
    place, (batch, columns) = seen.place, lengths.shape
    (bq, bk), tiles, device = place.block, place.grid[0], place.device
    words = torch.arange(bk // WORD, dtype=torch.int64, device=device) * WORD
    column = torch.arange(columns, dtype=torch.int64, device=device)
    item = torch.arange(batch, dtype=torch.int64, device=device)[:, None, None]
    codes = (item * columns + column).expand(batch, tiles, columns)
    bits = [_words(lengths.long()[:, :, None, None] - words).expand(batch, columns, bq, -1).flatten(0, 1)]
    if seen.causal:
        edge, end = visible(place, True)
        deep = int((end - edge).max(initial=0))
        first = edges(place, True)[0]
        tile = torch.arange(tiles, dtype=torch.int64, device=device)[:, None]
        own = batch * columns + (item * tiles + tile) * deep + column - first
        codes = torch.where(column < first, codes, own)
        block = (first + torch.arange(deep, dtype=torch.int64, device=device)).clamp(max=max(columns - 1, 0))
        queries = torch.arange(tiles * bq, dtype=torch.int64, device=device).view(tiles, 1, bq)
        ahead = queries + place.q_offset + 1 - block[:, :, None] * bk  # keys of the block up to the query
        keys = torch.minimum(lengths.long()[:, block][..., None], ahead)
        bits.append(_words(keys[..., None] - words).flatten(0, 2))
    natural = (place.kv_len - column * bk).clamp(max=bk)
    codes = torch.where((lengths < natural)[:, None], codes, BY_INTERVAL)
    return codes[:, None].to(torch.int32), torch.cat(bits).contiguous()


def _words(keys: Tensor) -> Tensor:
    """int32 words whose first bits are set, as many as these numbers, at least 0 and at most 32."""
    ones = (1 << keys.clamp(0, WORD)) - 1
    return torch.where(ones >= 1 << (WORD - 1), ones - (1 << WORD), ones).to(torch.int32)


def highest(scores: Tensor, first: Tensor | None) -> Tensor:
    """The rank of every block in its row, int64: 0 for the highest score, and those of `first` before all others.

    Equal scores rank by column, the lower one first. No score is NaN.
    """
    order = scores.sort(stable=True, dim=-1, descending=True).indices
    if first is not None:
        ahead = first.expand(scores.shape).gather(-1, order).to(torch.uint8)
        order = order.gather(-1, ahead.sort(stable=True, dim=-1, descending=True).indices)
    rank = torch.arange(scores.shape[-1], dtype=torch.int64, device=scores.device).expand(scores.shape)
    return torch.empty_like(order).scatter_(-1, order, rank)
