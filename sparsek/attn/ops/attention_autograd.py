"""Attention with gradients in eager mode, by torch.autograd.Function: a quarter of the host time of an op.

torch.func transforms these functions, unlike the ops of torch.library: grad, vjp and vmap work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention_args import flat_mask
from sparsek.attn.ops.attention_op import through_op
from sparsek.attn.ops.attention_plans import (
    ATTENTION,
    ATTENTION_BACKWARD,
    bound_to,
    differentiated,
    every_block,
    fixed,
)
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import Attended, AttentionPlan
from sparsek.attn.plan.attention_grad import Differentiated, Forward
from sparsek.attn.reference.scores import PLAIN, Scores
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.core.tracing import save_for_backward, saved_tensors, wants_gradient
from sparsek.engine.call import bound, transforms
from sparsek.engine.call.bound import Slot
from sparsek.engine.planning import same_family


@dataclass(slots=True, eq=False)  # a frozen one takes twice as long to make
class Call:
    """The settings of a call. `plan` gives lse; without one the mask's plan is used. `kernel`: a name, or None.

    `wanted`: whether a gradient is. `once`: the plan of a new mask is not kept. `scores` has no sinks, which are
    operands. The class hides the mask, a pytree, and the slopes from torch.func.
    """

    mask: BlockMask
    plan: AttentionPlan | None
    scale: float
    kernel: str | None
    deterministic: bool
    wanted: bool = True
    once: bool = False
    scores: Scores = PLAIN

    def all_scores(self, sinks: Tensor | None) -> Scores:
        """`scores` with these sinks."""
        return self.scores if sinks is None else replace(self.scores, sink_logits=sinks)


def check_untransformed(mask: BlockMask, slopes: Tensor | None) -> None:
    """InvalidInput for a mask, or slopes, that torch.func has wrapped."""
    for name, x in (("mask was", mask.full.starts), ("alibi_slopes were", slopes)):
        if x is not None and is_functorch_wrapped_tensor(x):
            those, it = ("this", "it") if x is not slopes else ("these", "them")
            raise InvalidInput(
                f"{those} {name} made inside a function that torch.func transforms; make {it} outside"
            )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor | None]:
    if call.kernel is not None and call.wanted:
        # Unsupported, with its reasons, where that one cannot give the gradients.
        given = Differentiated(q, k, v, call.mask, fixed(call.deterministic), scores=call.scores)
        p = given.problem(card_of(q.device))
        ATTENTION_BACKWARD.choose(p, same_family(call.kernel, "attention_backward"), None)
    if call.plan is None and transforms.traced():  # a TorchDispatchMode inside torch.func records the op
        settings = call.scale, True, call.kernel, call.deterministic, *call.all_scores(sinks).parts
        return through_op(q, k, v, call.mask, *settings)
    return run_forward(q, k, v, sinks, call, True)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    call: Call,
    lse: bool,
    slot: Slot = bound.UNBOUND,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of checked operands, by the given plan or the mask's."""
    given = Attended(q, k, v, call.mask, call.scale, lse, call.all_scores(sinks))
    if call.plan is not None:
        return call.plan.run(given, captured(q))
    return slot.run(lambda: ATTENTION.run(given, call.kernel, once=call.once))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, sinks, ctx.call = inputs
    save_for_backward(ctx, q, k, v, sinks, *output)
    ctx.set_materialize_grads(False)


@transforms.one_by_one
def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, grad_lse = grads
    q, k, v, sinks, out, lse = saved_tensors(ctx)
    grad = torch.zeros_like(out) if grad is None else grad
    # create_graph=True, or torch.func, also where that maps over gradients alone; otherwise there is nothing to record.
    recorded = torch.is_grad_enabled() or transforms.active()
    run = AttentionBackward.apply if recorded else AttentionBackward.forward
    learned = sinks if ctx.needs_input_grad[3] else None
    found = run(q, k, v, out, lse, grad, grad_lse, learned, ctx.call)
    wanted = zip(found[:3], ctx.needs_input_grad, strict=False)
    of_sinks = None if learned is None else found[3].sum(0).to(learned.dtype)
    return (*[x if needed else None for x, needed in wanted], of_sinks, None, None)


