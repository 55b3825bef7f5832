"""attention: what it refuses, and in which words."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

import sparsek as sk
from sparsek.core.errors import InvalidInput
from tests.ops.tensors import qkv, window
from tests.refusals import refused


def test_a_plan_that_is_called_refuses_gradients_with_a_hint():
    tensors, mask = qkv(), window()
    plan = sk.plan_attention(*tensors, mask)
    for place in range(3):
        q, k, v = (x.clone().requires_grad_(at == place) for at, x in enumerate(tensors))
        refused(r"no gradient; attention\(q, k, v, mask, plan=plan\) has one", plan, q, k, v, mask)
        words = r"gradients need lse, .* use plan_attention\(..., return_lse=True"
        refused(words, sk.attention, q, k, v, mask, plan=plan)
        with torch.no_grad():
            assert torch.equal(sk.attention(q, k, v, mask), plan(q, k, v, mask))
        assert sk.plan_attention(q, k, v, mask, device="h200").seconds > 0


def change(place: int, make: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """A call with q, k or v replaced by what `make` makes of it."""

    def call(*tensors: Tensor) -> Any:
        q, k, v = (make(x) if at == place else x for at, x in enumerate(tensors))
        return sk.attention(q, k, v, window())

    return call


def planned_by(plan: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sk.attention(q, k, v, plan=plan)


def swapped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as [B, S, H, D]."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


Q, K, V = 0, 1, 2
# Calls of q [2, 4, 192, 32], k [2, 2, 192, 32] and v [2, 2, 192, 64].
BAD_OPERANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "q numpy": (
        change(Q, np.asarray),
        r"q must be a dense torch.Tensor \[B, Hq, S, D\], got ndarray",
    ),
    "k none": (change(K, lambda k: None), r"k must be a dense torch.Tensor \[B, Hkv, T, D\], got NoneType"),
    "v sparse": (change(V, lambda v: v.to_sparse()), r"v must be .* got layout torch.sparse_coo; .*to_dense"),
    "q 3-D": (change(Q, lambda q: q[0]), r"q must be \[B, Hq, S, D\], got 3-D \[4, 192, 32\]"),
    "v 5-D": (change(V, lambda v: v[None]), r"v must be \[B, Hkv, T, Dv\], got 5-D"),
    "dtypes": (change(K, lambda k: k.double()), "q is torch.float32 and k torch.float64; cast one of them"),
    "ints": (lambda q, k, v: sk.attention(q.int(), k.int(), v.int()), "dtype torch.int32 is not supported"),
    "devices": (change(V, lambda v: v.to("meta")), "v is on the meta device and holds nothing"),
    "negated": (change(Q, torch._neg_view), r"q is a lazily negated view.*call .resolve_neg\(\)"),
    "batch": (change(Q, lambda q: q[:1]), "q, k and v have 1, 2 and 2 batch items; they must have as many"),
    "heads of v": (change(V, lambda v: v[:, :1]), "k has 2 heads and v 1; they must have as many"),
    "heads": (change(Q, lambda q: q[:, :3]), "q has 3 heads and k 2; q needs a positive multiple"),
    "fewer heads": (change(Q, lambda q: q[:, :1]), "q has 1 heads and k 2; q needs a positive multiple"),
    "no heads": (change(Q, lambda q: q[:, :0]), "q has 0 heads and k 2; q needs a positive multiple"),
    "values": (change(V, lambda v: v[:, :, :100]), "k has 192 keys and v 100 values; every key needs one"),
    "dims": (change(K, lambda k: k[..., :16]), "q has head dim 32 and k 16; they must agree"),
    "no dim": (lambda q, k, v: sk.attention(q[..., :0], k[..., :0], v), "q has head dim 0 and k 0"),
    "no dim of v": (change(V, lambda v: v[..., :0]), "v has head dim 0; it must be at least 1"),
    "mask": (
        lambda q, k, v: sk.attention(q, k, v, "causal"),  # type: ignore[call-overload]
        "mask is a builtins.str; it must be a sparsek BlockMask, a MaskPolicy, TokenLists, a bool tensor, a Flex",
    ),
    "mask function": (
        lambda q, k, v: sk.attention(q, k, v, lambda b, h, q, k: q >= k),  # type: ignore[call-overload]
        r"a function \(b, h, q_idx, kv_idx\) becomes a mask by BlockMask.from_mask_mod\(fn, B, H, S, T\)",
    ),
    "mask of a plan": (
        lambda q, k, v: sk.plan_attention(q, k, v)(q, k, v, torch.ones(192, 192).bool()),
        "this plan was made for another mask",
    ),
    "mask of floats": (
        lambda q, k, v: sk.attention(q, k, v, torch.zeros(192, 192)),
        r"mask is torch.float32 \[192, 192\], a bias, and attention adds none: where .* pass mask == 0; for any",
    ),
    "mask of ints": (
        lambda q, k, v: sk.attention(q, k, v, torch.ones(192, 192, dtype=torch.int64)),
        r"mask is torch.int64 \[192, 192\]; it must be bool, true where .*: mask.bool\(\)",
    ),
    "mask of other queries": (
        lambda q, k, v: sk.attention(q, k, v, torch.ones(190, 192).bool()),
        r"mask is \[190, 192\]; it must broadcast to \[B, Hq or Hkv, S, T\], here \[2, 4 or 2, 192, 192\]$",
    ),
    "mask of other heads": (
        lambda q, k, v: sk.attention(q, k, v, torch.ones(3, 192, 192).bool()),
        r"mask is \[3, 192, 192\]; it must broadcast to \[B, Hq or Hkv, S, T\], here \[2, 4 or 2, 192, 192\]$",
    ),
    "mask per batch item or head of k": (
        lambda q, k, v: sk.attention(q, k, v, torch.ones(2, 192, 192).bool()),
        r"; the first of three dims is heads of q, as in torch, .* mask\[:, None\] for .*, mask\[None\] for one per",
    ),
    "mask per batch item": (
        lambda q, k, v: sk.attention(q, k[:, :1], v[:, :1], torch.ones(2, 1, 192).bool()),
        r"and q has 4: pass mask\[:, None\] for a mask per batch item$",
    ),
    "mask per head of k": (
        lambda q, k, v: sk.attention(q[:1], k[:1], v[:1], torch.ones(2, 192, 192).bool()),
        r"and q has 4: pass mask\[None\] for one per head of k$",
    ),
    "mask of five dims": (
        lambda q, k, v: sk.attention(q, k, v, torch.ones(1, 2, 4, 192, 192).bool()),
        r"mask is \[1, 2, 4, 192, 192\]; it must broadcast",
    ),
    "mask and is_causal": (
        lambda q, k, v: sk.attention(q, k, v, window(), is_causal=True),
        "mask and is_causal=True are both given, and scaled_dot_product_attention refuses both too; give one",
    ),
    "is_causal": (
        lambda q, k, v: sk.attention(q, k, v, is_causal=1),  # type: ignore[call-overload]
        "is_causal is 1; it must be True or False",
    ),
    "lengths and heads swapped, block mask": (
        lambda q, k, v: sk.attention(*swapped(q, k, v), window()),
        r"mask is for 192 queries and 192 keys; q has 4 and k 2; .* pass x.transpose\(1, 2\) for each",
    ),
    "lengths and heads swapped, bool": (
        lambda q, k, v: sk.attention(*swapped(q, k, v), torch.ones(192, 192).bool()),
        r"here \[2, 192, 4, 2\]; q and k seem to be \[B, S, H, D\], .* pass x.transpose\(1, 2\) for each",
    ),
    "lengths and heads swapped, other lengths": (
        lambda q, k, v: sk.attention(*swapped(q[:, :, :50], k, v)),
        r"q has 50 heads and k 192; .* pass x.transpose\(1, 2\) for each",
    ),
    "queries of mask": (
        lambda q, k, v: sk.attention(q[:, :, :100], k, v, window()),
        "mask is for 192 queries and 192 keys; q has 100 and k 192. Build it with q_len=100, kv_len=192",
    ),
    "lengths of a mask_mod": (
        lambda q, k, v: sk.attention(
            q[:, :, :100],
            k,
            v,
            sk.BlockMask.from_mask_mod(noop_mask, None, None, 192, 192),
        ),
        r"mask is for 192 queries and 192 keys; q has 100 and k 192. Build it with Q_LEN=100, KV_LEN=192$",
    ),
    "lengths of a FlexAttention mask": (
        lambda q, k, v: sk.attention(
            q[:, :, :100], k, v, create_block_mask(noop_mask, None, None, 192, 192, "cpu", 64)
        ),
        r"mask is for 192 queries and 192 keys; q has 100 and k 192. Build it with Q_LEN=100, KV_LEN=192$",
    ),
    "lengths of a dense mask": (
        lambda q, k, v: sk.attention(
            q[:, :, :100], k, v, sk.BlockMask.from_dense(torch.ones(192, 192).bool())
        ),
        r"mask is for 192 queries and 192 keys; q has 100 and k 192. Build it of a tensor \[..., 100, 192\]$",
    ),
    "keys of mask": (
        lambda q, k, v: sk.attention(q, k[:, :, :100], v[:, :, :100], window()),
        "mask is for 192 queries and 192 keys; q has 192 and k 100",
    ),
    "heads of mask": (
        lambda q, k, v: sk.attention(q, k, v, sk.BlockMask.per_head([window()] * 3)),
        "mask has 3 heads; it needs 1 for all, 2 as k, or 4 as q",
    ),
    "batch of mask": (
        lambda q, k, v: sk.attention(q, k, v, sk.BlockMask.per_batch([window()] * 3)),
        "mask has 3 batch items and q 2; mask needs 1 or as many",
    ),
    "meta": (
        lambda q, k, v: sk.attention(q.to("meta"), k.to("meta"), v.to("meta"), window()),
        r"q is on the meta device and holds nothing; plan_attention\(..., device='h200'\) predicts a call",
    ),
    "meta backward": (
        lambda q, k, v: sk.plan_attention_backward(q.to("meta"), k.to("meta"), v.to("meta")),
        r"q is on the meta device and holds nothing; plan_attention_backward\(..., device='h200'\) predicts",
    ),
    "kernel of the backward pass": (
        lambda q, k, v: sk.attention(q, k, v, kernel="cpu.attention_bwd"),
        "no kernel of attention is called 'cpu.attention_bwd', which is .*; that of its family is 'cpu.attention'",
    ),
    "deterministic": (
        lambda q, k, v: sk.attention(q, k, v, deterministic="no"),  # type: ignore[call-overload]
        "deterministic is 'no'; it must be True or False",
    ),
    "deterministic plan": (
        lambda q, k, v: sk.plan_attention_backward(q, k, v, deterministic=1),  # type: ignore[arg-type]
        "deterministic is 1; it must be True or False",
    ),
    "kernel": (
        lambda q, k, v: sk.attention(q, k, v, kernel="hopper.spmm"),
        "no kernel of attention is called 'hopper.spmm'; known: hopper.attention_fwd, portable.attention_fwd, ",
    ),
    "kernel and plan": (
        lambda q, k, v: sk.attention(
            q, k, v, plan=sk.plan_attention(q, k, v, kernel="cpu.attention"), kernel="hopper.attention_fwd"
        ),
        "kernel='hopper.attention_fwd' contradicts plan, which uses cpu.attention",
    ),
    "lse and plan": (
        lambda q, k, v: sk.attention(q, k, v, plan=sk.plan_attention(q, k, v), return_lse=True),
        "return_lse=True contradicts plan, made with return_lse=False",
    ),
    "plan": (lambda *tensors: planned_by("fast", *tensors), "plan must come from plan_attention, got str"),
    "plan of spmm": (
        lambda *tensors: planned_by(
            sk.plan_spmm(sk.random_bsr(64, 64, 32, 0.5), torch.ones(64, 1)), *tensors
        ),
        "plan must come from plan_attention, got SpmmPlan",
    ),
    "config": (
        lambda q, k, v: sk.plan_attention(q, k, v, config=3),
        "config= belongs to one kernel; name it with kernel=",
    ),
    "config of another": (
        lambda q, k, v: sk.plan_attention(q, k, v, kernel="cpu.attention", config=3),
        "3 is no config of cpu.attention for this problem; its default is ",
    ),
    "card": (
        lambda q, k, v: sk.plan_attention(q, k, v, device="b200"),
        "no facts about a card named 'b200'; known: h200, .*, cpu",
    ),
}


@pytest.mark.parametrize("name", BAD_OPERANDS)
def test_bad_operands_are_told_what_where_and_what_would_be_right(name: str):
    call, text = BAD_OPERANDS[name]
    refused(text, call, *qkv())


def test_where_autocast_is_on_a_dtype_that_does_not_fit_is_told_what_to_do():
    q, k, v = qkv()
    plan = sk.plan_attention(q, k, v)
    advice = (
        "torch.autocast casts neither float64 nor the operands of plan=: cast all three, to torch.bfloat16"
    )
    for there in (True, False):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=there),
            pytest.raises(InvalidInput, match=r"q is torch.float32 and k torch.bfloat16; cast one") as raised,
        ):
            sk.attention(q, k.bfloat16(), v, plan=plan)
        assert (advice in str(raised.value)) is there


@pytest.mark.parametrize(
    "scale", [math.inf, math.nan, 0, -1.0, 1e-46, 1e39, True, "1", torch.tensor(1.0)], ids=repr
)
def test_a_scale_that_float32_does_not_hold_is_refused(scale: Any):
    tensors, mask = qkv(), window()
    for call in (sk.attention, sk.plan_attention(*tensors, mask)):
        refused("it must be a finite number from 1e-30 to 1e", call, *tensors, mask, scale=scale)


def test_a_nan_score_is_told_where_its_mask_is_used():
    scores = torch.ones(1, 1, 3, 3)
    scores[0, 0, 1, 1] = torch.nan
    refused("NaN", lambda: sk.attention(*qkv(), sk.BlockMask.topk(scores, 2, seq_len=192, block=64)))


def test_a_prediction_refuses_to_be_called_and_says_what_would_be_right():
    tensors, mask = qkv(dtype=torch.bfloat16), window()
    plan = sk.plan_attention(*tensors, mask, device="h200")
    assert not plan.ready
    for call in (plan, lambda *all_: sk.attention(*all_, plan=plan)):
        refused("prediction for NVIDIA H200; plan with operands on that card", call, *tensors, mask)


PLANNED: dict[str, tuple[Callable[..., tuple[Any, ...]], str]] = {
    "mask": (lambda q, k, v, m: (q, k, v, window()), "another mask; call plan_attention"),
    "no mask": (lambda q, k, v, m: (q, k, v), "another mask; call plan_attention"),
    "batch": (
        lambda q, k, v, m: (q[:1], k[:1], v[:1], m),
        r"takes fp32 q \[2, 4, 192, 32\] and v \[2, 2, 192, 64\]; got torch.float32 \[1, 4, 192, 32\]",
    ),
    "heads": (lambda q, k, v, m: (q[:, :2], k, v, m), r"takes fp32 q .* got torch.float32 \[2, 2, 192, 32\]"),
    "dim of v": (lambda q, k, v, m: (q, k, v[..., :32], m), r"got .* and \[2, 2, 192, 32\]"),
    "dtype": (lambda q, k, v, m: (q.half(), k.half(), v.half(), m), "takes fp32 q .* got torch.float16"),
    "rows": (
        lambda q, k, v, m: (q.mT.contiguous().mT, k, v, m),
        "last dims of q, k and v that are contiguous",
    ),
    "alignment": (
        lambda q, k, v, m: (torch.cat((q, q[..., :1]), 3)[..., :-1], k, v, m),
        "pointers and strides of q, k and v that are multiples of 16 bytes",
    ),
    "operands": (lambda q, k, v, m: (q, k, None, m), "v must be a dense torch.Tensor"),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_refuses_other_operands(name: str):
    tensors, mask = qkv(), window()
    plan = sk.plan_attention(*tensors, mask)
    change, text = PLANNED[name]
    refused(text, plan, *change(*tensors, mask))


def test_a_plan_for_operands_that_are_not_aligned_takes_any():
    (q, k, v), mask = qkv(), window()
    plan = sk.plan_attention(q.mT.contiguous().mT, k, v, mask)
    assert torch.equal(plan(q, k, v, mask), sk.attention(q, k, v, mask))
