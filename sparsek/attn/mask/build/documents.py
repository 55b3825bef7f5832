"""Masks of packed documents: each query sees an interval of its own document's keys, and the document's first keys.

Documents begin and end anywhere in a block. The host finds the blocks from a few numbers for each piece of a document
in a tile; the device writes the lists. A tile of one document has three kinds of blocks: full ones, partial ones by
interval, and, with bits, those of the document's first keys that are seen by queries with a window elsewhere. Tiles of
several documents have no full blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build import banded
from sparsek.attn.mask.build.banded import Band, counted_documents, on_gpu, room_of_documents
from sparsek.attn.mask.build.tiles import pack_bits
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.lists import (
    BY_INTERVAL,
    BlockLists,
    Place,
    Runs,
    check_stored,
    exact_sizes,
    heavy_blocks,
    lists_of_runs,
    table_of_runs,
    upload,
)
from sparsek.core.arguments import INT32_MAX
from sparsek.core.tracing import not_traced

CHUNK = 1 << 22  # elements of blocks whose bits are made in one step


class Window(NamedTuple):
    """The keys near a query, and the first ones.

    A query at position p sees keys p - `back` < k < p + `ahead` (None: no bound) of its document, and the first `sinks`
    keys of it. With `ahead` 1, which is causal, it sees none of these after p, unless `sinks_ahead`.
    """

    back: int | None = None
    ahead: int | None = None
    sinks: int = 0
    sinks_ahead: bool = False


class Documents(NamedTuple):
    """Queries and the keys that they may see, int64 [n] arrays.

    Query q_start <= q < q_end of batch item `item` stands at key position q + shift and sees keys k_start <= k < k_end
    only. Sinks count from key position `origin`, at most k_start: of a document whose first keys are missing, the sinks
    are missing too. Sorted by item and query; no query is in two documents, and one in none sees nothing.
    """

    item: np.ndarray
    q_start: np.ndarray
    q_end: np.ndarray
    k_start: np.ndarray
    k_end: np.ndarray
    shift: np.ndarray
    origin: np.ndarray

    @classmethod
    def packed(cls, q_edges: np.ndarray, k_edges: np.ndarray) -> Documents:
        """From the start of each document and the end of the last. The last query of each stands at its last key."""
        start, end = k_edges[:-1], k_edges[1:]
        return cls(np.zeros_like(start), q_edges[:-1], q_edges[1:], start, end, end - q_edges[1:], start)

    def take(self, at: np.ndarray) -> Documents:
        """The documents at these positions, in this order."""
        return Documents(*(each[at] for each in self))

    def sink_end(self, sinks: int) -> np.ndarray:
        """The end of the sinks, within k_start and k_end."""
        return _within(self.origin + min(sinks, INT32_MAX), self.k_start, self.k_end)


class PackedLayout(NamedTuple):
    """The documents of `batch` batch items with q_len queries and kv_len keys.

    `near` is a window that holds in addition to that of any policy.
    """

    docs: Documents
    q_len: int
    kv_len: int
    batch: int = 1
    near: Window = Window()

    @classmethod
    def of(cls, place: Place) -> PackedLayout:
        """One document, of all queries and keys."""
        fields = (0, 0, place.q_len, 0, place.kv_len, place.q_offset, 0)
        return cls(Documents(*(np.array([each], np.int64) for each in fields)), place.q_len, place.kv_len)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key for equal layouts."""
        return tuple(each.tobytes() for each in self.docs), *self[1:]

    @property
    def edges(self) -> np.ndarray | None:
        """Where each document begins, and the end of the last, of all batch items one behind the other; None if
        documents leave gaps, or some have other keys than queries.
        """
        docs, base = self.docs, self.docs.item * self.q_len
        if self.q_len != self.kv_len or docs.shift.any():
            return None
        starts, ends = docs.q_start + base, docs.q_end + base
        edges = np.append(starts, self.batch * self.q_len)
        same = docs.k_start is docs.q_start or (docs.k_start == docs.q_start).all()
        same = same and (docs.k_end is docs.q_end or (docs.k_end == docs.q_end).all())
        return edges if same and edges[0] == 0 and (edges[1:] == ends).all() else None


class Span(NamedTuple):
    """The numbers that the bounds of a query depend on, numpy or torch."""

    k_start: Any
    k_end: Any
    shift: Any
    sink_end: Any

    @classmethod
    def of(cls, docs: Documents, near: Window) -> Span:
        return cls(docs.k_start, docs.k_end, docs.shift, docs.sink_end(near.sinks))


