"""The adjoint of attention: attention_backward, which has no gradient itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.attn.plan.attention_operands import NO_SECOND_GRADIENT
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import save_for_backward, saved_tensors
from sparsek.engine.call.transforms import Gradients
from sparsek.engine.planning import same_family


def save_attention(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    """Save q, k, v, the tensors of scores and mask, out and lse; the backward pass recomputes the weights."""
    q, k, v, mask, *options = inputs
    ctx.options = [None if isinstance(x, Tensor) else x for x in options]
    own = [x if isinstance(x, Tensor) else None for x in options]
    save_for_backward(ctx, q, k, v, *output, *own, *mask)
    ctx.set_materialize_grads(False)


def of_attention(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Gradients:
    """The gradients of q, k, v and the sinks. The first three share their products, so omitting one saves nothing."""
    q, k, v, out, lse, *rest = saved_tensors(ctx)
    own, mask = rest[: len(ctx.options)], rest[len(ctx.options) :]
    given = [x if x is not None else plain for x, plain in zip(own, ctx.options, strict=True)]
    numbers, scale, return_lse, kernel, deterministic, *scores, sinks = given
    if not return_lse:
        raise InvalidInput("gradients need lse; call torch.ops.sparsek.attention with return_lse=True")
    grad = torch.zeros_like(out) if grad is None else grad
    learned = sinks if ctx.needs_input_grad[-1] else None
    kernel = same_family(kernel, "attention_backward")
    settings = mask, numbers, scale, deterministic, kernel, *scores, learned
    *found, of_sinks = torch.ops.sparsek.attention_backward(q, k, v, out, lse, grad, grad_lse, *settings)
    wanted = [x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)]
    of_sinks = None if learned is None else of_sinks.sum(0).to(learned.dtype)
    # torch expects the structure of the inputs: a list of tensors has elements, any other list has none.
    listed = all(isinstance(x, Tensor) for x in mask)
    nothing = [None] * len(mask) if listed else None, None if numbers else []
    return *wanted, *nothing, *[None] * (len(given) - 2), of_sinks


def of_attention_backward(ctx: Any, *grads: Tensor) -> Gradients:
    """Raise InvalidInput: attention has no second derivative."""
    raise InvalidInput(NO_SECOND_GRADIENT)
