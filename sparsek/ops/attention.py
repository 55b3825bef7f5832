"""Attention over the blocks of a mask: checks, the torch.library op, plan and launch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core import device as devices
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats.block_mask import BlockLists, BlockMask, Sizes
from sparsek.ops.planning import choose
from sparsek.plan import attention_operands as operands
from sparsek.plan.attention import AttentionPlan
from sparsek.plan.cache import PlanCache
from sparsek.plan.made import Made, captured, follow
from sparsek.plan.problem import AttentionProblem


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

    plan: from `plan_attention`; without it one is made and kept with the mask.
    kernel: a name of the kernels' table ("hopper.attention_fwd"): it runs or `Unsupported` says why not.

    Same plan, same bits. Once planned, GPU kernels do not sync; they allocate their outputs and, where the plan cuts
    long tiles, a workspace. A plan for lists on a GPU is made anew once these have been counted: mask.verify(wait=True)
    first, and the first call has the final one. torch.autocast does not touch the operands.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.

    Sources: online softmax, Milakov and Gimelshein, arXiv:1805.02867; tiles of it, FlashAttention, Dao et al.,
    arXiv:2205.14135; the Hopper kernel's overlap of products and softmax, FlashAttention-3, Shah et al.,
    arXiv:2407.08608.
    """
    if torch.compiler.is_compiling():
        if plan is not None:
            raise InvalidInput("plan= does not go through torch.compile; call attention(q, k, v, mask) there")
        out, lse = torch.ops.sparsek.attention(q, k, v, *_flat(mask), scale, return_lse, kernel)
        return (out, lse) if return_lse else out
    if plan is not None:
        _check_plan(plan, kernel, return_lse)
        return plan(q, k, v, mask, scale=scale)
    found = _checked(q, k, v, mask)
    operands.check_no_gradient(q, k, v)
    factor = operands.checked_scale(scale, q.shape[3])
    out, lse = _cached_plan(q, k, v, found, kernel, return_lse).run(q, k, v, found, factor)
    return out if lse is None else (out, lse)


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
    """The plan that `attention(q, k, v, mask)` would use: frozen, callable, and able to explain itself.

    kernel, config: use this kernel, with this config of its own. device: a card's name ("h200"): plan for that card,
    present or not; such a plan predicts and explains but cannot be called, and its operands may be anywhere.
    Costs: the schedule is made on the mask's device, without a host sync.
    """
    if config is not None and kernel is None:
        raise InvalidInput("config= belongs to one kernel; name it with kernel=")
    ready = device is None
    found = _checked(q, k, v, mask, here=ready)
    card = devices.card_of(q.device) if device is None else devices.card_named(str(device))
    p = _problem(q, k, v, found, operands.layout(q, k, v), return_lse, card)
    return _make_plan(found, p, kernel, config, ready=ready, unmasked=mask is None)


def _check_plan(plan: Any, kernel: str | None, return_lse: bool) -> None:
    if not isinstance(plan, AttentionPlan):
        raise InvalidInput(f"plan must come from plan_attention, got {type(plan).__name__}")
    if kernel not in (None, plan.kernel):
        raise InvalidInput(f"kernel={kernel!r} contradicts plan, which uses {plan.kernel}")
    if return_lse != plan.problem.lse:
        raise InvalidInput(
            f"return_lse={return_lse} contradicts plan, made with return_lse={plan.problem.lse}"
        )


def _checked(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, *, here: bool = True) -> BlockMask:
    """The mask to use, after all checks of the tensors. `here`: the call will run, so everything must be in place."""
    operands.check_tensors(q, k, v, predicted=not here)
    if mask is None:
        return _every_block(q.shape[2], k.shape[2], q.device if here else torch.device("cpu"))
    operands.check_mask(q, k, mask, here=here)
    return mask


def _every_block(q_len: int, kv_len: int, device: torch.device) -> BlockMask:
    """The mask of a call without one, for the current stream. A CUDA graph may capture one that was used before."""
    mask, made = _kept_every_block(q_len, kv_len, device)
    if made is not None:
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.add(mask)
        else:
            follow(made, (*mask.full, *mask.partial, mask.lo, mask.hi))
    return mask


@lru_cache(16)
def _kept_every_block(q_len: int, kv_len: int, device: torch.device) -> tuple[BlockMask, Made | None]:
    with torch.inference_mode(False):
        mask = BlockMask.full(q_len=q_len, kv_len=kv_len, device=device)
    return mask, Made.here(device)


# Graphs go on reading the masks of calls without one, which nobody else holds.
_CAPTURED: set[BlockMask] = set()


def _make_plan(
    mask: BlockMask, p: AttentionProblem, kernel: str | None, config: Any, *, ready: bool, unmasked: bool
) -> AttentionPlan:
    choice = choose(p, kernel, config)
    work, made = None, None
    if ready:
        lists = mask.partial.starts
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device_of(lists):
            work = choice.kernel.prepare(p, choice.config, mask)
        if not captured(lists):
            made = Made.here(mask.device)
    kept = (lambda: mask) if unmasked else weakref.ref(mask)
    return AttentionPlan(p, choice, work, ready, kept, mask.label, unmasked, made)


