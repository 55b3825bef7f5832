"""How wrong products of 2:4 matrices may be: as wrong as `testing/budget.py` lets the same product of dense ones be."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.semi24 import Semi24
from sparsek.reference.bsr24 import bsr24
from sparsek.reference.epilogue import PLAIN, Epilogue, in_float64
from sparsek.reference.semi24 import semi24
from sparsek.testing.budget import Gate, met, product_bound


def check_24(
    a: Semi24 | BSR24,
    b: Tensor,
    out: Tensor,
    epilogue: Epilogue = PLAIN,
    *,
    transposed: bool = False,
    tf32: bool = False,
) -> Gate:
    """Judges out [..., M, N] as the product of `a`, or its transpose, and b [..., K, N] against float64.

    `epilogue` as in `budget.check_spmm`. Rows of b that meet no stored block of a BSR24 may hold anything.
    """
    with torch.no_grad():
        wide = a.to(dtype=torch.float64)
        dense = a.to_dense()
        if isinstance(wide, Semi24):
            exact = semi24(wide, b.double(), in_float64(epilogue), transposed=transposed)
        else:
            exact = bsr24(wide, b.double(), in_float64(epilogue), transposed=transposed)
            b = met(wide.pattern.T if transposed else wide.pattern, b)
        return product_bound(dense.mT if transposed else dense, b, exact, epilogue, tf32=tf32).judge(out)


def check_linear24(
    x: Tensor,
    w: Semi24 | BSR24,
    out: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Gate:
    """Judges out [..., N] as act(x @ W.T + bias) + residual for x [..., K], as `check_24` does with an epilogue."""
    tokens = x.shape[:-1].numel()
    rest = None if residual is None else residual.reshape(tokens, w.shape[0]).mT
    epilogue = Epilogue(bias=bias, activation=activation or "", other=rest)
    return check_24(w, x.reshape(tokens, w.shape[1]).mT, out.reshape(tokens, w.shape[0]).mT, epilogue)
