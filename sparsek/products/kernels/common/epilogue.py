"""The epilogue of plain Triton kernels: `reference.epilogue.Epilogue`, on a tile in float32 before it is stored.

z = act(alpha * z + bias)  + beta * other        (COMBINE "add")
                           * other               (COMBINE "mul")
"""

from typing import Any

import triton
import triton.language as tl

from sparsek.engine.launch.tensors import at
from sparsek.products.reference.epilogue import Epilogue


@triton.jit
def _sigmoid(z):
    """1 / (1 + exp(-z)) without overflow."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0, e, 1.0) / (1.0 + e)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """Applies the activation of that name; NaN stays NaN."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2 u)
        z = z * _sigmoid(z * (1.5957691216057308 + 0.07135481282553018 * z * z))
    elif ACTIVATION == "silu":
        z = z * _sigmoid(z)
    return z


@triton.jit
def finished(
    z, alpha, bias, bias_live, other, other_live, beta,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    """Applies the epilogue to z [TM, TN]. `bias` points at [TM] elements or is None; `other` at [TM, TN] if COMBINE."""
    if SCALED:
        z = z * alpha
    if bias is not None:
        z = z + tl.load(bias, mask=bias_live, other=0.0).to(tl.float32)[:, None]
    z = activated(z, ACTIVATION)
    if COMBINE == "add":
        z = z + beta * tl.load(other, mask=other_live, other=0.0).to(tl.float32)
    elif COMBINE == "mul":
        z = z * tl.load(other, mask=other_live, other=0.0).to(tl.float32)
    return z


@triton.jit
def store_finished(
    z, c, row0, i, row_live, col, col_live, batch, sc_batch, sc_m, sc_n,
    alpha, bias, other, so_batch, so_m, so_n, beta,
    WIDE: tl.constexpr, SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    """Applies the epilogue to z [TM, TN] and stores rows row0 + `i` and columns `col` of item `batch` of c, live ones
    only.

    `batch` is int64. Offsets inside a tile are int64 if WIDE.
    """
    live = row_live[:, None] & col_live[None, :]
    if bias is not None:
        bias += row0 + i
    if COMBINE != "":
        other += batch * so_batch + row0.to(tl.int64) * so_m
        other = other + ((at(i, WIDE) * so_m)[:, None] + (at(col, WIDE) * so_n)[None, :])
    z = finished(z, alpha, bias, row_live, other, live, beta, SCALED, ACTIVATION, COMBINE)
    c += batch * sc_batch + row0.to(tl.int64) * sc_m
    c_ptr = c + ((at(i, WIDE) * sc_m)[:, None] + (at(col, WIDE) * sc_n)[None, :])
    tl.store(c_ptr, z.to(c.dtype.element_ty), mask=live)


def constants(epilogue: Epilogue) -> dict[str, Any]:
    """The constexprs of `finished`."""
    return {
        "SCALED": epilogue.alpha != 1,
        "ACTIVATION": epilogue.activation,
        "COMBINE": "" if epilogue.other is None else epilogue.combine,
    }
