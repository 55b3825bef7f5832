"""x [..., K] in FP8 with a scale per row, in one plain Triton kernel: bit for bit the result of
`formats.quantized_tensor`. Any CUDA GPU that converts to FP8 (from sm_89), and Triton's interpreter.

    scale[t] = max over k of |x[t, k]|, over 448 or 57344      values[t, k] = x[t, k] / scale[t], rounded to nearest

One program processes ROWS rows. A row that fits (K up to 4096) is read once and stays in registers; a longer one is
read twice, the second time from cache. A quotient is a product with the scale's reciprocal and one step of Newton's
method: five instructions; a division has some thirty. x may have any strides: for B [K, N] with contiguous rows,
x is B.mT; a program then reads 32 of its columns, and transposes the rounded values before it stores them.

8192x8192 in bf16 on an H200 (2026-11-22, by script): 58 us, 3.4 TB/s; as B [K, N] with contiguous rows 102 us.

`products/ops/packing.py` registers it with `products/formats/quantized_tensor.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch import tensors
from sparsek.engine.launch.launch import launch, launch_unspecialized
from sparsek.engine.launch.tensors import SIZE_LIMIT, at, quotients, times
from sparsek.products.formats.float8 import rounded
from sparsek.products.kernels.common.rounding import magnitude_bits, scale_of

# Rows of up to WHOLE elements stay in registers, EACH per thread; longer ones STEP at a time, STEP_EACH per thread;
# rows, step and warps of a transposed x. 8192^2 (H200, 2026-11-22): 58 us, 89 with the whole row in registers;
# transposed 102, with steps of 128 206.
WHOLE, EACH, STEP, STEP_EACH = 4096, 32, 4096, 16
TURNED_ROWS, TURNED_STEP, TURNED_WARPS = 32, 512, 8

# Triton does not specialize for these: neither a size nor an alignment triggers a compilation. UNIT gives the
# alignment.
_SIZES = ("rows", "k", "sx_batch", "sx_row", "sx_k", "row_tiles")
_ANYWHERE = ("x", "values", "scale")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def _round_rows(
    x, values, scale, rows, k, sx_batch, sx_row, sx_k, row_tiles,
    TOP: tl.constexpr, LIES: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, ONCE: tl.constexpr, WIDE: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """x [batch, rows, k] of any strides; values [batch, rows, k] and scale [batch, rows] contiguous."""
    if UNIT > 1:  # K, strides except 1, and the rows of a transposed x are whole 16-byte words
        k, sx_batch = times(k, 16), times(sx_batch, UNIT)
    if LIES == "rows":
        sx_k = 1
        sx_row = times(sx_row, UNIT)
    elif LIES == "turned":
        sx_row = 1
        rows, sx_k = times(rows, UNIT), times(sx_k, UNIT)
    pid = tl.program_id(0)
    batch = (pid // row_tiles).to(tl.int64)
    row = pid % row_tiles * ROWS + tl.arange(0, ROWS)
    kt = tl.arange(0, STEP)
    inside = row < rows
    x += batch * sx_batch
    x = x + (row.to(tl.int64) * sx_row)[:, None]
    largest = tl.zeros([ROWS], dtype=tl.int32)
    held = tl.zeros([ROWS, STEP], dtype=x.dtype.element_ty)
    for k0 in range(0, k, STEP):
        held = _row_part(x, k0 + kt, k, sx_k, inside, LIES, UNIT, WIDE)
        largest = tl.maximum(largest, tl.max(magnitude_bits(held.to(tl.float32)), axis=1))
    found = scale_of(largest, TOP)
    tl.store(scale + batch * rows + row, found, mask=inside)
    first = values + (batch * rows + row) * k
    for k0 in range(0, k, STEP):
        if not ONCE:
            held = _row_part(x, k0 + kt, k, sx_k, inside, LIES, UNIT, WIDE)
        made = quotients(held.to(tl.float32), found, DIVIDE).to(values.dtype.element_ty)
        to = first[:, None] + (k0 + kt)[None, :]
        if UNIT > 1:
            to = tl.multiple_of(to, (1, 16))
        tl.store(to, made, mask=inside[:, None] & (k0 + kt < k)[None, :])


@triton.jit
def _row_part(
    x, column, k, sx_k, inside, LIES: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Columns of the rows that begin at x [ROWS, 1]; 0 outside."""
    source = x + (at(column, WIDE) * sx_k)[None, :]
    if UNIT > 1:
        source = tl.multiple_of(source, (1, 16) if LIES == "rows" else (16, 1))
    return tl.load(source, mask=inside[:, None] & (column < k)[None, :], other=0.0)


