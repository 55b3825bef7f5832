"""The blocks that FlexPrefill and MInference's patterns keep: maps of bytes [B, Hq, Mb, Nb], in launches alone.

    VerticalSlash   probe (two passes, distances)  ->  cut of keys, cut of distances: kept before each place
                    [means -> scores -> softmax -> cut of each row, where a head has the pattern BLOCKS]
                    ->  a block is on a line if more are kept before its end than before its start
    FlexPrefill     probe (two passes)  ->  `_decide`: a program per head has v, e, their divergence and both cuts
                    means -> scores -> softmax -> cut of each query-aware head's whole map  ->  map

`attn/reference/line_blocks.py` is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.estimate.cut import FIRST_UNIT, PASSES, codes, cut, quanta
from sparsek.attn.kernels.estimate.mass import to_mass
from sparsek.attn.kernels.estimate.probe import ROW_BLOCKS, TILE, Probe, block_probe, token_lines
from sparsek.attn.kernels.estimate.scores import block_scores
from sparsek.attn.reference.line_blocks import BLOCKS, FORCED_DISTANCES, FORCED_KEYS, LINES, NEAR, Grid, Head
from sparsek.engine.launch.launch import launch

COLUMNS, MAP_WARPS, DECIDE_WARPS = 256, 2, 8
_NEAR, _BLOCKS = tl.constexpr(NEAR), tl.constexpr(BLOCKS)
_NUMBERS = (
    "tiles_m", "blocks_n", "heads", "q_len", "kv_len", "q_offset", "distances", "tiles", "first_block", "rows", "gamma",
    "tau", "least", "width", "base",
)  # fmt: skip


@triton.jit
def _floor(x, by: tl.constexpr):
    """x // by, rounded down for x below 0 too."""
    return tl.where(x >= 0, x // by, -((by - 1 - x) // by))


@triton.jit
def _place(tiles_m, blocks_n, q_len, q_offset, BQ: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr):
    """Row of the map, its first and last position, block columns, and which of them the tile sees."""
    row = tl.program_id(0)
    tile = row % tiles_m
    first = tile * BQ + q_offset
    last = tl.minimum((tile + 1) * BQ, q_len) - 1 + q_offset
    block = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return row, first, last, block, (block < blocks_n) & (block * BK <= last)


@triton.jit(do_not_specialize=_NUMBERS)
def _on_lines(
    table, up, across, mass, cuts, out, tiles_m, blocks_n, heads, q_len, kv_len, q_offset, distances,
    BQ: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """up int32 [B * Hq, T + 1] and across [B * Hq, distances + 1]: lines kept before each place. table int32 [3, Hq]:
    the patterns, and the two numbers of NEAR. mass float32 [B, Hq, Mb, Nb], cuts int32 [B * Hq * Mb]: of BLOCKS.
    """
    row, first, last, block, seen = _place(tiles_m, blocks_n, q_len, q_offset, BQ, BK, COLUMNS)
    head = row // tiles_m
    pattern = tl.load(table + head % heads)
    start = block * BK
    end = tl.minimum(start + BK, kv_len)
    if pattern == _NEAR:
        sinks = tl.load(table + heads + head % heads)
        window = tl.load(table + 2 * heads + head % heads)
        kept = (start < sinks) | (tl.maximum(first - end + 1, 0) < window)
    else:
        kept = start < 0
        if mass is not None:
            if pattern == _BLOCKS:
                found = tl.load(mass + row.to(tl.int64) * blocks_n + block, mask=seen, other=0.0)
                kept = codes(found) >= tl.load(cuts + row)
        if up is not None:
            if pattern != _BLOCKS:
                ups = up + head.to(tl.int64) * (kv_len + 1)
                kept = tl.load(ups + end, mask=seen, other=0) > tl.load(ups + start, mask=seen, other=0)
                low = tl.minimum(tl.maximum(first - end + 1, 0), distances)
                high = tl.minimum(tl.maximum(last - start + 1, 0), distances)
                acrosses = across + head.to(tl.int64) * (distances + 1)
                many = tl.load(acrosses + high, mask=seen, other=0) - tl.load(
                    acrosses + low, mask=seen, other=0
                )
                kept = kept | (many > 0)
    tl.store(out + row.to(tl.int64) * blocks_n + block, (kept & seen).to(tl.int8), mask=block < blocks_n)


@triton.jit
def _cut_here(x, share, least):
    """The cut of masses that a program holds: see cut.py."""
    code = codes(x)
    part = quanta(x)
    need = tl.sum(part).to(tl.float64) * (tl.zeros((), tl.float32) + share).to(tl.float64)
    found = tl.zeros((), tl.int32)
    unit = tl.zeros((), tl.int32) + FIRST_UNIT
    for _ in range(PASSES):
        more = tl.zeros((), tl.int32)
        for digit in tl.static_range(1, 4):
            in_it = code >= found + digit * unit
            enough = tl.sum(in_it.to(tl.int32)) >= least
            enough = enough & (tl.sum(tl.where(in_it, part, 0)).to(tl.float64) >= need)
            more = tl.where(enough, digit, more)
        found += more * unit
        unit = unit // 4
    return code >= tl.maximum(found, 1)


@triton.jit(do_not_specialize=_NUMBERS)
def _decide(
    part, raw, aware, vertical, slash,
    blocks_n, kv_len, q_len, q_offset, tiles, first_block, rows, gamma, tau, least, width, base,
    BK: tl.constexpr, PER: tl.constexpr, ROW_BLOCKS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """aware int32 [B * Hq]; vertical and slash int8 [B * Hq, width]: kept key blocks, and kept block distances from
    `base` on. PER tiles of `part` and `raw` make a key block.
    """
    head = tl.program_id(0)
    part += head.to(tl.int64) * tiles * ROW_BLOCKS
    raw += head.to(tl.int64) * tiles
    j = tl.arange(0, N)
    v = tl.zeros((N,), tl.float32)
    s = tl.zeros((N,), tl.float32)
    total = tl.zeros((N,), tl.float32)
    for one in tl.static_range(PER):
        tile = j * PER + one
        total += tl.load(raw + tile, mask=tile < tiles, other=0.0)
        for r in tl.static_range(ROW_BLOCKS):
            v += tl.load(part + tile * ROW_BLOCKS + r, mask=tile < tiles, other=0.0)
            tile_s = (first_block + r - base - j) * PER + one
            s += tl.load(part + tile_s * ROW_BLOCKS + r, mask=(tile_s >= 0) & (tile_s < tiles), other=0.0)
    there = (j < blocks_n) & (j * BK < q_len + q_offset)
    count = tl.minimum(kv_len - j * BK, BK) * rows
    score = tl.where(there, total / tl.maximum(count, 1).to(tl.float32), float("-inf"))
    top = tl.max(score)
    e = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top))
    e = e / tl.maximum(tl.sum(e), 1e-30)
    p = v / tl.maximum(tl.sum(v), 1e-30)
    middle = tl.maximum((p + e) * 0.5, 1e-38)
    terms = tl.where(p > 0, p * tl.log(tl.where(p > 0, p / middle, 1.0)), 0.0)
    terms += tl.where(e > 0, e * tl.log(tl.where(e > 0, e / middle, 1.0)), 0.0)
    distance = tl.sqrt(tl.maximum(tl.sum(terms), 0.0) * 0.5)
    tl.store(aware + head, (distance < tau).to(tl.int32))
    to = head.to(tl.int64) * width + j
    tl.store(vertical + to, _cut_here(v, gamma, least).to(tl.int8), mask=j < width)
    tl.store(slash + to, _cut_here(s, gamma, least).to(tl.int8), mask=j < width)


@triton.jit(do_not_specialize=_NUMBERS)
def _flex_map(
    aware, vertical, slash, mass, cuts, out, tiles_m, blocks_n, q_len, q_offset, width, base,
    BQ: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`mass` and `cuts` are of query-aware heads, the other tables of those that are not."""
    SPAN: tl.constexpr = (BQ + BK - 1) // BK + 1  # blocks of positions that a tile may be in
    row, first, last, block, seen = _place(tiles_m, blocks_n, q_len, q_offset, BQ, BK, COLUMNS)
    head = row // tiles_m
    first_own = _floor(first, BK)
    last_own = _floor(last, BK)
    if tl.load(aware + head) != 0:
        found = tl.load(mass + row.to(tl.int64) * blocks_n + block, mask=seen, other=0.0)
        kept = codes(found) >= tl.load(cuts + head)
    else:
        vertical += head.to(tl.int64) * width
        slash += head.to(tl.int64) * width
        kept = tl.load(vertical + block, mask=seen, other=0) != 0
        for one in tl.static_range(SPAN):
            at = first_own + one - block - base
            there = seen & (first_own + one <= last_own) & (at >= 0) & (at < width)
            kept = kept | (tl.load(slash + at, mask=there, other=0) != 0)
    kept = (kept | (block >= first_own) | (block == 0)) & seen
    tl.store(out + row.to(tl.int64) * blocks_n + block, kept.to(tl.int8), mask=block < blocks_n)


@cache
def _table(heads: tuple[Head, ...], device: torch.device) -> Tensor:
    """int32 [5, H]: patterns, both numbers, keys and distances to keep. Never dropped: captured graphs read it."""
    columns = [
        (h.pattern, h.first, h.second, *((h.first, h.second) if h.pattern == LINES else (1, 1)))
        for h in heads
    ]
    return torch.tensor(columns, dtype=torch.int32, device="cpu").T.contiguous().to(device)


def _mass(q: Tensor, k: Tensor, grid: Grid, scale: float | None) -> Tensor:
    factor = q.shape[3] ** -0.5 if scale is None else scale
    scores = block_scores(q, k, grid.block, (1, 1), factor, None, grid.q_offset)
    return to_mass(scores, grid.block, grid.q_len, grid.q_offset)


def _empty_map(q: Tensor, grid: Grid) -> Tensor:
    (bq, bk) = grid.block
    shape = *q.shape[:2], -(-grid.q_len // bq), -(-grid.kv_len // bk)
    return torch.empty(shape, dtype=torch.int8, device=q.device)


def vertical_slash_blocks(
    q: Tensor, k: Tensor, grid: Grid, heads: Sequence[Head], last: int, scale: float | None = None
) -> Tensor:
    """As in `attn/reference/line_blocks.py`. The first call for these heads copies their numbers to the device."""
    out = _empty_map(q, grid)
    if not out.numel():
        return out.view(torch.bool)
    heads = tuple(heads)
    tiles_m, blocks_n = out.shape[2:]
    table = _table(heads, q.device)
    up = across = mass = cuts = None
    distances = max(0, grid.q_offset + grid.q_len)
    if any(head.pattern == LINES for head in heads):
        vertical, slash = token_lines(q, k, last, grid.q_offset, scale)
        _, up = cut(vertical, budgets=table[3], forced=FORCED_KEYS)
        _, across = cut(slash, budgets=table[4], forced=FORCED_DISTANCES) if distances else (None, up)
    if any(head.pattern == BLOCKS for head in heads):
        mass = _mass(q, k, grid, scale)
        cuts, _ = cut(mass, budgets=table[1], counted=False)
    with torch.cuda.device_of(q):
        launch(
            _on_lines, (out.numel() // blocks_n, -(-blocks_n // COLUMNS)), table, up, across, mass, cuts, out,
            tiles_m, blocks_n, len(heads), grid.q_len, grid.kv_len, grid.q_offset, distances,
            BQ=grid.block[0], BK=grid.block[1], COLUMNS=COLUMNS, num_warps=MAP_WARPS,
        )  # fmt: skip
    return out.view(torch.bool)


def flex_blocks(
    q: Tensor,
    k: Tensor,
    grid: Grid,
    *,
    last: int,
    gamma: float,
    tau: float,
    least: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As in `attn/reference/line_blocks.py`; which heads are query-aware as int32 [B, Hq]."""
    out = _empty_map(q, grid)
    aware = torch.empty(q.shape[:2], dtype=torch.int32, device=q.device)
    if not out.numel():
        return out.view(torch.bool), aware
    tiles_m, blocks_n = out.shape[2:]
    probe: Probe = block_probe(q, k, last, grid.q_offset, grid.block[1], scale)
    per = max(1, grid.block[1] // TILE)
    width = blocks_n + ROW_BLOCKS
    base = max(0, probe.first_block - blocks_n + 1)
    vertical, slash = (torch.empty(aware.numel(), width, dtype=torch.int8, device=q.device) for _ in range(2))
    with torch.cuda.device_of(q):
        launch(
            _decide, (aware.numel(),), probe.part, probe.raw, aware, vertical, slash,
            blocks_n, grid.kv_len, grid.q_len, grid.q_offset, probe.part.shape[1], probe.first_block, probe.rows,
            float(gamma), float(tau), least, width, base,
            BK=grid.block[1], PER=per, ROW_BLOCKS=ROW_BLOCKS, N=max(32, triton.next_power_of_2(width)),
            num_warps=DECIDE_WARPS,
        )  # fmt: skip
        mass = _mass(q, k, grid, scale)
        cuts, _ = cut(mass.view(*aware.shape, -1), gamma, least * tiles_m, live=aware, counted=False)
        launch(
            _flex_map, (out.numel() // blocks_n, -(-blocks_n // COLUMNS)), aware, vertical, slash, mass, cuts, out,
            tiles_m, blocks_n, grid.q_len, grid.q_offset, width, base,
            BQ=grid.block[0], BK=grid.block[1], COLUMNS=COLUMNS, num_warps=MAP_WARPS,
        )  # fmt: skip
    return out.view(torch.bool), aware
