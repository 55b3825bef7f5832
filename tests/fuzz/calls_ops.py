"""Every public function of products and attention, with valid arguments for the fuzz. See `engine.Call`.

Objects made here are shared by all calls; what a call writes to is made anew. A name in brackets tells several calls of
one function apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor

import sparsek as sk
from sparsek.products.ops.linear import plan_layer
from sparsek.products.reference.epilogue import Epilogue
from tests.fuzz.engine import Call, Made

BF16 = torch.bfloat16


@lru_cache
def dense(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """N(0, 1) numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@lru_cache
def bsr(rows: int = 128, columns: int = 64, dtype: torch.dtype = torch.float32) -> sk.BSR:
    return sk.random_bsr(rows, columns, 32, 0.5, dtype=dtype)


@lru_cache
def two_four(kind: Any = sk.Semi24) -> Any:
    if kind is sk.BSR24:
        return sk.BSR24.from_bsr(sk.random_bsr(128, 64, 64, 1.0))
    return kind.from_dense(dense(128, 64))


@lru_cache
def fp8() -> sk.Quantized:
    return sk.quantize(bsr(dtype=BF16))


@lru_cache
def rounded() -> sk.QuantizedTensor:
    return sk.quantize(dense(48, 64, dtype=BF16))


@lru_cache
def heads(count: int, dim: int = 16) -> Tensor:
    """q, k or v of two batch items and 100 tokens."""
    return dense(2, count, 100, dim)


@lru_cache
def mask() -> sk.BlockMask:
    return sk.BlockMask.causal(100, block=64)


@lru_cache
def policy(**options: Any) -> sk.MaskPolicy:
    return sk.MaskPolicy(**options, block=64)


@lru_cache
def listed(heads: int = 1) -> Tensor:
    """Key blocks of 4 queries."""
    return torch.tensor([[[0, 2], [1, -1], [0, 1], [3, 0]]] * heads, dtype=torch.int32)


@lru_cache
def token_lists(queries: int = 100, block: int = 64) -> sk.TokenLists:
    """Lists for 2 heads of k."""
    draw = torch.Generator().manual_seed(0)
    return sk.TokenLists(torch.randint(-1, 3, (1, 2, queries, 2), generator=draw), block)


@lru_cache
def page_lists() -> sk.PageLists:
    return sk.PageLists.from_indices(listed(), (1, 16))


@lru_cache
def plan(name: str) -> Any:
    """A plan of each kind."""
    q, k, v = heads(4), heads(2), heads(2, 8)
    made: dict[str, Callable[[], Any]] = {
        "spmm": lambda: sk.plan_spmm(bsr(), dense(64, 48)),
        "right": lambda: sk.plan_spmm(dense(48, 128), bsr()),
        "semi24": lambda: sk.plan_spmm(two_four(), dense(64, 48)),
        "layer24": lambda: plan_layer(dense(48, 64), two_four()),
        "fp8": lambda: sk.plan_spmm(fp8(), dense(64, 48, dtype=BF16)),
        "layer8": lambda: plan_layer(dense(48, 64, dtype=BF16), fp8()),
        "sddmm": lambda: sk.plan_sddmm(dense(128, 48), dense(48, 64), bsr().pattern),
        "spgemm": lambda: sk.plan_spgemm(bsr(), bsr(64, 96)),
        "attention": lambda: sk.plan_attention(q, k, v, mask(), return_lse=True),
        "backward": lambda: sk.plan_attention_backward(q, k, v, mask()),
        "paged": lambda: sk.plan_attention_paged(**PAGED, return_lse=True),
        "linear": lambda: sk.choose_format(
            dense(48, 64), dense(128, 64), formats=["dense", "bsr"], block=32, keep=0.5
        ),
    }
    return made[name]()


@lru_cache
def forward() -> tuple[Tensor, Tensor]:
    return sk.attention(heads(4), heads(2), heads(2, 8), mask(), return_lse=True)


def function(called: Callable[..., Any], **arguments: Any) -> Callable[[Random], Made]:
    """The same call each time."""
    return lambda random: (called, dict(arguments))


def written(called: Callable[..., Any], **arguments: Any) -> Callable[[Random], Made]:
    """The same with an `out` [128, 48] of its own."""
    return lambda random: (called, {**arguments, "out": torch.ones(128, 48)})


