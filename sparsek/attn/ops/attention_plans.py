"""Attention and its gradients as operations of the planner, and their recorded calls."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.recorded import fresh_layout
from sparsek.attn.plan.attention import Attended, AttentionPlan
from sparsek.attn.plan.attention_fp8 import AttentionFp8Plan
from sparsek.attn.plan.attention_grad import AttentionGradPlan, Differentiated
from sparsek.attn.reference.scores import PLAIN, sink_gradients
from sparsek.engine.call import recorded_calls
from sparsek.engine.call.recorded_calls import Calls
from sparsek.engine.plan.op import Operation
from sparsek.engine.planning import choose

ATTENTION = Operation(AttentionPlan, choose)
ATTENTION_FP8 = Operation(AttentionFp8Plan, choose)
ATTENTION_BACKWARD = Operation(AttentionGradPlan, choose)
_UNMASKED = Calls()


def recorded(call: Attended, verb: Hashable, tensors: tuple[Tensor, ...], *, counting: bool = False) -> Any:
    """`repeat` of a call with these operands, among those of its mask: a result or a Slot. Verifies the mask.

    `verb`: with all settings that are not fields of `call`. `counting`: this is a use of the mask, which ends being new
    after a few. The plan of a new one is made in every call, which takes its base as an operand: attn/mask/recorded.py.
    """
    mask, scale, scores = call.mask, call.scale, call.scores
    if scale is not None and scale.__class__ is not float:
        return recorded_calls.UNBOUND  # 1, 1.0 and True are one key
    settings = verb, scale, call.return_lse, call.kernel, call.deterministic
    if scores is not PLAIN:
        marked, more = scores.parted()
        if marked is None:
            return recorded_calls.UNBOUND
        settings, tensors = (*settings, marked), (*tensors, *more)
    calls = _UNMASKED
    if mask is not None:
        call.once = False
        if type(mask) is not BlockMask:
            return recorded_calls.UNBOUND
        memo = mask._memo
        if "readbacks" in memo:
            mask.verify()
        layout = fresh_layout(mask, counting=counting) if "uses" in memo else None
        if layout is not None and mask._base is not None:
            call.once, tensors = True, (*tensors, mask._base)
            calls = layout._memo.get("calls") or layout.derived("calls", Calls)
        else:
            key = "calls" if mask.sizes.exact else "calls of bounds"
            calls = memo.get(key) or mask.derived(key, Calls)
    return recorded_calls.repeat(calls, settings, tensors, call)


def differentiated(given: Differentiated, kernel: str | None) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of a call; with sinks also their gradient for each batch item, [B, Hq]."""
    call, out, lse, grad, grad_lse = given
    found, sinks = ATTENTION_BACKWARD.run(given, kernel, once=call.once), call.scores.sink_logits
    if sinks is None:
        return found
    of_sinks = sink_gradients
    if call.q.is_cuda and call.q.dtype != torch.float64:
        with suppress(ImportError):  # without Triton the reference runs
            from sparsek.attn.kernels.backward.sinks import launched as of_sinks
    return *found, of_sinks(out, lse, grad, grad_lse, sinks)
