"""Attention over quantized q, k and v, forward only: checks, then a plan and its launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.cache import kept_mask
from sparsek.attn.mask.convert.argument import MaskLike, block_mask
from sparsek.attn.mask.heads8 import QuantizedHeads
from sparsek.attn.mask.lists import Frame
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskPolicy, MaskRule
from sparsek.attn.ops.attention_plans import bound_to
from sparsek.attn.ops.attention_refused import refuse
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention_fp8 import AttendedFp8, AttentionFp8Plan, check_heads, check_no_gradient
from sparsek.attn.reference.scores import Scores
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.engine.call import bound
from sparsek.engine.call.bound import Slot
from sparsek.engine.plan.op import Operation
from sparsek.engine.plan.plan import check_plan
from sparsek.engine.planning import choose

ATTENTION_FP8 = Operation(AttentionFp8Plan, choose)


def attention_fp8(
    q: QuantizedHeads,
    k: QuantizedHeads,
    v: QuantizedHeads,
    mask: MaskLike | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    plan: AttentionFp8Plan | None,
    kernel: str | None,
    changes: tuple[Any, Any, Any],
    refused: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """`sparsek.attention` of three QuantizedHeads. `changes`: softcap, alibi_slopes, sink_logits."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise InvalidInput("FP8 attention does not go through torch.compile and torch.func; call it outside")
    refuse("attention", refused)
    check_heads(q, k, v)
    found = _mask_of(mask, q, k, is_causal)
    if plan is None:
        to = bound_to(found, counting=True)
        slot: Any = bound.UNBOUND
        if to is not None and type(scale) in (float, type(None)) and not any(_given(changes)):
            form = q.rows, k.rows, v.rows, v.length, q.source_dtype
            tensors = q.values, q.scale, k.values, k.scale, v.values, v.scale
            settings = "attention_fp8", scale, return_lse, kernel, form
            slot = bound.repeat(to.calls, settings, (*tensors, *to.operands))
            if slot.__class__ is not Slot:
                return slot if return_lse else slot[0]
        found = _checked(q, k, found)
        call = _call(q, k, v, found, scale, return_lse, changes)
        both = slot.run(lambda: ATTENTION_FP8.run(call, kernel, once=to is not None and to.once))
    else:
        check_plan(plan, AttentionFp8Plan, "plan_attention of QuantizedHeads", kernel)
        if return_lse and not plan.problem.lse:
            raise InvalidInput("return_lse=True contradicts plan, made with return_lse=False")
        found = plan.checked(q, k, v, found)
        call = _call(q, k, v, found, scale, return_lse, changes)
        plan.check_scores(call.scores)
        both = plan.run(call, captured(q.values))
    return both if return_lse else both[0]


def plan_attention_fp8(
    q: QuantizedHeads,
    k: QuantizedHeads,
    v: QuantizedHeads,
    mask: MaskLike | None,
    kernel: str | None,
    config: Any,
    device: str | None,
    return_lse: bool,
    changes: tuple[Any, Any, Any],
) -> AttentionFp8Plan:
    """`sparsek.plan_attention` of three QuantizedHeads."""
    check_heads(q, k, v)
    found = _checked(q, k, _mask_of(mask, q, k, False), here=device is None)
    scores = _scores(q, changes, here=device is None)
    plan = ATTENTION_FP8.plan(
        AttendedFp8(q, k, v, found, lse=return_lse, scores=scores), kernel, config, device
    )
    return plan if mask is not None else replace(plan, mask=lambda: found, unmasked=True)


def _given(changes: tuple[Any, Any, Any]) -> tuple[bool, bool, bool]:
    """Which of softcap, alibi_slopes and sink_logits a call has."""
    softcap, alibi_slopes, sink_logits = changes
    return softcap.__class__ is not float or softcap != 0.0, alibi_slopes is not None, sink_logits is not None


def _mask_of(mask: Any, q: QuantizedHeads, k: QuantizedHeads, is_causal: bool) -> BlockMask | None:
    """The BlockMask of any form of a mask."""
    if isinstance(mask, MaskRule) and (not isinstance(mask, MaskPolicy) or mask.topk is not None):
        raise InvalidInput(
            f"mask is {mask.label}, which chooses blocks by q and k, and these are quantized; pass the BlockMask "
            "that policy.mask(q, k) makes of the tensors"
        )
    if is_causal is False and (mask is None or isinstance(mask, BlockMask)):
        return mask
    return block_mask(mask, _shaped(q), _shaped(k), is_causal)


def _shaped(x: QuantizedHeads) -> Tensor:
    """A tensor of the heads' shape on their device, as a mask needs it."""
    return x.scale.new_zeros(()).expand(x.shape)


def _checked(q: QuantizedHeads, k: QuantizedHeads, mask: BlockMask | None, here: bool = True) -> BlockMask:
    """The mask to use, after its checks."""
    if here:
        arguments.supported("q", q.device)
    if mask is None:
        frame = Frame(q_len=q.shape[2], kv_len=k.shape[2], device=q.device if here else "cpu")
        return kept_mask(("every block", *frame.values()), lambda: BlockMask.full(**frame))
    operands.check_mask(q.values, k.values, mask, here=here)
    return mask


def _scores(q: QuantizedHeads, changes: tuple[Any, Any, Any], here: bool = True) -> Scores:
    return operands.checked_scores(q, *changes, here=here, dtype=q.source_dtype)


def _call(
    q: QuantizedHeads,
    k: QuantizedHeads,
    v: QuantizedHeads,
    mask: BlockMask,
    scale: Any,
    lse: bool,
    changes: Any,
) -> AttendedFp8:
    scores = _scores(q, changes)
    check_no_gradient(q, k, v, scores.sink_logits)
    return AttendedFp8(q, k, v, mask, operands.checked_scale(scale, q.shape[3]), lse, scores)
