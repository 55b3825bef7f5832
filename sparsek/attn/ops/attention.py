"""Block-sparse attention with gradients: checks, then a plan and its launch, or the torch.library op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from sparsek.attn.mask.convert.argument import MaskLike
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.quantized_heads import QuantizedHeads
from sparsek.attn.ops.attention_autograd import differentiate, run_forward, transform
from sparsek.attn.ops.attention_op import through_op
from sparsek.attn.ops.attention_plans import ATTENTION, ATTENTION_BACKWARD, ATTENTION_FP8, recorded
from sparsek.attn.ops.foreign_options import refuse
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import Attended, AttentionPlan, every_block
from sparsek.attn.plan.attention_fp8 import AttendedFp8, AttentionFp8Plan
from sparsek.attn.plan.attention_grad import AttentionGradPlan, Differentiated
from sparsek.attn.reference.scores import PLAIN, Scores
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import check_no_tangent
from sparsek.engine.call import recorded_calls, transforms
from sparsek.engine.call.autocast import autocasts, follow_autocast
from sparsek.engine.call.recorded_calls import Slot
from sparsek.engine.plan.plan import check_plan

Heads = TypeVar("Heads", Tensor, QuantizedHeads)

_compiling = torch.compiler.is_compiling  # a name, because a cached call looks it up each time


@overload
def attention(
    q: Heads,
    k: Heads,
    v: Heads,
    mask: MaskLike | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    plan: AttentionPlan | AttentionFp8Plan | None = None,
    kernel: str | None = None,
    deterministic: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor: ...
@overload
def attention(
    q: Heads,
    k: Heads,
    v: Heads,
    mask: MaskLike | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[True],
    plan: AttentionPlan | AttentionFp8Plan | None = None,
    kernel: str | None = None,
    deterministic: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: MaskLike | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    plan: Any = None,
    kernel: str | None = None,
    deterministic: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    **refused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax(scale * q k^T) v over the keys that `mask` admits. Only the blocks that it stores are computed.

    For batch item b, head h and query i, with h' = h // (Hq / Hkv) and j over the keys that the query sees:

        s[j]   = scale * sum_d q[b, h, i, d] * k[b, h', j, d]
        lse    = log(sum_j exp(s[j]))
        out[d] = sum_j exp(s[j] - lse) * v[b, h', j, d]

    A query that sees no key gets out = 0 and lse = -inf. `softcap`, `alibi_slopes` and `sink_logits` change the scores,
    in this order, before the mask:

        s[j]   = softcap * tanh(s[j] / softcap)
        s[j]   = s[j] - alibi_slopes[b, h] * |i + T - S - j|
        lse    = log(exp(sink_logits[h]) + sum_j exp(s[j]))

    Args:
        q: Queries [B, Hq, S, D]. Tensors of [B, S, H, D] go in as `x.transpose(1, 2)`, without a copy.
        k: Keys [B, Hkv, T, D]. Hq is a multiple of Hkv, and head h of q reads head h // (Hq / Hkv) of k and v.
        v: Values [B, Hkv, T, Dv]. All three have one dtype and one device, and any strides; none is copied. GPU kernels
            take bf16 and fp16: hopper.attention_fwd with D and Dv up to 256 that are multiples of 8,
            portable.attention_fwd with D and Dv of 32, 64, 96, 128, 192 or 256. The CPU and the reference also take
            float32, float64 and any D. Or all three are QuantizedHeads, which `quantize_heads` makes: attention in FP8
            by hopper.attention_fp8, with D up to 256 and Dv up to 128 that are multiples of 16, or the reference.
        mask: Which keys a query sees; all of them for None. On the device of q.

            - A `BlockMask` of S queries and T keys, with 1 or B batch items and 1, Hkv or Hq heads.
            - A `MaskPolicy`: its mask for S and T, made once for each pair of lengths; with `topk` for each call.
            - A bool tensor that broadcasts to [B, Hq or Hkv, S, T], true where a query sees a key, as `attn_mask` of
              scaled_dot_product_attention; three dims are [1 or Hq, S, T]. It becomes `BlockMask.from_dense(mask)`,
              with blocks of 128, in O(S * T).
            - A FlexAttention `BlockMask`. It becomes `BlockMask.from_flex(mask)`.
            - `TokenLists`, the blocks of each query: their mask is made in each call, in O(S) for lists of one length.

            The conversion of a tensor or a FlexAttention mask is kept as long as that object lives, and later calls
            look it up. It is repeated after an in-place write to the tensor, or to a tensor that `mask_mod` reads by
            its closure or as a global. A tensor made in inference mode counts no writes and is converted every time.
        is_causal: Query i sees keys 0 to i, as in scaled_dot_product_attention: where S and T differ, the mask is
            aligned to the first query and the first key. `MaskPolicy()` and `BlockMask.causal` are aligned to the last
            ones. Not together with `mask`.
        scale: The factor of the scores, from 1e-30 to 1e30; D**-0.5 by default.
        return_lse: Whether to return lse as well.
        plan: The result of `plan_attention` for this mask, with return_lse=True if a gradient is wanted. Without it a
            plan is made at the first call and kept with the mask.
        kernel: A name from the table of kernels ("hopper.attention_fwd"). It runs or raises `Unsupported`. The backward
            pass uses the kernel of the same family; where a gradient is wanted, this call checks that one too.
        deterministic: Whether the sums of the gradients have a fixed order: same inputs, same bits. With False a kernel
            may add in any order, where that is faster.
        softcap: The bound of capped scores, as in Gemma 2: 0 for none, or from 1e-3 to 1e3.
        alibi_slopes: float32 [Hq] or [B, Hq]: a bias for each head that grows with the distance between query and key,
            as in flash-attention. The last query stands at the last key, whatever q_offset the mask was built with.
            They get no gradient, and must not require one.
        sink_logits: [Hq] in float32 or q's dtype: the score of a learned sink of each head, which takes part in the
            softmax and has no value, as in gpt-oss (`s_aux` of flash-attention). Finite, or -inf for none: others raise
            InvalidInput on a CPU; on a GPU, where that would wait, they make NaN of their head. A query that sees no
            key gets out = 0 and lse = its sink.
        **refused: Options of other libraries (dropout_p, attn_bias, score_mod and others). Values that change
            nothing pass, such as None, dropout_p=0.0 and enable_gqa=True; others raise InvalidInput, with what to do
            instead.

    Returns:
        out [B, Hq, S, Dv] in the dtype of q, for QuantizedHeads in q.source_dtype; in memory [B, S, Hq, Dv] if q is.
        With return_lse (out, lse), lse [B, Hq, S] in float32, or float64 for float64.

    Raises:
        InvalidInput: For operands that do not fit together; the message gives shapes and a cure.
        Unsupported: If no kernel can run, with the reasons of each.

    Gradients: for q, k, v and sink_logits, also through lse, once: their own gradients raise InvalidInput. The backward
    pass keeps q, k, v, out and lse, and no memory that grows with the number of blocks. It computes the gradients of q,
    k and v if one is wanted. They are dense in memory, [B, L, H, E] where the operand is. A gradient of out is copied
    first if its last dim is not contiguous or it is not aligned as q, k and v are. Attention in FP8 has no gradients:
    it raises InvalidInput where one is wanted.

    Synchronization: once planned, GPU kernels do not wait for the device. They allocate outputs and, where a plan cuts
    long tiles, a workspace. The host learns the exact size of lists that were made on a GPU after the first call, which
    then plans again; after `mask.verify(wait=True)` the first plan is final. Same plan, same bits.

    Under torch.autocast q, k and v are cast as by scaled_dot_product_attention, except with `plan`. torch.compile
    traces one node, and one more for a policy that reads q and k. It converts bool tensors and FlexAttention masks
    between two graphs; with fullgraph=True make the BlockMask outside.

    Sources: online softmax, Milakov and Gimelshein, arXiv:1805.02867; tiling and recomputation of weights in the
    backward pass, FlashAttention, Dao et al., arXiv:2205.14135; overlap of products and softmax on Hopper,
    FlashAttention-3, Shah et al., arXiv:2407.08608; softcap, Gemma 2, arXiv:2408.00118; ALiBi, Press et al.,
    arXiv:2108.12409; learned sinks, gpt-oss, arXiv:2508.10925.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = torch.randn(1, 8, 1000, 64), torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64)
        >>> mask = sk.BlockMask.sliding_window(1000, window=256, sinks=4)
        >>> sk.attention(q, k, v, mask).shape
        torch.Size([1, 8, 1000, 64])
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.to_dense(), enable_gqa=True)
        >>> torch.allclose(sk.attention(q, k, v, mask), dense, atol=1e-5)
        True
        >>> torch.equal(sk.attention(q, k, v, is_causal=True), sk.attention(q, k, v, sk.MaskPolicy()))
        True
    """
    if type(return_lse) is not bool or type(deterministic) is not bool:
        arguments.flag("return_lse", return_lse)
        arguments.flag("deterministic", deterministic)
    fp8 = q.__class__ is QuantizedHeads
    if autocasts() and plan is None and not fp8:
        q, k, v = follow_autocast(q, k, v)
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    plain = softcap.__class__ is float and not softcap and alibi_slopes is None and sink_logits is None
    scores = PLAIN if plain else Scores(softcap, alibi_slopes, sink_logits)
    made = AttendedFp8 if fp8 else Attended
    call = made(q, k, v, mask, scale, return_lse, kernel, deterministic, scores, plan)
    if refused or is_causal is not False or not (mask is None or isinstance(mask, BlockMask)):
        refuse("attention", refused)
        call.convert_mask(is_causal)
    both = route(call)
    return cast(Any, both if return_lse else both[0])


