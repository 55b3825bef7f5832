"""Scores of blocks from the means of their parts: log sum over parts of exp(scale * mean . mean), float32.

    means of q [2, B, Hq, Mb * DOWN, D]     one tile [TM, D], kept     ->  tl.dot, three products of halves
    means of k [2, B, Hkv, Nb * ACROSS, D]  tiles [TN, D] in a loop    ->  [TM, TN]  ->  [TM / DOWN, TN / ACROSS]

The products of parts stay in registers: only scores [B, Hq, Mb, Nb] are written. With `causal` tiles of blocks that lie
beyond every query are not computed, and are -inf.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.kernels.estimate.means import split_means
from sparsek.kernels.lang.launch import launch

# Parts of q and of k in a tile, warps, stages; tiles of k that a program visits: many, or FEW where there would be
# fewer than PROGRAMS programs. A guess until it is measured.
TILE_M, TILE_N, WARPS, STAGES, VISITS, FEW, PROGRAMS = 64, 64, 4, 2, 8, 2, 512
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

_NUMBERS = ("scale", "q_len", "kv_len", "rows", "columns", "heads", "group", "k_heads", "low_q", "low_k",
            "length_step", "offset")  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def _scores(
    q, k, scores, kv_lengths, scale, q_len, kv_len, rows, columns, heads, group, k_heads, low_q, low_k,
    length_step, offset,
    BM: tl.constexpr, BK: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, VISITS: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    SUB_M: tl.constexpr = BM // DOWN
    SUB_N: tl.constexpr = BK // ACROSS
    tiles = tl.cdiv(rows * DOWN, TM)
    head = tl.program_id(0) // tiles
    b = (head // heads).to(tl.int64)
    h = head % heads
    first = tl.program_id(0) % tiles * TM
    row = first + tl.arange(0, TM)
    column = tl.arange(0, WIDE)
    depth = (column < D)[None, :]
    q += head.to(tl.int64) * rows * DOWN * D + row.to(tl.int64)[:, None] * D + column[None, :]
    k += (b * k_heads + h // group) * columns * ACROSS * D
    live = (row < rows * DOWN)[:, None] & depth
    q_high = tl.load(q, mask=live, other=0.0)
    q_low = tl.load(q + low_q, mask=live, other=0.0)
    there = row // DOWN * BM + row % DOWN * SUB_M < q_len
    block_row = first // DOWN + tl.arange(0, TM // DOWN)
    scores += (head.to(tl.int64) * rows + block_row.to(tl.int64)[:, None]) * columns
    begin = tl.program_id(1) * VISITS * TN
    end = tl.minimum(begin + VISITS * TN, columns * ACROSS)
    edge = end
    if CAUSAL:  # the first part of k after every query of this tile
        last = tl.minimum((first // DOWN + TM // DOWN) * BM, q_len) + offset - 1
        edge = tl.minimum(tl.where(last < 0, 0, (last // BK + 1) * ACROSS), end)
    for start in range(begin, edge, TN):
        at = start + tl.arange(0, TN)
        block = at // ACROSS
        inside = block < columns
        k_at = k + at.to(tl.int64)[:, None] * D + column[None, :]
        k_high = tl.load(k_at, mask=inside[:, None] & depth, other=0.0)
        k_low = tl.load(k_at + low_k, mask=inside[:, None] & depth, other=0.0)
        product = tl.dot(q_low, k_high.T)
        product = tl.dot(q_high, k_low.T, product)
        product = tl.dot(q_high, k_high.T, product) * scale
        count = tl.minimum(kv_len - block * BK, BK)
        if kv_lengths is not None:
            count = tl.minimum(count, tl.load(kv_lengths + b * length_step + block, mask=inside, other=0))
        part = at % ACROSS * SUB_N < count
        if DOWN * ACROSS > 1:
            product = tl.where(there[:, None] & part[None, :], product * LOG2E, float("-inf"))
            cells = tl.reshape(product, (TM // DOWN, DOWN, TN // ACROSS, ACROSS))
            top = tl.max(tl.max(cells, 3), 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            weights = tl.exp2(cells - top[:, None, :, None])
            total = tl.sum(tl.sum(weights, 3), 1)
            none = total == 0
            product = tl.where(none, float("-inf"), (tl.log2(tl.where(none, 1.0, total)) + top) * LN2)
        else:
            product = tl.where(part[None, :], product, float("-inf"))
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


def block_scores(
    q: Tensor,
    k: Tensor,
    block: tuple[int, int],
    parts: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    kv_lengths: Tensor | None = None,
    causal_from: int | None = None,
) -> Tensor:
    """As reference/estimates.py, in two launches: float32 [B, Hq, Mb, Nb]. q and k bf16, fp16 or fp32, any strides.

    Parts are powers of two. With `causal_from` the first query stands at that key, and blocks beyond the last query of
    a tile may be -inf. No sync.
    """
    (tile, keys), (batch, heads, q_len, dim), (k_heads, kv_len) = block, q.shape, k.shape[1:3]
    rows, columns = -(-q_len // tile), -(-kv_len // keys)
    lengths = None if kv_lengths is None else kv_lengths.contiguous()
    q_means, k_means = split_means(q, k, block, parts, (None, lengths))
    scores = torch.empty((batch, heads, rows, columns), dtype=torch.float32, device=q.device)
    tiles, across = -(-rows * parts[0] // TILE_M) * batch * heads, -(-columns * parts[1] // TILE_N)
    visits = VISITS if tiles * -(-across // VISITS) >= PROGRAMS else FEW
    options: dict[str, Any] = {"num_warps": WARPS, "num_stages": STAGES}
    with torch.cuda.device_of(q):
        launch(
            _scores, (tiles, -(-across // visits)),
            q_means, k_means, scores, lengths, scale, q_len, kv_len, rows, columns,
            heads, heads // k_heads, k_heads, q_means.numel() // 2, k_means.numel() // 2,
            0 if lengths is None or lengths.shape[0] == 1 else columns, causal_from or 0,
            BM=tile, BK=keys, DOWN=parts[0], ACROSS=parts[1], CAUSAL=causal_from is not None,
            D=dim, TM=TILE_M, TN=TILE_N, VISITS=visits, **options,
        )  # fmt: skip
    return scores
