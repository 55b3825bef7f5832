"""Attention with gradients in eager mode, by torch.autograd.Function: a quarter of the host time of an op.

torch.func transforms these functions, unlike the ops of torch.library: grad, vjp and vmap work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.core.tracing import save_for_backward
from sparsek.mask.mask import BlockMask
from sparsek.ops import bound, gradients
from sparsek.ops.attention_plans import (
    ATTENTION,
    ATTENTION_BACKWARD,
    bound_to,
    fixed,
)
from sparsek.ops.bound import Slot
from sparsek.plan import attention_operands as operands
from sparsek.plan.attention import Attended, AttentionPlan
from sparsek.plan.attention_grad import Differentiated, Forward
from sparsek.plan.operands import wants_gradient


@dataclass(frozen=True)
class Call:
    """The settings of a call. `plan` gives lse; without one the mask's plan is used. `kernel`: a name, or None.

    `wanted`: whether a gradient is. `slot` is that of the forward pass, with `once` for a new mask, whose
    plan is not kept. The class hides the mask, a pytree, from
    torch.func.
    """

    mask: BlockMask
    plan: AttentionPlan | None
    scale: float
    kernel: str | None
    deterministic: bool
    wanted: bool = True
    slot: Slot = bound.UNBOUND
    once: bool = False


def check_untransformed(mask: BlockMask) -> None:
    """InvalidInput for a mask whose tensors torch.func has wrapped."""
    if is_functorch_wrapped_tensor(mask.full.starts):
        raise InvalidInput("this mask was made inside a function that torch.func transforms; make it outside")


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    if call.kernel is not None and call.wanted:
        # Unsupported, with its reasons, where that one cannot give the gradients.
        p = Differentiated(q, k, v, call.mask, fixed(call.deterministic)).problem(card_of(q.device))
        ATTENTION_BACKWARD.choose(p, gradients.same_family(call.kernel, "attention_backward"), None)
    return run_forward(q, k, v, call, True)


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, lse: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of checked operands, by the given plan or the mask's."""
    given = Attended(q, k, v, call.mask, call.scale, lse)
    if call.plan is not None:
        return call.plan.run(given, captured(q))
    return call.slot.run(lambda: ATTENTION.run(given, call.kernel, once=call.once), inside=True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, call = inputs
    # The slot has q, k and v, which live no longer than what is saved.
    ctx.call = call if call.slot is bound.UNBOUND else replace(call, slot=bound.UNBOUND)
    save_for_backward(ctx, q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, grad_lse = grads
    q, k, v, out, lse = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    # create_graph=True, or torch.func; otherwise there is nothing to record.
    run = AttentionBackward.apply if torch.is_grad_enabled() else AttentionBackward.forward
    found = run(q, k, v, out, lse, grad, grad_lse, ctx.call)
    wanted = zip(found, ctx.needs_input_grad, strict=False)
    return (*(x if needed else None for x, needed in wanted), None)


class Attention(torch.autograd.Function):
    """(out, lse) of q, k and v. Not for torch.func, whose way of saving tensors takes the host longer."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        output = _forward(q, k, v, call)
        _save(ctx, (q, k, v, call), output)
        return output

    backward = staticmethod(_backward)


def _no_tangent(ctx: Any, *tangents: Any) -> NoReturn:
    raise InvalidInput(operands.NO_TANGENT)


class TransformedAttention(torch.autograd.Function):
    """The same for torch.func."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)
    jvp = staticmethod(_no_tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, call: Call) -> Any:
        joined: Any = _joined(info.batch_size, in_dims, (q, k, v), call)
        # Under vmap requires_grad of an outer transform is not visible.
        call = replace(call, wanted=call.wanted or wants_gradient(*joined))
        return _apart(info.batch_size, TransformedAttention.apply(*joined, call))


class AttentionBackward(torch.autograd.Function):
    """(dq, dk, dv), which have no gradients of their own."""

    jvp = staticmethod(_no_tangent)

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        more = "attention_backward", call.scale, call.kernel, fixed(call.deterministic), grad_lse is None
        tensors = (q, k, v, out, lse, grad) if grad_lse is None else (q, k, v, out, lse, grad, grad_lse)
        to, once = bound_to(call.mask), False
        slot: Any = bound.UNBOUND
        if to is not None and not torch.compiler.is_compiling():
            once, slot = to.once, bound.repeat(to.calls, more, (*tensors, *to.operands))
        if slot.__class__ is not Slot:
            return slot
        kernel = gradients.same_family(call.kernel, "attention_backward")
        forward = Forward(out, lse, call.scale)
        given = Differentiated(q, k, v, call.mask, fixed(call.deterministic), forward, grad, grad_lse)
        return slot.run(lambda: ATTENTION_BACKWARD.run(given, kernel, once=once))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise InvalidInput(gradients.NO_SECOND_GRADIENT)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        *tensors, call = inputs
        joined = _joined(info.batch_size, in_dims, tensors, call)
        return _apart(info.batch_size, AttentionBackward.apply(*joined, call))


def _joined(size: int, in_dims: tuple[int | None, ...], tensors: Any, call: Call) -> list[Tensor | None]:
    """Tensors [..., B, ...] of vmap as one batch of size * B items; tensors that it does not map over are repeated."""
    if call.mask.batch != 1:
        raise InvalidInput(
            f"vmap makes one batch of its own dim and the batch items, which must share a mask; got a mask of "
            f"{call.mask.batch} batch items"
        )
    made: list[Tensor | None] = []
    for x, dim in zip(tensors, in_dims, strict=False):
        if x is None:
            made.append(None)
            continue
        first = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        made.append(first.reshape(-1, *first.shape[2:]))
    return made


def _apart(size: int, results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)
