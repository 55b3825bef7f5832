"""Groups of `stride` queries or keys as rows of a matrix, in FP8 with a scale per row or in the dtype of q: the
operands of XAttention's estimate. One launch for q and k.

    q [B, H, S, D] -> [B H rows, stride D']   a row holds its queries last to first, so that a product of a row of q
    k [B, H, T, D] -> [B H rows, stride D']   with a row of k is the sum of an antidiagonal

D' is D rounded up to 16. Rows and columns beyond the tensor are zero. A scale is the power of two that brings the
largest magnitude of a row to 128 or more and below 256: scaling is exact, and e4m3 loses at most one of its 15 octaves.
Bottleneck: memory, one read of q and k and half a write in FP8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch.launch import launch

E4M3 = torch.float8_e4m3fn
# Columns of D' are a multiple of this, so that the 8 or 16 of a row are whole steps of a product, which masks none.
FEWEST = 16
# Rows of a program, warps.
ROWS, WARPS = 4, 8

_NUMBERS = ("q_len", "kv_len", "q_rows", "k_rows", "q_tiles", "k_tiles", "q_programs", "length_step")


class Groups(NamedTuple):
    """Rows [B * H * rows, K] of q and of k, with a scale and a bias per row: scales None in full precision, `k_bias`
    (0, or -inf for a row without keys) None unless blocks have lengths.
    """

    q: Tensor
    k: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    k_bias: Tensor | None
    q_rows: int
    k_rows: int


@triton.jit
def place_of(group, TILE: tl.constexpr, LANES: tl.constexpr):
    """The row of a tile of TILE groups where one stands: lanes have TILE / LANES groups, and take pairs in turn."""
    own = group % (TILE // LANES)
    return (own // 2 * LANES + group // (TILE // LANES)) * 2 + own % 2


@triton.jit
def group_at(row, TILE: tl.constexpr, LANES: tl.constexpr):
    """The group that stands in a row of a tile."""
    return row // 2 % LANES * (TILE // LANES) + row // (2 * LANES) * 2 + row % 2


@triton.jit
def _row_groups(
    x, out, scale, bias, lengths, tile, length, rows, first_row, s_row, s_d,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    REVERSED: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head, from row tile * ROWS on; `first_row` is the head's first row of `out`."""
    PADDED: tl.constexpr = triton.next_power_of_2(WIDTH)
    row = tile * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, STRIDE)
    token = row[:, None] * STRIDE + inner[None, :]
    exists = token < length
    to_row = first_row + row // TILE * TILE + place_of(row % TILE, TILE, LANES)
    if lengths is not None:
        many = tl.load(lengths + token // BLOCK, mask=exists, other=0)
        exists = exists & (token % BLOCK < many)
        there = tl.max(exists.to(tl.int32), axis=1) > 0
        tl.store(bias + to_row, tl.where(there, 0.0, float("-inf")), mask=row < rows)
    column = tl.arange(0, PADDED)
    source = x + (token.to(tl.int64) * s_row)[:, :, None] + (column.to(tl.int64) * s_d)[None, None, :]
    held = tl.load(source, mask=exists[:, :, None] & (column < D)[None, None, :], other=0.0)
    if scale is not None:
        held = held.to(tl.float32)
        bits = held.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(tl.max(bits, axis=2), axis=1)
        exponent = tl.maximum(largest >> 23, 15) - 7  # biased, of the scale
        tl.store(scale + to_row, (exponent << 23).to(tl.float32, bitcast=True), mask=row < rows)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        held = held * inverse[:, None, None]
    place = STRIDE - 1 - inner if REVERSED else inner
    at = to_row.to(tl.int64)[:, None] * (STRIDE * WIDTH) + place[None, :] * WIDTH
    to = out + at[:, :, None] + column[None, None, :]
    inside = (row < rows)[:, None, None] & (column < WIDTH)[None, None, :]
    tl.store(to, held.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS)
def _group(
    q, k, q_out, k_out, q_scale, k_scale, k_bias, lengths,
    q_len, kv_len, q_rows, k_rows, q_tiles, k_tiles, q_programs, length_step,
    sq_b, sq_h, sq_m, sq_d, sk_b, sk_h, sk_n, sk_d,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Programs of q, then those of k. WIDTH is D'."""
    pid = tl.program_id(0)
    if pid < q_programs:
        head = pid // q_tiles
        x = q + (head // HEADS).to(tl.int64) * sq_b + (head % HEADS).to(tl.int64) * sq_h
        _row_groups(
            x, q_out, q_scale, None, None, pid % q_tiles, q_len, q_rows, head * q_rows, sq_m, sq_d,
            STRIDE, BLOCK, D, WIDTH, ROWS, True, TILE, 1,
        )  # fmt: skip
    else:
        pid -= q_programs
        head = pid // k_tiles
        batch = head // KV_HEADS
        x = k + batch.to(tl.int64) * sk_b + (head % KV_HEADS).to(tl.int64) * sk_h
        if lengths is not None:
            lengths += batch * length_step
        _row_groups(
            x, k_out, k_scale, k_bias, lengths, pid % k_tiles, kv_len, k_rows, head * k_rows, sk_n, sk_d,
            STRIDE, BLOCK, D, WIDTH, ROWS, False, TILE, LANES,
        )  # fmt: skip


def group(
    q: Tensor,
    k: Tensor,
    stride: int,
    block: int,
    kv_lengths: Tensor | None,
    fp8: bool,
    tiles: tuple[int, int],
    lanes: int = 1,
) -> Groups:
    """The rows of q and k, as many of a head as whole `tiles` need. `block`: keys of a block that has a length.
    `lanes`: how many parts of a tile of k take its pairs of rows in turn.

    `kv_lengths` int32 [1 or B, Nb]. Launches and allocations only.
    """
    (batch, heads, q_len, dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    q_rows, k_rows = (
        -(-length // (stride * tile)) * tile for length, tile in zip((q_len, kv_len), tiles, strict=True)
    )
    width = -(-dim // FEWEST) * FEWEST
    # The interpreter's own conversion to FP8 does not round to nearest (Triton 3.6): there torch rounds.
    kind = q.dtype if not fp8 else torch.float32 if env.interpreting() else E4M3
    made: list[Any] = []
    for all_rows in (batch * heads * q_rows, batch * kv_heads * k_rows):
        made.append(torch.empty(all_rows, stride * width, dtype=kind, device=q.device))
    for rows in made[:]:
        made.append(torch.empty(len(rows), dtype=torch.float32, device=q.device) if fp8 else None)
    q_out, k_out, q_scale, k_scale = made
    k_bias = None
    if kv_lengths is not None:
        k_bias = torch.empty(len(k_out), dtype=torch.float32, device=q.device)
        kv_lengths = kv_lengths.contiguous()
    q_tiles, k_tiles = -(-q_rows // ROWS), -(-k_rows // ROWS)
    q_programs, k_programs = batch * heads * q_tiles, batch * kv_heads * k_tiles
    with torch.cuda.device_of(q):
        launch(
            _group, (q_programs + k_programs,), q, k, q_out, k_out, q_scale, k_scale, k_bias, kv_lengths,
            q_len, kv_len, q_rows, k_rows, q_tiles, k_tiles, q_programs,
            kv_lengths.stride(0) if kv_lengths is not None and len(kv_lengths) > 1 else 0,
            *q.stride(), *k.stride(),
            HEADS=heads, KV_HEADS=kv_heads, STRIDE=stride, BLOCK=block, D=dim, WIDTH=width, ROWS=ROWS,
            TILE=tiles[1], LANES=lanes, num_warps=WARPS,
        )  # fmt: skip
    if env.interpreting() and fp8:
        q_out, k_out = (each.to(E4M3).to(torch.float16) for each in (q_out, k_out))
    return Groups(q_out, k_out, q_scale, k_scale, k_bias, q_rows, k_rows)
