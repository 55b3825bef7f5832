"""Masks whose rows are known in closed form: causal, strides, BigBird; windows and documents by `documents`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced
from sparsek.mask.documents import Documents, PackedLayout, Window, documents_mask
from sparsek.mask.lists import Frame, Place, Runs, as_lengths, assemble
from sparsek.matrix.pattern import INT32_MAX

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sparsek.mask.mask import BlockMask


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


@not_traced("a block mask")
def full(cls: type[BlockMask], seq_len: int | None = None, **frame: Unpack[Frame]) -> BlockMask:
    """The mask with which every query sees every key. `frame`: see `Frame`."""
    place = Place.of(seq_len, **frame)
    return _of_blocks(cls, place, _all_blocks(place), False, "full")


@not_traced("a block mask")
def causal(cls: type[BlockMask], seq_len: int | None = None, **frame: Unpack[Frame]) -> BlockMask:
    """Every query sees the keys up to its own position. `frame`: see `Frame`."""
    place = Place.of(seq_len, **frame)
    return _of_blocks(cls, place, _all_blocks(place), True, "causal")


@not_traced("a block mask")
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
    near = Window(window, 1 if causal else window, sinks, sinks_ahead=not causal)
    return documents_mask(cls, PackedLayout.of(place), near, place.block, place.device, label)


@not_traced("a block mask")
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


@not_traced("a block mask")
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


@not_traced("a block mask")
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


def _all_blocks(place: Place) -> Runs:
    return Runs.between(np.zeros(place.grid[0], np.int64), np.full(place.grid[0], place.grid[1]))


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
    first = last = np.full(place.grid[0], place.kv_len)
    if causal:
        first, last = (np.clip(p + 1, 0, place.kv_len) for p in (place.first, place.last))
    return first // place.block[1], -(-last // place.block[1])


@not_traced("a block mask")
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
    item = np.repeat(np.arange(len(rows)), [row.size for row in rows])
    ends, of_all = np.concatenate([np.cumsum(row) for row in rows]), np.concatenate(rows)
    starts, none = ends - of_all, np.zeros_like(ends)
    layout = PackedLayout(Documents(item, starts, ends, starts, ends, none, starts), total, total, len(rows))
    near, label = (
        Window(None, 1 if causal else None),
        f"block_diagonal({of_all.size} documents{_both_ways(causal)})",
    )
    return documents_mask(cls, layout, near, place.block, place.device, label)
