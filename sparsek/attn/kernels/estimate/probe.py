"""The softmax of a prompt's last queries over all keys, summed along lines: keys, distances, or blocks of both.

    pass 1, `_rows`   a program has one head and a share of the keys: maximum and sum of each row, a share's own
    pass 2, `_sums`   the same keys again: p = 2^(s - lse), and its sums

    tokens: column sums of p [n, TN], and sums of its diagonals: a tile is written to the program's own memory, 32 KB,
            and read back askew; a distance lies in two tiles, whose sums `_distances` adds
    blocks: the sum of each tile for each block of positions that rows are in

Keys are read twice, from L2 the second time where they fit; nothing of size n x T is kept. All sums have one order.
`attn/reference/lines.py` is the specification. Bottleneck: memory, 2 T D elements for each head of k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core.device import card_of
from sparsek.engine.launch.launch import launch

TILE = 128
WARPS, STAGES = {64: 4, 128: 8}, {64: 3, 128: 2}  # by rows
SPLITS = 64  # most shares of the keys
ROW_BLOCKS = 4  # most blocks of positions that 128 queries are in, rounded up
LOG2E = 1.4426950408889634

_NUMBERS = (
    "scale", "q_len", "kv_len", "end", "q_offset", "valid", "heads", "kv_heads", "splits", "per_split", "tiles",
    "distances", "first_block",
)  # fmt: skip


class Probe(NamedTuple):
    """The sums of tiles of min(side, TILE) keys: `part` float32 [B * Hq, tiles, ROW_BLOCKS] of p, `raw` [B * Hq, tiles]
    of the scores in base 2 before any mask; the block of positions of the first row; rows that count.
    """

    part: Tensor
    raw: Tensor
    first_block: int
    rows: int


@triton.jit
def _head_of(pid, heads, kv_heads, splits):
    """Item, head, head of k and share: programs of one head of k and one share are neighbours."""
    group = heads // kv_heads
    within = pid // group % splits
    kv = pid // group // splits
    return kv // kv_heads, kv % kv_heads * group + pid % group, kv % kv_heads, within


@triton.jit
def _tile(
    q_tile, k, start, scale, valid, kv_len, position, sk_n, sk_d,
    LAST: tl.constexpr, D: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """Scores [LAST, TN] in base 2, zero outside of k, and which are seen."""
    WIDE: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    key = start + tl.arange(0, TN)
    column = tl.arange(0, WIDE)
    at = k + key.to(tl.int64)[:, None] * sk_n + (column.to(tl.int64) * sk_d)[None, :]
    k_tile = tl.load(at, mask=(key < kv_len)[:, None] & (column < D)[None, :], other=0.0)
    s = tl.dot(q_tile, tl.trans(k_tile)) * scale
    row = tl.arange(0, LAST)
    seen = (key[None, :] <= position[:, None]) & (key < kv_len)[None, :] & (row >= LAST - valid)[:, None]
    return s, seen


@triton.jit
def _queries(q, q_len, valid, q_offset, sq_m, sq_d, LAST: tl.constexpr, D: tl.constexpr):
    """The last `valid` queries, as the last of LAST rows, and the positions of the rows."""
    WIDE: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    row = q_len - LAST + tl.arange(0, LAST)
    column = tl.arange(0, WIDE)
    there = (row >= q_len - valid)[:, None] & (column < D)[None, :]
    at = q + row.to(tl.int64)[:, None] * sq_m + (column.to(tl.int64) * sq_d)[None, :]
    return tl.load(at, mask=there, other=0.0), row + q_offset


@triton.jit(do_not_specialize=_NUMBERS)
def _rows(
    q, k, tops, totals, raw, scale, q_len, kv_len, end, q_offset, valid, heads, kv_heads, splits, per_split, tiles,
    sq_b, sq_h, sq_m, sq_d, sk_b, sk_h, sk_n, sk_d,
    LAST: tl.constexpr, D: tl.constexpr, TN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """tops, totals [B * Hq, splits, LAST]; raw [B * Hq, tiles]."""
    b, h, kv, split = _head_of(tl.program_id(0), heads, kv_heads, splits)
    q += b.to(tl.int64) * sq_b + h.to(tl.int64) * sq_h
    k += b.to(tl.int64) * sk_b + kv.to(tl.int64) * sk_h
    q_tile, position = _queries(q, q_len, valid, q_offset, sq_m, sq_d, LAST, D)
    head = b * heads + h
    top = tl.full((LAST,), float("-inf"), tl.float32)
    total = tl.zeros((LAST,), tl.float32)
    begin = split * per_split * TN
    for start in tl.range(begin, tl.minimum(begin + per_split * TN, end), TN, num_stages=STAGES):
        s, seen = _tile(q_tile, k, start, scale, valid, kv_len, position, sk_n, sk_d, LAST, D, TN)
        if raw is not None:
            tl.store(raw + head * tiles + start // TN, tl.sum(s))
        s = tl.where(seen, s, float("-inf"))
        now = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(s - base[:, None]), axis=1)
        top = now
    to = (head * splits + split) * LAST + tl.arange(0, LAST)
    tl.store(tops + to, top)
    tl.store(totals + to, total)


@triton.jit(do_not_specialize=_NUMBERS)
def _sums(
    q, k, tops, totals, vertical, askew, scratch, part,
    scale, q_len, kv_len, end, q_offset, valid, heads, kv_heads, splits, per_split, tiles, first_block,
    sq_b, sq_h, sq_m, sq_d, sk_b, sk_h, sk_n, sk_d,
    LAST: tl.constexpr, D: tl.constexpr, TN: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """vertical [B * Hq, T] and askew [B * Hq, tiles, 2 TN], or part [B * Hq, tiles, ROW_BLOCKS]."""
    pid = tl.program_id(0)
    b, h, kv, split = _head_of(pid, heads, kv_heads, splits)
    q += b.to(tl.int64) * sq_b + h.to(tl.int64) * sq_h
    k += b.to(tl.int64) * sk_b + kv.to(tl.int64) * sk_h
    q_tile, position = _queries(q, q_len, valid, q_offset, sq_m, sq_d, LAST, D)
    head = b * heads + h
    row = tl.arange(0, LAST)
    each = tl.arange(0, SPLITS)
    at = (head * splits + each[:, None]) * LAST + row[None, :]
    shares = tl.load(tops + at, mask=(each < splits)[:, None] & (row >= 0)[None, :], other=float("-inf"))
    top = tl.max(shares, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.load(totals + at, mask=(each < splits)[:, None] & (row >= 0)[None, :], other=0.0)
    total = tl.sum(sums * tl.exp2(shares - base[None, :]), axis=0)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    begin = split * per_split * TN
    for start in tl.range(begin, tl.minimum(begin + per_split * TN, end), TN, num_stages=STAGES):
        s, seen = _tile(q_tile, k, start, scale, valid, kv_len, position, sk_n, sk_d, LAST, D, TN)
        p = tl.where(seen, tl.exp2(s - base[:, None]) * share[:, None], 0.0)
        tile = (head * tiles + start // TN).to(tl.int64)
        if part is not None:
            of_row = tl.sum(p, axis=1)
            block = tl.maximum(position, 0) // BLOCK - first_block
            for one in tl.static_range(ROW_BLOCKS):
                tl.store(part + tile * ROW_BLOCKS + one, tl.sum(tl.where(block == one, of_row, 0.0)))
        else:
            key = start + tl.arange(0, TN)
            tl.store(vertical + head.to(tl.int64) * kv_len + key, tl.sum(p, axis=0), mask=key < kv_len)
            mine = scratch + pid.to(tl.int64) * (LAST * TN)
            tl.debug_barrier()  # the last tile has been read
            tl.store(mine + row[:, None] * TN + tl.arange(0, TN)[None, :], p)
            tl.debug_barrier()
            lane = tl.arange(0, 2 * TN)
            few = tl.arange(0, 8)
            found = tl.zeros((2 * TN,), tl.float32)
            for first in range(0, LAST, 8):
                r = first + few
                c = lane[None, :] - (LAST - 1) + r[:, None]
                found += tl.sum(
                    tl.load(mine + r[:, None] * TN + c, mask=(c >= 0) & (c < TN), other=0.0), axis=0
                )
            tl.store(askew + tile * (2 * TN) + lane, found)


@triton.jit(do_not_specialize=_NUMBERS)
def _distances(askew, slash, tiles, distances, TN: tl.constexpr, CHUNK: tl.constexpr):
    """slash [B * Hq, distances]: lane u of tile t is at distance distances - 1 - t TN - u."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = distances - 1 - d
    tile = x // TN
    at = askew + (head * tiles + tile) * (2 * TN) + x % TN
    inside = d < distances
    found = tl.load(at, mask=inside & (tile < tiles), other=0.0)
    found += tl.load(at - 2 * TN + TN, mask=inside & (tile >= 1) & (tile <= tiles), other=0.0)
    tl.store(slash + head * distances + d, found, mask=inside)


