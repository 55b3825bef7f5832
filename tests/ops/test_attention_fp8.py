"""attention over QuantizedHeads on a CPU: every mask, what is refused, plans, and the budget of the gate."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.plan.attention_fp8 import AttentionFp8Plan
from sparsek.attn.reference.attention_fp8 import attention_fp8
from sparsek.core.device import H100
from sparsek.testing.attention_fp8_budget import check_attention_fp8
from tests.refusals import refused

S, T = 150, 200
attention: Any = sk.attention  # of any operands


def drawn(
    heads: tuple[int, int] = (4, 2), dtype: Any = torch.bfloat16, **more: int
) -> tuple[Tensor, Tensor, Tensor]:
    s, t = more.get("s", S), more.get("t", T)
    q = torch.randn(2, heads[0], s, 32, dtype=dtype)
    k, v = torch.randn(2, heads[1], t, 32, dtype=dtype), torch.randn(2, heads[1], t, 48, dtype=dtype)
    return q, k, v


MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": lambda: sk.BlockMask.causal(q_len=S, kv_len=T),
    "window": lambda: sk.BlockMask.sliding_window(q_len=S, kv_len=T, window=40, sinks=3, block=64),
    "policy": lambda: sk.MaskPolicy(window=64),
    "bool": lambda: torch.rand(2, 4, S, T) > 0.6,
    "blocks": lambda: sk.BlockMask.from_block_map(torch.rand(2, 4, 2, 2) > 0.4, q_len=S, kv_len=T),
}


@pytest.mark.parametrize("scale", ["head", "block"])
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_the_dequantized_operands(name: str, scale: Any) -> None:
    mask, (q, k, v) = MASKS[name](), drawn()
    heads = sk.quantize_heads(q, k, v, scale, rows=64)
    out, lse = sk.attention(*heads, mask, return_lse=True)
    wanted, sums = attention(*(x.dequantize() for x in heads), mask, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted.to(torch.bfloat16)) or torch.allclose(
        out.float(), wanted, atol=4e-3, rtol=8e-3
    )
    assert torch.allclose(lse, sums, atol=1e-5)
    assert torch.equal(sk.attention(*heads, mask), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_results_have_the_dtype_that_was_quantized(dtype: torch.dtype) -> None:
    heads = sk.quantize_heads(*drawn(dtype=dtype))
    out, lse = sk.attention(*heads, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_results_lie_in_memory_as_q_does() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn())
    out = sk.attention(*sk.quantize_heads(q, k, v))
    assert out.is_contiguous(), "quantized heads lie as [B, H, L, D]"


def test_changed_scores_are_those_of_the_reference() -> None:
    q, k, v = drawn()
    heads, slopes, sinks = sk.quantize_heads(q, k, v), torch.rand(4), torch.randn(4)
    changes: dict[str, Any] = {"softcap": 5.0, "alibi_slopes": slopes, "sink_logits": sinks}
    out, lse = sk.attention(*heads, is_causal=True, scale=0.3, return_lse=True, **changes)
    wide = (x.dequantize() for x in heads)
    wanted, sums = attention(*wide, is_causal=True, scale=0.3, return_lse=True, **changes)
    assert torch.allclose(out.float(), wanted, atol=4e-3, rtol=8e-3)
    assert torch.allclose(lse, sums, atol=1e-5)


@pytest.mark.parametrize(("s", "t"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_empty_sides(s: int, t: int) -> None:
    q, k, v = drawn(s=s, t=t)
    out, lse = sk.attention(*sk.quantize_heads(q, k, v), return_lse=True)
    assert out.shape == (2, 4, s, 48)
    if t == 0:
        assert not out.any()
        assert bool((lse == -torch.inf).all())


def test_a_plan_runs_explains_and_refuses_others() -> None:
    q, k, v = drawn()
    mask = sk.BlockMask.causal(q_len=S, kv_len=T)
    heads, blocks = sk.quantize_heads(q, k, v), sk.quantize_heads(q, k, v, "block")
    plan = sk.plan_attention(*heads, mask, return_lse=True)
    assert isinstance(plan, AttentionFp8Plan)
    assert plan.kernel == "reference.attention_fp8"
    out, lse = plan(*heads, mask)
    assert torch.equal(out, sk.attention(*heads, mask, plan=plan))
    assert torch.equal(lse, sk.attention(*heads, mask, return_lse=True)[1])
    text = plan.explain()
    assert "e4m3" in text
    assert "one per head; out bf16" in text
    assert "hopper.attention_fp8: needs a Hopper card" in text
    refused(r"with a scale for .0, 0, 0. rows", plan, *blocks, mask)
    refused("another mask", plan, *heads, sk.BlockMask.causal(q_len=S, kv_len=T))
    refused("plan must come from", attention, *heads, mask, plan=sk.plan_attention(q, k, v, mask))
    refused("plan must come from", attention, q, k, v, mask, plan=plan)


@pytest.mark.parametrize("scale", ["head", "block"])
def test_an_h100_would_run_the_hopper_kernel(scale: Any) -> None:
    q, k, v = (torch.randn(1, 4, 512, 128, dtype=torch.bfloat16) for _ in range(3))
    plan = sk.plan_attention(*sk.quantize_heads(q, k, v, scale), sk.BlockMask.causal(512), device="h100")
    assert plan.kernel == "hopper.attention_fp8"
    assert plan.problem.card == H100
    assert plan.seconds < sk.plan_attention(q, k, v, sk.BlockMask.causal(512), device="h100").seconds
    assert f"scales of {scale}s" in str(plan.config)


def test_mixed_operands_are_refused() -> None:
    q, k, v = drawn()
    heads = sk.quantize_heads(q, k, v)
    for given in ((heads[0], k, v), (heads[0], heads[1], v)):
        refused(r"must be QuantizedHeads .* makes all three", attention, *given)
    refused("got QuantizedHeads; quantize_heads", attention, q, heads[1], heads[2])
    refused("v is quantized by rows", sk.attention, heads[0], heads[1], heads[1])
    refused("k is quantized along keys", sk.attention, heads[0], heads[2], heads[2])


def test_what_has_no_gradient_says_so() -> None:
    heads = sk.quantize_heads(*drawn())
    with pytest.raises(sk.InvalidInput, match=r"sink_logits requires a gradient, and FP8 attention has none"):
        sk.attention(*heads, sink_logits=torch.randn(4, requires_grad=True))
    heads[1].values.requires_grad_()
    refused(r"k requires a gradient, and FP8 attention has none", sk.attention, *heads)
    with torch.no_grad():
        sk.attention(*heads)


def test_other_refusals() -> None:
    heads = sk.quantize_heads(*drawn())
    with pytest.raises(sk.InvalidInput, match="chooses blocks by q and k, and these are quantized"):
        sk.attention(*heads, sk.policies.XAttention(threshold=0.9))
    refused("drops no weights", attention, *heads, dropout_p=0.5)
    refused("mask is for 100 queries", sk.attention, *heads, sk.BlockMask.causal(100))
    refused("no kernel of attention_fp8 is called", sk.attention, *heads, kernel="hopper.attention_fwd")
    with pytest.raises(sk.Unsupported, match=re.escape("hopper.attention_fp8")):
        sk.attention(*heads, kernel="hopper.attention_fp8")
    refused("return_lse is 1", attention, *heads, return_lse=1)
    refused("deterministic is 3", attention, *heads, deterministic=3)


def test_the_gate_passes_the_reference_and_refuses_faults() -> None:
    q, k, v = drawn()
    mask = sk.BlockMask.sliding_window(q_len=S, kv_len=T, window=60, block=64)
    heads = sk.quantize_heads(q, k, v, "block", rows=64)
    out, lse = sk.attention(*heads, mask, return_lse=True)
    assert check_attention_fp8(*heads, mask, out, lse).passed
    assert check_attention_fp8(*heads, mask, out, rows=[1]).passed
    exact, _ = attention_fp8(*heads, mask, dtype=torch.float64)
    # Faults of a step: a scale forgotten, keys in another order, a key too many.
    other = sk.quantize_heads(q, k, v, "block", rows=64)
    other[2].scale[:, :, 1] = other[2].scale[:, :, 0] * 1.3
    swapped = sk.quantize_heads(q, k, v[:, :, torch.randperm(T)], "block", rows=64)
    wider = sk.BlockMask.sliding_window(q_len=S, kv_len=T, window=64, block=64)
    for wrong in (sk.attention(*other, mask), sk.attention(*swapped, mask), sk.attention(*heads, wider)):
        assert not check_attention_fp8(*heads, mask, wrong).passed
    out[0, 0, 0, 0] = torch.nan
    assert not check_attention_fp8(*heads, mask, out).passed
    assert not check_attention_fp8(*heads, mask, exact.to(torch.bfloat16), lse + 0.02).passed
