"""Attention and its gradients as torch.library ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.ops import attention_gradients
from sparsek.attn.ops.attention_args import (
    AttentionArgs,
    AttentionBackwardArgs,
    flat_mask,
    mask_of,
    put_together,
)
from sparsek.attn.ops.attention_plans import ATTENTION, bound_to, checked, differentiated, fixed
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import Attended
from sparsek.attn.plan.attention_grad import Differentiated, Forward
from sparsek.core.operations import TAGS, schema_of
from sparsek.engine.call import bound, transforms
from sparsek.engine.call.bound import Slot

FORWARD = schema_of(AttentionArgs, "(Tensor, Tensor)")
BACKWARD = schema_of(AttentionBackwardArgs, "(Tensor, Tensor, Tensor, Tensor)")


@torch.library.custom_op("sparsek::attention", mutates_args=(), schema=FORWARD, tags=TAGS)
def attention_op(*given: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of `sparsek.attention`; lse is empty unless `return_lse`. Gradients need it.

    `deterministic` concerns the gradients.
    """
    args = AttentionArgs(*given)
    q, k, v = args[:3]
    with torch.no_grad():
        found = checked(q, k, v, mask_of(args.mask, args.numbers))
        factor = operands.checked_scale(args.scale, q.shape[3])
        scores = operands.checked_scores(q, *args[-3:])
        call = Attended(q, k, v, found, factor, args.return_lse, scores)
        more = "attention op", factor, args.return_lse, args.kernel, scores.form
        out, lse = _recorded(
            found, more, (q, k, v, *scores.tensors), lambda once: ATTENTION.run(call, args.kernel, once=once)
        )
    return out, q.new_empty(0) if lse is None else lse


@attention_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    args = AttentionArgs(*given)
    q, v = args.q, args.v
    _check_fake(args)
    if not args.return_lse:
        return operands.empty_out(q, v.shape[3]), q.new_empty(0)
    lse = q.new_empty(q.shape[:3], dtype=operands.lse_dtype(q.dtype))
    return operands.empty_out(q, v.shape[3]), lse


@torch.library.custom_op(
    "sparsek::attention_backward",
    mutates_args=(),
    schema=BACKWARD,
    tags=TAGS,
)
def attention_backward_op(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv) for the gradients `grad` of out and `grad_lse` of lse, and that of the sinks for each batch item,
    [B, Hq], empty without sinks.
    """
    args = AttentionBackwardArgs(*given)
    q, k, v, out, lse, grad, grad_lse = args[:7]
    with torch.no_grad():
        found = checked(q, k, v, mask_of(args.mask, args.numbers))
        operands.check_backward(q, v, out, lse, grad, grad_lse)
        forward = Forward(out, lse, operands.checked_scale(args.scale, q.shape[3]))
        in_order = fixed(args.deterministic)
        scores = operands.checked_scores(q, *args[-3:])
        call = Differentiated(q, k, v, found, in_order, forward, grad, grad_lse, scores)
        more = "attention_backward op", forward.scale, args.kernel, in_order, grad_lse is None, scores.form
        tensors = (q, k, v, out, lse, grad) if grad_lse is None else (q, k, v, out, lse, grad, grad_lse)
        grads = _recorded(
            found, more, (*tensors, *scores.tensors), lambda once: differentiated(call, args.kernel, once)
        )
    return grads if scores.sink_logits is not None else (*grads, lse.new_empty(0))


@attention_backward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = AttentionBackwardArgs(*given)
    _check_fake(args)
    dq, dk, dv = (operands.empty_out(x, x.shape[3]) for x in args[:3])
    shape = (0,) if args.sink_logits is None else args.q.shape[:2]
    return dq, dk, dv, args.q.new_empty(shape, dtype=operands.lse_dtype(args.q.dtype))


def _recorded(mask: BlockMask, more: Any, tensors: tuple[Tensor, ...], run: Callable[[bool], Any]) -> Any:
    """The result of `run(once)`; of a recorded call, if the mask was made in the same graph: see
    attn/mask/recorded.py.
    """
    to = bound_to(mask, counting=True) if mask._base is not None else None
    if to is None:
        return run(False)
    slot: Any = bound.repeat(to.calls, more, (*tensors, *to.operands))
    return slot.run(lambda: run(to.once)) if slot.__class__ is Slot else slot


def _check_fake(args: AttentionArgs | AttentionBackwardArgs) -> None:
    check_tensors(args.q, args.k, args.v)
    operands.checked_scale(args.scale, args.q.shape[3])
    operands.checked_scores(args.q, *args[-3:])
    if args.mask:
        operands.check_mask(args.q, args.k, put_together(args.mask, args.numbers))


attention_op.register_autograd(
    transforms.one_by_one(attention_gradients.of_attention), setup_context=attention_gradients.save_attention
)
attention_backward_op.register_autograd(attention_gradients.of_attention_backward)


def through_op(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    """The call through the torch.library op, with `settings` in the op's order."""
    return torch.ops.sparsek.attention(q, k, v, *flat_mask(mask), *settings)
