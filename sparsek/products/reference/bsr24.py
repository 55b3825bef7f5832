"""C = A @ B for a BSR of 2:4 blocks A, or its transpose, and a dense B, with an epilogue: the specification."""

from __future__ import annotations

from torch import Tensor

from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.reference.epilogue import PLAIN, Epilogue
from sparsek.products.reference.spmm import spmm


def bsr24(a: BSR24, b: Tensor, epilogue: Epilogue = PLAIN, *, transposed: bool = False) -> Tensor:
    """C = A @ B, or A.T @ B if `transposed`: `reference.spmm` of the BSR that holds all values of A's blocks.

    Shapes, sums, gradients and errors as there. Rows of B under empty block columns never reach C; inside a block,
    values that are not stored are multiplied as 0.
    """
    whole = a.to_bsr()
    return spmm(whole.T if transposed else whole, b, epilogue)
