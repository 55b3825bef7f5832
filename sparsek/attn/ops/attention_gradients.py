"""The adjoint of attention: attention_backward, which has no gradient itself."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from sparsek.attn.ops.attention_args import AttentionArgs
from sparsek.attn.plan.attention_operands import NO_SECOND_GRADIENT
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import save_for_backward, saved_tensors
from sparsek.engine.call.transforms import Gradients
from sparsek.engine.planning import same_family


def save_attention(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    """Save q, k, v, the tensors of scores and mask, out and lse; the backward pass recomputes the weights."""
    args, none = AttentionArgs(*inputs), cast(Any, None)
    save_for_backward(ctx, *args[:3], args.alibi_slopes, args.sink_logits, *output, *args.mask)
    ctx.set_materialize_grads(False)
    ctx.call = args._replace(q=none, k=none, v=none, mask=none, alibi_slopes=None, sink_logits=None)


def of_attention(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Gradients:
    """The gradients of q, k, v and the sinks. The first three share their products, so omitting one saves nothing."""
    args: AttentionArgs = ctx.call
    if not args.return_lse:
        raise InvalidInput("gradients need lse; call torch.ops.sparsek.attention with return_lse=True")
    q, k, v, slopes, sinks, out, lse, *mask = saved_tensors(ctx)
    grad = torch.zeros_like(out) if grad is None else grad
    kernel = same_family(args.kernel, "attention_backward")
    learned = sinks if ctx.needs_input_grad[-1] else None
    settings = mask, args.numbers, args.scale, args.deterministic, kernel, args.softcap, slopes, learned
    *found, of_sinks = torch.ops.sparsek.attention_backward(q, k, v, out, lse, grad, grad_lse, *settings)
    wanted = [x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)]
    of_sinks = None if learned is None else of_sinks.sum(0).to(learned.dtype)
    # torch expects the structure of the inputs: a list of tensors has elements, any other list has none.
    listed = all(isinstance(x, Tensor) for x in mask)
    rest = [None] * len(mask) if listed else None, None if args.numbers else [], *[None] * 6
    return *wanted, *rest, of_sinks


def of_attention_backward(ctx: Any, *grads: Tensor) -> Gradients:
    """Raise InvalidInput: attention has no second derivative."""
    raise InvalidInput(NO_SECOND_GRADIENT)
