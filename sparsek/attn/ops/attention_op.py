"""Attention and its gradients as torch.library ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.attn.ops import attention_gradients
from sparsek.attn.ops.attention_args import call_of, flat_mask, gradients_of
from sparsek.attn.ops.attention_plans import ATTENTION, differentiated, recorded
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import Attended, every_block
from sparsek.attn.plan.attention_grad import Differentiated
from sparsek.attn.reference.scores import PLAIN
from sparsek.core.operations import TAGS, schema_of
from sparsek.engine.call import transforms
from sparsek.engine.call.recorded_calls import UNBOUND, Slot


@torch.library.custom_op(
    "sparsek::attention", mutates_args=(), schema=schema_of(call_of, "(Tensor, Tensor)"), tags=TAGS
)
def attention_op(*given: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of `sparsek.attention`; lse is empty unless `return_lse`. Gradients need it.

    `deterministic` concerns the gradients.
    """
    call = call_of(*given)
    with torch.no_grad():
        call.check()
        slot = _recorded(call, "attention op", call.tensors)
        found = slot if slot.__class__ is not Slot else slot.run(lambda: _run(call))
        out, lse = found
    return out, out.new_empty(0) if lse is None else lse


def _run(call: Attended) -> Any:
    return ATTENTION.run(call, call.kernel, once=call.once)


@attention_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    call = call_of(*given)
    call.check()
    out, q = operands.empty_out(call.q, call.v.shape[3]), call.q
    return out, q.new_empty(
        q.shape[:3], dtype=operands.lse_dtype(q.dtype)
    ) if call.return_lse else q.new_empty(0)


@torch.library.custom_op(
    "sparsek::attention_backward",
    mutates_args=(),
    schema=schema_of(gradients_of, "(Tensor, Tensor, Tensor, Tensor)"),
    tags=TAGS,
)
def attention_backward_op(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv) for the gradients `grad` of out and `grad_lse` of lse, and that of the sinks for each batch item,
    [B, Hq], empty without sinks.
    """
    given = gradients_of(*args)
    call = given.call
    with torch.no_grad():
        given.check()
        slot = _recorded(
            call, ("attention_backward op", call.in_order, given.grad_lse is None), given.tensors
        )
        grads = slot if slot.__class__ is not Slot else slot.run(lambda: differentiated(given, call.kernel))
    return grads if call.scores.sink_logits is not None else (*grads, given.lse.new_empty(0))


@attention_backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = gradients_of(*args).call
    call.check()
    dq, dk, dv = (operands.empty_out(x, x.shape[3]) for x in call.tensors)
    shape = (0,) if call.scores.sink_logits is None else call.q.shape[:2]
    return dq, dk, dv, call.q.new_empty(shape, dtype=operands.lse_dtype(call.q.dtype))


def _recorded(call: Attended, verb: Any, tensors: tuple[Tensor, ...]) -> Any:
    """`recorded` for a mask that was made in the same graph: see attn/mask/recorded.py."""
    if call.mask is None:
        call.mask = every_block(call.q, call.k)
    return UNBOUND if call.mask._base is None else recorded(call, verb, tensors, counting=True)


attention_op.register_autograd(
    transforms.one_by_one(attention_gradients.of_attention), setup_context=attention_gradients.save_attention
)
attention_backward_op.register_autograd(attention_gradients.of_attention_backward)


def through_op(call: Attended) -> tuple[Tensor, Tensor]:
    """The call through the torch.library op, with lse where a gradient is wanted."""
    if not torch.compiler.is_compiling():
        call.check()
    elif call.scores is not PLAIN:  # the op checks the rest
        call.check_operands()
        call.check_scores()
    transforms.check_rules()
    lse = call.return_lse or call.learns
    given = *call.tensors, *flat_mask(call.mask), call.scale, lse, call.kernel, call.deterministic
    return torch.ops.sparsek.attention(*given, *call.scores)


def gradients_through_op(given: Differentiated, kernel: str | None) -> tuple[Tensor, ...]:
    """The gradients of a call through the torch.library op."""
    call = given.call
    options = *flat_mask(call.mask), call.scale, call.deterministic, kernel
    return torch.ops.sparsek.attention_backward(*call.tensors, *given[1:], *options, *call.scores)
