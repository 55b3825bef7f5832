"""Where policies take their estimates from: fused kernels on a CUDA GPU, plain torch elsewhere."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def estimates(name: str, q: Tensor) -> Any:
    """The module of this name with the estimates for q: of kernels/estimate on a GPU from sm_80 with Triton, of
    `reference` for other devices and float64.
    """
    if q.is_cuda and q.dtype != torch.float64 and torch.cuda.get_device_capability(q.device) >= (8, 0):
        try:
            return import_module(f"sparsek.kernels.estimate.{name}")
        except ImportError:
            pass
    return import_module(f"sparsek.reference.{name}")
