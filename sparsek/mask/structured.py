"""Masks whose rows are known in closed form: causal, windows, strides, BigBird, documents. See BlockMask for each.

Where a mask is an interval of keys for each query, both of its ends rise with the query. So a tile touches the keys
from the start of its first query's interval to the end of its last one's, and sees whole those from the start of the
last one's to the end of the first one's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.eager import eager
from sparsek.core.errors import InvalidInput
from sparsek.mask.lists import BY_INTERVAL, Frame, Place, Runs, as_lengths, assemble, upload
from sparsek.matrix.pattern import INT32_MAX

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sparsek.mask.mask import BlockMask

# From positions of queries, where the interval of each starts and ends; int64 of the same shape.
Interval = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Span(NamedTuple):
    """The intervals of each tile's first and last query, int64 [rows]."""

    first_lo: np.ndarray
    first_hi: np.ndarray
    last_lo: np.ndarray
    last_hi: np.ndarray

    @classmethod
    def of(cls, place: Place, interval: Interval) -> Span:
        return cls(*interval(place.first), *interval(place.last))

    def runs(self, bk: int) -> tuple[Runs, Runs]:
        """The full blocks in one run, the partial ones in one or two."""
        start, end = self.first_lo // bk, -(-self.last_hi // bk)
        end = np.where(self.first_lo < self.last_hi, end, start)
        whole = np.clip(-(-self.last_lo // bk), start, end)
        cut = np.clip(self.first_hi // bk, whole, end)
        full, right = Runs.between(whole, cut), Runs.between(cut, end)
        return full, right if (whole == start).all() else Runs.between(start, whole).then(right)


def _near(place: Place, back: int, ahead: int) -> Interval:
    """The query at p sees keys p - back < k < p + ahead."""

    def interval(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lo, hi = np.maximum(p - back + 1, 0), np.maximum(p + ahead, 0)
        return np.minimum(lo, place.kv_len), np.minimum(hi, place.kv_len)

    return interval


def every_key(place: Place) -> tuple[Tensor, Tensor] | None:
    """lo and hi that admit every key; none are needed if no block reaches beyond kv_len."""
    if place.kv_len % place.block[1] == 0:
        return None
    hi = torch.full((1, place.q_len), place.kv_len, dtype=torch.int32, device=place.device)
    return torch.zeros_like(hi), hi


def up_to_itself(place: Place) -> tuple[Tensor, Tensor]:
    """lo and hi that admit the keys up to the query's position."""
    hi = place.positions(1)
    return torch.zeros_like(hi), hi


@eager("a block mask")
def full(cls: type[BlockMask], seq_len: int | None = None, **frame: Unpack[Frame]) -> BlockMask:
    """The mask with which every query sees every key. `frame`: see `Frame`."""
    place = Place.of(seq_len, **frame)
    span = Span.of(place, _near(place, place.reach, place.reach))
    return assemble(cls, place, *span.runs(place.block[1]), every_key(place), pure=True, label="full")


@eager("a block mask")
def causal(cls: type[BlockMask], seq_len: int | None = None, **frame: Unpack[Frame]) -> BlockMask:
    """Every query sees the keys up to its own position. `frame`: see `Frame`."""
    place = Place.of(seq_len, **frame)
    span = Span.of(place, _near(place, place.reach, 1))
    return assemble(cls, place, *span.runs(place.block[1]), up_to_itself(place), pure=True, label="causal")


@eager("a block mask")
def sliding_window(
    cls: type[BlockMask],
    seq_len: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    causal: bool = True,
    **frame: Unpack[Frame],
) -> BlockMask:
    """A query at position p sees keys p - window < k <= p (not causal: |p - k| < window), and the first `sinks`
    keys (causal: up to p). The window counts the query's own position. `frame`: see `Frame`.
    """
    place = Place.of(seq_len, **frame)
    window, sinks = arguments.integer("window", window, 1), arguments.integer("sinks", sinks)
    causal = arguments.flag("causal", causal)
    label = f"sliding_window({window}{f', sinks={sinks}' if sinks else ''}{_both_ways(causal)})"
    back, sinks = min(window, place.reach), min(sinks, place.kv_len)
    ahead = 1 if causal else back
    near, lo, hi = _near(place, back, ahead), place.positions(1 - back), place.positions(ahead)
    if not sinks:
        return assemble(
            cls, place, *Span.of(place, near).runs(place.block[1]), (lo, hi), pure=True, label=label
        )

    def joined(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the window reaches down to the sinks, both are one interval from 0."""
        start, end = near(p)
        return np.where(start <= sinks, 0, start), end if causal else np.maximum(end, sinks)

    lo.masked_fill_(lo <= sinks, 0)
    if not causal:
        hi.clamp_(min=sinks)
    full, partial, bits = _window_and_sinks(place, joined, sinks)
    pure = bool((joined(place.last)[0] == 0).all())
    return assemble(cls, place, full, partial, (lo, hi), pure=pure, label=label, bits=bits)


def _window_and_sinks(place: Place, joined: Interval, sinks: int) -> tuple[Runs, Runs, np.ndarray | None]:
    """The runs of full and of partial blocks, and the bits of the partial ones that no interval describes.

    Queries whose interval starts at 0 see just that, the others see the first `sinks` keys as well. So there are
    three kinds of tiles. In early ones all queries are of the first kind. In late ones all are of the second, and no
    window reaches a sink block: the last of these may be cut, for all in the same way (bits 0). A few are between:
    each of their cut sink blocks has bits of its own.
    """
    bk, span = place.block[1], Span.of(place, joined)
    whole, some = sinks // bk, -(-sinks // bk)  # sink blocks that late tiles see whole, and sink blocks
    edge = min(some * bk, place.kv_len)
    early = span.last_lo == 0
    between = ~early & (span.first_lo < edge)
    cut = np.minimum(np.where(early, some, whole), span.first_hi // bk)
    end = np.maximum(np.minimum(some, -(-span.last_hi // bk)), cut)
    window, window_edges = Span(*(np.maximum(each, edge) for each in span)).runs(bk)
    full, partial = (
        Runs.between(np.zeros_like(cut), cut).then(window),
        Runs.between(cut, end).then(window_edges),
    )
    if not (end > cut)[~early].any():
        return full, partial, None
    own = np.where(between, end - cut, 0)
    before = np.cumsum(own) - own
    rule, rule_step = np.full_like(partial.first, BY_INTERVAL), np.zeros_like(partial.first)
    rule[0] = np.where(between, 1 + before, np.where(early, BY_INTERVAL, 0))
    rule_step[0] = between
    tiles = np.repeat(np.arange(place.grid[0]), own)
    columns = (cut - before)[tiles] + np.arange(tiles.size)
    bits = _sink_bits(place, joined, sinks, tiles, columns)
    return full, partial._replace(rule=rule, rule_step=rule_step), bits


def _sink_bits(
    place: Place, joined: Interval, sinks: int, tiles: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Bits 0: the last sink block, cut. Then those of the blocks (tiles, columns), int32 [1 + n, bq, bk / 32]."""
    bq, bk = place.block
    seen = np.empty((1 + tiles.size, bq, bk), bool)
    seen[0] = np.arange(sinks // bk * bk, sinks // bk * bk + bk) < sinks
    queries = np.minimum(tiles[:, None] * bq + np.arange(bq), place.q_len - 1) + place.q_offset
    lo, hi = (each[:, :, None] for each in joined(queries))
    keys = (columns[:, None] * bk + np.arange(bk))[:, None, :]
    seen[1:] = (keys < np.minimum(sinks, hi)) | ((lo <= keys) & (keys < hi))
    return np.packbits(seen, axis=-1, bitorder="little").view("<i4").astype(np.int32)


@eager("a block mask")
def strided(
    cls: type[BlockMask],
    seq_len: int | None = None,
    stride: int | None = None,
    window: int | None = None,
    causal: bool = True,
    **frame: Unpack[Frame],
) -> BlockMask:
    """Blocks near the diagonal and every (stride / bk)-th block from there. `stride` is a multiple of bk.

    A tile whose queries stand in key blocks p to p' sees blocks j with p - w < j < p' + w, where w is `window`
    in blocks, rounded up, and further j with (p - j) or (j - p') a multiple of stride / bk. Causal: only keys up
    to the query. Child et al. 2019, "Generating Long Sequences with Sparse Transformers", in blocks.
    """
    place = Place.of(seq_len, **frame)
    stride, window = arguments.integer("stride", stride, 1), arguments.integer("window", window, 1)
    causal, bk = arguments.flag("causal", causal), place.block[1]
    if stride % bk:
        raise InvalidInput(f"stride is {stride}; it must be a multiple of the block's {bk} keys")
    step, near = min(stride // bk, place.reach), place.blocks(window)
    top, bottom = place.first // bk, place.last // bk
    gap = -(-near // step) * step  # blocks to the first one of the stride that the window does not hold
    left = top % step
    runs = Runs.progression(left, (top - gap - left) // step + 1, step)
    runs = runs.then(Runs.between(top - near + 1, bottom + near))
    if not causal:
        runs = runs.then(Runs.progression(bottom + gap, np.full_like(bottom, place.reach), step))
    return _of_blocks(cls, place, runs, causal, f"strided({stride}, {window}{_both_ways(causal)})")


@eager("a block mask")
def dilated(
    cls: type[BlockMask],
    seq_len: int | None = None,
    window: int | None = None,
    dilation: int = 1,
    causal: bool = True,
    **frame: Unpack[Frame],
) -> BlockMask:
    """A window with gaps: of every `dilation` blocks one is seen. With `dilation` 1 a window of whole blocks.

    A tile whose queries stand in key blocks p to p' sees these and p - t * dilation, p' + t * dilation for
    0 < t < w, where w is `window` in blocks, rounded up. Causal: only keys up to the query. Beltagy et al. 2020,
    "Longformer", in blocks.
    """
    place = Place.of(seq_len, **frame)
    window, dilation = arguments.integer("window", window, 1), arguments.integer("dilation", dilation, 1)
    causal = arguments.flag("causal", causal)
    bk, step = place.block[1], min(dilation, place.reach)
    top, bottom = place.first // bk, place.last // bk
    more = np.full_like(top, place.blocks(window) - 1)
    runs = Runs.progression(top - more * step, more, step).then(Runs.between(top, bottom + 1))
    if not causal:
        runs = runs.then(Runs.progression(bottom + step, more, step))
    return _of_blocks(cls, place, runs, causal, f"dilated({window}, {dilation}{_both_ways(causal)})")


def _both_ways(causal: bool) -> str:
    return "" if causal else ", causal=False"


@eager("a block mask")
def bigbird(
    cls: type[BlockMask],
    seq_len: int | None = None,
    window: int | None = None,
    globals: int = 0,
    random: int = 0,
    seed: int = 0,
    causal: bool = False,
    heads: int = 1,
    **frame: Unpack[Frame],
) -> BlockMask:
    """Window, global and random blocks: Zaheer et al. 2020, "Big Bird".

    `window` is that of `strided`. The first `globals` keys, rounded up to blocks, are seen by all queries;
    tiles with a query among the first `globals` positions see all keys. Every other tile sees `random` more
    blocks (fewer if fewer are left), distinct, near uniform, others for each of `heads`, which share one mask if
    nothing is drawn. What is drawn depends on `seed` and the shape, not on the device.
    """
    place = Place.of(seq_len, **frame)
    window, seed = arguments.integer("window", window, 1), arguments.integer("seed", seed)
    globals, random = arguments.integer("globals", globals), arguments.integer("random", random)
    heads = arguments.integer("heads", heads, 1, INT32_MAX // max(place.grid[0], 1))
    causal = arguments.flag("causal", causal)
    label = f"bigbird({window}, {globals}, {random}, seed={seed}{', causal' if causal else ''})"
    bk, near, wide = place.block[1], place.blocks(window), place.blocks(globals)
    # Every tile sees the blocks before `first` and those from `left` to `right`.
    end = visible(place, causal)[1]
    first = np.where(place.first < globals, end, np.minimum(wide, end))
    left = np.clip(place.first // bk - near + 1, first, end)
    right = np.clip(place.last // bk + (1 if causal else near), left, end)
    others = left - first + end - right
    heads = heads if random and others.any() else 1
    rank, drawn = _draw(np.random.default_rng(seed), np.tile(others, heads), random)
    first, left, right = (np.tile(each, heads) for each in (first, left, right))
    column = first + rank
    before = column < left
    column = np.where(before, column, column + right - left)
    stored = Runs.between(np.zeros_like(first), first).then(Runs.single(column, drawn & before))
    stored = stored.then(Runs.between(left, right)).then(Runs.single(column, drawn & ~before))
    return _of_blocks(cls, place, stored, causal, label, heads)


def _draw(rng: np.random.Generator, n: np.ndarray, each: int) -> tuple[np.ndarray, np.ndarray]:
    """For each row r, `each` distinct ranks below n[r], ascending, or all of them: int64 [each, rows], and which count.

    As many numbers up to n - each, sorted; the i-th plus i. All sets can be drawn, and each rank about as often.
    """
    most = min(each, int(n.max(initial=0)))
    at = np.arange(most)[:, None]
    drawn = at < n
    room = n - np.minimum(most, n) + 1
    rank = np.floor(rng.random((most, n.size)) * room).astype(np.int64)
    return np.sort(np.where(drawn, rank, INT32_MAX), 0) + at, drawn


def _of_blocks(
    cls: type[BlockMask], place: Place, stored: Runs, causal: bool, label: str, heads: int = 1
) -> BlockMask:
    """The mask of these blocks as far as they exist; causal: of their keys up to the query."""
    edge, end = (np.tile(each, heads) for each in visible(place, causal))
    stored = stored.behind(np.zeros_like(edge)).before(end)
    interval = up_to_itself(place) if causal else every_key(place)
    full, partial = stored.before(edge), stored.behind(edge)
    return assemble(cls, place, full, partial, interval, pure=True, label=label, heads=heads)


def visible(place: Place, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """How many leading blocks all queries of a tile may see whole, and how many some of them may see. int64 [Mb]."""
    span = Span.of(place, _near(place, place.reach, 1 if causal else place.reach))
    return span.first_hi // place.block[1], -(-span.last_hi // place.block[1])


@eager("a block mask")
def block_diagonal(
    cls: type[BlockMask],
    lengths: Any,
    causal: bool = True,
    seq_len: int | None = None,
    block: int | tuple[int, int] = 128,
    device: str | torch.device | None = None,
) -> BlockMask:
    """Packed documents: a query sees the keys of its own document, causal up to itself.

    `lengths`: ints, one for each document, as a sequence, an array or a CPU tensor; or one such row for each
    batch item. Each row must sum up to the same length, and to `seq_len` if that is given.
    """
    rows, causal = as_lengths(lengths), arguments.flag("causal", causal)
    total = int(rows[0].sum()) if seq_len is None else arguments.integer("seq_len", seq_len)
    for at, row in enumerate(rows):
        if row.sum() != total:
            right = f"those of batch item 0 to {total}" if seq_len is None else f"seq_len is {total}"
            raise InvalidInput(f"lengths of batch item {at} sum up to {row.sum()}; {right}")
    place = Place.of(total, block=block, device=device, q_offset=0)
    spans = [Span.of(place, _document(row, causal)) for row in rows]
    span = Span(*(np.concatenate(each) for each in zip(*spans, strict=True)))
    starts = np.concatenate([np.cumsum(row) - row for row in rows])
    of_all = np.concatenate(rows)
    start, end, count = upload((starts, starts + of_all, of_all), place.device)
    size = len(rows), total
    lo, hi = (
        torch.repeat_interleave(each, count, output_size=math.prod(size)).view(size) for each in (start, end)
    )
    if causal:
        hi = place.positions(1).expand(len(rows), -1).contiguous()
    label = f"block_diagonal({of_all.size} documents{_both_ways(causal)})"
    return assemble(cls, place, *span.runs(place.block[1]), (lo, hi), pure=True, label=label, batch=len(rows))


def _document(lengths: np.ndarray, causal: bool) -> Interval:
    """From a document's start to its end, or to the query."""
    ends = np.cumsum(lengths)

    def interval(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.searchsorted(ends, p, side="right")
        return (ends - lengths)[at], p + 1 if causal else ends[at]

    return interval
