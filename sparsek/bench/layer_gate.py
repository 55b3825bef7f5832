"""What x @ W.T must be for a weight in any format, worked out once for all that is held to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.formats.scaled import Scaled, quantize
from sparsek.testing.budget import FACTOR, FLOOR, Gate, error, judge
from sparsek.testing.budget_fp8 import check_linear_fp8


@dataclass(frozen=True)
class Expected:
    """x [T, K] and a weight [N, K]; the exact product in float64, and the error that a result may have.

    Twice the error of the dense product in x's dtype. A weight in FP8 is judged by `testing/budget_fp8.py`, with x
    rounded to FP8 as the call does it.
    """

    x: Tensor
    weight: Any
    exact: Tensor | None = None
    allowed: float = 0.0

    @classmethod
    def of(cls, x: Tensor, weight: Any) -> "Expected":
        """The exact product of these."""
        if isinstance(weight, Scaled):
            return cls(x, weight)
        with torch.no_grad(), dtypes.as_given(x.device):
            right = weight if isinstance(weight, Tensor) else weight.to_dense()
            exact = x.double() @ right.double().T
            return cls(x, weight, exact, max(FLOOR, FACTOR * error(torch.matmul(x, right.T), exact)))

    def judge(self, y: Tensor) -> Gate:
        """Whether y [T, N] is near enough."""
        if self.exact is None:
            return check_linear_fp8(quantize(self.x), self.weight, y)
        return judge(y, self.exact, self.allowed)
