"""Means of parts of blocks of rows, of one or two tensors in one launch.

    x [B, H, L, D] --> means [2, B, H, blocks * PARTS, D]: of the rows of each part, as high + low halves

A program has one block of rows, reads it once, and writes a mean for each of its PARTS parts. The time is that of the
bytes of x. A float32 mean is split into two numbers of 16 bits: high is the mean rounded, low the rest rounded; scores
(`scores.py`) multiply high * high + high * low + low * high on tensor cores, which loses 2^-16 of a product. In the
interpreter, which has no right bf16, the halves are fp16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.kernels.lang.launch import launch

# Elements of x that a program reads at once, at most: 128 of each of its threads, 16 loads of 16 bytes in bf16.
ELEMENTS, PER_THREAD = 16384, 128

_NUMBERS = ("x_len", "x_heads", "x_blocks", "x_programs", "x_step", "x_low",
            "y_len", "y_heads", "y_blocks", "y_step", "y_low")  # fmt: skip


@triton.jit
def rows_there(length, lengths, b, step, tile, SIDE: tl.constexpr):
    """How many rows block `tile` has: those before `length`, and of them the first lengths[b, tile], if given."""
    count = tl.minimum(length - tile * SIDE, SIDE)
    if lengths is not None:
        count = tl.minimum(count, tl.maximum(tl.load(lengths + b * step + tile), 0))
    return count


@triton.jit
def _mean(
    x, means, lengths, program, length, heads, blocks, step, low, sx_b, sx_h, sx_m, sx_d,
    SIDE: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    SUB: tl.constexpr = SIDE // PARTS
    tile = program % blocks
    b = (program // blocks // heads).to(tl.int64)
    h = (program // blocks % heads).to(tl.int64)
    count = rows_there(length, lengths, b, step, tile, SIDE)
    part = tl.arange(0, PARTS)
    share = tl.maximum(tl.minimum(count - part * SUB, SUB), 1).to(tl.float32)
    row = tl.arange(0, SIDE)
    x += b * sx_b + h * sx_h + tile.to(tl.int64) * SIDE * sx_m
    means += (program.to(tl.int64) * PARTS + part.to(tl.int64)[:, None]) * D
    for start in tl.static_range(0, D, WIDE):
        column = start + tl.arange(0, WIDE)
        live = (row < count)[:, None] & (column < D)[None, :]
        part_of_x = tl.load(
            x + row.to(tl.int64)[:, None] * sx_m + column.to(tl.int64)[None, :] * sx_d, mask=live, other=0.0
        )
        sums = tl.sum(tl.reshape(part_of_x.to(tl.float32), (PARTS, SUB, WIDE)), 1)
        mean = sums / share[:, None]
        high = mean.to(means.dtype.element_ty)
        rest = mean - high.to(tl.float32)
        there = (column < D)[None, :] & (part >= 0)[:, None]
        tl.store(means + column[None, :], high, mask=there)
        tl.store(means + low + column[None, :], rest.to(means.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=_NUMBERS)
def _means(
    x, y, x_means, y_means, x_lengths, y_lengths,
    x_len, x_heads, x_blocks, x_programs, x_step, x_low, y_len, y_heads, y_blocks, y_step, y_low,
    sx_b, sx_h, sx_m, sx_d, sy_b, sy_h, sy_m, sy_d,
    X_SIDE: tl.constexpr, X_PARTS: tl.constexpr, Y_SIDE: tl.constexpr, Y_PARTS: tl.constexpr,
    D: tl.constexpr, X_WIDE: tl.constexpr, Y_WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < x_programs:
        _mean(
            x, x_means, x_lengths, program, x_len, x_heads, x_blocks, x_step, x_low, sx_b, sx_h, sx_m, sx_d,
            X_SIDE, X_PARTS, D, X_WIDE,
        )  # fmt: skip
    elif y is not None:
        _mean(
            y, y_means, y_lengths, program - x_programs, y_len, y_heads, y_blocks, y_step, y_low,
            sy_b, sy_h, sy_m, sy_d, Y_SIDE, Y_PARTS, D, Y_WIDE,
        )  # fmt: skip


def split_dtype() -> torch.dtype:
    """The dtype of the halves of means."""
    return torch.float16 if env.interpreting() else torch.bfloat16


def split_means(
    x: Tensor,
    y: Tensor | None,
    sides: tuple[int, int],
    parts: tuple[int, int] = (1, 1),
    lengths: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Means of x [B, H, L, D] and, if given, of y [B, H', L', D], each [2, B, H, blocks * parts, D]: high, low.

    A block has `sides` rows, and a mean is of a share of 1 / parts of them. Any strides; bf16, fp16 or fp32. `lengths`
    are int32 [1 or B, blocks], contiguous: the first rows of each block that count. A part without rows has mean 0.
    One launch, without a sync.
    """
    tensors = [x] if y is None else [x, y]
    grids = [-(-each.shape[2] // side) for each, side in zip(tensors, sides, strict=False)]
    made = [
        torch.empty((2, *each.shape[:2], blocks * split, each.shape[3]), dtype=split_dtype(), device=x.device)
        for each, blocks, split in zip(tensors, grids, parts, strict=False)
    ]
    programs = [each.shape[0] * each.shape[1] * blocks for each, blocks in zip(tensors, grids, strict=True)]
    numbers: list[int] = []
    for i in range(2):
        at = min(i, len(tensors) - 1)
        each, length = tensors[at], lengths[at]
        step = 0 if length is None or length.shape[0] == 1 else grids[at]
        own = [programs[at]] if i == 0 else []
        numbers += [each.shape[2], each.shape[1], grids[at], *own, step, made[at].numel() // 2]
    dim = x.shape[3]
    wide = [max(1, min(triton.next_power_of_2(dim), ELEMENTS // side)) for side in sides]
    busiest = max(side * each for side, each in zip(sides, wide, strict=True))
    options: dict[str, Any] = {"num_warps": max(1, min(8, busiest // (32 * PER_THREAD)))}
    with torch.cuda.device_of(x):
        launch(
            _means, (sum(programs),), x, y, made[0], made[-1], lengths[0], lengths[1], *numbers,
            *x.stride(), *tensors[-1].stride(),
            X_SIDE=sides[0], X_PARTS=parts[0], Y_SIDE=sides[1], Y_PARTS=parts[1], D=dim, X_WIDE=wide[0], Y_WIDE=wide[1],
            **options,
        )  # fmt: skip
    return made[0], made[-1]
