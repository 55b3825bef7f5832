"""Attention over the blocks of a mask, with gradients: checks, then a plan and its launch, or the torch.library op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.mask.mask import BlockMask
from sparsek.ops import bound
from sparsek.ops.attention_autograd import (
    Attention,
    Call,
    TransformedAttention,
    check_untransformed,
    run_forward,
)
from sparsek.ops.attention_op import through_op
from sparsek.ops.attention_plans import ATTENTION, ATTENTION_BACKWARD, calls_of, checked
from sparsek.ops.autocast import autocasts, follow_autocast
from sparsek.ops.bound import Slot
from sparsek.plan import attention_operands as operands
from sparsek.plan.attention import Attended, AttentionPlan
from sparsek.plan.attention_grad import AttentionGradPlan, Differentiated
from sparsek.plan.operands import check_no_tangent, wants_gradient
from sparsek.plan.plan import check_plan


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None = None,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    plan: AttentionPlan | None = None,
    kernel: str | None = None,
    deterministic: bool = True,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None = None,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    plan: AttentionPlan | None = None,
    kernel: str | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    kernel: str | None = None,
    deterministic: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T over the keys that `mask` admits) v, visiting only the blocks that `mask` stores.

    q: [B, Hq, S, D]. k: [B, Hkv, T, D]. v: [B, Hkv, T, Dv]. One dtype, one device; any strides, nothing is copied to
    suit a kernel. Hq is a multiple of Hkv: head h of q reads head h // (Hq / Hkv) of k and v. GPU kernels take bf16 and
    fp16: hopper.attention_fwd D and Dv that are multiples of 8 up to 256, portable.attention_fwd 32, 64, 96, 128, 192
    and 256. The CPU's and the reference take also float32, float64 and any D.
    mask: BlockMask of S queries and T keys on q's device, with 1 or B batch items and 1, Hkv or Hq heads; None for all.
    scale: above 0; D**-0.5 by default.

    Returns out [B, Hq, S, Dv] in q's dtype, whose memory is [B, S, Hq, Dv] where q's is. With return_lse also lse
    [B, Hq, S], float32 (float64 for float64): the natural logarithm of each row's sum of exponentials. Queries that
    see no key give 0 and -inf.

    plan: from `plan_attention`, with return_lse=True where a gradient is wanted; without it one is made and kept with
    the mask.
    kernel: a name of the kernels' table ("hopper.attention_fwd"): it runs or `Unsupported` says why not. The backward
    pass uses the kernel of the same family; where a gradient is wanted and that one cannot run, this call says so.

    Differentiable in q, k and v, also through lse; not twice: InvalidInput. Kept for the backward pass are q, k, v, out
    and lse, and nothing that grows with the blocks; the schedule of it stays with the mask. All three gradients are
    computed where one is wanted, without gaps in memory, [B, L, H, E] where the operand lies so. A gradient of out
    whose last dim is not contiguous, or not aligned as q, k and v are, is copied first.
    deterministic: the sums of the gradients have a fixed order, same inputs, same bits; False lets a kernel add in any
    order where that is faster.

    Same plan, same bits. Once planned, GPU kernels do not sync; they allocate their outputs and, where the plan cuts
    long tiles, a workspace. A plan for lists on a GPU is made anew once these have been counted: mask.verify(wait=True)
    first, and the first call has the final one.
    Under torch.autocast q, k and v are cast to its dtype, as by scaled_dot_product_attention; with plan= they are not.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.

    Sources: online softmax, Milakov and Gimelshein, arXiv:1805.02867; tiles of it, and weights computed again for the
    gradients, FlashAttention, Dao et al., arXiv:2205.14135; the Hopper kernel's overlap of products and softmax,
    FlashAttention-3, Shah et al., arXiv:2407.08608.
    """
    if autocasts() and plan is None:
        q, k, v = follow_autocast(q, k, v)
    if type(return_lse) is not bool or type(deterministic) is not bool:
        arguments.flag("return_lse", return_lse)
        arguments.flag("deterministic", deterministic)
    if kernel is not None:
        arguments.text("kernel", kernel)
    slot = bound.UNBOUND
    if plan is None and not torch.compiler.is_compiling() and (scale is None or type(scale) is float):
        calls = calls_of(mask)
        if calls is not None:
            both = slot = bound.repeat(calls, ("attention", scale, return_lse, kernel), (q, k, v))
            if slot.__class__ is not Slot:
                return cast(Any, both if return_lse else both[0])
    if plan is None and _traced():
        wanted = return_lse or wants_gradient(q, k, v)
        out, lse = through_op(q, k, v, mask, scale, wanted, kernel, deterministic)
        return (out, lse) if return_lse else out
    if plan is not None:
        _check_plan(plan, kernel, return_lse)
        found = plan.checked(q, k, v, mask)
    else:
        found = checked(q, k, v, mask)
    factor = operands.checked_scale(scale, q.shape[3])
    check_no_tangent(operands.NO_TANGENT, q, k, v)
    if torch._C._are_functorch_transforms_active():
        check_untransformed(found)
        wanted = wants_gradient(q, k, v)
        both = TransformedAttention.apply(q, k, v, Call(found, plan, factor, kernel, deterministic, wanted))
    elif wants_gradient(q, k, v):
        if plan is not None and not plan.problem.lse:
            raise InvalidInput(
                "gradients need lse, and plan was made with return_lse=False; use plan_attention(..., return_lse=True)"
            )
        both = Attention.apply(q, k, v, Call(found, plan, factor, kernel, deterministic, slot=slot))
    else:
        both = run_forward(q, k, v, Call(found, plan, factor, kernel, deterministic, slot=slot), return_lse)
    return cast(Any, both if return_lse else both[0])