def bounds(query: Any, docs: Span, near: Window, reach: int) -> tuple[Any, Any]:
    """lo and hi of queries, numpy or torch. Both ascend with the query, within a document.

    Where a window reaches down to the sinks, both are one interval from the document's start.
    """
    p, lo, hi = query + docs.shift, docs.k_start, docs.k_end
    if near.back is not None:
        lo = _within(p + (1 - min(near.back, reach)), docs.k_start, docs.k_end)
    if near.ahead is not None:
        hi = _within(p + min(near.ahead, reach), docs.k_start, docs.k_end)
    if near.sinks:
        lo = docs.k_start + (lo - docs.k_start) * (lo > docs.sink_end)
        if near.ahead not in (None, 1) or near.sinks_ahead:
            hi = _within(hi, docs.sink_end, docs.k_end)
    return lo, hi


def _within(x: Any, low: Any, high: Any) -> Any:
    """x between low and high. numpy's own clip takes the host five times as long on few numbers."""
    return x.clamp(low, high) if isinstance(x, Tensor) else np.minimum(np.maximum(x, low), high)


@not_traced("a block mask")
def documents_mask(
    cls: type[Mask], layout: PackedLayout, near: Window, block: Any, device: Any, label: str
) -> Mask:
    """The mask of a layout, in which each query sees the keys of its document that `near` admits.

    `layout.near` is not read. O(tiles + documents + partial blocks) on the host, without a sync; O(q_len + stored
    blocks) on the device.
    """
    place = Place.of(q_len=layout.q_len, kv_len=layout.kv_len, block=block, device=device, q_offset=0)
    if banded.has_kernels(place.device) and not near.sinks:
        edges = layout.edges
        made = None if edges is None else _of_edges(cls, place, edges, near, layout.batch, label)
        if made is not None:
            return made
    docs = layout.docs.take(np.flatnonzero(layout.docs.q_start < layout.docs.q_end))
    return _assembled(cls, place, docs, Pieces.of(docs, near, place), near, layout.batch, label)


def _of_edges(
    cls: type[Mask], place: Place, edges: np.ndarray, near: Window, batch: int, label: str
) -> Mask | None:
    """The mask of documents that adjoin, made by a kernel of their edges; None if none makes it."""
    if edges.size < 2 or batch * place.q_len > INT32_MAX:
        return None
    band = Band.of(place, *near)
    (there,) = upload([edges], place.device)
    count = partial(counted_documents, place, edges, band, batch)
    room = partial(room_of_documents, place, band, True, batch)
    return on_gpu(cls, place, "mask_of_documents", (there, band, batch), count, room, label, batch=batch)


class Pieces(NamedTuple):
    """Every piece of a document in a tile: int64 and bool [pieces], in rows of tiles that ascend."""

    docs: Span
    doc: np.ndarray
    row: np.ndarray
    alone: np.ndarray  # the piece is its whole tile
    first_lo: np.ndarray
    first_hi: np.ndarray
    last_lo: np.ndarray
    last_hi: np.ndarray

    @classmethod
    def of(cls, docs: Documents, near: Window, place: Place) -> Pieces:
        bq = place.block[0]
        top, bottom = docs.q_start // bq, (docs.q_end - 1) // bq
        count = bottom - top + 1
        doc = np.repeat(np.arange(count.size), count)
        tile = top[doc] + np.arange(doc.size) - np.repeat(np.cumsum(count) - count, count)
        first, end = np.maximum(docs.q_start[doc], tile * bq), np.minimum(docs.q_end[doc], (tile + 1) * bq)
        alone = (first == tile * bq) & (end == np.minimum((tile + 1) * bq, place.q_len))
        spans = Span(*(each[doc] for each in Span.of(docs, near)))
        ends = np.stack((first, end - 1))
        lo, hi = (np.broadcast_to(x, ends.shape) for x in bounds(ends, spans, near, reach_of(docs, place)))
        return cls(spans, doc, docs.item[doc] * place.grid[0] + tile, alone, lo[0], hi[0], lo[1], hi[1])

    @property
    def split(self) -> np.ndarray:
        """Whether some query sees sinks apart from its window."""
        return (self.docs.sink_end > self.docs.k_start) & (self.last_lo > self.docs.sink_end)

    @property
    def apart(self) -> np.ndarray:
        """Whether every query does."""
        return self.split & (self.first_lo > self.docs.sink_end)


class TileBlocks(NamedTuple):
    """The blocks of a mask.

    `sinks` and `window`: columns of full blocks, first and end, int64 [rows]. `row` and `column` of the partial ones,
    sorted; their `rules`; and for each entry of bits a row and a column that have it.
    """

    sinks: tuple[np.ndarray, np.ndarray]
    window: tuple[np.ndarray, np.ndarray]
    row: np.ndarray
    column: np.ndarray
    rules: np.ndarray | None
    bits: tuple[np.ndarray, np.ndarray]


