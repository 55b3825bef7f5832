"""Masks of per-token lists: a tile has the union of its tokens' blocks, and a bit for each token and block.

A tile has as many tokens as make 128 rows with the heads of q that share a head of k. Row r of the lists has a fixed
capacity: its partial blocks are the entries from r * capacity on, its full ones follow. A block is full if every token
of the tile sees all of it. A token's bit is 1 if it has listed the block, or its window or sinks hold all of it.

Blocks under 64 keys are in blocks of 64, in tiles of 64 tokens whatever the heads, and have bits for every key.

On a GPU a kernel of kernels/mask makes the mask; `specified` is the specification, in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.layout import ABSENT, Counted, MaskLayout, Room
from sparsek.attn.mask.lists import (
    BLOCK_SIZES,
    WORD,
    BlockLists,
    Members,
    Place,
    Sizes,
    check_stored,
    exact_sizes,
)
from sparsek.attn.mask.readback import DeferredSizes, made_in, with_readbacks
from sparsek.attn.mask.recorded import repeated
from sparsek.core.arguments import INT32_MAX, faking, is_fake
from sparsek.core.operations import by_kernel
from sparsek.core.tracing import not_traced

ROWS = 128  # tokens times heads of a tile
HEADS = 64  # at most so many heads of q are in a tile
FEWEST = min(BLOCK_SIZES)
CHUNK = 1 << 22  # candidates, and tokens times blocks, in one step of the specification
NOWHERE = INT32_MAX  # the column of a candidate that does not count


def packed_heads(group: int) -> int:
    """How many of the heads of q that share a head of k are in one tile: a power of two that divides them."""
    return min(group & -group, HEADS)


class UnionInputs(NamedTuple):
    """The checked arguments of a mask of per-token lists.

    Attributes:
        indices: Ints [B, H, S, n] in any strides, key blocks of `side` keys, unchecked.
        counts: Ints [B, H, S] in any strides, how many first entries count, unchecked; None: all.
        bounds: int32 lo and hi [2, S], contiguous: the keys of each query's document, as far as it sees them; lo is a
            multiple of the mask's block, and entries count from there. None: 0, and kv_len or the query's own end.
        place: Lengths and device, the tile in tokens, and the key block of the mask.
        side: Keys of a listed block.
        causal: Whether a query sees no keys after its own. Read without `bounds` only.
        window: Last keys of its interval that a query sees too, at most kv_len.
        sinks: First keys of its interval that a query sees too, at most kv_len.
        label: The mask in words.
    """

    indices: Tensor
    counts: Tensor | None
    bounds: Tensor | None
    place: Place
    side: int
    causal: bool
    window: int
    sinks: int
    label: str

    @property
    def rows(self) -> int:
        """Rows of the lists."""
        return self.indices.shape[0] * self.indices.shape[1] * self.place.grid[0]

    @property
    def near(self) -> tuple[int, int]:
        """How many blocks the sinks and the window of a query reach, at most."""
        (_, columns), bk = self.place.grid, self.place.block[1]
        window = (self.window - 2) // bk + 2 if self.window else 0
        return min(-(-self.sinks // bk), columns), min(window, columns)

    @property
    def capacity(self) -> int:
        """Entries of a row."""
        (tokens, bk), (sinks, window), n = self.place.block, self.near, self.indices.shape[3]
        if self.bounds is not None:  # tokens of several documents have windows and sinks of their own
            near = tokens * (sinks + window)
        else:
            near = sinks + ((self.window + tokens - 3) // bk + 2 if window else 0)
        return min(tokens * n + near, self.place.grid[1])

    @property
    def by_bits(self) -> bool:
        """Whether partial blocks have bits for every key."""
        return self.side < FEWEST

    @property
    def members(self) -> Members | None:
        """The rule of the mask."""
        return None if self.by_bits else Members(1, self.window, self.sinks)

    @property
    def words(self) -> int:
        """Words of bits for each entry."""
        return -(-self.place.block[0] // WORD)

    def bound(self) -> Sizes:
        """Bounds of the sizes."""
        groups, causal = self.indices.shape[0] * self.indices.shape[1], self.causal and self.bounds is None
        stored, longest = _bound(self.place, causal, self.capacity)
        return Sizes(groups * stored, groups * stored, longest, exact=False)

    def layout(self) -> MaskLayout:
        """The layout of the mask: full and partial blocks share their list."""
        batch, heads = self.indices.shape[:2]
        listed, bound = self.rows * self.capacity, self.bound()
        check_stored(listed * (1 if self.by_bits else self.words))
        room = Room(listed, bounds=1, bits=listed if self.by_bits else ABSENT)
        return MaskLayout.of(
            self.place, Counted(bound, bound.stored), room, self.label, batch=batch, heads=heads, pure=False,
            members=self.members,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _bound(place: Place, causal: bool, capacity: int) -> tuple[int, int]:
    """The most blocks of a head and of a row."""
    end = np.full(place.grid[0], place.kv_len)
    if causal:
        end = np.clip(place.last + 1, 0, place.kv_len)
    most = np.minimum(capacity, -(-end // place.block[1]))
    return int(most.sum()), int(most.max(initial=0))


@repeated
@not_traced("a block mask")
@torch.no_grad()
def token_mask(
    cls: type[Mask],
    indices: Tensor,
    counts: Tensor | None,
    bounds: Tensor | None,
    side: int,
    kv_len: int,
    group: int,
    options: tuple[bool, int, int],
    label: str,
) -> Mask:
    """The mask of lists that were checked, with no sync on a GPU.

    Args:
        indices: As in `UnionInputs`.
        counts: As in `UnionInputs`.
        bounds: As in `UnionInputs`.
        side: As in `UnionInputs`.
        kv_len: The keys, of all documents with the space between them.
        group: Heads of q for each head of k.
        options: `causal`, `window` and `sinks`.
        label: As in `UnionInputs`.
    """
    block = (FEWEST, FEWEST) if side < FEWEST else (ROWS // packed_heads(group), side)
    queries = indices.shape[2]
    place = Place(queries, kv_len, block, indices.device, kv_len - queries)
    causal, window, sinks = options
    window, sinks = min(window, kv_len), min(sinks, kv_len)
    c = UnionInputs(indices, counts, bounds, place, side, causal, window, sinks, label)
    if is_fake(indices) or faking():
        layout = c.layout()
        return cls.of_layout(layout, layout.base(place.device))
    if place.device.type == "cuda" and not c.by_bits:
        made = written(cls, c, partial(by_kernel, "token_unions"))
        if made is not None:
            return made
    return specified(cls, c)


def written(cls: type[Mask], c: UnionInputs, write: Any) -> Mask | None:
    """The mask whose tensors `write` fills; None if it does not. Views only: no sync."""
    layout = c.layout()
    base = layout.base(c.place.device)
    return made_in(cls, layout, base, late=True) if write(layout.pieces(base), c) else None


class Candidates(NamedTuple):
    """What tokens may see: int64 [rows, tokens, width], the n listed blocks first.

    Attributes:
        column: The key block of the mask; NOWHERE for what does not count.
        bit: Whether the token's bit is set for it.
        part: [rows, tokens, n], which of the listed blocks in that key block it is.
    """

    column: Tensor
    bit: Tensor
    part: Tensor


def specified(cls: type[Mask], c: UnionInputs) -> Mask:
    """The mask in torch, on any device. On a GPU without a sync."""
    place, device = c.place, c.place.device
    (tokens, bk), (tiles, _), capacity = place.block, place.grid, c.capacity
    interval = _interval(c)
    lo, hi = (_in_tiles(each, tokens) for each in interval)  # [tiles, tokens]
    there = torch.arange(tiles * tokens, dtype=torch.int64, device=device).view(tiles, tokens) < place.q_len
    entries, rules, bits, counts = [], [], [], []
    for some in torch.arange(c.rows, dtype=torch.int64, device=device).split(_step(c)):
        tile = some % max(tiles, 1)
        found = _candidates(c, some, lo[tile], hi[tile], there[tile])
        column, cell = _union(found, capacity)
        table = _table(c, found, cell)
        if c.by_bits:
            kept = column
            bits.append(_bits(c, column, table, lo[tile], hi[tile]).flatten(0, 1))
            counts.append(torch.stack(((column != NOWHERE).sum(1), torch.zeros_like(some))))
        else:
            words = _packed(table.flatten(2))
            whole = _whole(column, words, lo[tile], hi[tile], there[tile], bk)
            cut = (column != NOWHERE) & ~whole
            order = torch.where(cut, 0, torch.where(whole, 1, 2)).sort(stable=True, dim=1).indices
            kept = column.gather(1, order)
            rules.append(words.gather(1, order[:, :, None].expand(words.shape)).flatten())
            counts.append(torch.stack((cut.sum(1), whole.sum(1))))
        entries.append(torch.where(kept == NOWHERE, 0, kept).flatten())
    none = torch.zeros((2, 0), dtype=torch.int64, device=device)
    parts = _joined(entries), _joined(rules), torch.cat([*counts, none], 1)
    indices, by_entry, (cut, whole) = (each.to(torch.int32) for each in parts)
    starts = torch.arange(c.rows, dtype=torch.int32, device=device) * capacity
    if c.by_bits:
        by_entry = torch.arange(indices.numel(), dtype=torch.int32, device=device)
    sizes = c.bound() if device.type != "cpu" else exact_sizes(whole.numpy(), cut.numpy())
    full, cut = (each.contiguous() for each in (whole, cut))
    batch, heads = c.indices.shape[:2]
    mask = cls.unchecked(
        q_len=place.q_len, kv_len=place.kv_len, block=place.block, batch=batch, heads=heads,
        full=BlockLists(starts + cut, full, indices), partial=BlockLists(starts, cut, indices),
        lo=interval[0].to(torch.int32)[None], hi=interval[1].to(torch.int32)[None], rules=by_entry,
        bits=torch.cat(bits) if bits else None, sizes=sizes, pure=False, label=c.label, members=c.members,
    )  # fmt: skip
    return with_readbacks(mask, (DeferredSizes(),))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.int64)


def _step(c: UnionInputs) -> int:
    """Rows of one step."""
    tokens = c.place.block[0]
    width = tokens * (c.indices.shape[3] + sum(c.near)) + c.capacity * tokens * (
        c.place.block[1] if c.by_bits else 1
    )
    return max(CHUNK // max(width, 1), 1)


def _interval(c: UnionInputs) -> tuple[Tensor, Tensor]:
    """lo and hi of the queries, int64 [S]."""
    if c.bounds is not None:
        return c.bounds[0].long(), c.bounds[1].long()
    place = c.place
    end = torch.arange(place.q_len, dtype=torch.int64, device=place.device) + (place.q_offset + 1)
    end = end.clamp(0, place.kv_len) if c.causal else torch.full_like(end, place.kv_len)
    return torch.zeros_like(end), end


def _in_tiles(x: Tensor, tokens: int) -> Tensor:
    """[tiles, tokens] of [S]; 0 for tokens beyond."""
    return torch.nn.functional.pad(x, (0, -x.shape[0] % tokens)).view(-(-x.shape[0] // tokens), tokens)


def _lists(c: UnionInputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Entries [rows, tokens, n] int64, and whether they count, of the tokens that exist."""
    (tokens, _), (tiles, _), (_, heads, queries, n) = c.place.block, c.place.grid, c.indices.shape
    group, tile = rows // max(tiles, 1), rows % max(tiles, 1)
    token = tile[:, None] * tokens + torch.arange(tokens, dtype=torch.int64, device=rows.device)
    at = (group // heads)[:, None], (group % heads)[:, None], token.clamp(max=max(queries - 1, 0))
    used = (token < queries)[:, :, None].expand(-1, -1, n)
    if c.counts is not None:
        entry = torch.arange(n, dtype=torch.int64, device=rows.device)
        used = used & (entry < c.counts[at][:, :, None])
    return c.indices[at].long(), used


def _candidates(c: UnionInputs, rows: Tensor, lo: Tensor, hi: Tensor, there: Tensor) -> Candidates:
    """Those of some rows, whose tokens have these bounds [rows, tokens]."""
    bk = c.place.block[1]
    lo, hi, there = lo[:, :, None], hi[:, :, None], there[:, :, None]
    at, used = _lists(c, rows)
    first = at.clamp(-1, INT32_MAX) * c.side  # of the document
    used = used & (at >= 0) & (first < hi - lo)
    sinks, window = (torch.arange(each, dtype=torch.int64, device=rows.device) for each in c.near)
    ends = torch.maximum(hi - c.window, lo)
    columns = [(lo + first) // bk, lo // bk + sinks, ends // bk + window]
    begin, end = (torch.cat([each + add for each in columns[1:]], 2) * bk for add in (0, 1))
    in_sinks, in_window = sinks * bk < hi - lo, columns[2] * bk < hi
    near = there & torch.cat((in_sinks & (sinks * bk < c.sinks), in_window), 2)
    split = len(sinks)
    whole = torch.cat((end[..., :split] <= lo + c.sinks, begin[..., split:] >= hi - c.window), 2) & (
        end <= hi
    )
    column = torch.where(torch.cat((used, near), 2), torch.cat(columns, 2), NOWHERE)
    part = at.clamp(min=0) % (bk // c.side)
    return Candidates(column, torch.cat((used, whole & near), 2), part)


def _union(found: Candidates, capacity: int) -> tuple[Tensor, Tensor]:
    """The distinct columns of each row [rows, capacity], ascending, then NOWHERE; and of each candidate its place
    among them, in the order of the candidates.
    """
    flat = found.column.flatten(1)
    ordered, order = flat.sort(1)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    rank = new.cumsum(1) - 1
    column = torch.full((flat.shape[0], capacity + 1), NOWHERE, dtype=torch.int64, device=flat.device)
    column.scatter_(1, rank.clamp(max=capacity), ordered)
    column[:, capacity] = NOWHERE
    place = torch.empty_like(rank).scatter_(1, order, rank)
    return column[:, :capacity], torch.where(flat == NOWHERE, capacity, place.clamp(max=capacity))


def _table(c: UnionInputs, found: Candidates, place: Tensor) -> Tensor:
    """Which tokens have which parts of a column, bool [rows, capacity, tokens, parts]: the bits of all candidates, or
    by bits, where a column has several listed blocks, the listed ones alone.
    """
    (tokens, bk), capacity, n = c.place.block, c.capacity, c.indices.shape[3]
    parts = bk // c.side
    token = torch.arange(tokens, dtype=torch.int64, device=place.device)[:, None]
    cell = (place.view(found.bit.shape) * tokens + token) * parts
    bit = found.bit
    if c.by_bits:
        cell, bit = cell[..., :n] + found.part, bit[..., :n]
    nobody = capacity * tokens * parts
    table = torch.zeros((place.shape[0], nobody + 1), dtype=torch.bool, device=place.device)
    table.scatter_(1, torch.where(bit, cell.clamp(max=nobody), nobody).flatten(1), True)
    return table[:, :nobody].view(place.shape[0], capacity, tokens, parts)


def _packed(member: Tensor) -> Tensor:
    """Words of bits, int64 within int32 [..., ceil(n / 32)], of bool [..., n]."""
    padded = torch.nn.functional.pad(member, (0, -member.shape[-1] % WORD)).unflatten(-1, (-1, WORD))
    shift = torch.arange(WORD, dtype=torch.int64, device=member.device)
    return (padded.long() << shift).sum(-1).to(torch.int32).long()


def _whole(column: Tensor, words: Tensor, lo: Tensor, hi: Tensor, there: Tensor, bk: int) -> Tensor:
    """Whether all tokens of the tile see all keys of each column, bool [rows, capacity]."""
    wanted = _packed(there)
    from_key = torch.where(there, lo, 0).amax(1, keepdim=True)
    to_key = torch.where(there, hi, INT32_MAX).amin(1, keepdim=True)
    inside = (column != NOWHERE) & (column * bk >= from_key) & ((column + 1) * bk <= to_key)
    return inside & (words == wanted[:, None]).all(2)


def _bits(c: UnionInputs, column: Tensor, table: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """The keys of each column that tokens see, int32 [rows, capacity, tokens, bk / 32], for blocks under 64."""
    bk, device = c.place.block[1], column.device
    shift = torch.arange(0, WORD, c.side, dtype=torch.int64, device=device)
    parts = ((1 << c.side) - 1) << shift
    listed = torch.where(table.unflatten(3, (-1, len(parts))), parts, 0).sum(4)
    key = column[:, :, None, None] * bk + torch.arange(0, bk, WORD, dtype=torch.int64, device=device)
    lo, hi = lo[:, None, :, None], hi[:, None, :, None]
    ends = ~_ones(hi - c.window - key) | _ones(lo + c.sinks - key)
    return ((listed | ends) & _ones(hi - key) & ~_ones(lo - key)).to(torch.int32)


def _ones(keys: Tensor) -> Tensor:
    """Words, int64, whose first bits are set, as many as these numbers, at least 0 and at most 32."""
    return (1 << keys.clamp(0, WORD)) - 1