def route(call: Attended) -> Any:
    """(out, lse) of a call: a recorded one's, or by the torch.library op, torch.func, autograd or the plan alone."""
    plan, slot = call.plan, recorded_calls.UNBOUND
    if plan is not None:
        _check_plan(call)
    else:
        if not _compiling():
            slot = recorded(call, call.form, call.tensors, counting=True)
            if slot.__class__ is not Slot:
                return slot
        if _traced() and call.__class__ is Attended and not transforms.active():
            check_no_tangent(operands.NO_TANGENT, *call.tensors, call.scores.sink_logits)  # the op drops them
            return through_op(call)
    call.check()
    if call.mask is None:
        call.mask = every_block(call.q, call.k)
    if call.__class__ is AttendedFp8:
        call.refuse_gradient()
    if plan is not None and not plan.problem.lse and call.learns:
        raise InvalidInput(
            "gradients need lse, and plan was made with return_lse=False; use plan_attention(..., return_lse=True)"
        )
    check_no_tangent(operands.NO_TANGENT, *call.tensors, call.scores.sink_logits)
    if torch._C._are_functorch_transforms_active():
        return transform(call)
    return differentiate(call, slot) if call.learns else run_forward(call, slot)


@overload
def plan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None = None,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    return_lse: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> AttentionPlan: ...
@overload
def plan_attention(
    q: QuantizedHeads,
    k: QuantizedHeads,
    v: QuantizedHeads,
    mask: MaskLike | None = None,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    return_lse: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> AttentionFp8Plan: ...
def plan_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: MaskLike | None = None,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    return_lse: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> AttentionPlan | AttentionFp8Plan:
    """Return the plan that `attention(q, k, v, mask)` uses without autocast: frozen, callable, with `explain()`.

    The schedule is made on the mask's device, without a host sync.

    Args:
        q: Queries [B, Hq, S, D], as in `attention`. On any device, meta too, if `device` is given.
        k: Keys [B, Hkv, T, D].
        v: Values [B, Hkv, T, Dv].
        mask: As in `attention`. A plan that is to be called needs the BlockMask itself, because it runs for that only.
        kernel: A name from the table of kernels. Without it the one predicted to be fastest.
        config: A config of the named kernel, by its text or by some of its fields; default: its own choice.
        device: The name of a card ("h200"). The plan is then a prediction for that card and cannot be called.
        return_lse: Whether to plan for lse too, which calls with a gradient need.
        softcap: As in `attention`. The plan takes calls with any softcap above 0, or with none, as here.
        alibi_slopes: As in `attention`. Calls need slopes if they are given here; so do `sink_logits`.
        sink_logits: As in `attention`.

    Returns:
        An `AttentionPlan`, for QuantizedHeads an `AttentionFp8Plan`. Call it, `plan(q, k, v, mask)`, or pass it on,
        `attention(q, k, v, mask, plan=plan)`.

    Raises:
        InvalidInput: For operands that do not fit together, and for an unknown kernel, config or card.
        Unsupported: If no kernel can run, with the reasons of each.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = torch.randn(3, 1, 4, 300, 64).unbind()
        >>> mask = sk.BlockMask.causal(300)
        >>> plan = sk.plan_attention(q, k, v, mask)
        >>> torch.equal(plan(q, k, v, mask), sk.attention(q, k, v, mask))
        True
        >>> sk.plan_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, device="h200").kernel
        'hopper.attention_fwd'
    """
    arguments.flag("return_lse", return_lse)
    fp8 = q.__class__ is QuantizedHeads
    kind, operation = (AttendedFp8, ATTENTION_FP8) if fp8 else (Attended, ATTENTION)
    scores = Scores(softcap, alibi_slopes, sink_logits)
    call: Attended = kind(q, k, v, mask, return_lse=return_lse, kernel=kernel, scores=scores)
    return _planned(call, call, operation, config, device)


def plan_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None = None,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    deterministic: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> AttentionGradPlan:
    """Return the plan that the backward pass of `attention(q, k, v, mask)` uses.

    Made on the mask's device, without a host sync: the schedule and, for kernels that iterate over key blocks, the
    transposed lists of the mask.

    Args:
        q: Queries [B, Hq, S, D], as in `attention`. On any device, meta too, if `device` is given.
        k: Keys [B, Hkv, T, D].
        v: Values [B, Hkv, T, Dv].
        mask: As in `plan_attention`.
        kernel: A name of a kernel of attention_backward ("hopper.attention_bwd").
        config: A config of the named kernel, by its text or by some of its fields.
        device: The name of a card ("h200"), as in `plan_attention`.
        deterministic: As in `attention`.
        softcap: As in `plan_attention`.
        alibi_slopes: As in `plan_attention`. Learned sinks are in lse: the plan does not depend on them.

    Returns:
        An `AttentionGradPlan`. `plan(q, k, v, mask, out, lse, grad)` returns (dq, dk, dv); it takes `scale`, `softcap`
        and `alibi_slopes` as the forward pass had them, and `grad_lse` where lse has a gradient.

    Raises:
        InvalidInput: For operands that do not fit together, and for an unknown kernel, config or card.
        Unsupported: If no kernel can run, with the reasons of each.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = torch.randn(3, 1, 4, 300, 64, dtype=torch.bfloat16).unbind()
        >>> sk.plan_attention_backward(q, k, v, sk.BlockMask.causal(300), device="h200").kernel
        'hopper.attention_bwd'
    """
    arguments.flag("deterministic", deterministic)
    scores = Scores(softcap, alibi_slopes)
    call = Attended(q, k, v, mask, kernel=kernel, deterministic=deterministic, scores=scores)
    return _planned(call, Differentiated(call), ATTENTION_BACKWARD, config, device)


def _planned(call: Attended, given: Any, operation: Any, config: Any, device: str | None) -> Any:
    """The plan of `given`, which is `call` or its gradients, after all checks."""
    here, unmasked = device is None, call.mask is None
    if call.kernel is not None:
        arguments.encodable("kernel", call.kernel)
    if torch._C._are_functorch_transforms_active():
        raise InvalidInput("plans are made outside of functions that torch.func transforms")
    if not (unmasked or isinstance(call.mask, BlockMask)):
        call.convert_mask(predicted=not here)
    call.check(here=here, planner=operation.plans.planner)
    if unmasked:
        call.mask = every_block(call.q, call.k, here)
    plan, mask = operation.plan(given, call.kernel, config, device), call.mask
    return replace(plan, mask=lambda: mask, unmasked=True) if unmasked else plan


def _traced() -> bool:
    """Whether torch.compile or a TorchDispatchMode records the call op by op."""
    return _compiling() or torch._C._len_torch_dispatch_stack() > 0


def _check_plan(call: Attended) -> None:
    fp8 = call.__class__ is AttendedFp8
    plans, origin = (AttentionFp8Plan, " of QuantizedHeads") if fp8 else (AttentionPlan, "")
    check_plan(call.plan, plans, f"plan_attention{origin}", call.kernel)
    if call.return_lse and not call.plan.problem.lse:
        raise InvalidInput("return_lse=True contradicts plan, made with return_lse=False")
