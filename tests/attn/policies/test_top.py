"""MeanTopK, SubBlock and VSA against loops."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsek as sk
from sparsek.attn.reference import estimates
from tests.attn.policies.drawn import chosen, keys_of, lengths_of, normal, slow_scores, visible
from tests.refusals import refused

policies = sk.policies


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    block = draw(st.sampled_from([(64, 64), (64, 128), (128, 64)]))
    q_len, kv_len = draw(st.integers(1, 300)), draw(st.integers(1, 400))
    batch, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    lengths = draw(st.sampled_from([None, 1, batch]))
    return {
        "q": normal(batch, 2 * group, q_len, 8, seed=draw(st.integers(0, 99))),
        "k": normal(batch, 2, kv_len, 8, seed=draw(st.integers(100, 199))),
        "block": block,
        "causal": draw(st.booleans()),
        "q_offset": draw(st.sampled_from([None, 0, kv_len - q_len, 100, -70])),
        "kv_lengths": None if lengths is None else lengths_of(-(-kv_len // block[1]), block[1], lengths, 5),
    }


def slow_top(case: dict[str, Any], parts: tuple[int, int], k: int, always: tuple[int, int]) -> torch.Tensor:
    """The blocks of the k highest scores of each tile, those of `always` first."""
    q, keys, block, lengths = case["q"], case["k"], case["block"], case["kv_lengths"]
    q_len, kv_len = q.shape[2], keys.shape[2]
    offset = kv_len - q_len if case["q_offset"] is None else case["q_offset"]
    scores = slow_scores(q, keys, block, parts, lengths)
    found = torch.zeros(scores.shape, dtype=torch.bool)
    sinks, local = always
    for b, h, i in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).view(-1, 3).tolist():
        first, last = i * block[0] + offset, min((i + 1) * block[0], q_len) - 1 + offset
        left, right = first // block[1] - local + 1, last // block[1] + (1 if case["causal"] else local)
        ranked = []
        for j in range(scores.shape[3]):
            keys_here = keys_of(j, block[1], kv_len, lengths, b)
            if visible(i, keys_here, block, q_len, offset if case["causal"] else None):
                kept = j < sinks or (local > 0 and left <= j < right)
                ranked.append((not kept, -float(scores[b, h, i, j]), j))
        for _, _, j in sorted(ranked)[:k]:
            found[b, h, i, j] = True
    return found


@given(cases(), st.sampled_from([(1, 1), (4, 4), (2, 8)]))
@settings(max_examples=12)
def test_scores_are_those_of_loops(case: dict[str, Any], parts: tuple[int, int]) -> None:
    q, k, block, lengths = (case[name] for name in ("q", "k", "block", "kv_lengths"))
    wide = None if lengths is None else lengths
    found = estimates.block_scores(q, k, block, parts, q.shape[3] ** -0.5, wide)
    torch.testing.assert_close(found.double(), slow_scores(q, k, block, parts, lengths), rtol=1e-5, atol=1e-5)


@given(cases(), st.integers(1, 5), st.sampled_from([(0, 0), (1, 0), (1, 1), (0, 2)]))
@settings(max_examples=25)
def test_the_best_blocks_by_means_are_kept(case: dict[str, Any], k: int, always: tuple[int, int]) -> None:
    policy = policies.MeanTopK(topk=k, block=case["block"], causal=case["causal"], always=always)
    mask = policy.mask(case["q"], case["k"], q_offset=case["q_offset"], kv_lengths=case["kv_lengths"])
    q_len, (bq, bk) = case["q"].shape[2], case["block"]
    offset = case["k"].shape[2] - q_len if case["q_offset"] is None else case["q_offset"]
    starts = range(offset, offset + q_len, bq)
    own = max(min(at + bq, offset + q_len) - 1 - at + at % bk for at in starts) // bk + 1
    near = own + (always[1] - 1) * (1 if case["causal"] else 2) if always[1] else 0
    k = max(k, min(always[0] + near, mask.grid[1]))
    assert torch.equal(chosen(mask).expand(*case["q"].shape[:2], -1, -1), slow_top(case, (1, 1), k, always))
    assert mask.block == case["block"]


@given(cases(), st.integers(1, 5), st.sampled_from([(4, 4), (1, 2)]))
@settings(max_examples=12)
def test_sub_blocks_rank_by_log_sum_exp(case: dict[str, Any], k: int, parts: tuple[int, int]) -> None:
    policy = policies.SubBlock(topk=k, parts=parts, block=case["block"], causal=case["causal"])
    mask = policy.mask(case["q"], case["k"], q_offset=case["q_offset"], kv_lengths=case["kv_lengths"])
    assert torch.equal(chosen(mask), slow_top(case, parts, k, (0, 0)))


@given(cases(), st.integers(1, 5))
@settings(max_examples=12)
def test_vsa_keeps_the_best_blocks_by_means(case: dict[str, Any], k: int) -> None:
    case |= {"causal": False}
    mask = policies.VSA(topk=k, block=case["block"]).mask(case["q"], case["k"], kv_lengths=case["kv_lengths"])
    assert torch.equal(chosen(mask), slow_top(case, (1, 1), k, (0, 0)))


@pytest.mark.parametrize("causal", [False, True])
def test_elements_follow_the_diagonal_and_the_lengths(causal: bool) -> None:
    q, k = normal(2, 2, 200, 16), normal(2, 1, 300, 16, seed=1)
    lengths = torch.tensor([[64, 3, 0, 64, 44]], dtype=torch.int32)
    policy = policies.MeanTopK(topk=3, block=64, causal=causal)
    dense = policy.mask(q, k, q_offset=80, kv_lengths=lengths).to_dense()
    key, query = torch.arange(300), torch.arange(200)[:, None] + 80
    exists = key % 64 < lengths[0][key // 64]
    assert not dense[..., ~exists].any()
    if causal:
        assert not (dense & (key > query)).any()
    held = policy.mask(q, k, q_offset=80, kv_lengths=lengths)
    for b, h, i, j in chosen(held).nonzero().tolist():
        rows, columns = slice(64 * i, 64 * i + 64), slice(64 * j, 64 * j + 64)
        wanted = exists[columns] & (
            (key[columns] <= query[rows]) if causal else torch.ones(1, dtype=torch.bool)
        )
        assert torch.equal(dense[b, h, rows, columns], wanted.expand_as(dense[b, h, rows, columns]))


def test_density_is_a_share_of_all_blocks_rounded_up() -> None:
    q = normal(1, 1, 700, 8)  # 11 blocks of 64
    assert [policies.SubBlock(density=d).mask(q, q).stored_blocks for d in (1 / 11, 0.1, 0.5, 1)] == [
        11,
        22,
        66,
        121,
    ]


def test_the_budget_grows_to_hold_what_is_always_kept() -> None:
    q = normal(1, 1, 640, 8)
    mask = policies.MeanTopK(topk=1, block=64, always=(2, 3)).mask(q, q)
    assert chosen(mask)[0, 0].sum(1).tolist() == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5]


def test_heads_of_q_choose_for_themselves() -> None:
    q, k = normal(1, 4, 512, 16), normal(1, 2, 512, 16, seed=1)
    mask = policies.MeanTopK(topk=2, block=64, causal=False, always=(0, 0)).mask(q, k)
    repeated = policies.MeanTopK(topk=2, block=64, causal=False, always=(0, 0)).mask(
        q, k.repeat_interleave(2, 1)
    )
    assert mask.heads == 4
    assert torch.equal(chosen(mask), chosen(repeated))
    assert not torch.equal(chosen(mask)[:, 0], chosen(mask)[:, 1])


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "topk is 0; it must be an int of at least 1": (policies.MeanTopK, {"topk": 0}),
    "density is 0; it must be a share": (policies.MeanTopK, {"density": 0.0}),
    "density is 1.5; it must be a finite number from 0 to 1": (policies.SubBlock, {"density": 1.5}),
    "always is 3; it must be two ints": (policies.MeanTopK, {"always": 3}),
    "block is 48": (policies.MeanTopK, {"block": 48}),
    r"parts\[1\] is 3; a block of 64 has 1, 2, 4, ... or 8 parts": (policies.SubBlock, {"parts": (4, 3)}),
    r"parts\[0\] is 16; a block of 64": (policies.SubBlock, {"parts": (16, 4)}),
    "causal is 1; it must be True or False": (policies.MeanTopK, {"causal": 1}),
    "topk is 2.5": (policies.VSA, {"topk": 2.5}),
}


@pytest.mark.parametrize("message", WRONG)
def test_options_that_do_not_fit_are_refused(message: str) -> None:
    policy, options = WRONG[message]
    refused(message, policy, **options)


LENGTHS: dict[str, Any] = {
    r"kv_lengths are \[3\]; 4 blocks need \[4\] or \[1 or 1, 4\]": torch.ones(3, dtype=torch.int32),
    "dtype of kv_lengths is torch.float32": torch.ones(4),
    "kv_lengths must be a dense torch.Tensor, got list": [1, 2, 3, 4],
}


@pytest.mark.parametrize("message", LENGTHS)
def test_lengths_that_do_not_fit_are_refused(message: str) -> None:
    q = normal(1, 1, 256, 8)
    refused(message, policies.VSA().mask, q, q, kv_lengths=LENGTHS[message])
