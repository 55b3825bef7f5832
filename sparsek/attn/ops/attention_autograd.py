"""Attention with gradients in eager mode, by torch.autograd.Function: a quarter of the host time of an op.

torch.func transforms these functions, unlike the ops of torch.library: grad, vjp and vmap work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from sparsek.attn.ops.attention_op import gradients_through_op, through_op
from sparsek.attn.ops.attention_plans import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_FP8,
    differentiated,
    recorded,
)
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import NONE, Attended, every_block
from sparsek.attn.plan.attention_grad import Differentiated
from sparsek.attn.reference.scores import PLAIN
from sparsek.core import arguments
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.core.tracing import save_for_backward, saved_tensors, wants_gradient
from sparsek.engine.call import recorded_calls, transforms
from sparsek.engine.call.recorded_calls import Slot
from sparsek.engine.planning import same_family


def check_untransformed(call: Attended) -> None:
    """InvalidInput for a mask, or slopes, that torch.func has wrapped."""
    slopes = call.scores.alibi_slopes
    for name, x in (("mask was", call.mask.full.starts), ("alibi_slopes were", slopes)):
        if x is not None and is_functorch_wrapped_tensor(x):
            those, it = ("this", "it") if x is not slopes else ("these", "them")
            raise InvalidInput(
                f"{those} {name} made inside a function that torch.func transforms; make {it} outside"
            )


def run_forward(call: Attended, slot: Slot = recorded_calls.UNBOUND) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a checked call, by its plan or the mask's."""
    if call.plan is not None:
        return call.plan.run(call, captured(call.like))
    operation = ATTENTION if call.__class__ is Attended else ATTENTION_FP8
    return slot.run(lambda: operation.run(call, call.kernel, once=call.once))


def _forward(call: Attended, wanted: bool = True) -> tuple[Tensor, Tensor | None]:
    """The same, with lse, for a call of which a gradient may be `wanted`."""
    call.return_lse = True
    if call.kernel is not None and wanted:
        # Unsupported, with its reasons, where that one cannot give the gradients.
        p = Differentiated(call).problem(card_of(call.q.device))
        ATTENTION_BACKWARD.choose(p, same_family(call.kernel, "attention_backward"), None)
    if call.plan is None and transforms.traced():  # a TorchDispatchMode inside torch.func records the op
        return through_op(call)
    return run_forward(call)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, ctx.call, _, sinks = inputs
    # Slopes are saved so that torch notices a write to them.
    save_for_backward(ctx, q, k, v, sinks, *output, ctx.call.scores.alibi_slopes)
    ctx.set_materialize_grads(False)


@transforms.one_by_one
def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, grad_lse = (*grads, None)[:2]
    q, k, v, sinks, out, lse, _ = saved_tensors(ctx)
    grad = torch.zeros_like(out) if grad is None else grad
    # create_graph=True, or torch.func, also where that maps over gradients alone; otherwise there is nothing to record.
    listened = torch.is_grad_enabled() or transforms.active()
    run = AttentionBackward.apply if listened else AttentionBackward.forward
    of_q, of_k, of_v, _, _, *of_sinks = ctx.needs_input_grad
    learned = sinks if True in of_sinks else None
    dq, dk, dv, *more = run(q, k, v, out, lse, grad, grad_lse, learned, ctx.call)
    found = dq if of_q else None, dk if of_k else None, dv if of_v else None
    return *found, None, None, None if learned is None else more[0].sum(0).to(learned.dtype)


