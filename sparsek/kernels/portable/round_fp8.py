"""x [..., K] in FP8 with a scale for each row, by one plain Triton kernel: what `formats.scaled_tensor` does, bit for
bit. Any CUDA GPU that converts to FP8 (from sm_89), and Triton's interpreter.

    scale[t] = max over k of |x[t, k]|, over 448 or 57344      values[t, k] = x[t, k] / scale[t], rounded to nearest

One program takes ROWS rows. Where a row fits (K up to 8192) it is read once and stays in registers; a longer one is
read twice, the second time from L2. x may lie in memory as it likes: for B [K, N] with contiguous rows, x is B.mT, a
program then takes 32 of its columns, and what it has rounded turns on its way out.

H200: not timed yet. At 8192x8192 in bf16 it has 201 MB to move, 47 us at copy bandwidth.

How it is reached: `ops/scaled.py` registers it with `formats/scaled_tensor.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.formats.float8 import LEAST, rounded
from sparsek.kernels.prims import portable_tensors as tensors
from sparsek.kernels.prims.portable_tensors import SIZE_LIMIT, at

# Elements of a row in registers, elements of a thread then; a step of a longer row; rows and step of a turned x.
WHOLE, EACH, STEP, TURNED_ROWS, TURNED_STEP = 8192, 16, 4096, 32, 128


@triton.jit
def _magnitude_bits(x):
    """Of float32: bits without the sign. Their order is that of magnitudes, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round_rows(
    x, values, scale, rows, k, sx_batch, sx_row, sx_k, row_tiles, least, top,
    ROWS: tl.constexpr, STEP: tl.constexpr, ONCE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """x [batch, rows, k] of any strides; values [batch, rows, k] and scale [batch, rows] contiguous."""
    pid = tl.program_id(0)
    batch = (pid // row_tiles).to(tl.int64)
    row = pid % row_tiles * ROWS + tl.arange(0, ROWS)
    kt = tl.arange(0, STEP)
    inside = row < rows
    x += batch * sx_batch
    x = x + (row.to(tl.int64) * sx_row)[:, None]
    first_out = (batch * rows + row) * k
    largest = tl.zeros([ROWS], dtype=tl.int32)
    held = tl.zeros([ROWS, STEP], dtype=tl.float32)
    for k0 in range(0, k, STEP):
        live = inside[:, None] & (k0 + kt < k)[None, :]
        held = tl.load(x + (at(k0 + kt, WIDE) * sx_k)[None, :], mask=live, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(_magnitude_bits(held), axis=1))
    size = largest.to(tl.float32, bitcast=True)
    found = tl.math.div_rn(size, tl.zeros([ROWS], dtype=tl.float32) + top)
    found = tl.where(found < least, least, found)  # a NaN stays
    found = tl.where(size == 0, 1.0, found)
    tl.store(scale + batch * rows + row, found, mask=inside)
    for k0 in range(0, k, STEP):
        live = inside[:, None] & (k0 + kt < k)[None, :]
        if not ONCE:
            held = tl.load(x + (at(k0 + kt, WIDE) * sx_k)[None, :], mask=live, other=0.0).to(tl.float32)
        made = tl.math.div_rn(held, found[:, None] + tl.zeros([ROWS, STEP], dtype=tl.float32))
        tl.store(
            values + first_out[:, None] + (k0 + kt)[None, :], made.to(values.dtype.element_ty), mask=live
        )


def _constants(x: Tensor) -> tuple[dict[str, Any], int]:
    """Constexprs for x [batch, rows, K], and warps."""
    k = x.shape[2]
    wide = {"WIDE": tensors.extent(x) > SIZE_LIMIT}
    if x.stride(2) != 1 and k > 1 and x.shape[1] > 1:
        return {"ROWS": TURNED_ROWS, "STEP": TURNED_STEP, "ONCE": k <= TURNED_STEP, **wide}, 4
    step = max(16, 1 << (k - 1).bit_length()) if k <= WHOLE else STEP
    rows = max(1, min(16, 1024 // step))
    warps = max(1, min(16, rows * step // (32 * EACH)))
    return {"ROWS": rows, "STEP": step, "ONCE": k <= step, **wide}, warps


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Values [..., K] in `dtype` and scales [...] of x [..., K] in bf16, fp16 or fp32; None where it cannot."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.shape[-1] > SIZE_LIMIT:
        return None
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        return None
    # The interpreter's own conversion to FP8 does not round to nearest (Triton 3.6): there torch rounds.
    values = torch.empty(x.shape, dtype=torch.float32 if env.interpreting() else dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if not x.numel():
        return values.to(dtype), scale.fill_(1.0)
    x, out, of_rows = (each.unsqueeze(0) if x.ndim == 1 else each for each in (x, values, scale))
    for x3, out3, scale3 in tensors.folded(x, out, of_rows.unsqueeze(-1)):
        constants, warps = _constants(x3)
        batch, rows, k = x3.shape
        tiles = -(-rows // constants["ROWS"])
        with torch.cuda.device_of(x3):
            _round_rows[(tiles * batch,)](
                x3, out3, scale3, rows, k, *tensors.strides(x3), tiles, LEAST, torch.finfo(dtype).max,
                **constants, num_warps=warps,
            )  # fmt: skip
    return values if values.dtype == dtype else rounded(values, dtype), scale
