"""Blocks of keys for each query token: scores of tiles of queries, and the highest of a query's row. In plain Triton:
any CUDA GPU from sm_80, and Triton's interpreter. `attn/policies/token.py` and `selected.py` are the specification.

    _score   a tile of queries, all heads of q of one head of k:  [TOKENS x heads, D]  against TN keys at a time
                 twice, if weights are a softmax: first for its normalizers, then for the weights themselves
             -> summed over heads, joined over the keys of a cell, for its own cell and, where keys span more than their
                stride, for those behind it: float32 [PLANES, B, Hkv, queries, cells]
    _pick    a query: joins the cells of every block, and finds the highest by bisection over the row in registers

Products of queries and keys stay in registers, and the caller makes cells for some queries at a time. Every sum has one
order: same inputs, same bits. Bottleneck of softmax weights: exponentials, two for each product; else tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.ranks import highest, order

MOST_COLUMNS = 16384  # blocks of a row, which is in registers
MOST_BYTES = 512  # of a row of q, which a tile has in shared memory
LOG2E = 1.4426950408889634
_INF = tl.constexpr(float("inf"))
_GREATEST, _GREATEST_WIDE = tl.constexpr(3.4028234663852886e38), tl.constexpr(1.7976931348623157e308)


@dataclass(frozen=True)
class Config:
    """Rows of a tile, of heads within tokens, keys of a step, warps and stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


WEIGHTS, PRODUCTS = Config(128, 64, 8, 3), Config(128, 64, 4, 3)  # 16-bit operands, D up to 128
WIDE_ROWS, SINGLE = Config(64, 64, 4, 2), Config(32, 32, 8, 2)  # D up to 256, and float32


class Cells(NamedTuple):
    """Scores of cells, equal parts of blocks. The cell of `step` keys has a score for queries that see `span` keys from
    its first one on.

    values: float32 or float64 [planes, B, H, n, each * blocks]: of cell i in plane p for cell i + p.
    sums: whether the score of a block is the sum of those of its cells, else the largest.
    nothing: the score of a cell that has no key for a query.
    """

    values: Tensor
    step: int
    span: int
    each: int
    sums: bool
    nothing: float


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _products(x, at, key, count, D: tl.constexpr, WIDE: tl.constexpr, TN: tl.constexpr, WHOLE: tl.constexpr):
    """x times the rows at these places, [rows, TN]. WHOLE: all of them exist."""
    if not WHOLE:
        y = tl.load(at, mask=(key < count)[:, None] & (tl.arange(0, WIDE) < D)[None, :], other=0.0)
    elif D < WIDE:
        y = tl.load(at, mask=(tl.arange(0, WIDE) < D)[None, :], other=0.0)
    else:
        y = tl.load(at)
    return tl.dot(x, y.T, input_precision="ieee")