MATRIX = "BSR Semi24 BSR24 Quantized"
DENSE = "tensor QuantizedTensor"
NAMED = {"kernel": "text none"}
NUMBERS = {"alpha": "int float", "beta": "int float"}
FACTORS = dict.fromkeys("AB", f"{MATRIX} {DENSE}")  # where both are drawn, either may be the sparse one
PRODUCT = {**NUMBERS, **NAMED, **FACTORS, "out": "tensor none", "dtype": "none dtype"}
LAYER = {**NAMED, "W": f"{MATRIX} tensor", "x": DENSE, "dtype": "none dtype"} | dict.fromkeys(
    ("bias", "activation", "residual"), "none tensor text"
)
PLANNED = {**PRODUCT, "device": "none text", "config": "none dict", "epilogue": "Epilogue", "W": "tensor BSR"}
SCORES = {"softcap": "float int", "alibi_slopes": "none", "sink_logits": "none"}
ATTENTION = {**NAMED, **SCORES, "mask": "none BlockMask", "scale": "none float int", "plan": "none"}
VARLEN = {**ATTENTION, "cu_seqlens_k": "none tensor", "mask": "none MaskPolicy BlockMask"}
PLACE = {"device": "none text device"}
POLICY = dict.fromkeys(("window", "stride", "topk"), "none int") | {"block": "int sequence"}
QKV = {"q": heads(4), "k": heads(2), "v": heads(2, 8)}
PACKED = {"q": dense(100, 4, 16), "k": dense(100, 2, 16), "v": dense(100, 2, 8)}
CU = torch.tensor([0, 40, 100], dtype=torch.int32)
PAGED: dict[str, Any] = {
    "q": dense(4, 4, 16),
    "cache": dense(6, 2, 16, 32),
    "block_table": torch.tensor([[5, 0, 3], [2, 4, 1]], dtype=torch.int32),
    "seq_lens": torch.tensor([40, 20], dtype=torch.int32),
    "cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32),
}
PAGED_ALSO = {
    **NAMED, "cache": "sequence", "mask": "none MaskPolicy PageLists", "scale": "none float int",
    "softcap": "int float",
    "max_seqlen_q": "none int", "max_seqlen_k": "none int", "k_scale": "none float int", "v_scale": "none float int",
    "sink_logits": "none tensor", "out": "none tensor", "device": "none text", "config": "none dict",
}  # fmt: skip
SAMPLED = {"X": dense(128, 48), "Y": dense(48, 64), "pattern": bsr().pattern}
X, B, BIAS, RESIDUAL = dense(48, 64), dense(64, 48), dense(128), dense(48, 128)
LOW = {"bias": BIAS.to(BF16), "residual": RESIDUAL.to(BF16)}
AFTER = Epilogue(0.5, BIAS, "gelu")
PLAIN = Epilogue()

