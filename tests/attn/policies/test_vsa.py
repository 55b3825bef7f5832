"""VSA.attention against loops over blocks, and its gradients."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from tests.attn.policies.drawn import keys_of, lengths_of, normal
from tests.refusals import refused

policies = sk.policies


def slow(
    q: Tensor, k: Tensor, v: Tensor, gate: Any, topk: int, scale: float, lengths: tuple[Any, Any]
) -> Tensor:
    """gate * coarse + sparse, block by block."""
    out, there_rows = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros(q.shape[:3])
    group = q.shape[1] // k.shape[1]
    there = torch.zeros_like(q)
    for b, i in itertools.product(range(q.shape[0]), range(-(-q.shape[2] // 64))):
        rows = keys_of(i, 64, q.shape[2], lengths[0], b)
        there[b, :, rows.start : rows.stop] = q[b, :, rows.start : rows.stop]
    mask = policies.VSA(topk=topk).mask(there, k, kv_lengths=lengths[1])
    sparse = sk.attention(q, k, v, mask, scale=scale)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            there = [keys_of(j, 64, k.shape[2], lengths[1], b) for j in range(-(-k.shape[2] // 64))]
            means = [[x[b, h // group, r.start : r.stop].mean(0) for r in there if r] for x in (k, v)]
            for i in range(-(-q.shape[2] // 64)):
                rows = keys_of(i, 64, q.shape[2], lengths[0], b)
                mean = q[b, h, rows.start : rows.stop].mean(0) if rows else torch.zeros_like(q[b, h, 0])
                weights = (scale * torch.stack(means[0]) @ mean).softmax(0)
                out[b, h, 64 * i : 64 * i + 64] = weights @ torch.stack(means[1])
                there_rows[b, h, rows.start : rows.stop] = True
    return (sparse + (out if gate is None else gate * out)) * there_rows[..., None]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("batch", [None, 1, 2])
def test_it_adds_attention_between_the_means(gated: bool, batch: int | None) -> None:
    q, k, v = normal(2, 4, 200, 16), normal(2, 2, 300, 16, seed=1), normal(2, 2, 300, 8, seed=2)
    gate = normal(2, 4, 200, 8, seed=3) if gated else None
    lengths = (
        (None, None)
        if batch is None
        else (lengths_of(4, 64, batch, 4), lengths_of(5, 64, batch, 5).clamp(max=44))
    )
    found = policies.VSA(topk=2).attention(
        q, k, v, gate, q_lengths=lengths[0], kv_lengths=lengths[1], scale=0.4
    )
    torch.testing.assert_close(found, slow(q, k, v, gate, 2, 0.4, lengths), rtol=1e-4, atol=1e-5)


def test_gradients_flow_through_both_branches() -> None:
    q, k, v, gate = (
        normal(1, 2, 130, 4, seed=seed, dtype=torch.float64).requires_grad_() for seed in range(4)
    )
    lengths = torch.tensor([64, 30, 2], dtype=torch.int32)
    policy = policies.VSA(topk=2)

    def call(*given: Tensor) -> Tensor:
        return policy.attention(*given, q_lengths=lengths, kv_lengths=lengths)[:, :, ::13]

    assert torch.autograd.gradcheck(call, (q, k, v, gate), fast_mode=True)
    coarse = policies.VSA(topk=2).attention(q, k, v, gate) - sk.attention(q, k, v, policy)
    found = torch.autograd.grad(coarse.sum(), (q, k, v, gate))
    assert all(each.any() for each in found)


def test_gradients_in_rows_after_a_tile_go_nowhere() -> None:
    leaves = [normal(1, 2, 192, 8, seed=seed).requires_grad_() for seed in range(4)]
    lengths = torch.tensor([64, 30, 0], dtype=torch.int32)
    there = (torch.arange(64) < lengths[:, None]).flatten()[:, None]
    out = policies.VSA(topk=2).attention(*leaves, q_lengths=lengths, kv_lengths=lengths)
    weight = normal(*out.shape, seed=9)
    found = torch.autograd.grad(out, leaves, weight, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(out, leaves, weight * there), strict=True):
        torch.testing.assert_close(one, other)
        assert not (one * ~there).any()


def test_nan_after_a_tile_is_in_no_gradient() -> None:
    q, k, v = (normal(1, 2, 128, 8, seed=seed) for seed in range(3))
    lengths = torch.tensor([64, 30], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (q.index_fill(2, torch.arange(94, 128), torch.nan), k, v)]
    found = torch.autograd.grad(policies.VSA(topk=1).attention(*leaves, q_lengths=lengths).sum(), leaves)
    assert all(each.isfinite().all() for each in found)
    assert not found[0][:, :, 94:].any()


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("side", [64, (64, 128), 128])
def test_rows_after_a_tile_are_0(side: int | tuple[int, int], learns: bool) -> None:
    q = normal(2, 2, 192, 8).requires_grad_(learns)
    tile = side if isinstance(side, int) else side[0]
    lengths = torch.tensor([[40, 64, 0], [0, 1, 63]], dtype=torch.int32)[:, : -(-192 // tile)]
    row = torch.arange(192)
    there = (row % tile < lengths[:, row // tile])[:, None, :, None]
    out = policies.VSA(2, side).attention(q, q, q, q, q_lengths=lengths)
    assert not out.masked_fill(there, 0).any()
    assert out.masked_fill(~there, 1).all()


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("lengths", [(0, 64), (64, 0)])
def test_no_queries_and_no_keys_give_nothing(lengths: tuple[int, int], learns: bool) -> None:
    q, k = (torch.randn(2, 4, length, 8, requires_grad=learns) for length in lengths)
    out = policies.VSA(topk=2).attention(q, k, k)
    assert out.shape == q.shape
    assert not out.any()
    assert policies.VSA(topk=2).attention(q[:0], k[:0], k[:0]).shape == q[:0].shape


def test_a_gate_may_be_one_number_per_head() -> None:
    q = normal(1, 2, 128, 16)
    policy, gate = policies.VSA(topk=1), torch.tensor([0.0, 2.0])[:, None, None]
    sparse, whole = sk.attention(q, q, q, policy), policy.attention(q, q, q)
    torch.testing.assert_close(policy.attention(q, q, q, gate), sparse + gate * (whole - sparse))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_output_has_the_dtype_of_q(dtype: torch.dtype) -> None:
    q = normal(1, 2, 128, 16).to(dtype)
    assert policies.VSA().attention(q, q, q, q).dtype == dtype


WRONG: dict[str, Any] = {
    r"gate is torch.float64 \[1, 2, 128, 16\]; it must be torch.float32": lambda q: {"gate": q.double()},
    r"gate is torch.float32 \[3\]; it must be torch.float32 and broadcast": lambda q: {
        "gate": q[0, 0, 0, :3]
    },
    r"q_lengths are \[3\]; 2 blocks need": lambda q: {"q_lengths": torch.ones(3, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", WRONG)
def test_operands_that_do_not_fit_are_refused(message: str) -> None:
    q = normal(1, 2, 128, 16)
    refused(message, policies.VSA().attention, q, q, q, **WRONG[message](q))