def _blocks(pieces: Pieces, place: Place, rows: int) -> TileBlocks:
    bk, columns = place.block[1], place.grid[1]
    docs, split, alone = pieces.docs, pieces.split, pieces.alone
    some = pieces.first_lo < pieces.last_hi
    start = pieces.first_lo // bk
    end = np.where(some, -(-pieces.last_hi // bk), start)
    # Of a tile of one document: the blocks inside every window, and the blocks of sinks alone.
    whole = _within(-(-pieces.last_lo // bk), start, end)
    cut = np.where(alone, _within(pieces.first_hi // bk, whole, end), whole)
    every_tile = len(pieces.row) == rows and bool(alone.all())

    def by_row(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if every_tile:
            return first, end
        made, at = np.zeros((2, rows), np.int64), pieces.row[alone]
        made[0, at], made[1, at] = first[alone], end[alone]
        return made[0], made[1]

    window = by_row(whole, cut)
    if not split.any():
        piece, column = _expanded(((start, whole), (cut, end)))
        cells, _, _ = _distinct(pieces.row[piece] * columns + column)
        nothing = np.zeros(rows, np.int64)
        return TileBlocks(
            (nothing, nothing), window, *np.divmod(cells, columns), None, (cells[:0], cells[:0])
        )
    apart = pieces.apart
    left = -(-docs.k_start // bk)
    right = np.where(alone & split, np.minimum(docs.sink_end, pieces.first_hi) // bk, left)
    right = np.maximum(left, right)
    sink_start = docs.k_start // bk
    sink_end = np.where(apart, -(-docs.sink_end // bk), sink_start)
    none = left == right
    runs = (
        (sink_start, np.where(none, sink_end, np.minimum(left, sink_end))),
        (np.where(none, sink_end, right), sink_end),
        (start, whole),
        (cut, end),
    )
    piece, column = _expanded(runs)
    outside = (column < left[piece]) | (right[piece] <= column)
    if not outside.all():
        piece, column = piece[outside], column[outside]
    by_bits = split[piece] & (column * bk < docs.sink_end[piece])
    cells, at, back = _distinct(pieces.row[piece] * columns + column)
    rules, bits = None, (cells[:0], cells[:0])
    if by_bits.any():
        # Where no window reaches, the sinks of a document have the same bits in all of its tiles.
        same = (alone & apart)[piece] & ((column + 1) * bk <= pieces.first_lo[piece])
        number = np.where(
            same, pieces.doc[piece] * columns + column, -1 - pieces.row[piece] * columns - column
        )
        has_bits = np.zeros(cells.size, bool)
        has_bits[back[by_bits]] = True
        own = number[at][has_bits]
        _, chosen, which = np.unique(own, return_index=True, return_inverse=True)
        rules = np.full(cells.size, BY_INTERVAL, np.int64)
        rules[has_bits] = which
        bits = np.divmod(cells[has_bits][chosen], columns)
    return TileBlocks(by_row(left, right), window, *np.divmod(cells, columns), rules, bits)


def _expanded(runs: tuple[tuple[np.ndarray, np.ndarray], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Piece and column of every block of runs (first, end) of each piece, piece by piece."""
    runs = tuple(run for run in runs if (run[0] < run[1]).any()) or runs[:1]
    first, end = (np.stack(each, 1).ravel() for each in zip(*runs, strict=True))
    count = np.maximum(end - first, 0)
    run = np.repeat(np.arange(count.size), count)
    return run // len(runs), (first - (np.cumsum(count) - count))[run] + np.arange(run.size)


def _distinct(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct numbers of x, sorted; a position of each in x; and for each of x its place among them.

    Ascending numbers, as those of one document, are not sorted again.
    """
    if (x[1:] > x[:-1]).all():
        at = np.arange(x.size)
        return x, at, at
    return np.unique(x, return_index=True, return_inverse=True)


class Queries(NamedTuple):
    """The bounds of each query, int32 [batch, q_len]: keys lo <= k < hi and, below hi, start <= k < sink_end."""

    lo: Tensor
    hi: Tensor
    start: Tensor
    sink_end: Tensor

    @classmethod
    def of(
        cls, docs: Span, near: Window, size: tuple[int, int], reach: int, device: torch.device, for_bits: bool
    ) -> Queries:
        """From the document of each query: [batch, q_len], or ints of the only document. `for_bits`: with sinks."""
        kind = torch.int32 if 2 * reach <= INT32_MAX else torch.int64
        lo, hi = bounds(torch.arange(size[1], dtype=kind, device=device), docs, near, reach)
        given = (lo, hi, docs.k_start, docs.sink_end) if for_bits else (lo, hi, lo, lo)
        made = (
            x if isinstance(x, Tensor) else torch.full(size, x, dtype=torch.int32, device=device)
            for x in given
        )
        return cls(*(x.to(torch.int32).expand(size).contiguous() for x in made))

    @staticmethod
    def documents(spans: Tensor, near: Window, size: tuple[int, int], reach: int) -> Span:
        """The document of each query from int32 [5, spans]: the queries of each span, and its document."""
        kind = torch.int32 if 2 * reach <= INT32_MAX else torch.int64
        count, *fields = spans.unbind()
        at = torch.repeat_interleave(count, output_size=size[0] * size[1])
        start, *more = (x.to(kind).index_select(0, at).view(size) for x in fields[: 4 if near.sinks else 3])
        return Span(start, *more, *[start] * (3 - len(more)))

    def bits(self, rows: Tensor, columns: Tensor, place: Place) -> Tensor:
        """int32 [n, bq, bk / 32] of the blocks in these rows and columns."""
        (bq, bk), tiles = place.block, place.grid[0]
        made, step = [], CHUNK // (bq * bk)
        for row, column in zip(rows.split(step), columns.split(step), strict=True):
            item, tile = (row // tiles, row % tiles) if len(self.lo) > 1 else (None, row)
            query = (tile * bq)[:, None] + torch.arange(bq, dtype=torch.int32, device=row.device)
            at = query.clamp(max=place.q_len - 1)
            at = at if item is None else at + (item * place.q_len)[:, None]
            lo, hi, start, sink_end = (x.flatten()[at][:, :, None] for x in self)
            key = (column * bk)[:, None, None] + torch.arange(bk, dtype=torch.int32, device=row.device)
            sinks = (start <= key) & (key < torch.minimum(sink_end, hi))
            made.append(pack_bits(sinks | ((lo <= key) & (key < hi))))
        return made[0] if len(made) == 1 else torch.cat(made)


def _assembled(
    cls: type[Mask], place: Place, docs: Documents, pieces: Pieces, near: Window, batch: int, label: str
) -> Mask:
    rows = batch * place.grid[0]
    found = _blocks(pieces, place, rows)
    full = Runs.between(*found.window)
    if (found.sinks[0] < found.sinks[1]).any():
        full = Runs.between(*found.sinks).then(full)
    whole = full.count.sum(0)
    cut = np.bincount(found.row, minlength=rows)
    sizes = exact_sizes(whole, cut)
    check_stored(sizes.stored)
    table = table_of_runs(full, whole)
    lists = [np.cumsum(cut) - cut, cut, found.column]
    by_bits = [] if found.rules is None else [found.rules, *found.bits]
    only = batch == docs.item.size == 1 and docs.q_end[0] - docs.q_start[0] == place.q_len
    spans = [] if only else [_spans(docs, near, place.q_len, batch)]
    sent = upload([*lists, *table, *by_bits, *spans], place.device)
    size, reach = (batch, place.q_len), reach_of(docs, place)
    of_queries = (
        Span(*(int(each[0]) for each in Span.of(docs, near)))
        if only
        else Queries.documents(sent[-1], near, size, reach)
    )
    queries = Queries.of(of_queries, near, size, reach, place.device, for_bits=bool(by_bits))
    rules = bits = None
    behind = 3 + len(table)
    if by_bits:
        rules, bits = sent[behind], queries.bits(sent[behind + 1], sent[behind + 2], place)
    every = torch.arange(place.grid[1], dtype=torch.int32, device=place.device)
    full_lists = lists_of_runs(sent[3:behind], every, sizes.stored - sizes.partial)
    mask = cls.unchecked(
        q_len=place.q_len, kv_len=place.kv_len, block=place.block, batch=batch, heads=1, full=full_lists,
        partial=BlockLists(*sent[:3]), lo=queries.lo, hi=queries.hi, rules=rules,
        bits=bits, sizes=sizes, pure=not pieces.split.any(), label=label,
    )  # fmt: skip
    mask._memo["heavy"] = heavy_blocks(whole, cut)
    return mask


def _spans(docs: Documents, near: Window, q_len: int, batch: int) -> np.ndarray:
    """int64 [5, 2 * n + 1]: the documents, and before, between and after them spans of queries that see nothing."""
    starts, ends = docs.item * q_len + docs.q_start, docs.item * q_len + docs.q_end
    edges = np.stack((starts, ends), 1).flatten()
    spans = np.zeros((5, edges.size + 1), np.int64)
    spans[0] = np.diff(edges, prepend=0, append=batch * q_len)
    spans[1:, 1::2] = Span.of(docs, near)
    return spans


def reach_of(docs: Documents, place: Place) -> int:
    """More keys than lie between any query and any key."""
    return place.reach + int(np.abs(docs.shift).max(initial=0))
