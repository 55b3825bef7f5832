"""Error budgets of SDDMM, BSR x BSR and linear layers: twice the error of dense torch in the same dtype, or what
rounding explains.

`testing/budget.py` defines errors, and what rounding explains.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import dtypes
from sparsek.products.formats.bsr import BSR, padding_nonzeros
from sparsek.products.formats.padding import tiles_of, zero_padding
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import Matrix, Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.reference.epilogue import Activation, Epilogue
from sparsek.products.reference.linear import swiglu
from sparsek.products.reference.sddmm import sddmm
from sparsek.products.reference.spgemm import pairs, spgemm
from sparsek.testing.budget import (
    CORE,
    ROUNDED,
    SLOPE,
    Bound,
    Gate,
    Rounding,
    check_spmm,
    product_rounding,
    stored_variance,
    summing_unit,
    using_tf32,
)


def check_sddmm(x: Tensor, y: Tensor, s: BSR, *, tf32: bool = False) -> Gate:
    """Judges `s` as x [..., M, K] @ y [..., K, N], summed over leading dims, at s's pattern.

    The error is that of the stored elements, against the reference in float64; the dense product is that of
    torch.matmul in the inputs' dtype at the same elements. Padding outside the matrix must be 0. Rows of x and
    columns of y without a block may hold anything, NaN too.
    """
    pattern = s.pattern
    with torch.no_grad():
        exact = sddmm(x.double(), y.double(), pattern).values
        (m, n), wide = pattern.shape, x.shape[:-2].numel() * x.shape[-1]
        left = x.masked_fill(~met_rows(pattern)[:, None], 0).movedim(-2, 0).reshape(m, wide)
        right = y.masked_fill(~met_rows(pattern.T), 0).movedim(-1, 0).reshape(n, wide).mT
        dense, rounding = _dense(left, right, tf32)
        rounding = rounding.map(lambda x: stored(x, pattern))
        gate = Bound(exact, rounding, [stored(dense, pattern)]).judge(s.logical_values())
        return replace(gate, passed=gate.passed and padding_nonzeros(s) == 0)


def check_spgemm(a: BSR, b: BSR, out: Tensor | BSR, *, tf32: bool = False) -> Gate:
    """Judges `out`, a dense [M, N] or a BSR, as A @ B; of a BSR its stored blocks are judged.

    The error is against the reference in float64; the dense product is torch.matmul of both, made dense, in their
    dtype. Blocks without a pair, and padding outside the matrix, must be 0. Blocks of A and B without a pair may hold
    anything, NaN too.
    """
    wanted = out.pattern if isinstance(out, BSR) else None
    left, right = unmet_filled(a, b, wanted, 0.0)
    with torch.no_grad():
        exact = spgemm(a.to(dtype=torch.float64), b.to(dtype=torch.float64), wanted)
        dense, rounding = _dense(left.to_dense(), right.to_dense(), tf32)
        if isinstance(out, BSR):
            met = torch.zeros(out.nnzb, dtype=torch.bool, device=out.device)
            met[torch.tensor(pairs(a.pattern, b.pattern, wanted).target, device=out.device)] = True
            found, right64 = out.logical_values(), exact.values
            dense, rounding = stored(dense, out.pattern), rounding.map(lambda x: stored(x, out.pattern))
            not_zero = bool((found[~met] != 0).any()) or padding_nonzeros(out) > 0
        else:
            (m, n), (bm, bn) = exact.shape, exact.block
            found, right64 = out, exact.to_dense()
            met = _cells(exact.pattern).repeat_interleave(bm, 0)[:m].repeat_interleave(bn, 1)[:, :n]
            not_zero = bool((out.masked_fill(met, 0) != 0).any())
        gate = Bound(right64, rounding, [dense]).judge(found)
        return replace(gate, passed=gate.passed and not not_zero)


def check_linear(
    x: Tensor | QuantizedTensor,
    w: Matrix | Quantized,
    out: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    *,
    tf32: bool = False,
    core: float = CORE,
) -> Gate:
    """Judges out [..., N] as act(x @ W.T + bias) + residual for x [..., K], as `check_spmm` does with an epilogue.

    The dense layer of the budget does the same in the inputs' dtype, step by step.
    """
    tokens = x.shape[:-1].numel()
    columns = x.rows().mT if isinstance(x, QuantizedTensor) else x.reshape(tokens, w.shape[1]).mT
    rest = None if residual is None else residual.reshape(tokens, w.shape[0]).mT
    epilogue = Epilogue(bias=bias, activation=activation or "", other=rest)
    return check_spmm(w, columns, out.reshape(tokens, w.shape[0]).mT, epilogue, tf32=tf32, core=core)


def check_swiglu(x: Tensor, w_gate: BSR, w_up: BSR, out: Tensor, *, tf32: bool = False) -> Gate:
    """Judges out [..., N] as silu(x @ W_gate.T) * (x @ W_up.T), in the same way."""
    tokens = x.shape[:-1].numel()
    x, out = x.reshape(tokens, w_gate.shape[1]), out.reshape(tokens, w_gate.shape[0])
    with torch.no_grad():
        wide = (w.to(dtype=torch.float64) for w in (w_gate, w_up))
        exact = swiglu(x.double(), *wide)
        gate_x, up_x = (x.masked_fill(~met_rows(w.pattern.T), 0) for w in (w_gate, w_up))
        halves = [_dense(w.to_dense(), half.mT, tf32) for w, half in ((w_gate, gate_x), (w_up, up_x))]
        gate, up = (half.double() for half, _ in halves)
        active = functional.silu(gate)
        (_, in_gate), (_, in_up) = halves
        of_gate, of_up = (SLOPE * up).square(), active.square()
        sums = of_gate * in_gate.sums + of_up * in_up.sums
        # The activation, in several steps, and the product of both are as exact as the sums, and may be rounded.
        steps = of_gate * gate.square() + of_up * up.square()
        sums = sums + 4 * ROUNDED * summing_unit(x.dtype) ** 2 * steps
        assert in_gate.each is not None
        assert in_up.each is not None
        each = sums + of_gate * in_gate.each + of_up * in_up.each + stored_variance(steps, x.dtype)
        rounding = Rounding(sums, each, x.dtype).map(lambda x: x.mT)
        dense = (functional.silu(halves[0][0]) * halves[1][0]).mT
        return Bound(exact, rounding, [dense]).judge(out)


def met_rows(pattern: BlockPattern) -> Tensor:
    """Which rows [M] belong to a block row that has a block."""
    return (pattern.row_lengths > 0).repeat_interleave(pattern.block[0])[: pattern.shape[0]]


def unmet_filled(a: BSR, b: BSR, wanted: BlockPattern | None, value: float) -> tuple[BSR, BSR]:
    """A and B with a value in the blocks that have no pair, except in their padding."""
    found = pairs(a.pattern, b.pattern, wanted)
    made = []
    for matrix, used in ((a, found.left), (b, found.right)):
        unmet = torch.ones(matrix.nnzb, dtype=torch.bool, device=matrix.device)
        unmet[torch.tensor(used, device=matrix.device)] = False
        view = matrix.order is not None
        if view:
            unmet = unmet[matrix.pattern.transposed[1].long()]
        values = matrix.values.detach().masked_fill(unmet[:, None, None], value)
        zero_padding(matrix.pattern.T if view else matrix.pattern, values)
        made.append(BSR.unchecked(matrix.pattern, values, matrix.order))
    return made[0], made[1]


def _dense(left: Tensor, right: Tensor, tf32: bool) -> tuple[Tensor, Rounding]:
    """torch.matmul of [M, K] and [..., K, N] in their dtype, and its rounding errors."""
    with dtypes.as_given(left.device):
        with using_tf32(tf32):
            dense = torch.matmul(left, right)
        with using_tf32(False):
            return dense, product_rounding(left, right, left.dtype, tf32=tf32)


def stored(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """The blocks [nnzb, bm, bn] of a dense [M, N] that `pattern` stores, 0 outside the matrix."""
    return tiles_of(dense, pattern.block).transpose(1, 2)[pattern.block_rows.long(), pattern.indices.long()]


def _cells(pattern: BlockPattern) -> Tensor:
    """bool [Mb, Nb]: which blocks are stored."""
    cells = torch.zeros(pattern.grid, dtype=torch.bool, device=pattern.device)
    cells[pattern.block_rows.long(), pattern.indices.long()] = True
    return cells
