"""The reference of attention against a naive softmax in float64; its gradients; merge; the gate that judges kernels."""

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention, merge_attention
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import ATTENTION_CASES, AttentionCase, random_bits
from tests.refusals import refused
from tests.sampling import half

SMALL = (64, 64)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def naive(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """One head of one batch item at a time, with softmax as it is written in books."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_zeros(q.shape[:3])
    dense = mask.to_dense()
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            of_keys = h // (q.shape[1] // k.shape[1])
            of_mask = h // (q.shape[1] // mask.heads)
            seen = dense[b if mask.batch > 1 else 0, of_mask].double()
            weights = seen * (q[b, h] @ k[b, of_keys].T * scale).exp()
            total = weights.sum(-1, keepdim=True)
            out[b, h] = (weights @ v[b, of_keys]) / torch.where(total == 0, 1, total)
            lse[b, h] = total.log().squeeze(-1)
    return out, lse


@pytest.mark.parametrize("case", half(ATTENTION_CASES), ids=str)
def test_every_case_is_the_naive_softmax(case: AttentionCase) -> None:
    q, k, v, mask = case.make(dtype=torch.float64)
    out, lse = attention(q, k, v, mask, scale=0.2)
    exact, exact_lse = naive(q, k, v, mask, 0.2)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", half(ATTENTION_CASES, of="budget"), ids=str)
def test_every_case_is_within_its_budget(case: AttentionCase, device: str) -> None:
    q, k, v, mask = case.make(device)
    gate = check_attention(q, k, v, mask, *attention(q, k, v, mask))
    assert gate.passed, gate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_have_the_documented_dtypes(dtype: torch.dtype) -> None:
    q = torch.ones(1, 1, 70, 32, dtype=dtype)
    out, lse = attention(q, q, q, BlockMask.causal(70))
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_scale_is_one_over_the_root_of_d_unless_given() -> None:
    q, k, v = (normal(1, 1, 64, 32, seed=i) for i in range(3))
    mask = BlockMask.full(64)
    assert torch.equal(attention(q, k, v, mask)[0], attention(q, k, v, mask, scale=32**-0.5)[0])


def test_scores_far_from_zero_do_not_overflow() -> None:
    q, k, v = (normal(1, 1, 64, 32, seed=i) for i in range(3))
    out, lse = attention(100 * q, 100 * k, v, BlockMask.causal(64))
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    assert float(lse.abs().max()) > 1000


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_keys_and_values_that_no_query_of_a_tile_sees_never_reach_it(bad: float) -> None:
    mask = BlockMask.sliding_window(256, 20, block=SMALL)
    q, k, v = (normal(1, 2, 256, 8, seed=i) for i in range(3))
    clean = attention(q, k, v, mask)
    k[:, :, 60:70] = v[:, :, 60:70] = bad
    dirty = attention(q, k, v, mask)
    # The tiles before query 128 see some of these keys; those after see keys from 109 on.
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one[:, :, 128:], other[:, :, 128:])
    assert bool(dirty[0][:, :, 64].isnan().all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_keys_and_values_that_no_query_sees_reach_no_gradient(bad: float) -> None:
    seen = torch.ones(1, 1, 100, 90, dtype=torch.bool)
    seen[..., 60:70] = False
    q, k, v = (normal(1, 2, length, 8, seed=length) for length in (100, 90, 90))
    k[:, :, 60:70] = v[:, :, 60:70] = bad
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, BlockMask.from_dense(seen, SMALL))
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), inputs):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": (2, 100, 8)},
            r"q must be a tensor \[batch, heads, length, dim\], got torch.float64 \[2, 100, 8\]",
        ),
        ({"k": (1, 2, 90, 7)}, r"k must be \[B, Hkv, T, D\]"),
        ({"v": (1, 2, 91, 8)}, r"v \[B, Hkv, T, Dv\]"),
        ({"v": (1, 1, 90, 8)}, r"v \[B, Hkv, T, Dv\]"),
        ({"k": (1, 3, 90, 8), "v": (1, 3, 90, 8)}, "3 heads of k and v cannot serve 4 heads of q"),
        ({"q": (1, 4, 101, 8)}, "the mask is for 100 queries and 90 keys, got 101 queries and 90 keys"),
        ({"q": (1, 6, 100, 8)}, "the mask has batch 1 and 4 heads; batch must be 1 or 1, heads 1, 2 or 6"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"q": (1, 4, 100, 8), "k": (1, 2, 90, 8), "v": (1, 2, 90, 8), **change}
    mask = random_bits("cpu", (100, 90), SMALL, heads=4)
    refused(message, attention, normal(*shapes["q"]), normal(*shapes["k"]), normal(*shapes["v"]), mask)


def test_kinds_that_do_not_fit_are_refused() -> None:
    q, mask = normal(1, 1, 64, 8), BlockMask.full(64, device="cpu")
    for other in (q.float(), q.to("meta")):
        refused("they must agree", attention, q, other, q, mask)
    refused("not supported", attention, q.long(), q.long(), q.long(), mask)
    refused("mask must be a BlockMask, got Tensor", attention, q, q, q, mask.to_dense())
    refused(r"k must be a tensor .* got list", attention, q, [1.0], q, mask)


def halves(dtype: torch.dtype, seed: int = 0) -> tuple[tuple[Tensor, Tensor], ...]:
    """Causal attention to the first 100 of 200 keys, to the others, of which early queries see none, and to all."""
    q, k, v = (normal(2, 2, 200, 16, seed=seed + i).to(dtype) for i in range(3))
    whole = attention(q, k, v, BlockMask.causal(200, block=SMALL))
    left = BlockMask.causal(q_len=200, kv_len=100, q_offset=0, block=SMALL)
    right = BlockMask.causal(q_len=200, kv_len=100, q_offset=-100, block=SMALL)
    return (
        attention(q, k[:, :, :100], v[:, :, :100], left),
        attention(q, k[:, :, 100:], v[:, :, 100:], right),
        whole,
    )


@pytest.mark.parametrize(
    ("dtype", "slack"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_merged_parts_are_the_whole(dtype: torch.dtype, slack: float) -> None:
    left, right, (out, lse) = halves(dtype)
    assert bool((right[1][:, :, :100] == -torch.inf).all())
    merged, merged_lse = merge_attention(*left, *right)
    assert (merged.dtype, merged_lse.dtype) == (out.dtype, lse.dtype)
    torch.testing.assert_close(merged, out, rtol=slack, atol=slack)
    torch.testing.assert_close(merged_lse, lse, rtol=min(slack, 1e-6), atol=min(slack, 1e-6))


def test_merging_gives_the_same_bits_in_either_order() -> None:
    left, right, _ = halves(torch.float32)
    for one, other in zip(merge_attention(*left, *right), merge_attention(*right, *left), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
@pytest.mark.parametrize("other", [-torch.inf, torch.inf])
def test_a_part_that_saw_nothing_counts_for_nothing_whatever_it_holds(empty: float, other: float) -> None:
    o, lse = normal(3, 5, 4), normal(3, 5)
    nothing, again = torch.full_like(lse, empty), torch.full_like(lse, other)
    for dead in (torch.zeros_like(o), poisoned(o.shape, o.dtype)):
        for parts in ((o, lse, dead, nothing), (dead, nothing, o, lse)):
            merged, merged_lse = merge_attention(*parts)
            assert torch.equal(merged, o)
            torch.testing.assert_close(merged_lse, lse)
        both, both_lse = merge_attention(dead, nothing, dead, again)
        assert bool((both == 0).all())
        assert bool((both_lse == -torch.inf).all())


def test_merging_lse_far_apart_or_large_does_not_overflow() -> None:
    o1, o2 = torch.ones(2, 1), torch.full((2, 1), 3.0)
    out, lse = merge_attention(o1, torch.tensor([1000.0, 0.0]), o2, torch.tensor([1000.0, -500.0]))
    assert out.flatten().tolist() == [2.0, 1.0]
    torch.testing.assert_close(lse, torch.tensor([1000.6931, 0.0]))


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_merge_has_gradients_that_empty_parts_do_not_spoil(empty: float) -> None:
    o1, o2 = (normal(4, 3, seed=i).requires_grad_() for i in (1, 2))
    lse1, lse2 = (normal(4, seed=i).requires_grad_() for i in (3, 4))
    assert torch.autograd.gradcheck(merge_attention, (o1, lse1, o2, lse2))
    nothing = torch.full((4,), empty, dtype=torch.float64, requires_grad=True)
    merge_attention(o1, nothing, o2, nothing)[0].sum().backward()
    assert o1.grad is not None
    assert nothing.grad is not None
    assert bool((o1.grad == 0).all())
    assert bool((nothing.grad == 0).all())
    dead = torch.full((4, 3), torch.nan, dtype=torch.float64, requires_grad=True)
    out, lse = merge_attention(dead, nothing, o2, lse2)
    grads = torch.autograd.grad(out.sum() + 2 * lse.sum(), (dead, nothing, o2, lse2))
    for grad, right in zip(grads, (0.0, 0.0, 1.0, 2.0), strict=True):
        torch.testing.assert_close(grad, torch.full_like(grad, right))


def test_merge_refuses_what_does_not_fit() -> None:
    o, lse = torch.ones(2, 5, 4), torch.ones(2, 5)
    for wrong in (
        (o, lse, o[:1], lse),
        (o, lse[:1], o, lse[:1]),
        (o, lse, o.half(), lse),
        (o, lse, o, lse.double()),
        (o, lse.to("meta"), o, lse.to("meta")),
    ):
        refused("merge_attention needs", merge_attention, *wrong)
    refused("lse must be float32 or float64", merge_attention, o, lse.half(), o, lse.half())
    refused(r"lse2 must be a dense torch\.Tensor, got float", merge_attention, o, lse, o, 1.0)


def test_the_names_of_cases_are_unique() -> None:
    assert len({str(case) for case in ATTENTION_CASES}) == len(ATTENTION_CASES)
