"""Attention and its gradients as torch.library ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsek.mask.mask import BlockMask
from sparsek.mask.operands import check_tensors
from sparsek.ops import gradients
from sparsek.ops.attention_flat import flat_mask, mask_of, put_together
from sparsek.ops.attention_plans import ATTENTION, ATTENTION_BACKWARD, checked, fixed
from sparsek.ops.flat import TAGS
from sparsek.plan import attention_operands as operands
from sparsek.plan.attention import Attended
from sparsek.plan.attention_grad import Differentiated, Forward


@torch.library.custom_op("sparsek::attention", mutates_args=(), tags=TAGS)
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
    return_lse: bool,
    kernel: str | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `sparsek.attention`; lse is empty unless it is wanted. Gradients need it.

    `mask` and `numbers` come from `flat_mask`. `deterministic` is about the gradients.
    """
    with torch.no_grad():
        found = checked(q, k, v, mask_of(mask, numbers))
        factor = operands.checked_scale(scale, q.shape[3])
        out, lse = ATTENTION.run(Attended(q, k, v, found, factor, return_lse), kernel)
    return out, q.new_empty(0) if lse is None else lse


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
    return_lse: bool,
    kernel: str | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    _check_fake(q, k, v, mask, numbers, scale)
    if not return_lse:
        return operands.empty_out(q, v.shape[3]), q.new_empty(0)
    lse = q.new_empty(q.shape[:3], dtype=operands.lse_dtype(q.dtype))
    return operands.empty_out(q, v.shape[3]), lse


@torch.library.custom_op("sparsek::attention_backward", mutates_args=(), tags=TAGS)
def attention_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
    deterministic: bool,
    kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) for the gradients `grad` of out and `grad_lse` of lse; `kernel` is one of attention_backward."""
    with torch.no_grad():
        found = checked(q, k, v, mask_of(mask, numbers))
        operands.check_backward(q, v, out, lse, grad, grad_lse)
        forward = Forward(out, lse, operands.checked_scale(scale, q.shape[3]))
        call = Differentiated(q, k, v, found, fixed(deterministic), forward, grad, grad_lse)
        return ATTENTION_BACKWARD.run(call, kernel)


@attention_backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
    deterministic: bool,
    kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_fake(q, k, v, mask, numbers, scale)
    dq, dk, dv = (operands.empty_out(x, x.shape[3]) for x in (q, k, v))
    return dq, dk, dv


def _check_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
) -> None:
    check_tensors(q, k, v)
    operands.checked_scale(scale, q.shape[3])
    if mask:
        operands.check_mask(q, k, put_together(mask, numbers))


attention_op.register_autograd(gradients.of_attention, setup_context=gradients.save_attention)
attention_backward_op.register_autograd(gradients.of_attention_backward)


def through_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None,
    scale: float | None,
    return_lse: bool,
    kernel: str | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """The call as an op of torch.library."""
    args = *flat_mask(mask), scale, return_lse, kernel, deterministic
    return torch.ops.sparsek.attention(q, k, v, *args)
