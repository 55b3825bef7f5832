"""Outputs that reveal elements which a kernel does not write."""

from collections.abc import Sequence

import torch
from torch import Tensor


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """A tensor full of NaN."""
    return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)
