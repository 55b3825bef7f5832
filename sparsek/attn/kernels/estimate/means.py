"""Means of parts of blocks of rows, of one or two tensors in one launch.

    x [B, H, L, D] --> means [2, B, H, blocks * PARTS, D]: of the rows of each part, as high + low halves

A program has one block of rows, reads it once, part by part, and writes a mean for each of its PARTS parts. The time is
that of the bytes of x. A float32 mean is split into two numbers of 16 bits: high is the mean rounded, low the rest
rounded; scores (`scores.py`) multiply high * high + high * low + low * high on tensor cores, which loses 2^-16 of a
product. In the interpreter, which has no right bf16, the halves are fp16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch.launch import launch

# Columns that a program reads at once, and rows of a warp: 128 elements of a thread, 16 loads of 16 bytes in bf16 if a
# block has one part.
WIDE, ROWS = 64, 64

# Where a mean stands: behind that of the part before; or, for blocks of QUADS parts, where the accumulator of a product
# on Hopper has all of a block in one thread: `quad_row` and `quad_column`, for tiles of QUAD_ROWS and QUAD_COLUMNS.
PLAIN, AS_ROWS, AS_COLUMNS = range(3)
QUADS, QUAD_ROWS, QUAD_COLUMNS = 4, 128, 16

_NUMBERS = ("x_len", "x_heads", "x_blocks", "x_programs", "x_step", "x_low",
            "y_len", "y_heads", "y_blocks", "y_step", "y_low")  # fmt: skip


@triton.jit
def rows_there(length, lengths, b, step, tile, SIDE: tl.constexpr):
    """How many rows block `tile` has: those before `length`, and of them the first lengths[b, tile], if given; 0 or
    less for a block after the last.
    """
    count = tl.minimum(length - tile * SIDE, SIDE)
    if lengths is not None:
        many = tl.load(lengths + b * step + tile, mask=count > 0, other=0)
        count = tl.minimum(count, tl.maximum(many, 0))
    return count


@triton.jit
def quad_row(block, part):
    """A thread of `wgmma`, for 128 rows of 4 warps, has rows r, r + 8, r + 64 and r + 72."""
    return block // 32 * 128 + part // 2 * 64 + block % 32 // 8 * 16 + part % 2 * 8 + block % 8


@triton.jit
def quad_column(block, part):
    """Of each 16 columns it has c, c + 1, c + 8 and c + 9, for even c."""
    return block // 4 * 16 + part // 2 * 8 + block % 4 * 2 + part % 2


@triton.jit
def _mean(
    x, means, lengths, program, length, heads, blocks, step, low, sx_b, sx_h, sx_m, sx_d,
    SIDE: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    SUB: tl.constexpr = SIDE // PARTS
    tile = program % blocks
    head = program // blocks
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    count = rows_there(length, lengths, b, step, tile, SIDE)
    inner = tl.arange(0, SUB)
    x += b * sx_b + h * sx_h + tile.to(tl.int64) * SIDE * sx_m
    means += head.to(tl.int64) * blocks * PARTS * D
    for part in tl.static_range(PARTS):
        row = part * SUB + inner
        share = tl.maximum(tl.minimum(count - part * SUB, SUB), 1).to(tl.float32)
        if ORDER == 1:
            place = quad_row(tile, part)
        elif ORDER == 2:
            place = quad_column(tile, part)
        else:
            place = tile * PARTS + part
        to = means + place.to(tl.int64) * D
        for start in tl.static_range(0, D, WIDE):
            column = start + tl.arange(0, WIDE)
            there = column < D
            live = (row < count)[:, None] & there[None, :]
            read = x + row.to(tl.int64)[:, None] * sx_m + column.to(tl.int64)[None, :] * sx_d
            mean = tl.sum(tl.load(read, mask=live, other=0.0).to(tl.float32), 0) / share
            high = mean.to(means.dtype.element_ty)
            rest = mean - high.to(tl.float32)
            tl.store(to + column, high, mask=there)
            tl.store(to + low + column, rest.to(means.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=_NUMBERS)
def _means(
    x, y, x_means, y_means, x_lengths, y_lengths,
    x_len, x_heads, x_blocks, x_programs, x_step, x_low, y_len, y_heads, y_blocks, y_step, y_low,
    sx_b, sx_h, sx_m, sx_d, sy_b, sy_h, sy_m, sy_d,
    X_SIDE: tl.constexpr, X_PARTS: tl.constexpr, Y_SIDE: tl.constexpr, Y_PARTS: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, X_ORDER: tl.constexpr, Y_ORDER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < x_programs:
        _mean(
            x, x_means, x_lengths, program, x_len, x_heads, x_blocks, x_step, x_low,
            sx_b, sx_h, sx_m, sx_d, X_SIDE, X_PARTS, D, WIDE, X_ORDER,
        )  # fmt: skip
    elif y is not None:
        _mean(
            y, y_means, y_lengths, program - x_programs, y_len, y_heads, y_blocks, y_step, y_low,
            sy_b, sy_h, sy_m, sy_d, Y_SIDE, Y_PARTS, D, WIDE, Y_ORDER,
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
    quads: bool = False,
) -> tuple[Tensor, Tensor]:
    """Means of x [B, H, L, D] and, if given, of y [B, H', L', D], each [2, B, H, blocks * parts, D]: high, low.

    A block has `sides` rows, and a mean is of a share of 1 / parts of them. Any strides; bf16, fp16 or fp32. `lengths`
    are int32 [1 or B, blocks], contiguous: the first rows of each block that count. A part without rows has mean 0.
    `quads`: of 4 parts, those of x stand by `quad_row`, of y by `quad_column`, with blocks up to a multiple of
    QUAD_ROWS and of QUAD_COLUMNS; those after the last have means 0. One launch, without a sync.
    """
    tensors = [x] if y is None else [x, y]
    blocks = [-(-each.shape[2] // side) for each, side in zip(tensors, sides, strict=False)]
    units = (QUAD_ROWS // QUADS, QUAD_COLUMNS // QUADS) if quads else (1, 1)
    grids = [-(-many // unit) * unit for many, unit in zip(blocks, units, strict=False)]
    made = [
        torch.empty((2, *each.shape[:2], many * split, each.shape[3]), dtype=split_dtype(), device=x.device)
        for each, many, split in zip(tensors, grids, parts, strict=False)
    ]
    programs = [each.shape[0] * each.shape[1] * many for each, many in zip(tensors, grids, strict=True)]
    numbers: list[int] = []
    for i in range(2):
        at = min(i, len(tensors) - 1)
        each, length = tensors[at], lengths[at]
        step = 0 if length is None or length.shape[0] == 1 else blocks[at]
        own = [programs[at]] if i == 0 else []
        numbers += [each.shape[2], each.shape[1], grids[at], *own, step, made[at].numel() // 2]
    dim = x.shape[3]
    with torch.cuda.device_of(x):
        launch(
            _means, (sum(programs),), x, y, made[0], made[-1], lengths[0], lengths[1], *numbers,
            *x.stride(), *tensors[-1].stride(),
            X_SIDE=sides[0], X_PARTS=parts[0], Y_SIDE=sides[1], Y_PARTS=parts[1], D=dim,
            WIDE=min(triton.next_power_of_2(dim), WIDE), X_ORDER=AS_ROWS if quads else PLAIN,
            Y_ORDER=AS_COLUMNS if quads else PLAIN, num_warps=max(1, max(sides) // ROWS),
        )  # fmt: skip
    return made[0], made[-1]
