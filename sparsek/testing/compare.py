"""Results compared with a product or with dense operands, computed once; the worst of several gates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.products.formats.quantized import Quantized, quantize
from sparsek.testing.budget import (
    FACTOR,
    FLOOR,
    ROUNDED,
    Bound,
    Gate,
    error,
    judge,
    product_bound,
    summing_unit,
)
from sparsek.testing.product_budget import check_linear


def worst(gates: Sequence[Gate]) -> Gate:
    """The gate that comes nearest to its budget, or is furthest beyond it."""
    return max(gates, key=lambda gate: (not gate.passed, gate.error / gate.budget))


def near_dense(out: Tensor, exact64: Tensor, dense: Tensor, terms: int = 0) -> Gate:
    """Allows twice the error that dense operands in the same dtype give, or that sums of `terms` terms may give which
    are taken one after another: dense products keep several sums (`testing/budget.py`).
    """
    floor = FACTOR * math.sqrt(ROUNDED * terms / 2) * summing_unit(out.dtype)
    return judge(out, exact64, max(FLOOR, floor, FACTOR * error(dense, exact64)))


@dataclass(frozen=True)
class Expected:
    """x [T, K] and a weight [N, K] in any format, and the bound of their product [N, T], by `testing/budget.py`.

    With a weight in FP8, x is rounded to FP8 as the call does it.
    """

    x: Tensor
    weight: Any
    bound: Bound | None = None

    @classmethod
    def of(cls, x: Tensor, weight: Any) -> "Expected":
        """The exact product of these, computed once for all results that are compared with it."""
        if isinstance(weight, Quantized):
            return cls(x, weight)
        with torch.no_grad(), dtypes.as_given(x.device):
            dense = weight if isinstance(weight, Tensor) else weight.to_dense()
            return cls(x, weight, product_bound(dense, x.T, dense.double() @ x.double().T))

    def judge(self, y: Tensor) -> Gate:
        """Whether y [T, N] is near enough."""
        if self.bound is None:
            return check_linear(quantize(self.x), self.weight, y)
        return self.bound.judge(y.T)
