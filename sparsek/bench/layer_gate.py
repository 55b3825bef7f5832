"""What x @ W.T must be for a weight in any format, worked out once for all that is held to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.formats.scaled import Scaled, quantize
from sparsek.testing.budget import FACTOR, FLOOR, Gate, error, judge


@dataclass(frozen=True)
class Expected:
    """The exact product in float64, and the error that a result may have."""

    exact: Tensor
    allowed: float

    @classmethod
    def of(cls, x: Tensor, weight: Any) -> "Expected":
        """For x [T, K] and a weight [N, K]: twice the error of the dense product in x's dtype.

        Of a weight in FP8 the exact product is that of the FP8 values of both with their scales, and the dense one is
        that in float32, rounded to x's dtype.
        """
        with torch.no_grad(), dtypes.as_given(x.device):
            if isinstance(weight, Scaled):
                left, right = quantize(x).dequantize(torch.float64), weight.to_dense(torch.float64)
                exact = left @ right.T
                dense = (left.float() @ right.float().T).to(x.dtype)
            else:
                right = weight if isinstance(weight, Tensor) else weight.to_dense()
                exact = x.double() @ right.double().T
                dense = torch.matmul(x, right.T)
            return cls(exact, max(FLOOR, FACTOR * error(dense, exact)))

    def judge(self, y: Tensor) -> Gate:
        return judge(y, self.exact, self.allowed)
