"""sk.attention, attention_varlen and attention_paged with TokenLists, against their dense rows in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask import aligned
from tests.attn.mask.drawn_lists import drawn_lists
from tests.refusals import refused


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(q_heads: int, kv_heads: int, queries: int, keys: int, batch: int = 2) -> tuple[Tensor, ...]:
    made = drawn(batch, q_heads, queries, 8), *(drawn(batch, kv_heads, keys, 8, seed=at) for at in (1, 2))
    return tuple(x.requires_grad_() for x in made)


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Of every element that is seen, bool [1 or B, 1 or Hkv, S, T]; 0 where none is."""
    group = q.shape[1] // k.shape[1]
    if seen.shape[1] != q.shape[1]:
        seen = seen.expand(-1, k.shape[1], -1, -1).repeat_interleave(group, 1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.masked_fill(~seen.any(-1, keepdim=True), 0).softmax(-1).masked_fill(~seen, 0) @ v


def same_with_gradients(found: Tensor, wanted: Tensor, operands: tuple[Tensor, ...]) -> None:
    grad = drawn(*found.shape, seed=9)
    mine, right = (torch.autograd.grad(out, operands, grad, retain_graph=True) for out in (found, wanted))
    torch.testing.assert_close((found, mine), (wanted, right))


CASES: dict[str, tuple[tuple[int, ...], int, tuple[int, int], int, dict[str, Any]]] = {
    # lists, block, heads, keys, options
    "shared": ((1, 1, 70, 3), 64, (8, 2), 200, {}),
    "per head": ((2, 2, 70, 2), 128, (8, 2), 300, {}),
    "one head each": ((2, 2, 130, 2), 64, (2, 2), 130, {"sinks": 3}),
    "heads of q": ((2, 8, 130, 2), 64, (8, 2), 200, {"window": 3}),
    "window": ((1, 2, 70, 2), 64, (6, 2), 200, {"window": 70, "sinks": 65}),
    "every key": ((1, 1, 33, 2), 64, (4, 1), 150, {"causal": False}),
    "more queries": ((1, 1, 90, 1), 64, (4, 1), 50, {"window": 2}),
    "small blocks": ((1, 2, 70, 3), 16, (4, 2), 100, {"window": 3, "sinks": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients(name: str) -> None:
    shape, block, (q_heads, kv_heads), keys, options = CASES[name]
    q, k, v = qkv(q_heads, kv_heads, shape[2], keys)
    lists = drawn_lists(shape, block, keys, 3, **options)
    same_with_gradients(sk.attention(q, k, v, lists), attended(q, k, v, lists.to_dense(keys)), (q, k, v))


def test_options_of_attention_go_with_lists() -> None:
    q, k, v = (x.detach() for x in qkv(4, 2, 70, 70))
    lists = drawn_lists((1, 2, 70, 2), 16, 70, 4, window=1)
    dense = sk.BlockMask.from_dense(lists.to_dense())
    options: dict[str, Any] = {"softcap": 2.0, "sink_logits": drawn(4), "return_lse": True, "scale": 0.5}
    torch.testing.assert_close(
        sk.attention(q, k, v, lists, **options), sk.attention(q, k, v, dense, **options)
    )


def test_plans_take_lists_and_name_their_unions() -> None:
    lists = drawn_lists((1, 2, 256, 2), 64, 512, 5)
    q, k = (
        torch.empty(1, heads, length, 64, dtype=torch.bfloat16) for heads, length in ((16, 256), (2, 512))
    )
    mask = lists.mask_for(q, k)
    assert mask.block == (16, 64)
    plan = sk.plan_attention(q, k, k, mask)
    text = plan.explain()
    assert "2 blocks of 64 per token" in text
    assert "by members" in text
    assert sk.plan_attention_backward(q, k, k, lists, device="h200").problem.block == (16, 64)
    q, k = q.to("meta"), k.to("meta")
    assert sk.plan_attention(q, k, k, lists, device="h200").problem.block == (16, 64)


def test_the_cure_of_a_plan_made_of_lists_cures() -> None:
    """Lists make a mask in each call, so that of a plan is gone with the call that made it."""
    q, k, v = (x.detach() for x in qkv(4, 2, 70, 70))
    lists = drawn_lists((1, 2, 70, 2), 64, 70, 4)
    plan, gone = sk.plan_attention(q, k, v, lists), "no longer exists.*mask = lists.mask_for"
    refused(gone, plan, q, k, v, lists)
    refused(gone, sk.attention, q, k, v, lists, plan=plan)
    mask = lists.mask_for(q, k)
    wanted = sk.attention(q, k, v, lists)
    assert torch.equal(sk.plan_attention(q, k, v, mask)(q, k, v, mask), wanted)


def test_times_of_lists_that_the_host_has_not_read_are_told_as_bounds() -> None:
    q, k = (torch.empty(1, heads, 256, 64, dtype=torch.bfloat16) for heads in (8, 2))
    mask = drawn_lists((1, 2, 256, 3), 64, 256, 0).mask_for(q, k)
    told = "times and roofline are for the most blocks"
    assert told not in sk.plan_attention(q, k, k, mask, device="h200").explain()
    object.__setattr__(mask, "sizes", mask.sizes._replace(exact=False))  # as that of a GPU
    assert told in sk.plan_attention(q, k, k, mask, device="h200").explain()


LENGTHS = [100, 0, 64, 1, 30]


@pytest.mark.parametrize(
    ("block", "key_lengths", "options"),
    [
        (64, LENGTHS, {"window": 3}),
        (64, [128, 64, 64, 0, 0], {"sinks": 2}),
        (16, [90, 5, 130, 1, 60], {"window": 20, "sinks": 17}),
        (128, [300, 5, 64, 1, 60], {"causal": False}),
    ],
)
def test_documents_are_lists_of_their_own(
    block: int, key_lengths: list[int], options: dict[str, Any]
) -> None:
    q, k, v = (
        drawn(sum(n), heads, 8).requires_grad_()
        for n, heads in ((LENGTHS, 4), (key_lengths, 2), (key_lengths, 2))
    )
    lists = drawn_lists((1, 2, sum(LENGTHS), 3), block, 200, 6, **options)
    edges = [torch.tensor([0, *n]).cumsum(0) for n in (LENGTHS, key_lengths)]
    found = sk.attention_varlen(q, k, v, *edges, mask=lists)
    parts = []
    for (a, b), (c, d) in zip(
        *(torch.stack((each[:-1], each[1:]), 1).tolist() for each in edges), strict=True
    ):
        own = sk.TokenLists(lists.indices[:, :, a:b], block, **options)
        heads = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        parts.append(attended(heads[0], heads[1], heads[2], own.to_dense(d - c))[0].transpose(0, 1))
    same_with_gradients(found, torch.cat(parts), (q, k, v))


def test_documents_are_placed_once_for_equal_lengths() -> None:
    lists = drawn_lists((1, 1, 100, 2), 64, 100, 7)
    q, edges = drawn(100, 2, 8), torch.tensor([0, 30, 100])
    aligned._KEPT.clear()
    for _ in range(2):
        sk.attention_varlen(q, q, q, edges.clone(), mask=lists)
    assert len(aligned._KEPT) == 1
    slopes = torch.ones(2)
    refused("alibi_slopes", sk.attention_varlen, q, q, q, edges, mask=lists, alibi_slopes=slopes)
    refused("batch items", sk.attention_varlen, q, q, q, edges, mask=drawn_lists((2, 1, 100, 2), 64, 100, 7))


def test_documents_placed_in_inference_mode_serve_training() -> None:
    lists = drawn_lists((1, 1, 100, 2), 64, 100, 7)
    q, edges = drawn(100, 2, 8).requires_grad_(), torch.tensor([0, 30, 100])
    aligned._KEPT.clear()
    with torch.inference_mode():
        served = sk.attention_varlen(q, q, q, edges, mask=lists)
    trained = sk.attention_varlen(q, q, q, edges, mask=lists)
    trained.sum().backward()
    assert torch.equal(served, trained)


def test_policies_by_token_choose_in_each_document() -> None:
    policy = sk.policies.MoBAGate(block=16, topk=2)
    q, k, edges = drawn(100, 4, 8), drawn(100, 2, 8), torch.tensor([0, 30, 100])
    lists = policy.lists(*(x.transpose(0, 1)[None] for x in (q, k)), scale=0.5, cu_seqlens=edges)
    found, wanted = (sk.attention_varlen(q, k, k, edges, mask=mask, scale=0.5) for mask in (policy, lists))
    assert torch.equal(found, wanted)
    refused("cu_seqlens_k is given", sk.attention_varlen, q, k, k, edges, edges.clone(), mask=policy)


@pytest.mark.parametrize("causal", [True, False])
def test_lists_over_pages(causal: bool) -> None:
    lengths, queries, page = [70, 33], [5, 2], 16
    cache = drawn(9, 2, page, 16)
    table = torch.tensor([[3, 0, 7, 1, 8], [2, 5, 4, 0, 0]], dtype=torch.int32)
    q = drawn(7, 4, 8)
    lists = drawn_lists((1, 2, 7, 4), 16, 80, 8, causal=causal)
    counts = torch.randint(-1, 6, (1, 2, 7))
    lists = sk.TokenLists(lists.indices.long(), 16, counts, causal=causal)
    tables = table, torch.tensor(lengths).int(), torch.tensor([0, 5, 7]).int()
    found = sk.attention_paged(q, cache, *tables, lists)
    begin = 0
    for r, (length, many) in enumerate(zip(lengths, queries, strict=True)):
        keys = cache[table[r].long()].transpose(0, 1).flatten(1, 2)[None, :, :length]
        part = slice(begin, begin + many)
        own = sk.TokenLists(lists.indices[:, :, part], 16, counts[:, :, part], causal=causal)
        wanted = attended(q[part].transpose(0, 1)[None], keys[..., :8], keys[..., 8:], own.to_dense(length))
        torch.testing.assert_close(found[part], wanted[0].transpose(0, 1))
        begin += many
    plan = sk.plan_attention_paged(q, cache, *tables, lists)
    assert plan.problem.list_block == (1, 16)
    assert torch.equal(plan(q, cache, *tables, lists), found)
    near = sk.TokenLists(lists.indices, 16, window=4)
    refused("no window and no sinks", sk.attention_paged, q, cache, *tables, near)
    for small in (sk.TokenLists(lists.indices, 8, causal=causal), sk.policies.MoBAGate(topk=2, block=8)):
        refused("block is 8; over pages it must be one of 16", sk.attention_paged, q, cache, *tables, small)
    refused(
        "over pages it must be", sk.attention_paged, q, cache, *tables, drawn_lists((2, 1, 7, 2), 16, 80, 0)
    )