CALLS: dict[str, Call] = {
    "spmm": Call(function(sk.spmm, A=bsr(), B=B, out=None, alpha=1.5, beta=0.0, kernel=None), PRODUCT),
    "spmm (out)": Call(written(sk.spmm, A=bsr(), B=B, alpha=2, beta=0.5, kernel="cpu.spmm"), PRODUCT),
    "spmm (right)": Call(function(sk.spmm, A=RESIDUAL, B=bsr(), alpha=1, kernel=None), PRODUCT),
    "spmm (plan)": Call(
        function(sk.spmm, A=bsr(), B=B, plan=plan("spmm"), kernel=None), PRODUCT | {"plan": "none"}
    ),
    "spmm (2:4)": Call(
        function(sk.spmm, A=two_four(), B=B, alpha=2.0, kernel="reference.semi24", dtype=None), PRODUCT
    ),
    "spmm (2:4, plan)": Call(
        function(sk.spmm, A=two_four(), B=B, plan=plan("semi24")), PRODUCT | {"plan": "none"}
    ),
    "spmm (BSR24)": Call(function(sk.spmm, A=two_four(sk.BSR24), B=B, alpha=2.0, kernel=None), PRODUCT),
    "spmm (FP8)": Call(
        function(sk.spmm, A=fp8(), B=B.to(BF16), alpha=2.0, kernel=None, dtype=torch.float32), PRODUCT
    ),
    "spmm (FP8, out)": Call(written(sk.spmm, A=fp8(), B=rounded().mT, beta=1, dtype=None), PRODUCT),
    "spmm (FP8, plan)": Call(
        function(sk.spmm, A=fp8(), B=B.to(BF16), plan=plan("fp8"), kernel=None, dtype=BF16),
        PRODUCT | {"plan": "none"},
    ),
    "linear": Call(
        function(sk.linear, x=X, W=bsr(), bias=BIAS, activation="relu", residual=RESIDUAL, kernel=None), LAYER
    ),
    "linear (dense)": Call(
        function(
            sk.linear, x=X, W=dense(128, 64), bias=BIAS, activation="gelu", residual=RESIDUAL, dtype=None
        ),
        LAYER,
    ),
    "linear (2:4)": Call(
        function(
            sk.linear,
            x=X,
            W=two_four(),
            bias=BIAS,
            activation="silu",
            residual=RESIDUAL,
            kernel="reference.semi24",
        ),
        LAYER,
    ),
    "linear (FP8)": Call(
        function(sk.linear, x=X.to(BF16), W=fp8(), activation="gelu_tanh", dtype=BF16, **LOW), LAYER
    ),
    "linear (FP8, rounded)": Call(
        function(sk.linear, x=rounded(), W=fp8(), kernel=None, dtype=None, **LOW), LAYER
    ),
    "swiglu": Call(
        function(sk.swiglu, x=X, W_gate=bsr(), W_up=two_four(), kernel=None),
        LAYER | {"W_gate": MATRIX, "W_up": MATRIX},
    ),
    "mlp": Call(
        function(sk.mlp, x=X, W_up=bsr(), W_down=bsr().T, activation="silu", kernel=None),
        LAYER | {"W_up": f"tensor {MATRIX}", "W_down": f"tensor {MATRIX}"},
    ),
    "swiglu (FP8)": Call(function(sk.swiglu, x=rounded(), W_gate=fp8(), W_up=fp8(), kernel=None), LAYER),
    "sddmm": Call(function(sk.sddmm, **SAMPLED, plan=None, kernel=None), NAMED),
    "sddmm (plan)": Call(
        function(sk.sddmm, **SAMPLED, plan=plan("sddmm"), kernel="reference.sddmm"),
        NAMED | {"plan": "none"},
    ),
    "spgemm": Call(
        function(sk.spgemm, A=bsr(), B=bsr(64, 96), out="bsr", kernel=None), NAMED | {"out": "BlockPattern"}
    ),
    "spgemm (plan)": Call(
        function(sk.spgemm, A=bsr(), B=bsr(64, 96), out="dense", plan=plan("spgemm"), kernel=None),
        NAMED | {"plan": "none"},
    ),
    "attention": Call(
        function(
            sk.attention,
            **QKV,
            mask=mask(),
            scale=0.5,
            return_lse=True,
            plan=None,
            kernel=None,
            deterministic=True,
        ),
        ATTENTION,
    ),
    "attention (scores)": Call(
        function(
            sk.attention,
            **QKV,
            mask=mask(),
            softcap=5.0,
            alibi_slopes=dense(4).abs(),
            sink_logits=dense(4),
        ),
        ATTENTION,
    ),
    "attention (plan)": Call(
        function(
            sk.attention,
            **QKV,
            mask=mask(),
            scale=None,
            return_lse=True,
            plan=plan("attention"),
            kernel="cpu.attention",
        ),
        ATTENTION,
    ),
    "attention (lists)": Call(
        function(sk.attention, **QKV, mask=token_lists(), scale=0.5, sink_logits=dense(4)), ATTENTION
    ),
    "attention_varlen (lists)": Call(
        function(sk.attention_varlen, **PACKED, cu_seqlens_q=CU, cu_seqlens_k=None, mask=token_lists()),
        VARLEN,
    ),
    "attention_varlen": Call(
        function(
            sk.attention_varlen,
            **PACKED,
            cu_seqlens_q=CU,
            cu_seqlens_k=CU,
            mask=policy(window=16),
            scale=None,
            return_lse=False,
            deterministic=False,
        ),
        VARLEN,
    ),
    "attention_varlen (top-k)": Call(
        function(
            sk.attention_varlen,
            **PACKED,
            cu_seqlens_q=CU,
            cu_seqlens_k=None,
            mask=policy(topk=1),
            softcap=5.0,
            alibi_slopes=dense(4),
            sink_logits=dense(4),
        ),
        VARLEN,
    ),
    "attention_paged": Call(
        function(
            sk.attention_paged,
            **PAGED,
            mask=None,
            max_seqlen_q=4,
            max_seqlen_k=48,
            causal=True,
            scale=0.5,
            softcap=2.0,
            sink_logits=dense(4),
            k_scale=None,
            v_scale=1.0,
            out=None,
            return_lse=True,
            kernel=None,
            check=True,
        ),
        PAGED_ALSO,
    ),
    "attention_paged (lists)": Call(
        function(sk.attention_paged, **PAGED, mask=page_lists(), causal=False, check=False), PAGED_ALSO
    ),
    "attention_paged (token lists)": Call(
        function(sk.attention_paged, **PAGED, mask=token_lists(4, 16), causal=False), PAGED_ALSO
    ),
    "attention_paged (window)": Call(
        function(sk.attention_paged, **PAGED, mask=sk.MaskPolicy(window=8, sinks=2), kernel=None),
        PAGED_ALSO,
    ),
    "attention_paged (policy)": Call(
        function(sk.attention_paged, **PAGED, mask=policy(topk=1), scale=None), PAGED_ALSO
    ),
    "plan_attention_paged": Call(
        function(
            sk.plan_attention_paged, **PAGED, mask=None, kernel=None, config=None, device=None, softcap=1.0
        ),
        PAGED_ALSO,
    ),
    "Plan (paged)": Call(function(plan("paged"), **PAGED, mask=None), PAGED_ALSO),
    "PageLists": Call(
        function(
            sk.PageLists,
            full=page_lists().full,
            partial=page_lists().partial,
            heads=1,
            tiles=4,
            block=(1, 16),
            longest=2,
        ),
        {"full": "sequence", "partial": "sequence"},
    ),
    "PageLists.from_indices": Call(
        function(
            sk.PageLists.from_indices,
            indices=listed(2),
            block=(64, 32),
            counts=listed(2)[..., 0].contiguous(),
        ),
        {"counts": "none"},
    ),
    "PageLists.of_masks": Call(function(sk.PageLists.of_masks, masks=[mask(), mask()], verify=True)),
    "merge_attention": Call(
        function(sk.merge_attention, o1=dense(2, 3, 8), lse1=dense(2, 3), o2=dense(2, 3, 8), lse2=dense(2, 3))
    ),
    "MaskPolicy": Call(function(sk.MaskPolicy, window=64, sinks=2, topk=None, causal=True, block=64), POLICY),
    "MaskPolicy (stride)": Call(
        function(sk.MaskPolicy, window=64, stride=256, causal=True, block=(64, 128)), POLICY
    ),
    "MaskPolicy.mask": Call(
        function(policy(window=16).mask, q_len=70, kv_len=100, device="cpu"), PLACE | {"kv_len": "none int"}
    ),
    "MaskPolicy.mask_for": Call(function(policy(window=16).mask_for, q=heads(4), k=heads(2))),
    "MaskPolicy.mask_for (top-k)": Call(function(policy(topk=1).mask_for, q=heads(4), k=heads(2))),
    "MaskPolicy.packed": Call(
        function(policy(window=16).packed, cu_seqlens_q=CU, cu_seqlens_k=CU, device="cpu"),
        PLACE | {"cu_seqlens_k": "none tensor"},
    ),
    "Epilogue": Call(function(Epilogue, alpha=1.5, activation="relu", combine="add", beta=2), NUMBERS),
    "plan_spmm": Call(
        function(
            sk.plan_spmm, A=bsr(), B=B, out=None, epilogue=AFTER, kernel="cpu.spmm", config=None, device=None
        ),
        PLANNED,
    ),
    "plan_spmm (H200)": Call(
        function(sk.plan_spmm, A=bsr(), B=B, kernel=None, config=None, device="h200"),
        {**PLANNED, "B": f"{DENSE} meta"},
    ),
    "plan_spmm (2:4)": Call(
        function(sk.plan_spmm, A=two_four(), B=B, epilogue=AFTER, kernel=None, device=None), PLANNED
    ),
    "plan_spmm (FP8)": Call(
        function(
            sk.plan_spmm,
            A=fp8(),
            B=rounded().mT,
            epilogue=PLAIN,
            kernel=None,
            device=None,
            dtype=torch.float16,
        ),
        PLANNED,
    ),
    "plan_sddmm": Call(
        function(sk.plan_sddmm, **SAMPLED, kernel=None, config=None, device=None),
        PLANNED,
    ),
    "plan_spgemm": Call(
        function(
            sk.plan_spgemm, A=bsr(), B=bsr(64, 96), out="dense", kernel=None, config=None, device="h200"
        ),
        {**NAMED, "device": "none", "out": "BlockPattern"},
    ),
    "plan_attention": Call(
        function(
            sk.plan_attention,
            **QKV,
            mask=mask(),
            kernel=None,
            config=None,
            device=None,
            return_lse=True,
            softcap=5.0,
            alibi_slopes=dense(2, 4),
            sink_logits=dense(4),
        ),
        PLANNED | ATTENTION,
    ),
    "plan_attention_backward": Call(
        function(
            sk.plan_attention_backward,
            **QKV,
            mask=mask(),
            kernel=None,
            config=None,
            device="h200",
            deterministic=True,
            softcap=5.0,
            alibi_slopes=dense(4),
        ),
        PLANNED | ATTENTION,
    ),
    "choose_format": Call(
        function(
            sk.choose_format,
            W=dense(128, 64),
            x=X,
            keep=[0.5, 0.25],
            block=32,
            formats=["bsr"],
            scope="row",
            max_error=None,
            min_norm=0.0,
            device=None,
        ),
        {
            "W": MATRIX,
            "x": "sequence",
            "keep": "float int",
            "block": "none sequence",
            "formats": "none text",
            "max_error": "none float int",
            "min_norm": "none float int",
            "device": "none text",
        },
        every=5,
    ),
    "choose_format (BSR)": Call(
        function(
            sk.choose_format,
            W=bsr(),
            x=(48, 64),
            keep=0.5,
            block=[32, (32, 64)],
            formats="bsr",
            device="h200",
        ),
        {
            "W": f"{MATRIX} tensor",
            "x": "tensor",
            "keep": "float int sequence",
            "block": "none int",
            "formats": "none sequence",
            "device": "none",
        },
        every=5,
    ),
    "FormatChoice": Call(
        function(plan("linear"), x=X, bias=BIAS, activation="silu", residual=RESIDUAL), LAYER
    ),
    "Plan": Call(function(plan("spmm"), a=bsr(), b=B, out=None, epilogue=PLAIN)),
    "Plan (right)": Call(function(plan("right"), a=RESIDUAL, b=bsr(), epilogue=PLAIN)),
    "Plan (2:4)": Call(function(plan("semi24"), a=two_four(), b=B, out=None, epilogue=PLAIN)),
    "Plan (2:4, layer)": Call(function(plan("layer24"), a=X, b=two_four(), out=None, epilogue=PLAIN)),
    "Plan (FP8)": Call(function(plan("fp8"), a=fp8(), b=B.to(BF16), out=None, epilogue=PLAIN)),
    "Plan (FP8, layer)": Call(function(plan("layer8"), a=X.to(BF16), b=fp8(), out=None, epilogue=PLAIN)),
    "Plan (sddmm)": Call(function(plan("sddmm"), x=dense(128, 48), y=dense(48, 64), pattern=bsr().pattern)),
    "Plan (spgemm)": Call(function(plan("spgemm"), a=bsr(), b=bsr(64, 96))),
    "Plan (attention)": Call(function(plan("attention"), **QKV, mask=mask(), scale=None), ATTENTION),
    "Plan (backward)": Call(
        function(
            plan("backward"),
            **QKV,
            mask=mask(),
            out=forward()[0],
            lse=forward()[1],
            grad=forward()[0],
            grad_lse=None,
            scale=0.25,
        ),
        ATTENTION | {"grad_lse": "tensor"},
    ),
    "Plan.retarget": Call(function(plan("spmm").retarget, a=bsr())),
}

# What has no arguments to spoil, or is no call that users make.
REASONS = {
    "explain": "takes no arguments",
    "headline": "takes no arguments",
    "details": "takes no arguments",
    "refuse_unless_ready": "takes no arguments",
    "Plan.run": "for the operations: runs operands that were checked",
    "MaskPolicy.visible_in": "for the operations: of a layout that was checked",
}
