"""Sums over ranks of plain tensors, without the host's time of DTensors: of y, and of the gradients of a copied x."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from sparsek.core.handshake import failed


class Copied(torch.autograd.Function):
    """A plain x that every rank has: its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return added(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class Added(torch.autograd.Function):
    """The sum of all ranks' y, in the memory of y. Every rank has its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(y)
        ctx.group = group
        return _all_reduced(y, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copied(grad, ctx.group), None


def _all_reduced(y: Tensor, group: Any) -> Tensor:
    try:
        dist.all_reduce(y, group=group)
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        what = f"the exchange of {[*y.shape]}, {Partial()} to {Replicate()},"
        raise failed(what, group, error) from error
    return y


def copied(x: Tensor, group: Any) -> Any:
    """x, whose gradients on the ranks are added up."""
    if torch.compiler.is_dynamo_compiling():
        return _untraced(Copied.apply, x, group)
    return Copied.apply(x, group) if x.requires_grad and torch.is_grad_enabled() else x


def added(y: Tensor, group: Any) -> Any:
    """The sum of the ranks' y, perhaps in the memory of y. MeshError if the collective fails."""
    if torch.compiler.is_dynamo_compiling():
        return _untraced(added, y, group)
    y, learns = y.contiguous(), y.requires_grad and torch.is_grad_enabled()
    return (Added.apply if learns else _all_reduced)(y, group)


@torch._disable_dynamo
def _untraced(call: Any, *given: Any) -> Any:
    """`call(*given)`, which communicates between two graphs."""
    return call(*given)
