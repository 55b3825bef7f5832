"""A mask from a function of positions, evaluated in blocks: never a matrix of all queries and keys, and one sync.

    evaluate   of each query and block of keys: how many keys it sees, the first, and the end of the last
    classify   of each block: absent, full, partial by interval, or partial with bits; of each query its interval
    (sync)     how many there are of each
    write      the lists; the bits of the blocks that need them are evaluated again

The hull of a query, from the first key that it sees to the last, is its interval, as in build/tiles.py. It depends on
one row of blocks only, so rows are evaluated and classified in chunks. What is kept of a chunk is a byte for each block
and 8 for each query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.build.tiles import pack_bits
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.lists import BY_INTERVAL, BlockLists, Place, Sizes, check_stored
from sparsek.core.arguments import INT32_MAX

ABSENT, WHOLE, SOLID, CUT = range(4)  # the kinds of blocks
CELLS = 1 << 24  # queries times blocks of keys that are classified in one step
BYTES = 0x0101010101010101


class BlockVisibility(NamedTuple):
    """Of each query and block of keys, int32 [queries, blocks]: how many keys are seen, the first one (INT32_MAX if
    none), and the end of the last one (0 if none).
    """

    count: Tensor
    first: Tensor
    end: Tensor


class QueryWindow(NamedTuple):
    """Queries from `query` on and keys from `key` on, of one batch item and head; int64 tensors without dimensions."""

    item: Tensor
    head: Tensor
    query: Tensor
    key: Tensor


# From a window, how many queries it has, and the first key of each of its blocks.
Look = Callable[[QueryWindow, int, Tensor], BlockVisibility]
# From batch items and heads [n], queries [n, bq] and keys [n, bk] of blocks: bool [n, bq, bk].
LookAt = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def seen_in(blocks: Tensor, start: Tensor) -> BlockVisibility:
    """From bool [queries, blocks, bk]; `start`: the first key of each block, int32 [blocks]."""
    key = start[:, None] + torch.arange(blocks.shape[2], dtype=torch.int32, device=blocks.device)
    return BlockVisibility(
        blocks.sum(2, dtype=torch.int32),
        torch.where(blocks, key, INT32_MAX).amin(2),
        torch.where(blocks, key + 1, 0).amax(2),
    )


def seen_on_cpu(blocks: Tensor, start: Tensor) -> BlockVisibility:
    """`seen_in`, for a CPU: counts eight keys at a time, and looks at single keys only where some are not seen."""
    bk = blocks.shape[2]
    words = blocks.contiguous().view(torch.int64).sum(2)  # a byte counts up to bk / 8
    count = ((words * BYTES) >> 56 & 0xFF).to(torch.int32)
    none = count == 0
    first = torch.where(none, INT32_MAX, start)
    end = torch.where(none, 0, start + bk)
    query, block = torch.nonzero(~none & (count < bk), as_tuple=True)
    if query.numel():
        some = blocks[query, block].view(torch.uint8)
        first[query, block] = start[block] + some.argmax(1).to(torch.int32)
        end[query, block] = start[block] + bk - some.flip(1).argmax(1).to(torch.int32)
    return BlockVisibility(count, first, end)


class Classes(NamedTuple):
    """The kind of each block, int8 [tiles, blocks], and the interval of each query, int32 [tiles * bq]."""

    kind: Tensor
    lo: Tensor
    hi: Tensor


def classified(seen: BlockVisibility, here: Tensor, start: Tensor, sides: tuple[int, int]) -> Classes:
    """`here`: whether a query exists, bool [queries]."""
    bq, bk = sides
    count, first, end = (each.unflatten(0, (-1, bq)) for each in seen)
    there = here.view(-1, bq, 1)
    stored = (there & (count > 0)).any(1)
    whole = ((count == bk) | ~there).all(1) & stored
    lo, hi = torch.where(there, first, INT32_MAX).amin(2), torch.where(there, end, 0).amax(2)
    from_key, to_key = lo[:, :, None].clamp(min=start), hi[:, :, None].clamp(max=start + bk)
    solid = count == end - torch.where(count > 0, first, 0)
    same = (first == from_key) & (end == to_key)
    neither = (count == 0) & (from_key >= to_key)
    explained = (solid & (same | neither) | ~there).all(1)
    kind = torch.where(whole, WHOLE, torch.where(explained, SOLID, CUT))
    some = lo < hi
    zero = torch.zeros_like(lo)
    return Classes(
        torch.where(stored, kind, ABSENT).to(torch.int8),
        torch.where(some, lo, zero).flatten(),
        torch.where(some, hi, zero).flatten(),
    )


class Evaluation:
    """A mask in the making, by a function that is evaluated at `chunk` elements at a time."""

    def __init__(self, place: Place, batch: int, heads: int, chunk: int) -> None:
        self.place, self.batch, self.heads, self.chunk = place, batch, heads, chunk
        self.tiles, self.columns = place.grid
        self.start = torch.arange(self.columns, dtype=torch.int32, device=place.device) * place.block[1]
        most = max(place.q_len + place.block[0], place.kv_len + place.block[1], batch, heads)
        self.number = torch.arange(most, device=place.device)

    def classes(self, look: Look, classify: Callable[..., Classes]) -> Classes:
        """The kinds of all blocks [rows, blocks] and the intervals [batch * heads, q_len]. No sync of its own."""
        (bq, _), device = self.place.block, self.place.device
        if not self.tiles or not self.columns:
            nothing = torch.zeros(self.batch * self.heads, self.place.q_len, dtype=torch.int32, device=device)
            kind = torch.zeros(
                self.batch * self.heads * self.tiles, self.columns, dtype=torch.int8, device=device
            )
            return Classes(kind, nothing, nothing)
        tiles = max(min(CELLS // (bq * self.columns), self.tiles), 1)
        kinds, los, his = [], [], []
        for group in range(self.batch * self.heads):
            for top in range(0, self.tiles, tiles):
                rows = range(top, min(top + tiles, self.tiles))
                seen = self._seen(look, group, rows)
                here = self.number[top * bq : rows.stop * bq] < self.place.q_len
                found = classify(seen, here, self.start, self.place.block)
                kinds.append(found.kind)
                los.append(found.lo[: self.place.q_len - top * bq])
                his.append(found.hi[: self.place.q_len - top * bq])
        per_query = (-1, self.place.q_len)
        return Classes(torch.cat(kinds), torch.cat(los).view(per_query), torch.cat(his).view(per_query))

    def _seen(self, look: Look, group: int, rows: range) -> BlockVisibility:
        """What the queries of some tiles see, in windows of at most `chunk` elements."""
        bq, bk = self.place.block
        width = min(max(self.chunk // (bq * bk), 1), self.columns)
        height = max(self.chunk // (width * bk * bq), 1)
        item, head = self.number[group // self.heads], self.number[group % self.heads]
        by_rows = []
        for top in range(rows.start, rows.stop, height):
            queries = (min(top + height, rows.stop) - top) * bq
            by_columns = []
            for left in range(0, self.columns, width):
                window = QueryWindow(item, head, self.number[top * bq], self.number[left * bk])
                by_columns.append(look(window, queries, self.start[left : left + width]))
            by_rows.append(_joined(by_columns, 1))
        return _joined(by_rows, 0)

    def mask(self, cls: type[Mask], found: Classes, look_at: LookAt, label: str, *, share: bool) -> Mask:
        """The mask of these classes. Waits for the device once, and if bits are to be shared again."""
        kind = found.kind
        full, partial, cut = kind == WHOLE, kind >= SOLID, kind == CUT
        whole, ragged = full.sum(1, dtype=torch.int32), partial.sum(1, dtype=torch.int32)
        both = (whole + ragged).long()
        stored = both.sum()
        longest = both.max() if both.numel() else stored
        heavy = torch.where(both * max(len(kind), 1) > 2 * stored, both, 0).sum()
        facts = torch.stack((stored, ragged.sum(), cut.sum(), longest, heavy)).tolist()
        total, of_partial, of_cut, most, of_heavy = facts
        check_stored(total)
        rules = bits = None
        at_partial = _places(partial, of_partial)
        if of_cut:
            bits = self._bits(look_at, _places(cut, of_cut))
            number = torch.arange(of_cut, dtype=torch.int32, device=kind.device)
            if share:
                distinct, number = torch.unique(bits.flatten(1), dim=0, return_inverse=True)
                bits, number = distinct.view(-1, *bits.shape[1:]), number.to(torch.int32)
            by_bits = cut.flatten().index_select(0, at_partial)
            place = (by_bits.cumsum(0) - 1).clamp(min=0)
            rules = torch.where(by_bits, number.index_select(0, place), BY_INTERVAL)
        bounds = found if of_partial > of_cut else None
        mask = cls.unchecked(
            q_len=self.place.q_len, kv_len=self.place.kv_len, block=self.place.block, batch=self.batch,
            heads=self.heads, full=self._lists(whole, _places(full, total - of_partial)),
            partial=self._lists(ragged, at_partial), lo=bounds and bounds.lo, hi=bounds and bounds.hi,
            rules=rules, bits=bits, sizes=Sizes(total, of_partial, most, exact=True), pure=not of_cut, label=label,
        )  # fmt: skip
        mask._memo["heavy"] = of_heavy
        return mask

    def _lists(self, counts: Tensor, places: Tensor) -> BlockLists:
        """From the blocks of each row, and the row * Nb + column of all."""
        starts = (counts.cumsum(0) - counts).to(torch.int32)
        return BlockLists(starts, counts, (places % max(self.columns, 1)).to(torch.int32))

    def _bits(self, look_at: LookAt, cells: Tensor) -> Tensor:
        """int32 [n, bq, bk / 32] of these blocks."""
        bq, bk = self.place.block
        made = []
        for some in cells.split(max(self.chunk // (bq * bk), 1)):
            row, column = some // self.columns, some % self.columns
            group, queries = row // self.tiles, (row % self.tiles * bq)[:, None] + self.number[:bq]
            keys = (column * bk)[:, None] + self.number[:bk]
            there = (queries < self.place.q_len)[:, :, None] & (keys < self.place.kv_len)[:, None, :]
            queries, keys = queries.clamp(max=self.place.q_len - 1), keys.clamp(max=self.place.kv_len - 1)
            made.append(pack_bits(there & look_at(group // self.heads, group % self.heads, queries, keys)))
        return torch.cat(made)


def _joined(parts: list[BlockVisibility], dim: int) -> BlockVisibility:
    made: Any = (each[0] if len(each) == 1 else torch.cat(each, dim) for each in zip(*parts, strict=True))
    return BlockVisibility(*made)


def _places(flags: Tensor, count: int) -> Tensor:
    """Where `flags` are true, in `count` places: int64 [count], ascending. No sync."""
    wanted = torch.arange(1, count + 1, device=flags.device)
    return torch.searchsorted(flags.flatten().cumsum(0), wanted)