class Attention(torch.autograd.Function):
    """(out, lse) of q, k, v and sinks. Not for torch.func, whose way of saving tensors takes the host longer."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        call: Call,
        run: Callable[[], tuple[Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor | None]:
        output = run()
        _save(ctx, (q, k, v, sinks, call), output)
        return output

    backward = staticmethod(_backward)


_attention = bound.applied(Attention)


class Learned(NamedTuple):
    """Attention of the operands of a recorded call whose gradient autograd needs; see `bound.Slot.differentiate`.

    The fields are those of `Call`; `slopes` and `sinks`: whether the last operands are these.
    """

    scale: float
    kernel: str | None
    deterministic: bool
    once: bool
    softcap: float
    slopes: bool
    sinks: bool

    def __call__(self, mask: BlockMask | None, given: Sequence[Tensor], run: Callable[[], Any]) -> Any:
        """(out, lse)."""
        scale, kernel, deterministic, once, softcap, slopes, sinks = self
        q, k, v = given[:3]
        scores = Scores(softcap, given[-1 - sinks] if slopes else None) if softcap or slopes else PLAIN
        mask = every_block(q, k) if mask is None else mask
        call = Call(mask, None, scale, kernel, deterministic, True, once, scores)
        return _attention(q, k, v, given[-1] if sinks else None, call, run)


def differentiated_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, sinks: Tensor | None, call: Call, slot: Slot
) -> Any:
    """(out, lse) of checked operands, whose gradient autograd needs. `mask`: that of the caller."""
    run = functools.partial(_forward, q, k, v, sinks, call)
    if not slot.learns:
        return Attention.apply(q, k, v, sinks, call, run)
    scores = call.scores
    more = scores.softcap, scores.alibi_slopes is not None, sinks is not None
    return slot.differentiate(
        Learned(call.scale, call.kernel, call.deterministic, call.once, *more), mask, run
    )


def _no_tangent(ctx: Any, *tangents: Any) -> NoReturn:
    raise InvalidInput(operands.NO_TANGENT)


class TransformedAttention(torch.autograd.Function):
    """The same for torch.func."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)
    jvp = staticmethod(_no_tangent)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        call: Call,
    ) -> Any:
        _check_shared(in_dims[3])
        joined: Any = _joined(info.batch_size, in_dims, (q, k, v), call)
        # Under vmap requires_grad of an outer transform is not visible.
        wanted = call.wanted or wants_gradient(*joined, sinks)
        call = replace(call, wanted=wanted, scores=_repeated(info.batch_size, call.scores))
        return _apart(info.batch_size, TransformedAttention.apply(*joined, sinks, call))


class AttentionBackward(torch.autograd.Function):
    """(dq, dk, dv), and with sinks their gradient for each batch item, [B, Hq], which have no gradients themselves."""

    jvp = staticmethod(_no_tangent)

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None,
        sinks: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, ...]:
        more = "attention_backward", call.scale, call.kernel, fixed(call.deterministic), grad_lse is None
        tensors = (q, k, v, out, lse, grad) if grad_lse is None else (q, k, v, out, lse, grad, grad_lse)
        scores = call.all_scores(sinks)
        if scores is not PLAIN:
            more, tensors = (*more, scores.form), (*tensors, *scores.tensors)
        to, once = bound_to(call.mask), False
        slot: Any = bound.UNBOUND
        if to is not None and not torch.compiler.is_compiling():
            once, slot = to.once, bound.repeat(to.calls, more, (*tensors, *to.operands))
        if slot.__class__ is not Slot:
            return slot
        if transforms.traced():
            mask, numbers = flat_mask(call.mask)
            given = mask, numbers, call.scale, call.deterministic, call.kernel, *call.all_scores(sinks).parts
            found = torch.ops.sparsek.attention_backward(q, k, v, out, lse, grad, grad_lse, *given)
            return found if sinks is not None else found[:3]
        kernel = same_family(call.kernel, "attention_backward")
        forward = Forward(out, lse, call.scale)
        given = Differentiated(q, k, v, call.mask, fixed(call.deterministic), forward, grad, grad_lse, scores)
        return slot.run(lambda: differentiated(given, kernel, once))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise InvalidInput(operands.NO_SECOND_GRADIENT)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        *tensors, sinks, call = inputs
        _check_shared(in_dims[-2])
        joined = _joined(info.batch_size, in_dims, tensors, call)
        call = replace(call, scores=_repeated(info.batch_size, call.scores))
        return _apart(info.batch_size, AttentionBackward.apply(*joined, sinks, call))


def _joined(size: int, in_dims: tuple[int | None, ...], tensors: Any, call: Call) -> list[Tensor | None]:
    """Tensors [..., B, ...] of vmap as one batch of size * B items; tensors that it does not map over are repeated."""
    if call.mask.batch != 1:
        raise InvalidInput(
            f"vmap makes one batch of its own dim and the batch items, which must share a mask; got a mask of "
            f"{call.mask.batch} batch items"
        )
    made: list[Tensor | None] = []
    for x, dim in zip(tensors, in_dims, strict=False):
        if x is None:
            made.append(None)
            continue
        first = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        made.append(first.reshape(-1, *first.shape[2:]))
    return made


def _check_shared(dim: int | None) -> None:
    """InvalidInput if vmap maps over the sinks: its items become batch items, which share them."""
    if dim is not None:
        raise InvalidInput("vmap does not map over sink_logits: batch items share them")


def _repeated(size: int, scores: Scores) -> Scores:
    """For one batch of `size` * B items: slopes of each batch item, `size` times."""
    slopes = scores.alibi_slopes
    if slopes is None or slopes.dim() == 1:
        return scores
    return replace(scores, alibi_slopes=slopes.repeat(size, 1))


def _apart(size: int, results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)
