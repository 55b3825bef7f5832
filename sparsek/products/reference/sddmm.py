"""S = X @ Y at the stored blocks of a pattern: the specification of every kernel.

The adjoint of C = A @ B in the values of A: their gradient is dC @ B.T at A's pattern.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR, zero_padding
from sparsek.products.formats.pattern import BlockPattern

# Elements of X and Y that one step gathers: 256 MiB of float32.
STEP_ELEMENTS = 1 << 26


def sddmm(x: Tensor, y: Tensor, pattern: BlockPattern) -> BSR:
    """S[i, j] = sum over the leading dims of X[..., i, :] @ Y[..., :, j], for the stored blocks (i, j) of `pattern`.

    `x` is [..., M, K], `y` is [..., K, N], with the same leading dims, any strides, one dtype, both on the pattern's
    device; the pattern's shape is (M, N). S has that dtype and pattern. Its values outside the matrix are 0. Sums in
    float64 for float64 inputs, otherwise in float32 (following torch's own TF32 setting), rounded once.
    Differentiable in x and y. Raises InvalidInput for shapes, dtypes or devices that do not fit.

    Only stored blocks are computed: row i of X is read for the blocks of its block row alone, column j of Y for those
    of its block column. A NaN in X[i, :] reaches the stored elements of row i of S and nothing else, one in Y[:, j]
    those of column j; rows and columns of empty block rows and columns are not read. Each element of S is one dot
    product over the leading dims and K, so the bits repeat.
    """
    _check(x, y, pattern)
    with dtypes.as_given(x.device):
        values = _sums(x, y, pattern).to(x.dtype)
        return BSR.unchecked(pattern, zero_padding(pattern, values))


def _sums(x: Tensor, y: Tensor, pattern: BlockPattern) -> Tensor:
    """The blocks [nnzb, bm, bn] as summed, in float32 or float64; undefined outside the matrix."""
    (m, n), (rows, columns), (bm, bn) = pattern.shape, pattern.grid, pattern.block
    wide = x.shape[:-2].numel() * x.shape[-1]
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    left, right = x.movedim(-2, 0).reshape(m, wide), y.movedim(-1, 0).reshape(n, wide)
    left = functional.pad(left, (0, 0, 0, rows * bm - m)).view(rows, bm, wide)
    right = functional.pad(right, (0, 0, 0, columns * bn - n)).view(columns, bn, wide)
    at_once = max(1, STEP_ELEMENTS // max(1, wide * (bm + bn)))
    steps = zip(pattern.block_rows.split(at_once), pattern.indices.split(at_once), strict=True)
    return torch.cat(
        [
            torch.bmm(left.index_select(0, i).to(sum_dtype), right.index_select(0, j).to(sum_dtype).mT)
            for i, j in steps
        ]
    )


def _check(x: Tensor, y: Tensor, pattern: BlockPattern) -> None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not isinstance(pattern, BlockPattern):
        kinds = ", ".join(type(each).__name__ for each in (x, y, pattern))
        raise InvalidInput(f"sddmm needs two torch.Tensors and a BlockPattern, got {kinds}")
    dtypes.name(x.dtype)
    m, n = pattern.shape
    fits = x.ndim >= 2 and y.ndim >= 2 and x.shape[:-2] == y.shape[:-2] and x.shape[-1] == y.shape[-2]
    if not fits or (x.shape[-2], y.shape[-1]) != (m, n):
        raise InvalidInput(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; S is {m}x{n} and needs [..., {m}, K] and "
            f"[..., K, {n}] with the same leading dims"
        )
    if y.dtype != x.dtype or not x.device == y.device == pattern.device:
        raise InvalidInput(
            f"x is {x.dtype} on {x.device}, y {y.dtype} on {y.device} and the pattern on {pattern.device}; they must "
            "agree"
        )
