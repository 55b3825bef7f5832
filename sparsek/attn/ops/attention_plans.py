"""Attention and its gradients as operations of the planner; the mask of a call without one; recorded calls."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.cache import kept_mask
from sparsek.attn.mask.lists import Frame
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.recorded import fresh_layout
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import AttentionPlan
from sparsek.attn.plan.attention_grad import AttentionGradPlan, Differentiated
from sparsek.attn.reference.scores import sink_gradients
from sparsek.engine.call.bound import Calls
from sparsek.engine.plan.op import Operation
from sparsek.engine.planning import choose

ATTENTION = Operation(AttentionPlan, choose)
ATTENTION_BACKWARD = Operation(AttentionGradPlan, choose)


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None,
    *,
    here: bool = True,
    planner: str = "plan_attention",
) -> BlockMask:
    """Check all tensors and return the mask to use. `here`: the call will run, so everything must be on one device.

    `planner`: the function that predicts the call, for messages.
    """
    check_tensors(q, k, v, predicted=not here, planner=planner)
    if mask is None:
        return every_block(q, k, here)
    operands.check_mask(q, k, mask, here=here)
    return mask


def every_block(q: Tensor, k: Tensor, here: bool = True) -> BlockMask:
    """The mask of a call without one."""
    frame = Frame(q_len=q.shape[2], kv_len=k.shape[2], device=q.device if here else "cpu")
    return kept_mask(("every block", *frame.values()), lambda: BlockMask.full(**frame))


_UNMASKED = Calls()


class Bound(NamedTuple):
    """Where calls with a mask are recorded, and the operands that the mask adds to them.

    `once`: the mask is new, so its plan is made in every call: see attn/mask/recorded.py.
    """

    calls: Calls
    operands: tuple[Tensor, ...] = ()
    once: bool = False


_ALL = Bound(_UNMASKED)


def bound_to(mask: Any, *, counting: bool = False) -> Bound | None:
    """Where calls with a mask, or without one, are recorded; None for a subclass of BlockMask. Verifies the mask.

    `counting`: this is a use of the mask, which ends being new after a few.
    """
    if mask is None:
        return _ALL
    if type(mask) is not BlockMask:
        return None
    memo = mask._memo
    if "readbacks" in memo:
        mask.verify()
    layout, base = fresh_layout(mask, counting=counting), mask._base
    if layout is not None and base is not None:
        return Bound(layout._memo.get("calls") or layout.derived("calls", Calls), (base,), True)
    key = "calls", mask.sizes.exact
    return Bound(memo.get(key) or mask.derived(key, Calls))


def differentiated(call: Differentiated, kernel: str | None, once: bool) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of a call; with sinks also their gradient for each batch item, [B, Hq]."""
    found = ATTENTION_BACKWARD.run(call, kernel, once=once)
    sinks, forward, grad = call.scores.sink_logits, call.forward, call.grad
    if sinks is None:
        return found
    assert forward is not None
    assert grad is not None
    of_sinks = sink_gradients
    if call.q.is_cuda and call.q.dtype != torch.float64:
        with suppress(ImportError):  # without Triton the reference runs
            from sparsek.attn.kernels.backward.sinks import launched as of_sinks
    return *found, of_sinks(forward.out, forward.lse, grad, call.grad_lse, sinks)


def fixed(deterministic: bool) -> bool:
    """Whether sums have a fixed order: always under torch.use_deterministic_algorithms."""
    return deterministic or torch.are_deterministic_algorithms_enabled()
