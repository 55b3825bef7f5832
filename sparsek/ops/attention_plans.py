"""The plans of attention and of its gradients: made once for a mask and a kind of operands, and kept with the mask."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsek import kernels
from sparsek.core import device as devices
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, captured, wait_for
from sparsek.mask.mask import BlockMask
from sparsek.mask.operands import check_tensors
from sparsek.ops import gradients
from sparsek.ops.bound import Calls
from sparsek.ops.planning import choose
from sparsek.plan import attention_operands as operands
from sparsek.plan.attention import AttentionPlan
from sparsek.plan.attention_grad import AttentionGradPlan, sharing_transposed
from sparsek.plan.cache import PlanCache
from sparsek.plan.problem import AttentionGradProblem, AttentionProblem
from sparsek.plan.select import Choice


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | None,
    *,
    here: bool = True,
    planner: str = "plan_attention",
) -> BlockMask:
    """The mask to use, after all checks of the tensors. `here`: the call will run, so everything must be in place.

    `planner`: what predicts such a call.
    """
    check_tensors(q, k, v, predicted=not here, planner=planner)
    if mask is None:
        return every_block(q.shape[2], k.shape[2], q.device if here else torch.device("cpu"))
    operands.check_mask(q, k, mask, here=here)
    return mask


def every_block(q_len: int, kv_len: int, device: torch.device) -> BlockMask:
    """The mask of a call without one, for the current stream. A CUDA graph may capture one that was used before."""
    mask, made = _kept_every_block(q_len, kv_len, device)
    if made is not None:
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.add(mask)
        else:
            wait_for(made, (*mask.full, *mask.partial, mask.lo, mask.hi))
    return mask


@lru_cache(16)
def _kept_every_block(q_len: int, kv_len: int, device: torch.device) -> tuple[BlockMask, Ready | None]:
    # Inside torch.func tensors that are made belong to it, and these outlive it.
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        mask = BlockMask.full(q_len=q_len, kv_len=kv_len, device=device)
    return mask, Ready.here(device)


_UNMASKED = Calls()


def calls_of(mask: Any) -> Calls | None:
    """The recorded calls of a mask, or of calls without one; None for what is no mask. Verifies the mask."""
    if mask is None:
        return _UNMASKED
    if type(mask) is not BlockMask:
        return None
    mask.verify()
    return mask.derived(("calls", mask.sizes.exact), Calls)


OTHER_PASS = {"attention": "attention_backward", "attention_backward": "attention"}

# Graphs go on reading the masks of calls without one, which nobody else holds.
_CAPTURED: set[BlockMask] = set()


def make_plan(
    mask: BlockMask, p: AttentionProblem, kernel: str | None, config: Any, *, ready: bool, unmasked: bool
) -> AttentionPlan:
    """A plan for `p`, which `mask` poses. `ready`: everything is on the card that it is for."""
    return AttentionPlan(*_parts(mask, p, kernel, config, ready, unmasked))


def make_grad_plan(
    mask: BlockMask, p: AttentionGradProblem, kernel: str | None, config: Any, *, ready: bool, unmasked: bool
) -> AttentionGradPlan:
    """The same for the gradients."""
    with sharing_transposed(mask) if ready else nullcontext():
        return AttentionGradPlan(*_parts(mask, p, kernel, config, ready, unmasked))


def _parts(
    mask: BlockMask, p: AttentionProblem, kernel: str | None, config: Any, ready: bool, unmasked: bool
) -> tuple[Any, ...]:
    choice = _choice(p, kernel, config)
    work, made = None, None
    if ready:
        lists = mask.partial.starts
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device_of(lists):
            work = choice.kernel.prepare(p, choice.config, mask)
        if not captured(lists):
            made = Ready.here(mask.device)
    kept = (lambda: mask) if unmasked else weakref.ref(mask)
    return p, choice, work, ready, kept, mask.label, unmasked, made


def _choice(p: AttentionProblem, kernel: str | None, config: Any = None) -> Choice:
    other = OTHER_PASS[p.op]
    if kernel is not None and kernel in kernels.names_for(other):
        raise InvalidInput(
            f"no kernel of {p.op} is called {kernel!r}, which is one of {other}; that of its family is "
            f"{gradients.same_family(kernel, p.op)!r}"
        )
    return choose(p, kernel, config)


def cached_plan(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, kernel: str | None, lse: bool
) -> AttentionPlan:
    """The plan that `mask` keeps for operands like these, made if there is none."""
    layout = operands.layout(q, k, v)
    # Bounds of a mask's sizes may give way to what its lists hold, and then to a better plan.
    key = kernel, q.shape, k.shape[1], v.shape[3], q.dtype, layout, lse, mask.sizes.exact

    def make() -> AttentionPlan:
        p = problem(q, k, v, mask, layout, lse, devices.card_of(q.device))
        return make_plan(mask, p, kernel, None, ready=True, unmasked=False)

    plans: PlanCache[AttentionPlan] = mask.derived("plans", PlanCache)
    return plans.get(key, make, captured(q))


def cached_grad_plan(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, kernel: str | None, deterministic: bool
) -> AttentionGradPlan:
    """The same for the gradients. Where torch.use_deterministic_algorithms is on, sums always have a fixed order."""
    layout = operands.backward_layout(q, k, v)
    fixed = deterministic or torch.are_deterministic_algorithms_enabled()
    key = kernel, q.shape, k.shape[1], v.shape[3], q.dtype, layout, fixed, mask.sizes.exact

    def make() -> AttentionGradPlan:
        p = grad_problem(q, k, v, mask, layout, fixed, devices.card_of(q.device))
        return make_grad_plan(mask, p, kernel, None, ready=True, unmasked=False)

    plans: PlanCache[AttentionGradPlan] = mask.derived("gradient plans", PlanCache)
    return plans.get(key, make, captured(q))


def check_backward_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, kernel: str | None, deterministic: bool
) -> None:
    """Unsupported, with its reasons, where `kernel` cannot give the gradients."""
    fixed = deterministic or torch.are_deterministic_algorithms_enabled()
    layout = operands.backward_layout(q, k, v)
    _choice(grad_problem(q, k, v, mask, layout, fixed, devices.card_of(q.device)), kernel)


def problem(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, layout: operands.Layout, lse: bool, card: devices.Card
) -> AttentionProblem:
    """What attention of q, k and v under `mask` asks of `card`."""
    return AttentionProblem(**_sizes(q, k, v, mask, layout), card=card, lse=lse)


def grad_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    layout: operands.Layout,
    deterministic: bool,
    card: devices.Card,
) -> AttentionGradProblem:
    """What its gradients ask."""
    return AttentionGradProblem(**_sizes(q, k, v, mask, layout), card=card, deterministic=deterministic)


def _sizes(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, layout: operands.Layout) -> dict[str, Any]:
    batch, q_heads, q_len, dim = q.shape
    return {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": k.shape[1],
        "q_len": q_len,
        "kv_len": k.shape[2],
        "dim": dim,
        "v_dim": v.shape[3],
        "dtype": dtypes.name(q.dtype),
        "block": mask.block,
        "mask_batch": mask.batch,
        "mask_heads": mask.heads,
        **mask.sizes._asdict(),
        "by_interval": mask.lo is not None,
        "by_bits": mask.bits is not None and mask.rules is not None,
        "aligned": layout.aligned,
        "unit_stride": layout.unit_stride,
    }