@triton.jit
def _normalizers(
    top, total, x, at, begin, end, lo, hi, count, s_key, scale,
    D: tl.constexpr, WIDE: tl.constexpr, TN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest product of each row, and the sum of 2^(scale * (product - largest)). WHOLE: all rows see all keys."""
    for start in range(begin, end, TN):
        key = start + tl.arange(0, TN)
        s = _products(x, at + (tl.full([], 0, tl.int64) + start) * s_key, key, count, D, WIDE, TN, WHOLE)
        if not WHOLE:
            seen = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
            s = tl.where(seen, s, -_INF)
        new = tl.maximum(top, tl.max(s, 1))
        over = tl.where(new == -_INF, 0.0, new) * scale
        total = total * tl.exp2(top * scale - over) + tl.sum(tl.exp2(s * scale - over[:, None]), 1)
        top = new
    return top, total


@triton.jit
def _cells(
    to, inside, x, at, begin, end, first_cell, cells, plane, lo, hi, count, s_key, scale, shift,
    SOFTMAX: tl.constexpr, SUMS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, CELL: tl.constexpr,
    PLANES: tl.constexpr, COVERS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Writes the cells of keys `begin` to `end`; `to` [tokens] is at the first cell."""
    TOKENS: tl.constexpr = ROWS // PACK
    NOTHING: tl.constexpr = 0.0 if SOFTMAX else float("-inf")
    head = tl.arange(0, ROWS) % PACK
    place = tl.arange(0, CELL)
    for start in range(begin, end, TN):
        key = start + tl.arange(0, TN)
        w = _products(x, at + (tl.full([], 0, tl.int64) + start) * s_key, key, count, D, WIDE, TN, WHOLE)
        if SOFTMAX:
            w = tl.exp2(w * scale - shift[:, None])
        if not WHOLE:
            seen = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
            w = tl.where(seen, w, NOTHING)
        if GROUP < PACK:
            w = tl.where((head < GROUP)[:, None], w, NOTHING)
        if PACK > 1:
            w = tl.sum(tl.reshape(w, (TOKENS, PACK, TN)), 1)
        w = tl.reshape(w, (TOKENS, TN // CELL, CELL))
        cell = start // CELL - first_cell + tl.arange(0, TN // CELL)
        for p in tl.static_range(PLANES):
            # How many parts of the cell behind by p a key covers.
            often = tl.minimum(place + COVERS, (p + 1) * CELL) - tl.maximum(place, p * CELL)
            covers = (often > 0)[None, None, :]
            if SUMS:
                joined = tl.sum(tl.where(covers, w * often.to(tl.float32)[None, None, :], 0.0), 2)
            else:
                joined = tl.reduce(tl.where(covers, w, NOTHING), 2, _larger)
            there = inside[:, None] & (cell < cells)[None, :]
            tl.store(to[:, None] + p * plane + cell[None, :], joined, mask=there)


@triton.jit(
    do_not_specialize=("start", "queries", "left", "cells", "plane", "count", "heads", "k_heads", "scale")
)
def _score(
    q, k, out, position, first, start, queries, left, cells, plane, count, heads, k_heads, scale,
    sq_b, sq_h, sq_m, sq_d, sk_b, sk_h, sk_n, sk_d,
    SOFTMAX: tl.constexpr, SUMS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, CELL: tl.constexpr,
    PLANES: tl.constexpr, COVERS: tl.constexpr, PARTS: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """One tile of queries of a head of k; key i is that of `span` keys from STRIDE * i on. Long tiles come first."""
    TOKENS: tl.constexpr = ROWS // PACK
    tiles = tl.cdiv(queries, TOKENS)
    tile, group = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    row = tl.arange(0, ROWS)
    token, head = tile * TOKENS + row // PACK, row % PACK
    there = token < queries
    at = tl.load(position + start + token, mask=there, other=-1).to(tl.int32)
    lo = tl.load(first + start + token, mask=there, other=0).to(tl.int32) * PARTS
    end = at + 1 - SPAN
    hi = tl.minimum(tl.where(end < 0, 0, end // STRIDE + 1), count)
    lo_tile = tl.min(tl.where(there, lo, 0x7FFFFFFF), 0)
    lo_most = tl.max(lo, 0)
    hi_tile = tl.maximum(tl.max(hi, 0), lo_tile)
    hi_least = tl.min(tl.where(there, hi, 0x7FFFFFFF), 0)
    whole = tl.where(lo_most > lo_tile, lo_tile, lo_tile + tl.maximum(hi_least - lo_tile, 0) // TN * TN)

    column = tl.arange(0, WIDE)
    q_head = h * GROUP + head.to(tl.int64)
    x = tl.load(
        q + b * sq_b + q_head[:, None] * sq_h + (start + token).to(tl.int64)[:, None] * sq_m
        + column.to(tl.int64)[None, :] * sq_d,
        mask=(there & (head < GROUP))[:, None] & (column < D)[None, :], other=0.0,
    )  # fmt: skip
    keys = (
        k + b * sk_b + (h % k_heads) * sk_h + tl.arange(0, TN).to(tl.int64)[:, None] * sk_n
        + column.to(tl.int64)[None, :] * sk_d
    )  # fmt: skip
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SOFTMAX:
        top, total = _normalizers(
            top, total, x, keys, lo_tile, whole, lo, hi, count, sk_n, scale, D, WIDE, TN, True
        )
        top, total = _normalizers(
            top, total, x, keys, whole, hi_tile, lo, hi, count, sk_n, scale, D, WIDE, TN, False
        )
    top *= scale
    shift = tl.where(top == _INF, float("nan"), top + tl.log2(tl.where(total == 0, 1.0, total)))
    each = tile * TOKENS + tl.arange(0, TOKENS)
    to = out + (group.to(tl.int64) * queries + each) * cells
    _cells(
        to, each < queries, x, keys, lo_tile, whole, left, cells, plane, lo, hi, count, sk_n, scale, shift,
        SOFTMAX, SUMS, GROUP, PACK, CELL, PLANES, COVERS, D, WIDE, ROWS, TN, True,
    )  # fmt: skip
    _cells(
        to, each < queries, x, keys, whole, hi_tile, left, cells, plane, lo, hi, count, sk_n, scale, shift,
        SOFTMAX, SUMS, GROUP, PACK, CELL, PLANES, COVERS, D, WIDE, ROWS, TN, False,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=(
        "start",
        "queries",
        "all_queries",
        "left",
        "columns",
        "plane",
        "topk",
        "sinks",
        "local",
        "parts",
    )
)
def _pick(
    scores, out, position, first, start, queries, all_queries, left, columns, plane, topk, sinks, local, block, step,
    span, each, parts,
    PLANES: tl.constexpr, SUMS: tl.constexpr, FILL: tl.constexpr, WIDE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The blocks of one query, in ascending order, where `out` has room for the parts of `topk`."""
    row = tl.program_id(0)
    i, group = row % queries, row // queries
    at = tl.load(position + start + i)
    begin = tl.load(first + start + i).to(tl.int32)
    own = tl.where(at < 0, -1, at // block).to(tl.int32)
    lane = tl.arange(0, COLS)
    column = left + lane
    there = (lane < columns) & (column >= begin) & (column <= own)
    kind = tl.float64 if WIDE else tl.float32
    x = tl.full((COLS,), FILL, kind)
    scores += row.to(tl.int64) * columns * each
    for e in range(each):
        for p in tl.static_range(PLANES):
            cell = column * each + e - p
            key = cell.to(tl.int64) * step
            live = there & (cell >= begin * each) & (key + span <= at + 1)
            value = tl.load(scores + p * plane + cell - left * each, mask=live, other=FILL).to(kind)
            if SUMS:
                x += value
            else:
                x = _larger(x, value)
    greatest: tl.constexpr = _GREATEST_WIDE if WIDE else _GREATEST
    x = tl.where(x > greatest, greatest, x).to(kind)
    if WIDE:
        nothing, ahead = tl.full([], -0x8000000000000000, tl.int64), tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    else:
        nothing, ahead = tl.full([], -0x80000000, tl.int32), tl.full([], 0x7FFFFFFF, tl.int32)
    key = tl.where(there & (x == x) & (x != -_INF), order(x, WIDE), nothing)
    key = tl.where(there & ((column < begin + sinks) | (column > own - local)), ahead, key)
    count = tl.minimum(tl.sum((key > nothing).to(tl.int32), 0), topk)
    high = tl.max(tl.where(key < ahead, key, nothing), 0)
    low = tl.min(tl.where(key > nothing, key, ahead), 0)
    low = tl.where(count > 0, low - 1, nothing)
    kept = highest(key, count, nothing, tl.minimum(low, high), high)
    entry = tl.cumsum(kept.to(tl.int32), 0) - 1
    out += (group.to(tl.int64) * all_queries + start + i) * (topk.to(tl.int64) * parts)
    last = (at - begin.to(tl.int64) * block) * parts // block
    for part in range(parts):
        value = (column - begin) * parts + part
        tl.store(out + entry * parts + part, tl.where(value <= last, value, -1), mask=kept)


class Tiles(NamedTuple):
    """Scores of a softmax over keys, or of their products alone, by `_score`.

    Attributes:
        q: [B, Hq, S, D].
        keys: [B, 1 or Hkv, n, D]: key i stands for `span` keys from i * stride on.
        position: int64 [S]: of each query among the keys.
        first: int64 [S]: the first block of its document.
        heads: That q is of, Hkv.
        spans: The keys of a block, `span` and `stride`.
        scale: The factor of products.
        softmax: Whether scores are weights, of the heads of a group in sum.
        sums: Whether the score of a block is a sum over keys, else the largest.
    """

    q: Tensor
    keys: Tensor
    position: Tensor
    first: Tensor
    heads: int
    spans: tuple[int, int, int]
    scale: float
    softmax: bool
    sums: bool

    @property
    def config(self) -> Config:
        """The tile for these operands."""
        if self.q.dtype == torch.float32:
            return SINGLE
        return WIDE_ROWS if self.q.shape[3] > 128 else WEIGHTS if self.softmax else PRODUCTS

    @property
    def pack(self) -> int:
        """The heads of a group in a tile, a power of two."""
        return triton.next_power_of_2(self.q.shape[1] // self.heads)

    @property
    def usable(self) -> bool:
        """Whether there is a kernel for these."""
        rows = triton.next_power_of_2(self.q.shape[3]) * self.q.element_size()
        kinds = (
            torch.float16,
            torch.float32,
            *([] if env.interpreting() else [torch.bfloat16]),
        )  # is wrong there
        known = self.q.dtype in kinds and self.keys.dtype == self.q.dtype
        return known and rows <= MOST_BYTES and self.pack <= self.config.rows

    @property
    def cell(self) -> int:
        """The keys of a cell."""
        return min(self.spans[0] // self.spans[2], self.config.keys)

    @property
    def planes(self) -> int:
        """The cells that a key reaches into, at most."""
        return 1 + -(-(self.spans[1] // self.spans[2] - 1) // self.cell)

    @property
    def numbers(self) -> int:
        """The numbers that a query has in memory."""
        block, _, stride = self.spans
        cells = -(-self.keys.shape[2] // self.cell) + block // stride // self.cell
        return self.q.shape[0] * self.heads * self.planes * cells

    def __call__(self, start: int, end: int, blocks: tuple[int, int]) -> Cells:
        """The scores of queries from `start` on, of so many blocks. One launch."""
        q, k, c, (block, span, stride) = self.q, self.keys, self.config, self.spans
        each = block // stride // self.cell
        cells, queries = (blocks[1] - blocks[0]) * each, end - start
        made = torch.empty(
            (self.planes, q.shape[0], self.heads, queries, cells), dtype=torch.float32, device=q.device
        )
        tiles = -(-queries // (c.rows // self.pack))
        with torch.cuda.device_of(q):
            launch(
                _score, (tiles * q.shape[0] * self.heads,),
                q, k, made, self.position, self.first, start, queries, blocks[0] * each, cells, made.stride(0),
                k.shape[2], self.heads, k.shape[1], LOG2E * self.scale, *q.stride(), *k.stride(),
                SOFTMAX=self.softmax, SUMS=self.sums, GROUP=q.shape[1] // self.heads, PACK=self.pack, CELL=self.cell,
                PLANES=self.planes, COVERS=span // stride, PARTS=block // stride, STRIDE=stride, SPAN=span,
                D=q.shape[3], WIDE=max(16, triton.next_power_of_2(q.shape[3])), ROWS=c.rows, TN=c.keys,
                num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip
        return Cells(made, self.cell * stride, span, each, self.sums, 0.0 if self.softmax else float("-inf"))


def pick(
    made: Tensor,
    scores: Cells | Tensor,
    position: Tensor,
    first: Tensor,
    start: int,
    blocks: tuple[int, int],
    block: int,
    topk: int,
    always: tuple[int, int],
) -> bool:
    """Writes the blocks of queries from `start` on to `made` int32 [B, H, S, parts * topk], contiguous, where no entry
    is -1. False, and nothing, for rows that are too long. `scores` as a tensor are [B, H, n, blocks]. One launch.
    """
    columns = blocks[1] - blocks[0]
    if columns > MOST_COLUMNS:
        return False
    c = (
        scores
        if isinstance(scores, Cells)
        else Cells(scores.contiguous()[None], block, 1, 1, False, float("-inf"))
    )
    queries, cols = c.values.shape[3], max(16, triton.next_power_of_2(columns))
    with torch.cuda.device_of(made):
        launch(
            _pick, (made.shape[0] * made.shape[1] * queries,),
            c.values, made, position, first, start, queries, made.shape[2], blocks[0], columns, c.values.stride(0),
            topk, *always, block, c.step, c.span, c.each, made.shape[3] // topk,
            PLANES=c.values.shape[0], SUMS=c.sums, FILL=c.nothing,
            WIDE=c.values.dtype == torch.float64, COLS=cols, num_warps=min(max(cols // 512, 1), 32),
        )  # fmt: skip
    return True
