"""XAttention's estimate of the softmax mass of every block, in plain Triton: any CUDA GPU from sm_80, in FP8 from
sm_89, and Triton's interpreter. `attn/reference/antidiagonals.py` is the specification.

    S = Q' K'^T over groups of `stride` tokens (groups.py);   mass[block] = sum of softmax(S) over its groups

    one row tile: tile_m rows of Q'                          a program walks the key tiles of its row tile
    .--------- tile_n ---------.--------- tile_n ---.
    |  S in registers          |                    |        top[row]: the highest score so far
    |  p = 2^(S - top)         |  ...               |        total[row] += sum of p, after total *= 2^(old top - top)
    '--------------------------'--------------------'
        | sums of p over each block's columns                parts [tile_m, Nb] and top, as of this tile, in memory
        v
    end of the row tile: mass = sum over a block's rows of part * 2^(top then - top now) / total

One loop runs over the key tiles and their steps of K, so loads go on while a tile's softmax is computed. The 4 lanes
that share a row of S in tensor cores' layout have pairs of columns in turn. Groups of keys stand in memory so that a
lane has whole blocks (`place_of` in groups.py): no sum over a block's columns needs a shuffle.

The softmax needs the row's total before rows may be added, so the sums over columns wait in memory: float32 [tile_m,
Nb] for each program, one per SM, and one row tile at a time. On 132 SMs that is 17 MB for 32K
keys and 69 MB for 128K in blocks of 128, for any batch and any number of heads. S is never in memory, and Q' K'^T is
computed once. Every sum has one order: same inputs, same bits.

With a causal mask key tiles after the diagonal are skipped. Row tiles are then taken in pairs, last and first, last but
one and second, so that every program has the same work.

Bottleneck: tensor cores; 2 S T D / stride operations for each head. An accumulator of 128 x 256 takes 128 registers of
each of 256 threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsek.attn.kernels.estimate.groups import Groups, group, group_at
from sparsek.core import env
from sparsek.core.device import card_of
from sparsek.engine.launch.launch import launch

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """A tile of S, the depth of one step in bytes, warps and stages; `tma`: operands by TMA, on Hopper; `folded`: key
    tiles that the end of a row tile handles at a time; `lanes`: threads that share a row of S.
    """

    tile_m: int = 128
    tile_n: int = 256
    depth: int = 128
    num_warps: int = 8
    num_stages: int = 3
    tma: bool = True
    folded: int = 1
    lanes: int = 4


FP8 = Config(num_stages=4)  # 265 us; of 2 key tiles 275, of 4 339 (H100, 32K, 16 heads, 2026-11-25)
HALF = Config(tile_n=128, num_stages=4, folded=4)
# Other cards, and the interpreter.
SMALL = Config(tile_m=64, tile_n=64, num_warps=4, num_stages=3, tma=False, folded=8)

_NUMBERS = (
    "factor", "q_len", "k_groups", "q_offset", "q_tiles", "tiles_m", "blocks_n", "units", "slots",
    "heads", "shared_by",
)  # fmt: skip


@triton.jit
def _operand(
    x, first, start, at, DEPTH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, TMA: tl.constexpr
):
    """ROWS rows from row `first + start` on, DEPTH columns from column `at` on."""
    if TMA:
        tile = x.load([first + start, at])
    else:
        row = (first + start).to(tl.int64) + tl.arange(0, ROWS)
        tile = tl.load(x + row[:, None] * K + (at + tl.arange(0, DEPTH))[None, :])
    return tile


@triton.jit
def _limits(row, q_len, q_offset, k_groups, STRIDE: tl.constexpr, CAUSAL: tl.constexpr):
    """How many key groups each row of Q' sees."""
    limit = tl.where(row * STRIDE < q_len, k_groups, 0)
    if CAUSAL:
        last = q_offset + tl.minimum((row + 1) * STRIDE, q_len) - 1
        limit = tl.minimum(limit, tl.where(last < 0, 0, last // STRIDE + 1))
    return limit


@triton.jit(do_not_specialize=_NUMBERS)
def _estimate(
    q, k, q_scale, k_scale, k_bias, parts, tops, out,
    factor, q_len, k_groups, q_offset, q_tiles, tiles_m, blocks_n, units, slots, heads,
    shared_by, STRIDE: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr,
    K: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, DEPTH: tl.constexpr,
    RQ: tl.constexpr, RK: tl.constexpr, FOLDED: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """RQ and RK: groups of a block's queries and keys. `slots`: key tiles of all keys. `units`: row tiles, or pairs of
    them, of all heads.
    """
    PER: tl.constexpr = TN // RK
    INNER: tl.constexpr = K // DEPTH
    width = slots * PER
    TURNS: tl.constexpr = 2 if CAUSAL else 1
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    inner = tl.arange(0, TM)
    parts += pid.to(tl.int64) * TM * width
    tops += pid.to(tl.int64) * TM * slots
    per_head = (q_tiles + TURNS - 1) // TURNS
    turns = (units - pid + programs - 1) // programs * TURNS
    for turn in range(turns):
        unit = pid + turn // TURNS * programs
        head = unit // per_head
        tile = unit % per_head
        live = True
        if CAUSAL:
            other = q_tiles - 1 - tile
            live = (turn % 2 == 0) | (other != tile)  # the middle one of an odd number has no partner
            tile = tl.where(turn % 2 == 0, other, tile)
        kv_head = head // heads * (heads // shared_by) + head % heads // shared_by
        q_first = (head * q_tiles + tile) * TM
        k_first = kv_head * slots * TN
        row = tile * TM + inner
        limit = _limits(row, q_len, q_offset, k_groups, STRIDE, CAUSAL)
        whole = tl.min(tl.where(row * STRIDE < q_len, limit, k_groups), axis=0)
        steps = tl.where(live, (tl.max(limit, axis=0) + TN - 1) // TN, 0)
        scale = tl.full((TM,), factor, dtype=tl.float32)
        if q_scale is not None:
            scale = scale * tl.load(q_scale + q_first + inner)
        total = tl.zeros((TM,), dtype=tl.float32)
        top = tl.full((TM,), float("-inf"), dtype=tl.float32)
        column = tl.arange(0, TN)
        if k_scale is not None:
            factors = tl.load(k_scale + k_first + column)
        s = tl.zeros((TM, TN), dtype=tl.float32)
        for done in tl.range(0, steps * INNER, num_stages=STAGES):
            step = done // INNER
            at = done % INNER * DEPTH
            start = step * TN
            a = _operand(q, q_first, 0, at, DEPTH, TM, K, TMA)
            b = _operand(k, k_first, start, at, DEPTH, TN, K, TMA)
            s = tl.dot(a, b.T, s)
            if at == (INNER - 1) * DEPTH:
                if k_scale is not None:
                    s = s * factors[None, :]
                if k_bias is not None:
                    s = s + tl.load(k_bias + k_first + start + column)[None, :]
                if start + TN > whole:
                    s = tl.where(
                        start + group_at(column, TN, LANES)[None, :] < limit[:, None], s, float("-inf")
                    )
                now = tl.maximum(top, tl.max(s, axis=1) * scale)
                base = tl.where(now == float("-inf"), 0.0, now)
                p = tl.exp2(s * scale[:, None] - base[:, None])
                # [rows, blocks of a lane, pairs of a block, lanes, 2]
                p = tl.reshape(p, (TM, PER // LANES, RK // 2, LANES, 2))
                part = tl.sum(tl.sum(p, axis=4), axis=2)
                total = total * tl.exp2(top - base) + tl.sum(tl.sum(part, axis=2), axis=1)
                top = now
                part = tl.reshape(tl.trans(part, (0, 2, 1)), (TM, PER))
                tl.store(parts + inner[:, None] * width + (step * PER + tl.arange(0, PER))[None, :], part)
                tl.store(tops + step * TM + inner, base)
                s = tl.zeros((TM, TN), dtype=tl.float32)
                if k_scale is not None:
                    coming = tl.minimum(step + 1, slots - 1) * TN
                    factors = tl.load(k_scale + k_first + coming + column)
        tl.debug_barrier()
        last = tl.where(top == float("-inf"), 0.0, top)
        share = 1.0 / tl.where(total == 0.0, 1.0, total)
        to_row = tile * (TM // RQ) + tl.arange(0, TM // RQ)
        to = out + (head.to(tl.int64) * tiles_m + to_row)[:, None] * blocks_n
        inside = (to_row < tiles_m) & live
        for first in range(0, steps, FOLDED):
            of = first + tl.arange(0, FOLDED)
            # Rows after the last query count nothing, whatever they hold.
            there = (of < steps)[None, :] & (row * STRIDE < q_len)[:, None]
            base = tl.load(tops + of[None, :] * TM + inner[:, None], mask=there, other=0.0)
            weight = tl.where(there, tl.exp2(base - last[:, None]) * share[:, None], 0.0)
            block = first * PER + tl.arange(0, FOLDED * PER)
            part = tl.load(
                parts + inner[:, None] * width + block[None, :],
                mask=(block < steps * PER)[None, :],
                other=0.0,
            )
            part = tl.reshape(part, (TM, FOLDED, PER)) * weight[:, :, None]
            # NaN times 0 of rows after the last query.
            part = tl.where(there[:, :, None], part, 0.0)
            mass = tl.sum(tl.reshape(part, (TM // RQ, RQ, FOLDED * PER)), axis=1)
            tl.store(to + block[None, :], mask=inside[:, None] & (block < blocks_n)[None, :], value=mass)
        for first in range(steps * PER, blocks_n, FOLDED * PER):  # not seen
            block = first + tl.arange(0, FOLDED * PER)
            nothing = tl.zeros((TM // RQ, FOLDED * PER), dtype=tl.float32)
            tl.store(to + block[None, :], nothing, mask=inside[:, None] & (block < blocks_n)[None, :])
        tl.debug_barrier()


def default(q: Tensor, fp8: bool) -> Config:
    """The config for the card of q."""
    if not q.is_cuda or card_of(q.device).capability != (9, 0) or q.dtype == torch.float32:
        return SMALL
    return FP8 if fp8 else HALF


def block_mass(
    q: Tensor,
    k: Tensor,
    *,
    stride: int,
    block: tuple[int, int],
    causal: bool,
    q_offset: int,
    kv_lengths: Tensor | None = None,
    fp8: bool = False,
    scale: float | None = None,
    config: Config | None = None,
) -> Tensor:
    """As the function of this name in `attn/reference/antidiagonals.py`, for bf16, fp16 and fp32. Two launches."""
    c = config or default(q, fp8)
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    tiles_m, blocks_n = -(-q_len // block[0]), -(-kv_len // block[1])
    out = torch.empty(batch, heads, tiles_m, blocks_n, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    tile_m, tile_n = c.tile_m, c.tile_n
    lanes = min(c.lanes, tile_n // (block[1] // stride))
    g = group(q, k, stride, block[1], kv_lengths, fp8, (tile_m, tile_n), lanes)
    q_tiles = g.q_rows // tile_m
    units = batch * heads * (-(-q_tiles // 2) if causal else q_tiles)
    programs = min(units, card_of(q.device).sm_count if q.is_cuda else 2)
    slots = g.k_rows // tile_n
    RQ, RK = block[0] // stride, block[1] // stride
    parts = torch.empty(programs * tile_m * slots * (tile_n // RK), dtype=torch.float32, device=q.device)
    tops = torch.empty(programs * tile_m * slots, dtype=torch.float32, device=q.device)
    factor = (q.shape[3] ** -0.5 if scale is None else scale) / stride * LOG2E
    numbers = (
        factor, q_len, -(-kv_len // stride), q_offset, q_tiles, tiles_m, blocks_n, units, slots,
        heads, heads // kv_heads,
    )  # fmt: skip
    depth = c.depth // g.q.element_size()
    with torch.cuda.device_of(q):
        launch(
            _estimate, (programs,), *_operands(g, c, depth), g.q_scale, g.k_scale, g.k_bias, parts, tops, out,
            *numbers,
            STRIDE=stride, CAUSAL=causal, TMA=c.tma, K=g.q.shape[1],
            TM=tile_m, TN=tile_n, DEPTH=depth, RQ=RQ, RK=RK, FOLDED=c.folded, LANES=lanes,
            STAGES=c.num_stages, num_warps=c.num_warps,
        )  # fmt: skip
    return out


def _operands(g: Groups, c: Config, depth: int) -> tuple[Any, Any]:
    if not c.tma or env.interpreting():
        return g.q, g.k
    boxes = ((g.q, c.tile_m), (g.k, c.tile_n))
    return tuple(TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, depth]) for x, rows in boxes)