class Attention(torch.autograd.Function):
    """`output`, (out, lse) of q, k, v and sinks, or its first alone. Not for torch.func, whose way of saving tensors
    takes the host longer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Attended,
        output: tuple[Tensor, Tensor | None],
        sinks: Tensor | None = None,
    ) -> Any:
        out, lse = output
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, out, lse, call.scores.alibi_slopes)  # which was checked
        if not call.return_lse:
            return out
        ctx.set_materialize_grads(False)
        return output

    backward = staticmethod(_backward)


_attention = recorded_calls.applied(Attention)


def differentiate(call: Attended, slot: Slot) -> Any:
    """(out, lse) of a checked call, whose gradient autograd needs."""
    for x in (*call.tensors, *call.scores.parted()[1]):
        arguments.kept("an operand", x)
    run = functools.partial(_forward, replace(call))  # the operands of `call` are taken out
    if slot.learns:
        return slot.differentiate(_differentiable, call, run)
    with torch.no_grad():
        output = run()
    return _differentiable(call, (), output)


def _differentiable(call: Attended, given: Sequence[Tensor], output: tuple[Tensor, Tensor | None]) -> Any:
    """(out, lse) with gradients; see `Slot.differentiate`. `given`: none of a call without a key. Autograd keeps the
    call, without operands.
    """
    tensors, scores = (call.q, call.k, call.v, call, output), call.scores
    call.q = call.k = call.v = NONE
    if call.mask is None:
        call.mask = every_block(*tensors[:2])
    if scores is not PLAIN:
        call.scores = scores.with_sinks(None)
        tensors = tensors if scores.sink_logits is None else (*tensors, scores.sink_logits)
    made = (_attention if given else Attention.apply)(*tensors)
    return made if call.return_lse else (made, None)


def transform(call: Attended) -> Any:
    """(out, lse) of a checked call inside torch.func."""
    check_untransformed(call)
    transforms.check_rules()
    call.once = False
    return TransformedAttention.apply(*call.tensors, call.without(), call.learns, call.scores.sink_logits)


def _no_tangent(ctx: Any, *tangents: Any) -> NoReturn:
    raise InvalidInput(operands.NO_TANGENT)


class TransformedAttention(torch.autograd.Function):
    """The same for torch.func."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, call: Attended, wanted: bool, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return _forward(call.of(q, k, v, sinks), wanted)

    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)
    jvp = staticmethod(_no_tangent)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Attended,
        wanted: bool,
        sinks: Tensor | None,
    ) -> Any:
        _check_shared(in_dims[5])
        joined: Any = _joined(info.batch_size, in_dims, (q, k, v), call)
        # Under vmap requires_grad of an outer transform is not visible.
        wanted = wanted or wants_gradient(*joined, sinks)
        call = _repeated(info.batch_size, call)
        return _apart(
            info.batch_size, _items(q, in_dims[0]), TransformedAttention.apply(*joined, call, wanted, sinks)
        )


class AttentionBackward(torch.autograd.Function):
    """(dq, dk, dv), and with sinks their gradient for each batch item, [B, Hq], which have no gradients themselves."""

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
        sinks: Tensor | None,
        call: Attended,
    ) -> tuple[Tensor, ...]:
        tensors = (q, k, v, out, lse, grad) if grad_lse is None else (q, k, v, out, lse, grad, grad_lse)
        call, slot = call if sinks is None else call.of(NONE, NONE, NONE, sinks), recorded_calls.UNBOUND
        if not torch.compiler.is_compiling():
            verb = "attention_backward", call.in_order, grad_lse is None, call.wide
            slot = recorded(call, verb, tensors)
            if slot.__class__ is not Slot:
                return slot
        given = Differentiated(call.of(q, k, v, sinks), out, lse, grad, grad_lse)
        kernel = same_family(call.kernel, "attention_backward")
        if transforms.traced():
            found = gradients_through_op(given, kernel)
            return found if sinks is not None else found[:3]
        return slot.run(lambda: differentiated(given, kernel))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise InvalidInput(operands.NO_SECOND_GRADIENT)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        *tensors, sinks, call = inputs
        _check_shared(in_dims[-2])
        joined = _joined(info.batch_size, in_dims, tensors, call)
        call = _repeated(info.batch_size, call)
        return _apart(
            info.batch_size, _items(tensors[0], in_dims[0]), AttentionBackward.apply(*joined, sinks, call)
        )


def _joined(size: int, in_dims: tuple[int | None, ...], tensors: Any, call: Attended) -> list[Tensor | None]:
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
        made.append(first.flatten(0, 1))
    return made


def _check_shared(dim: int | None) -> None:
    """InvalidInput if vmap maps over the sinks: its items become batch items, which share them."""
    if dim is not None:
        raise InvalidInput("vmap does not map over sink_logits: batch items share them")


def _repeated(size: int, call: Attended) -> Attended:
    """The call for one batch of `size` * B items: with slopes of each batch item, `size` times."""
    slopes = call.scores.alibi_slopes
    if slopes is None or slopes.dim() == 1:
        return call
    return replace(call, scores=call.scores._replace(alibi_slopes=slopes.repeat(size, 1)))


def _items(x: Tensor, dim: int | None) -> int:
    """How many batch items each entry of x [..., B, ...] has."""
    return x.shape[1 if dim == 0 else 0]


def _apart(size: int, items: int, results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(x.unflatten(0, (size, items)) for x in results), (0,) * len(results)
