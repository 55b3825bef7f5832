"""Scores of blocks from the means of their parts: log sum over parts of exp(scale * mean . mean), float32.

    means of q [2, B, Hq, Mb * DOWN, D]     tile [TM, DEPTH]  .
    means of k [2, B, Hkv, Nb * ACROSS, D]  tile [TN, DEPTH]  |- 3 D / DEPTH steps: low * high, high * low, high * high
                                                              v
                                [TM, TN] in registers  ->  [TM / DOWN, TN / ACROSS] in memory

The products of parts stay in registers: only scores [B, Hq, Mb, Nb] are written. With `causal` tiles of blocks that lie
beyond every query are not computed, and are -inf.

Bottleneck: tensor cores, 6 D operations for each pair of parts, and behind them, not at the same time, the exponentials
of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsek.attn.kernels.estimate.means import QUADS, split_means
from sparsek.core import env
from sparsek.core.device import card_of
from sparsek.engine.launch.launch import launch


@dataclass(frozen=True)
class Config:
    """Parts of q and of k in a tile, columns of a step, warps and stages; `tma`: operands by TMA, on Hopper; `quads`:
    for blocks of 4 x 4 parts, in tiles of 128 rows by 4 warps.
    """

    tile_m: int = 64
    tile_n: int = 64
    depth: int = 32
    num_warps: int = 4
    num_stages: int = 3
    tma: bool = False
    quads: bool = False


SMALL = Config()  # other cards, few parts, and the interpreter
HOPPER = Config(128, 128, 64, 4, 3, True, True)
# Tiles of k that a program visits: many, or FEW where there would be fewer than PROGRAMS programs.
VISITS, FEW, PROGRAMS = 8, 2, 512
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

_NUMBERS = ("scale", "q_len", "kv_len", "rows", "columns", "heads", "group", "k_heads", "q_rows", "k_rows",
            "low_q", "low_k", "length_step", "offset")  # fmt: skip


@triton.jit
def _operand(x, row, live, at, D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr):
    """ROWS rows from `row` on and DEPTH columns from `at` on; 0 beyond column D. Rows after the first `live` are 0, or
    by TMA those that follow, which the caller must not use.
    """
    if TMA:
        tile = x.load([row, at])
    else:
        inner = tl.arange(0, ROWS)
        column = at + tl.arange(0, DEPTH)
        to = x + (row.to(tl.int64) + inner)[:, None] * D + column[None, :]
        tile = tl.load(to, mask=(inner < live)[:, None] & (column < D)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=_NUMBERS)
def _scores(
    q, k, scores, kv_lengths, scale, q_len, kv_len, rows, columns, heads, group, k_heads, q_rows, k_rows,
    low_q, low_k, length_step, offset,
    BM: tl.constexpr, BK: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, DEPTH: tl.constexpr, VISITS: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """`q_rows` and `k_rows`: of the means of a head. `low_q`, `low_k`: of all high halves, which the low ones follow.
    QUADS: the means stand so that a thread has all 4 x 4 products of a block, and adds them without the others.
    """
    STEPS: tl.constexpr = (D + DEPTH - 1) // DEPTH
    SUB_M: tl.constexpr = BM // DOWN
    SUB_N: tl.constexpr = BK // ACROSS
    tiles = tl.cdiv(q_rows, TM)
    head = tl.program_id(0) // tiles
    b = (head // heads).to(tl.int64)
    h = head % heads
    first = tl.program_id(0) % tiles * TM
    row = first + tl.arange(0, TM)
    q_first = head * q_rows + first
    k_first = (head // heads * k_heads + h // group) * k_rows
    if QUADS:  # as `means.quad_row`
        block = row // 128 * 32 + row % 64 // 16 * 8 + row % 8
        part = row % 128 // 64 * 2 + row // 8 % 2
    else:
        block = row // DOWN
        part = row % DOWN
    there = block * BM + part * SUB_M < q_len
    whole_rows = tl.min(there.to(tl.int32), 0) > 0
    block_row = first // DOWN + tl.arange(0, TM // DOWN)
    scores += (head.to(tl.int64) * rows + block_row.to(tl.int64)[:, None]) * columns
    begin = tl.program_id(1) * VISITS * TN
    end = tl.minimum(begin + VISITS * TN, columns * ACROSS)
    edge = end
    if CAUSAL:  # the first part of k after every query of this tile
        last = tl.minimum((first // DOWN + TM // DOWN) * BM, q_len) + offset - 1
        edge = tl.minimum(tl.where(last < 0, 0, (last // BK + 1) * ACROSS), end)
    for start in range(begin, edge, TN):
        product = tl.zeros((TM, TN), dtype=tl.float32)
        for step in tl.range(0, 3 * STEPS, num_stages=STAGES):
            at = step % STEPS * DEPTH
            q_row = q_first + tl.where(step < STEPS, low_q, 0)
            k_row = k_first + start + tl.where(step // STEPS == 1, low_k, 0)
            x = _operand(q, q_row, q_rows - first, at, D, DEPTH, TM, TMA)
            y = _operand(k, k_row, k_rows - start, at, D, DEPTH, TN, TMA)
            product = tl.dot(x, y.T, product)
        column = start + tl.arange(0, TN)
        if QUADS:  # as `means.quad_column`
            k_block = column // 16 * 4 + column % 8 // 2
            k_part = column // 8 % 2 * 2 + column % 2
        else:
            k_block = column // ACROSS
            k_part = column % ACROSS
        inside = k_block < columns
        count = tl.minimum(kv_len - k_block * BK, BK)
        if kv_lengths is not None:
            count = tl.minimum(count, tl.load(kv_lengths + b * length_step + k_block, mask=inside, other=0))
        exists = k_part * SUB_N < count
        if DOWN * ACROSS > 1:
            if whole_rows & (tl.min(exists.to(tl.int32), 0) > 0):
                product = product * (scale * LOG2E)
            else:
                live = there[:, None] & exists[None, :]
                product = tl.where(live, product * (scale * LOG2E), float("-inf"))
            if QUADS:
                cells = tl.reshape(product, (2, 4, 2, 8, TN // 16, 2, 4, 2))
                top = tl.max(tl.max(tl.max(tl.max(cells, 7), 5), 2), 0)
                top = tl.where(top == float("-inf"), 0.0, top)
                weights = tl.exp2(cells - top[None, :, None, :, :, None, :, None])
                total = tl.sum(tl.sum(tl.sum(tl.sum(weights, 7), 5), 2), 0)
                top = tl.reshape(top, (TM // 4, TN // 4))
                total = tl.reshape(total, (TM // 4, TN // 4))
            else:
                cells = tl.reshape(product, (TM // DOWN, DOWN, TN // ACROSS, ACROSS))
                top = tl.max(tl.max(cells, 3), 1)
                top = tl.where(top == float("-inf"), 0.0, top)
                weights = tl.exp2(cells - top[:, None, :, None])
                total = tl.sum(tl.sum(weights, 3), 1)
            none = total == 0
            product = tl.where(none, float("-inf"), (tl.log2(tl.where(none, 1.0, total)) + top) * LN2)
        else:
            product = tl.where(exists[None, :], product * scale, float("-inf"))
        cell = start // ACROSS + tl.arange(0, TN // ACROSS)
        tl.store(
            scores + cell[None, :], product, mask=(block_row < rows)[:, None] & (cell < columns)[None, :]
        )
    if CAUSAL:
        for start in range(begin + tl.cdiv(tl.maximum(edge - begin, 0), TN) * TN, end, TN):
            cell = start // ACROSS + tl.arange(0, TN // ACROSS)
            never = tl.full((TM // DOWN, TN // ACROSS), float("-inf"), tl.float32)
            tl.store(
                scores + cell[None, :], never, mask=(block_row < rows)[:, None] & (cell < columns)[None, :]
            )


def default(q: Tensor, parts: tuple[int, int], columns: int) -> Config:
    """The config for the card of q."""
    hopper = q.is_cuda and card_of(q.device).capability == (9, 0)
    quads = parts == (QUADS, QUADS) and q.shape[3] % 8 == 0 and columns * QUADS >= HOPPER.tile_n
    return HOPPER if hopper and quads else SMALL


def block_scores(
    q: Tensor,
    k: Tensor,
    block: tuple[int, int],
    parts: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    kv_lengths: Tensor | None = None,
    causal_from: int | None = None,
    q_lengths: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """As attn/reference/estimates.py, in two launches: float32 [B, Hq, Mb, Nb]. q and k bf16, fp16 or fp32, any
    strides.

    Parts are powers of two. With `causal_from` the first query stands at that key, and blocks beyond the last query of
    a tile may be -inf. No sync.
    """
    (tile, keys), (batch, heads, q_len, dim), (k_heads, kv_len) = block, q.shape, k.shape[1:3]
    rows, columns = -(-q_len // tile), -(-kv_len // keys)
    q_counts, lengths = (None if each is None else each.contiguous() for each in (q_lengths, kv_lengths))
    scores = torch.empty((batch, heads, rows, columns), dtype=torch.float32, device=q.device)
    if not scores.numel():
        return scores
    c = config or default(q, parts, columns)
    q_means, k_means = split_means(q, k, block, parts, (q_counts, lengths), c.quads)
    q_rows, k_rows = q_means.shape[3], k_means.shape[3]
    tiles, across = -(-q_rows // c.tile_m) * batch * heads, -(-k_rows // c.tile_n)
    visits = VISITS if tiles * -(-across // VISITS) >= PROGRAMS else FEW
    sides: Any = q_means, k_means
    if c.tma and not env.interpreting():
        boxes = zip(sides, (c.tile_m, c.tile_n), strict=True)
        sides = [TensorDescriptor(x, [x.numel() // dim, dim], [dim, 1], [many, c.depth]) for x, many in boxes]
    with torch.cuda.device_of(q):
        launch(
            _scores, (tiles, -(-across // visits)),
            *sides, scores, lengths, scale, q_len, kv_len, rows, columns,
            heads, heads // k_heads, k_heads, q_rows, k_rows, batch * heads * q_rows, batch * k_heads * k_rows,
            0 if lengths is None or lengths.shape[0] == 1 else columns, causal_from or 0,
            BM=tile, BK=keys, DOWN=parts[0], ACROSS=parts[1], CAUSAL=causal_from is not None,
            D=dim, TM=c.tile_m, TN=c.tile_n, DEPTH=c.depth, VISITS=visits, STAGES=c.num_stages,
            TMA=c.tma and not env.interpreting(), QUADS=c.quads, num_warps=c.num_warps,
        )  # fmt: skip
    return scores
