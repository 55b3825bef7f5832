"""A mask from its elements: which blocks are full, partial or absent, and the rule of each partial one.

Partial blocks keep their elements as bits until all blocks are known. Then the hull is taken: for each query the
interval from the first key that it sees anywhere to the last. If any interval explains a block, the hull does, and its
bits are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.lists import BY_INTERVAL, WORD, BlockLists
from sparsek.core.arguments import INT32_MAX
from sparsek.products.formats.padding import tiles_of


class KeyBounds(NamedTuple):
    """Partial blocks. Query q of block n sees keys from `first[n, q]` on and before `end[n, q]` (INT32_MAX and 0 if
    none), and every one of those if `solid[n, q]`. Queries beyond q_len see none.
    """

    cells: Tensor  # int64 [n]
    bits: Tensor  # int32 [n, bq, bk / 32]
    first: Tensor  # int32 [n, bq]
    end: Tensor  # int32 [n, bq]
    solid: Tensor  # bool [n, bq]


class TileMask:
    """A mask in the making. A cell is row * Nb + column of a block, int64; each is added once."""

    def __init__(
        self, lengths: tuple[int, int], block: tuple[int, int], batch: int, heads: int, device: torch.device
    ) -> None:
        self.q_len, self.kv_len = lengths
        self.block, self.batch, self.heads, self.device = block, batch, heads, device
        self.tiles, self.columns = (-(-length // side) for length, side in zip(lengths, block, strict=True))
        self.rows = batch * heads * self.tiles
        self._full: list[Tensor] = []
        self._partial: list[KeyBounds] = []
        self.add(
            torch.empty(0, dtype=torch.int64, device=device),
            torch.empty(0, *block, dtype=torch.bool, device=device),
        )

    def add_full(self, cells: Tensor) -> None:
        """Blocks where every query sees every key; none may reach beyond kv_len."""
        self._full.append(cells)

    def add(self, cells: Tensor, tiles: Tensor) -> None:
        """Blocks and their elements, bool [n, bq, bk], which count up to q_len and kv_len only. Syncs."""
        queries, keys = self.positions(cells)
        here = queries < self.q_len
        tiles = tiles & here[:, :, None] & (keys < self.kv_len)[:, None, :]
        some = tiles.any(2)
        whole = (tiles.all(2) | ~here).all(1)
        self._full.append(cells[whole])
        kept = torch.nonzero(some.any(1) & ~whole)[:, 0]
        cells, tiles, some, keys = cells[kept], tiles[kept], some[kept], keys[kept, None].to(torch.int32)
        first = torch.where(tiles, keys, INT32_MAX).amin(2)
        end = torch.where(tiles, keys + 1, 0).amax(2)
        solid = tiles.sum(2) == end - torch.where(some, first, 0)
        self._partial.append(KeyBounds(cells, pack_bits(tiles), first, end, solid))

    def add_slab(self, first: tuple[int, int], slab: Tensor) -> None:
        """Add the blocks of bool [queries, keys], the first of them in this row and column of blocks. Syncs."""
        row, column = first
        blocks = tiles_of(slab, self.block)
        some, whole = blocks.any(3).any(1), blocks.all(3).all(1)
        tiles, columns = torch.nonzero(whole, as_tuple=True)
        self.add_full((row + tiles) * self.columns + column + columns)
        tiles, columns = torch.nonzero(some & ~whole, as_tuple=True)
        self.add((row + tiles) * self.columns + column + columns, blocks[tiles, :, columns])

    def positions(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """The queries [n, bq] and keys [n, bk] of blocks, int64; some may lie beyond q_len and kv_len."""
        rows, columns = cells // self.columns, cells % self.columns
        queries, keys = (torch.arange(side, device=self.device) for side in self.block)
        return (rows % self.tiles * self.block[0])[:, None] + queries, (columns * self.block[1])[
            :, None
        ] + keys

    def mask(self, cls: type[Mask], label: str) -> Mask:
        """The mask, of class `cls`, of all added blocks. Syncs."""
        full = torch.cat(self._full).sort().values
        seen = KeyBounds(*map(torch.cat, zip(*self._partial, strict=True)))
        order = seen.cells.argsort()
        seen = KeyBounds(*(part[order] for part in seen))
        lo, hi = self._hull(full, seen)
        explained = self._explained(seen, lo, hi)
        pure, by_interval = bool(explained.all()), bool(explained.any())
        rules, bits = (None, None) if pure else _shared_bits(seen.bits, explained)
        full, partial = self._lists(full), self._lists(seen.cells)
        return cls(
            self.q_len, self.kv_len, self.block, self.batch, self.heads, full, partial,
            lo=self._per_query(lo, lo < hi) if by_interval else None,
            hi=self._per_query(hi, lo < hi) if by_interval else None,
            rules=rules, bits=bits, pure=pure, label=label,
        )  # fmt: skip

    def _hull(self, full: Tensor, seen: KeyBounds) -> tuple[Tensor, Tensor]:
        """The first key that each query sees and the one after the last, int32 [rows, bq]; INT32_MAX and 0 for none."""
        start = (full % self.columns * self.block[1]).to(torch.int32)
        rows_of_full, rows_of_seen = (
            full // self.columns,
            (seen.cells // self.columns)[:, None].expand_as(seen.end),
        )

        def extreme(how: str, none: int, in_full: Tensor, in_seen: Tensor) -> Tensor:
            by_row = torch.full((self.rows,), none, dtype=torch.int32, device=self.device)
            by_row.scatter_reduce_(0, rows_of_full, in_full, how)
            by_query = by_row[:, None].repeat(1, self.block[0])
            return by_query.scatter_reduce_(0, rows_of_seen, in_seen, how)

        return extreme("amin", INT32_MAX, start, seen.first), extreme(
            "amax", 0, start + self.block[1], seen.end
        )

    def _explained(self, seen: KeyBounds, lo: Tensor, hi: Tensor) -> Tensor:
        """Whether the hull explains each partial block, bool [n]."""
        queries, keys = self.positions(seen.cells)
        rows, start = seen.cells // self.columns, keys[:, :1]
        first, end = lo[rows].clamp(min=start), hi[rows].clamp(max=start + self.block[1])
        same = (seen.first == first) & (seen.end == end)
        neither = (seen.end == 0) & (first >= end)
        return (seen.solid & (same | neither) | (queries >= self.q_len)).all(1)

    def _per_query(self, bound: Tensor, sees: Tensor) -> Tensor:
        """int32 [batch * heads, q_len] from [rows, bq]; 0 for queries that see nothing."""
        whole = torch.where(sees, bound, 0).view(self.batch * self.heads, -1)
        return whole[:, : self.q_len].contiguous()

    def _lists(self, cells: Tensor) -> BlockLists:
        """Rows of block columns from sorted cells."""
        indptr, columns = rows_of_cells(cells, self.rows, self.columns)
        return BlockLists(indptr[:-1].contiguous(), indptr.diff(), columns)


def rows_of_cells(cells: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Row pointers and block columns, int32, of sorted cells row * columns + column."""
    edges = torch.arange(rows + 1, device=cells.device) * columns
    return torch.searchsorted(cells, edges, out_int32=True), (cells % columns).to(torch.int32)


def pack_bits(tiles: Tensor) -> Tensor:
    """int32 [n, bq, bk / 32] of bool [n, bq, bk]: bit c % 32 of word c // 32 is column c."""
    places = torch.arange(WORD, dtype=torch.int32, device=tiles.device)
    weights = torch.ones_like(places) << places
    return torch.where(tiles.unflatten(2, (-1, WORD)), weights, 0).sum(3, dtype=torch.int32)


def _shared_bits(bits: Tensor, explained: Tensor) -> tuple[Tensor, Tensor]:
    """The rule of each block, and the bits of those that no interval explains, equal ones stored once."""
    rules = torch.full(explained.shape, BY_INTERVAL, dtype=torch.int32, device=bits.device)
    distinct, number = torch.unique(bits[~explained].flatten(1), dim=0, return_inverse=True)
    rules[~explained] = number.to(torch.int32)
    return rules, distinct.view(-1, *bits.shape[1:])
