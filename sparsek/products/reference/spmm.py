"""C = A @ B for a BSR matrix A and a dense B, with an epilogue: the specification of every kernel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.reference.epilogue import PLAIN, Epilogue, check_epilogue


def spmm(a: BSR, b: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """C[..., i, :] = sum over the stored blocks (i, j) of A[i, j] @ B[..., j, :], with `epilogue` applied.

    `a` is [M, K], `b` is [..., K, N] with any strides, in a's dtype and on its device; C is [..., M, N] in that
    dtype, contiguous. Sums in float64 for float64 inputs, otherwise in float32 (following torch's own TF32 setting).
    The epilogue is applied to these sums, and C is rounded once. Differentiable in a.values, b and the epilogue's
    bias and other matrix, which are never written to. Raises InvalidInput for shapes, dtypes or devices that do not
    fit.

    Only stored blocks are touched: NaN in rows of B without a stored block never reaches C, and for an empty row of A
    the epilogue is applied to 0. Step s adds the s-th block of every block row that has one. A row occurs once in a
    step, so no two additions collide and the bits repeat.
    """
    _check(a, b)
    check_epilogue(epilogue, (*b.shape[:-2], a.shape[0], b.shape[-1]), b.dtype, b.device)
    with dtypes.as_given(b.device):
        return epilogue.apply(_sums(a, b)).to(b.dtype).contiguous()


def _sums(a: BSR, b: Tensor) -> Tensor:
    """A @ B as summed, in float32 or float64."""
    (m, k), (rows, columns), (bm, bk) = a.shape, a.grid, a.block
    batch, n = b.shape[:-2], b.shape[-1]
    wide = batch.numel() * n
    sum_dtype = torch.promote_types(b.dtype, torch.float32)

    flat = b.movedim(-2, 0).reshape(k, wide)
    tiles = functional.pad(flat, (0, 0, 0, columns * bk - k)).view(columns, bk, wide)
    by_step, lengths = a.pattern.derived("reference.spmm", lambda: _steps(a.pattern))
    pieces = (a.logical_values(), a.pattern.block_rows, a.pattern.indices)
    steps = zip(*(piece.index_select(0, by_step).split(lengths) for piece in pieces), strict=True)

    out = torch.zeros(rows, bm, wide, dtype=sum_dtype, device=b.device)
    for values, row, column in steps:
        met = tiles.index_select(0, column)
        out.index_add_(0, row, torch.bmm(values.to(sum_dtype), met.to(sum_dtype)))
    return out.view(rows * bm, wide)[:m].view(m, *batch, n).movedim(0, -2)


def _steps(pattern: BlockPattern) -> tuple[Tensor, list[int]]:
    """The blocks ordered by position in their row, and the number of blocks per position. At least one step."""
    indptr = pattern.host.indptr
    place = np.arange(pattern.nnzb) - np.repeat(indptr[:-1], np.diff(indptr))
    by_step = torch.tensor(np.argsort(place, kind="stable"), device=pattern.device)
    return by_step, np.bincount(place, minlength=1).tolist()


def _check(a: BSR, b: Tensor) -> None:
    if not isinstance(a, BSR) or not isinstance(b, Tensor):
        raise InvalidInput(
            f"spmm needs a BSR and a torch.Tensor, got {type(a).__name__} and {type(b).__name__}"
        )
    dtypes.name(b.dtype)
    if b.ndim < 2 or b.shape[-2] != a.shape[1]:
        raise InvalidInput(
            f"b has shape {tuple(b.shape)}; A is {a.shape[0]}x{a.shape[1]} and needs [..., K, N]"
        )
    if b.dtype != a.dtype or b.device != a.device:
        raise InvalidInput(f"A is {a.dtype} on {a.device} and b {b.dtype} on {b.device}; they must agree")
