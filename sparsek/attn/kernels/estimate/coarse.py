"""Adds attention between means to attention: out[i] += gate[i] * means[i // side], in place, in one pass over out.

Rows after the length of their tile become 0 in the same pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.engine.launch.launch import launch

# Rows of a program; 64 elements for each of its 128 threads at a head dim of 128.
ROWS, WARPS = 64, 4

_NUMBERS = ("q_len", "heads", "tiles")


@triton.jit(do_not_specialize=_NUMBERS)
def _add(
    out, means, gate, lengths, q_len, heads, tiles,
    so_b, so_h, so_m, so_d, sg_b, sg_h, sg_m, sg_d, sl_b,
    SIDE: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = triton.next_power_of_2(DV)
    chunks = tl.cdiv(q_len, ROWS)
    head = tl.program_id(0) // chunks
    first = tl.program_id(0) % chunks * ROWS
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    row, column = (first + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, WIDE).to(tl.int64)
    live = (row < q_len)[:, None] & (column < DV)[None, :]
    mean = tl.load(
        means + (head.to(tl.int64) * tiles + first // SIDE) * DV + column, mask=column < DV, other=0.0
    )[None, :]
    if gate is not None:
        at = gate + b * sg_b + h * sg_h + row[:, None] * sg_m + column[None, :] * sg_d
        mean = mean * tl.load(at, mask=live, other=0.0).to(tl.float32)
    out += b * so_b + h * so_h + row[:, None] * so_m + column[None, :] * so_d
    x = tl.load(out, mask=live, other=0.0).to(tl.float32) + mean
    if lengths is not None:
        x = tl.where((row % SIDE < tl.load(lengths + b * sl_b + first // SIDE))[:, None], x, 0.0)
    tl.store(out, x.to(out.dtype.element_ty), mask=live)


def add_means(
    out: Tensor, means: Tensor, gate: Tensor | None, side: int, lengths: Tensor | None = None
) -> None:
    """out += gate * means, where means[..., j, :] is for the rows from j * side on, in float32, rounded once.

    Rows from j * side + lengths[..., j] on, up to the next tile, become 0.

    out: bf16, fp16 or fp32 [B, H, S, Dv], any strides, of memory of its own. means: float32 [B, H, ceil(S / side), Dv],
    contiguous. gate: broadcasts to out, or None for 1. side: a multiple of 64. lengths: int32 [1 or B, ceil(S / side)],
    or None for all rows. No sync.
    """
    batch, heads, q_len, dim = out.shape
    means = means.contiguous()
    wide = None if gate is None else gate.expand(out.shape)
    tiles = None if lengths is None else lengths.contiguous().expand(batch, -1)
    with torch.cuda.device_of(out):
        launch(
            _add, (batch * heads * triton.cdiv(q_len, ROWS),), out, means, wide, tiles, q_len, heads,
            means.shape[2], *out.stride(), *((0, 0, 0, 0) if wide is None else wide.stride()),
            0 if tiles is None else tiles.stride(0),
            SIDE=side, DV=dim, ROWS=ROWS, num_warps=WARPS,
        )  # fmt: skip
