"""Heads of q, k or v of attention in e4m3 with given scales, in one plain Triton kernel: bit for bit the result of
`mask.quantized_heads`. Any CUDA GPU that converts to FP8 (from sm_89), and Triton's interpreter.

    values[b, h, i, d] = x[b, h, i, d] / scale of row i                                     rounded to nearest
    turned: values[b, h, d, place of i]                                                     0 beyond the last row

One program rounds ROWS rows of one head. x may have any strides. Turned values are transposed in registers; the rows of
every sixteen are read in the order in which they are stored, so the stores of a column are contiguous.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch.launch import launch, launch_unspecialized
from sparsek.engine.launch.tensors import quotients
from sparsek.products.formats.float8 import rounded
from sparsek.products.formats.pattern import INT32_MAX

ROWS, WARPS = 64, 4
WIDEST = 512  # columns of a head that a program holds

_SIZES = (
    "heads",
    "length",
    "stored",
    "dim",
    "sx_batch",
    "sx_head",
    "sx_row",
    "sx_dim",
    "per_head",
    "rows",
    "tiles",
)
_ANYWHERE = ("x", "values", "scale")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def _round_heads(
    x, values, scale, heads, length, stored, dim, sx_batch, sx_head, sx_row, sx_dim, per_head, rows, tiles,
    TURNED: tl.constexpr, UNIT_STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    """x [batch, heads, length, dim] of any strides; values [batch, heads, length, dim], or [batch, heads, dim, stored].

    A head has `per_head` scales, one for each `rows` rows.
    """
    if UNIT_STRIDE:
        sx_dim = 1
    pid = tl.program_id(0)
    head = pid // tiles
    place = pid % tiles * ROWS + tl.arange(0, ROWS)
    row = place
    if TURNED:  # 4 t + 2 a + b holds row 8 a + 2 t + b
        row = (place // 16) * 16 + (place // 2) % 2 * 8 + (place // 4) % 4 * 2 + place % 2
    column = tl.arange(0, DIM)
    inside = (row < length)[:, None] & (column < dim)[None, :]
    at = (head // heads).to(tl.int64) * sx_batch + (head % heads).to(tl.int64) * sx_head
    at = at + row.to(tl.int64)[:, None] * sx_row + column.to(tl.int64)[None, :] * sx_dim
    given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    of_row = tl.load(scale + head.to(tl.int64) * per_head + row // rows, mask=row < length, other=1.0)
    made = quotients(given, of_row, DIVIDE).to(values.dtype.element_ty)
    if TURNED:
        first = values + head.to(tl.int64) * dim * stored
        to = first + column.to(tl.int64)[:, None] * stored + place[None, :]
        tl.store(to, tl.trans(made), mask=(column < dim)[:, None] & (place < stored)[None, :])
    else:
        first = values + head.to(tl.int64) * length * dim
        tl.store(first + row.to(tl.int64)[:, None] * dim + column[None, :], made, mask=inside)


class HeadConstants(NamedTuple):
    """The constexprs of `_round_heads`, in its order."""

    turned: bool
    unit_stride: bool
    rows: int
    dim: int
    divide: bool


def round_heads(x: Tensor, scale: Tensor, rows: int, stored: int, turned: bool) -> Tensor | None:
    """Values in e4m3 of x [B, H, L, D] in bf16, fp16 or fp32, [B, H, L, D], or turned [B, H, D, stored]; None for
    unsupported inputs. `scale`: [B, H], or [B, H, n] with one for each `rows` rows.
    """
    b, h, length, dim = x.shape
    supported = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and 0 < dim <= WIDEST
    if not supported or max(length + ROWS, b * h) >= 1 << 24:
        return None
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        return None
    shape = (b, h, dim, stored) if turned else (b, h, length, dim)
    # The interpreter's own conversion to FP8 does not round to nearest (Triton 3.6): there torch rounds.
    dtype = torch.float32 if env.interpreting() else torch.float8_e4m3fn
    values = torch.empty(shape, dtype=dtype, device=x.device)
    tiles = -(-(stored if turned else length) // ROWS)
    if tiles * b * h:
        per_head = scale.shape[2] if rows else 1
        # As in launch/tensors.py: a dim of one element may have any stride.
        strides = [step if size > 1 else 0 for step, size in zip(x.stride(), x.shape, strict=True)]
        args = (x, values, scale, h, length, stored, dim, *strides, per_head, rows or 1 << 30, tiles)
        side = max(16, 1 << (dim - 1).bit_length())
        constants = HeadConstants(turned, x.stride(3) == 1, ROWS, side, env.interpreting())
        if max(strides) > INT32_MAX:  # to Triton, 64-bit sizes are another kernel
            with torch.cuda.device_of(x):
                launch(_round_heads, (tiles * b * h,), *args, *constants, num_warps=WARPS)
        else:
            launch_unspecialized(_round_heads, x.device, tiles * b * h, args, constants, WARPS)
    return values if values.dtype == torch.float8_e4m3fn else rounded(values, torch.float8_e4m3fn)
