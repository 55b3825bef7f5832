"""What x @ W.T must be for a weight in any format, worked out once for all that is held to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.matrix.quantized import Quantized, quantize
from sparsek.testing.budget import Bound, Gate, product_bound
from sparsek.testing.product_budget import check_linear


@dataclass(frozen=True)
class Expected:
    """x [T, K] and a weight [N, K], and what their product [N, T] is held to by `testing/budget.py`.

    With a weight in FP8, x is rounded to FP8 as the call does it.
    """

    x: Tensor
    weight: Any
    bound: Bound | None = None

    @classmethod
    def of(cls, x: Tensor, weight: Any) -> "Expected":
        """The exact product of these."""
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