def _cached_plan(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, kernel: str | None, lse: bool
) -> AttentionPlan:
    layout = operands.layout(q, k, v)
    # Bounds of a mask's sizes may give way to what its lists hold, and then to a better plan.
    key = kernel, q.shape, k.shape[1], v.shape[3], q.dtype, layout, lse, mask.sizes.exact

    def make() -> AttentionPlan:
        p = _problem(q, k, v, mask, layout, lse, devices.card_of(q.device))
        return _make_plan(mask, p, kernel, None, ready=True, unmasked=False)

    plans: PlanCache[AttentionPlan] = mask.derived("plans", PlanCache)
    return plans.get(key, make, captured(q))


def _problem(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, layout: operands.Layout, lse: bool, card: devices.Card
) -> AttentionProblem:
    batch, q_heads, q_len, dim = q.shape
    return AttentionProblem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=k.shape[1],
        q_len=q_len,
        kv_len=k.shape[2],
        dim=dim,
        v_dim=v.shape[3],
        dtype=dtypes.name(q.dtype),
        card=card,
        block=mask.block,
        mask_batch=mask.batch,
        mask_heads=mask.heads,
        stored=mask.sizes.stored,
        partial=mask.sizes.partial,
        longest=mask.sizes.longest,
        exact=mask.sizes.exact,
        by_interval=mask.lo is not None,
        by_bits=mask.bits is not None and mask.rules is not None,
        aligned=layout.aligned,
        unit_stride=layout.unit_stride,
        lse=lse,
    )


# Masks that came through the compiled op, so that plans are made once, each with what it was made of. An entry lives
# as long as its first tensor: the mask holds another tensor object on the same memory.
_MASKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _flat(mask: BlockMask | None) -> tuple[list[Tensor | None], list[int]]:
    """A mask as tensors and ints, for the op; without a mask there are none."""
    if mask is None:
        return [], []
    if not isinstance(mask, BlockMask):
        raise InvalidInput(f"mask must be a BlockMask or None, got {type(mask).__name__}")
    tensors = [*mask.full, *mask.partial, mask.lo, mask.hi, mask.rules, mask.bits]
    stored, partial, longest, exact = mask.sizes
    sizes = [mask.q_len, mask.kv_len, *mask.block, mask.batch, mask.heads, stored, partial, longest]
    # The op takes ints, not bools, where torch.compile has made any of them symbolic.
    return tensors, [*sizes, 1 if exact else 0, 1 if mask.pure else 0]


def _mask_of(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> BlockMask | None:
    """The mask that `_flat` took apart, the same object as long as its tensors live."""
    if not tensors:
        return None
    facts = tuple(numbers), tuple(None if x is None else (x.data_ptr(), x.shape) for x in tensors)
    known = _MASKS.get(tensors[0])
    if known is None or known[1] != facts:
        known = _put_together([None if x is None else x.detach() for x in tensors], numbers), facts
        _MASKS[tensors[0]] = known
    return known[0]


def _put_together(tensors: Sequence[Any], numbers: Sequence[int]) -> BlockMask:
    q_len, kv_len, bq, bk, batch, heads, stored, partial, longest, exact, pure = numbers
    return BlockMask.unchecked(
        q_len=q_len,
        kv_len=kv_len,
        block=(bq, bk),
        batch=batch,
        heads=heads,
        full=BlockLists(*tensors[:3]),
        partial=BlockLists(*tensors[3:6]),
        lo=tensors[6],
        hi=tensors[7],
        rules=tensors[8],
        bits=tensors[9],
        sizes=Sizes(stored, partial, longest, bool(exact)),
        pure=bool(pure),
    )


# Plans are kept from call to call; the memory of a graph that torch.compile captures by itself would not outlive them.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)


@torch.library.custom_op("sparsek::attention", mutates_args=(), tags=_TAGS)
def _attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
    return_lse: bool,
    kernel: str | None,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        made = _mask_of(mask, numbers)
        if return_lse:
            return attention(q, k, v, made, scale=scale, return_lse=True, kernel=kernel)
        return attention(q, k, v, made, scale=scale, kernel=kernel), q.new_empty(0)


@_attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
    return_lse: bool,
    kernel: str | None,
) -> tuple[Tensor, Tensor]:
    operands.check_tensors(q, k, v)
    operands.checked_scale(scale, q.shape[3])
    if mask:
        operands.check_mask(q, k, _put_together(mask, numbers))
    if not return_lse:
        return operands.empty_out(q, v.shape[3]), q.new_empty(0)
    lse = q.new_empty(q.shape[:3], dtype=operands.lse_dtype(q.dtype))
    return operands.empty_out(q, v.shape[3]), lse


def _refuse_gradient(ctx: Any, *grads: Tensor) -> NoReturn:
    raise InvalidInput(operands.NO_GRADIENT)


_attention_op.register_autograd(_refuse_gradient)
