"""Sums over ranks of plain tensors, without the host's time of DTensors: of y, and of the gradients of a copied x.

The gradients of products of a copied x do not wait for the sum:

    dx of this rank    -> all_reduce, on a stream of its own    -> dx
                       -> dW = dy.T @ x at the stored blocks    -> dW
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from sparsek.core.handshake import failed
from sparsek.core.tracing import save_for_backward, saved_tensors
from sparsek.engine.call import transforms
from sparsek.engine.call.autocast import autocasts
from sparsek.products.formats.bsr import BSR
from sparsek.products.ops.linear import linear
from sparsek.products.ops.sddmm import sampled
from sparsek.products.ops.spmm import spmm
from sparsek.products.plan.sddmm import Sampled
from sparsek.products.plan.spmm import tokens


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


class CopiedProducts(torch.autograd.Function):
    """x @ W.T of a plain x that every rank has, for each W. Gradients of x are added up while those of W are made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, weights: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group = group
        ctx.patterns = [w.pattern if isinstance(w, BSR) else None for w in weights]
        save_for_backward(ctx, x, *values)
        # Torch lets nobody change in place a view, as of leading dims, that a function returns.
        return tuple(y.data if y._is_view() else y for y in (linear(x, w) for w in weights))

    @staticmethod
    @transforms.one_by_one
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *values = saved_tensors(ctx)
        needs = [node is not None and _runs(node) for node, _ in ctx.next_functions]  # of x and the values
        return _of_copied(ctx.group, x, ctx.patterns, values, grads, needs)


def _runs(node: Any) -> bool:
    """Whether this backward pass goes on to a node: it may be for the gradients of some tensors only."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf whose gradient torch.autograd.grad returns
        return True


def _of_copied(
    group: Any, x: Tensor, patterns: Any, values: Any, grads: Any, needs: Sequence[bool]
) -> tuple[Any, ...]:
    """The gradients of `CopiedProducts`, in the bits of `Copied` before products of their own."""
    if torch.compiler.is_dynamo_compiling():
        return _untraced(_of_copied, group, x, patterns, values, grads, needs)
    whole: Any = None
    for pattern, held, grad in zip(patterns[::-1], values[::-1], grads[::-1], strict=True):
        if needs[0] and grad is not None:  # autograd adds those of the last product first
            dz = tokens(grad)
            own = dz @ held if pattern is None else spmm(dz, BSR.unchecked(pattern, held, None))
            whole = own if whole is None else whole + own

    def of_values() -> list[Tensor | None]:
        rows = tokens(x)
        parts = zip(patterns, grads, needs[1:], strict=True)
        return [_of_values(pattern, grad, rows) if need else None for pattern, grad, need in parts]

    if not needs[0]:
        return None, None, None, *of_values()
    # Without a gradient here, other ranks may have one.
    whole = (x.new_zeros(x.shape) if whole is None else whole).view(x.shape)
    if torch.is_grad_enabled():  # for gradients of gradients
        return added(whole.clone(), group), None, None, *of_values()
    made: list[list[Tensor | None]] = []
    whole = _all_reduced(whole, group, lambda: made.append(of_values()))
    return whole, None, None, *made[0]


def _of_values(pattern: Any, grad: Tensor | None, x: Tensor) -> Tensor | None:
    if grad is None:
        return None
    dz = tokens(grad).mT
    return dz @ x if pattern is None else sampled(Sampled(dz, x, pattern), None)


def _all_reduced(y: Tensor, group: Any, beside: Callable[[], None] | None = None) -> Tensor:
    """The sum of the ranks' y, in its memory. `beside` runs meanwhile."""

    def checked(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            what = f"the exchange of {[*y.shape]}, {Partial()} to {Replicate()},"
            raise failed(what, group, error) from error

    work = checked(partial(dist.all_reduce, y, group=group, async_op=beside is not None))
    if beside is not None:
        beside()
        checked(work.wait)
    return y


def copied(x: Tensor, group: Any) -> Any:
    """x, whose gradients on the ranks are added up."""
    if torch.compiler.is_dynamo_compiling():
        return _untraced(Copied.apply, x, group)
    return Copied.apply(x, group) if x.requires_grad and torch.is_grad_enabled() else x


def learn_beside(x: Tensor, *weights: Any) -> bool:
    """Whether x and a weight learn, in products that `copied_products` computes: of a BSR or a dense W, not traced."""
    if not (torch.is_grad_enabled() and x.requires_grad) or autocasts():
        return False
    values = [w.values if isinstance(w, BSR) else w for w in weights]
    known = all(w.order is None if isinstance(w, BSR) else isinstance(w, Tensor) for w in weights)
    return known and any(v.requires_grad for v in values) and transforms.untraced(x, *values)


def copied_products(x: Tensor, weights: Sequence[Any], group: Any) -> tuple[Tensor, ...]:
    """`linear(copied(x, group), W)` for each W, where `learn_beside`; the gradients of W hide the sum of those of x."""
    values = [w.values if isinstance(w, BSR) else w for w in weights]
    return CopiedProducts.apply(x, group, weights, *values)


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
