"""torch.autocast: the casts of operands of products and attention, as those of nn.Linear and SDPA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes

# Whether torch.autocast is on for any device. The verbs check this first.
autocasts = torch._C._is_any_autocast_enabled
CAST = (torch.float32, *dtypes.LOW)


def follow_autocast(*operands: Any) -> tuple[Any, ...]:
    """The operands in the dtype of torch.autocast, if it is on for their device; differentiable.

    Tensors and the values of matrices are cast if they are float32, bf16 or fp16. float64 stays, as in torch, and so do
    matrices and tensors in FP8. Anything else is returned as it is; later checks refuse it.
    """
    return tuple(map(_cast, operands)) if autocasts() else operands


def dtype_on(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on `device`; None where it is off."""
    on = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def _cast(x: Any) -> Any:
    values = x if isinstance(x, Tensor) else x.values if getattr(type(x), "_each", None) else None
    if values is None or values.dtype not in CAST:
        return x
    if not arguments.is_dense(values) or arguments.is_ended(values):  # some of these have no .to
        return x
    wanted = dtype_on(values.device)
    if wanted is None or wanted == values.dtype:
        return x
    made = values.to(wanted)
    return made if isinstance(x, Tensor) else x._each(lambda _: made)