def plan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None = None,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    return_lse: bool = False,
) -> AttentionPlan:
    """The plan that `attention(q, k, v, mask)` would use without autocast: frozen, callable, able to explain itself.

    kernel, config: use this kernel, with this config of its own. device: a card's name ("h200"): plan for that card,
    present or not; such a plan predicts and explains but cannot be called, and its operands may be anywhere.
    return_lse: plan for lse as well, which calls with a gradient need.
    Costs: the schedule is made on the mask's device, without a host sync.
    """
    arguments.flag("return_lse", return_lse)
    found = _planned(q, k, v, mask, kernel, device, "plan_attention")
    plan = ATTENTION.plan(Attended(q, k, v, found, lse=return_lse), kernel, config, device)
    return plan if mask is not None else replace(plan, mask=lambda: found, unmasked=True)


def plan_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None = None,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    deterministic: bool = True,
) -> AttentionGradPlan:
    """The plan that the backward pass of `attention(q, k, v, mask)` would use.

    It explains itself, and may be called too: `plan(q, k, v, mask, out, lse, grad)` gives dq, dk and dv, with `scale=`
    as the forward pass had it and `grad_lse=` where lse has a gradient.
    kernel: a name of attention_backward's kernels ("hopper.attention_bwd"); config, device: as for `plan_attention`.
    deterministic: as for `attention`.
    Costs: the schedule, and for kernels that go by keys the mask's transposed lists, if it has none yet; both are made
    on the mask's device, without a host sync.
    """
    arguments.flag("deterministic", deterministic)
    found = _planned(q, k, v, mask, kernel, device, "plan_attention_backward")
    plan = ATTENTION_BACKWARD.plan(Differentiated(q, k, v, found, deterministic), kernel, config, device)
    return plan if mask is not None else replace(plan, mask=lambda: found, unmasked=True)


def _planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None,
    kernel: str | None,
    device: str | None,
    planner: str,
) -> BlockMask:
    """The mask to plan for, after all checks."""
    if kernel is not None:
        arguments.text("kernel", kernel)
    if torch._C._are_functorch_transforms_active():
        raise InvalidInput("plans are made outside of functions that torch.func transforms")
    return checked(q, k, v, mask, here=device is None, planner=planner)


def _traced() -> bool:
    """Something looks at the call op by op: torch.compile, or a TorchDispatchMode."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _check_plan(plan: Any, kernel: str | None, return_lse: bool) -> None:
    check_plan(plan, AttentionPlan, "plan_attention", kernel)
    if return_lse and not plan.problem.lse:
        raise InvalidInput("return_lse=True contradicts plan, made with return_lse=False")
