"""Error budgets of chains of dense operations, such as a layer and its backward pass, by random rounding errors.

Each operation in float64 gets the random error that `testing/budget.py` expects of the same operation in another
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsek.testing.budget import Bound, Rounding, stored_variance, sum_variance, summing_unit

DRAWS = 8
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot)
MOVES = (aten.clone, aten._to_copy, aten.index, aten.cat, aten.constant_pad_nd, aten.neg)


class _Inexact(TorchDispatchMode):
    """Inside, results in float64 have random errors like those of `dtype`."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.dtype, self.seed = dtype, seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        exact = func.is_view or func._schema.is_mutable or func.overloadpacket in MOVES
        if exact or not isinstance(out, Tensor) or out.dtype != torch.float64:
            return out
        variance = stored_variance(out.square(), self.dtype)
        unit = summing_unit(self.dtype)
        if func.overloadpacket in PRODUCTS:
            left, right = args[-2:]
            squares = torch.matmul(left.square(), right.square())
            variance = variance + sum_variance(out, squares, left.shape[-1], unit)
        elif func.overloadpacket is aten.sum:
            squares = func(args[0].square(), *args[1:], **(kwargs or {}))
            variance = variance + sum_variance(out, squares, args[0].numel() // max(1, out.numel()), unit)
        self.seed += 1
        draw = torch.Generator(out.device).manual_seed(self.seed)
        noise = torch.randn(out.shape, generator=draw, dtype=out.dtype, device=out.device)
        return out + variance.sqrt() * noise


def chain_bounds(
    run: Callable[[], Sequence[Tensor]],
    exact64: Sequence[Tensor],
    dense: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Bound]:
    """The bounds of the results `exact64` of `run`, dense operations in float64, if computed in `dtype`.

    `dense` are the results of the same operations in that dtype. Elements are not judged one by one.
    """
    squares = [torch.zeros_like(x) for x in exact64]
    for seed in range(DRAWS):
        with _Inexact(dtype, seed << 32):
            drawn = run()
        for total, right, x in zip(squares, exact64, drawn, strict=True):
            total += (x.detach() - right.detach()).square() / DRAWS
    return [
        Bound(right, Rounding(total, None, torch.float64), [plain])
        for right, total, plain in zip(exact64, squares, dense, strict=True)
    ]
