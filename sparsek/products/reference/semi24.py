"""C = A @ B for a 2:4 matrix A, or its transpose, and a dense B, with an epilogue: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.reference.epilogue import PLAIN, Epilogue, check_epilogue


def semi24(a: Semi24, b: Tensor, epilogue: Epilogue = PLAIN, *, transposed: bool = False) -> Tensor:
    """C = A @ B, or A.T @ B if `transposed`, with `epilogue` applied.

    `a` is stored as [M, K], or [K, M] if `transposed`; `b` is [..., K, N] with any strides, in a's dtype on its
    device; C is [..., M, N] in that dtype, contiguous. A is written out dense. Sums are in float64 for float64
    inputs, otherwise in float32 (following torch's own TF32 setting). The epilogue is applied to these sums, and C is
    rounded once. Differentiable in a.values, b and the epilogue's tensors. Raises InvalidInput for shapes, dtypes or
    devices that do not fit.

    Values that are not stored are multiplied as 0: a NaN or Inf in a row of B may reach every row of C. In other
    kernels it may reach only the rows of A that store that column.
    """
    rows, columns = a.shape[::-1] if transposed else a.shape
    if not isinstance(b, Tensor) or b.ndim < 2 or b.shape[-2] != columns:
        shape = list(b.shape) if isinstance(b, Tensor) else type(b).__name__
        raise InvalidInput(f"A is {rows}x{columns} and b {shape}; it needs [..., {columns}, N]")
    if b.dtype != a.dtype or b.device != a.device:
        raise InvalidInput(f"A is {a.dtype} on {a.device} and b {b.dtype} on {b.device}; they must agree")
    check_epilogue(epilogue, (*b.shape[:-2], rows, b.shape[-1]), b.dtype, b.device)
    wide = torch.promote_types(b.dtype, torch.float32)
    with dtypes.as_given(b.device):
        dense = a.to_dense(wide)
        z = torch.matmul(dense.mT if transposed else dense, b.to(wide))
        return epilogue.apply(z).to(b.dtype).contiguous()