class RowConstants(NamedTuple):
    """The constexprs of `_round_rows`, in its order."""

    top: float
    lies: str
    unit: int
    rows: int
    step: int
    once: bool
    wide: bool
    divide: bool


def _constants(x: Tensor, dtype: torch.dtype) -> tuple[RowConstants, int]:
    """The constexprs for x [batch, rows, K], and warps."""
    _, rows, k = x.shape
    _, of_row, of_k = tensors.strides(x)
    lies = "rows" if of_k == 1 or k == 1 else "turned" if of_row == 1 and rows > 1 else "any"
    along, down = tensors.units(x)
    unit = {"rows": along, "turned": min(down, tensors.unit(rows, x)), "any": 1}[lies]
    if k % 16 or x.data_ptr() % 16:
        unit = 1
    wide = max(tensors.extent(x), *tensors.strides(x)) > SIZE_LIMIT
    if lies == "turned":
        rows, step, warps = TURNED_ROWS, TURNED_STEP, TURNED_WARPS
    else:
        step = max(16, 1 << (k - 1).bit_length()) if k <= WHOLE else STEP
        rows = max(1, min(16, 1024 // step))
        warps = max(1, min(16, rows * step // (32 * (EACH if k <= step else STEP_EACH))))
    top = torch.finfo(dtype).max
    return RowConstants(top, lies, unit, rows, step, k <= step, wide, env.interpreting()), warps


def round_rows(x: Tensor, dtype: torch.dtype, together: bool = False) -> tuple[Tensor, Tensor] | None:
    """Values [..., K] in `dtype` and scales [...] of x [..., K] in bf16, fp16 or fp32; None for unsupported inputs.
    `together`: both are views of one allocation."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or max(x.shape) > SIZE_LIMIT:
        return None
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        return None
    # The interpreter's own conversion to FP8 does not round to nearest (Triton 3.6): there torch rounds.
    kind = torch.float32 if env.interpreting() else dtype
    if together:
        size = x.numel() * kind.itemsize
        begin = -(-size // 16) * 16
        whole = torch.empty(begin + 4 * x.shape[:-1].numel(), dtype=torch.uint8, device=x.device)
        values, scale = (
            whole[:size].view(kind).view(x.shape),
            whole[begin:].view(torch.float32).view(x.shape[:-1]),
        )
    else:
        values = torch.empty(x.shape, dtype=kind, device=x.device)
        scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if not x.numel():
        return values.to(dtype), scale.fill_(1.0)
    x, out, of_rows = (each.unsqueeze(0) if x.ndim == 1 else each for each in (x, values, scale))
    for x3, out3, scale3 in tensors.folded(x, out, of_rows.unsqueeze(-1)):
        constants, warps = _constants(x3, dtype)
        batch, rows, k = x3.shape
        tiles = -(-rows // constants.rows)
        args = (x3, out3, scale3, rows, k, *tensors.strides(x3), tiles)
        if constants.wide:  # to Triton, 64-bit sizes are another kernel
            with torch.cuda.device_of(x3):
                launch(_round_rows, (tiles * batch,), *args, *constants, num_warps=warps)
        else:
            launch_unspecialized(_round_rows, x3.device, tiles * batch, args, constants, warps)
    return values if values.dtype == dtype else rounded(values, dtype), scale