class _Call(NamedTuple):
    """What both passes take."""

    numbers: tuple[float, ...]
    strides: tuple[int, ...]
    constants: dict[str, int]
    programs: int
    shape: tuple[int, int]  # splits, rows


def _call(q: Tensor, k: Tensor, last: int, q_offset: int, side: int, scale: float | None) -> _Call:
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    rows, tile = max(16, triton.next_power_of_2(min(last, q_len))), min(side, TILE)
    end = min(kv_len, -(-max(0, q_offset + q_len) // side) * side)
    tiles = -(-end // tile)
    wanted = -(-2 * (card_of(q.device).sm_count if q.is_cuda else 1) // max(1, batch * heads))
    per_split = max(1, -(-tiles // min(SPLITS, wanted)))
    splits = max(1, -(-tiles // per_split))
    factor = (dim**-0.5 if scale is None else scale) * LOG2E
    numbers = (
        factor, q_len, kv_len, end, q_offset, min(last, q_len), heads, kv_heads, splits, per_split,
        max(1, -(-kv_len // tile)),
    )  # fmt: skip
    size = 64 if rows <= 64 else 128
    constants = {"LAST": rows, "D": dim, "TN": tile, "STAGES": STAGES[size], "num_warps": WARPS[size]}
    return _Call(numbers, (*q.stride(), *k.stride()), constants, batch * heads * splits, (splits, rows))


def _first_pass(q: Tensor, k: Tensor, call: _Call, raw: Tensor | None) -> tuple[Tensor, Tensor]:
    size = q.shape[0] * q.shape[1] * call.shape[0] * call.shape[1]
    tops, totals = (torch.empty(size, dtype=torch.float32, device=q.device) for _ in range(2))
    launch(_rows, (call.programs,), q, k, tops, totals, raw, *call.numbers, *call.strides, **call.constants)
    return tops, totals


def token_lines(
    q: Tensor, k: Tensor, last: int, q_offset: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """As in `attn/reference/lines.py`: mass of keys [B, Hq, T] and of distances [B, Hq, n]. `last` at most 128."""
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    call = _call(q, k, last, q_offset, TILE, scale)
    tiles, distances = int(call.numbers[-1]), max(0, q_offset + q_len)
    vertical = torch.zeros(batch, heads, kv_len, dtype=torch.float32, device=q.device)
    slash = torch.empty(batch, heads, distances, dtype=torch.float32, device=q.device)
    askew = torch.zeros(batch * heads * tiles * 2 * TILE, dtype=torch.float32, device=q.device)
    scratch = torch.empty(call.programs * call.shape[1] * TILE, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        tops, totals = _first_pass(q, k, call, None)
        launch(
            _sums, (call.programs,), q, k, tops, totals, vertical, askew, scratch, None, *call.numbers, 0,
            *call.strides, **call.constants, SPLITS=SPLITS, BLOCK=1,
            ROW_BLOCKS=ROW_BLOCKS,
        )  # fmt: skip
        grid = batch * heads, -(-distances // 1024)
        launch(_distances, grid, askew, slash, tiles, distances, TN=TILE, CHUNK=1024)
    return vertical, slash


def block_probe(
    q: Tensor, k: Tensor, last: int, q_offset: int, side: int, scale: float | None = None
) -> Probe:
    """Sums by tiles of at most TILE keys, for blocks of positions of `side`. `last` at most 128."""
    batch, heads, q_len, _ = q.shape
    call = _call(q, k, last, q_offset, side, scale)
    tiles, rows = int(call.numbers[-1]), min(last, q_len)
    first_block = max(0, q_offset + q_len - rows) // side
    part = torch.zeros(batch * heads, tiles, ROW_BLOCKS, dtype=torch.float32, device=q.device)
    raw = torch.zeros(batch * heads, tiles, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        tops, totals = _first_pass(q, k, call, raw)
        launch(
            _sums, (call.programs,), q, k, tops, totals, None, None, None, part, *call.numbers, first_block,
            *call.strides, **call.constants, SPLITS=SPLITS, BLOCK=side,
            ROW_BLOCKS=ROW_BLOCKS,
        )  # fmt: skip
    return Probe(part, raw, first_block, rows)
