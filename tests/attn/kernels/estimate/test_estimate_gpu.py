"""kernels/estimate and policies on a GPU, against attn/reference/estimates.py and against the same policies
on the CPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.attn.kernels.estimate.maps import mark
from sparsek.attn.kernels.estimate.mass import to_mass
from sparsek.attn.kernels.estimate.means import split_means
from sparsek.attn.kernels.estimate.scores import block_scores
from sparsek.attn.reference import estimates as reference
from tests.attn.policies.drawn import chosen, lengths_of, normal
from tests.engine.launch.covering import once

pytestmark = pytest.mark.gpu
policies = sk.policies

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# q_len, kv_len, heads of q and k, head dim, block, parts, causal_from
CASES = [
    (1000, 1000, 4, 2, 128, (64, 64), (4, 4), None),
    (130, 900, 2, 2, 64, (128, 64), (1, 1), 770),
    (511, 2100, 2, 1, 80, (64, 128), (2, 8), 1589),
    (2048, 2048, 1, 1, 256, (128, 128), (1, 1), 0),
    (3, 600, 2, 1, 40, (128, 128), (4, 4), -5),
]


@pytest.mark.parametrize(
    ("bshd", "batch", "case", "dtype"),
    once(product((False, True), (None, 1, 2), CASES, DTYPES), together=2),
    ids=str,
)
def test_scores_are_those_of_the_reference(
    case: Any, dtype: torch.dtype, batch: int | None, bshd: bool
) -> None:
    q_len, kv_len, q_heads, k_heads, dim, block, parts, causal_from = case
    q, k = (
        normal(2, heads, length, dim, seed=seed).to("cuda", dtype)
        for seed, (heads, length) in enumerate(((q_heads, q_len), (k_heads, kv_len)))
    )
    if bshd:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    lengths = None if batch is None else lengths_of(-(-kv_len // block[1]), block[1], batch, 7).cuda()
    found = block_scores(q, k, block, parts, 0.3, lengths, causal_from).cpu()
    wanted = reference.block_scores(q, k, block, parts, 0.3, lengths).cpu()
    if causal_from is not None:
        last = (torch.arange(1, wanted.shape[2] + 1) * block[0]).clamp(max=q_len)[:, None] + causal_from
        beyond = torch.arange(wanted.shape[3]) * block[1] >= last
        found, wanted = found.masked_fill(beyond, 0), wanted.masked_fill(beyond, 0)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [64, 128, 256])
def test_halves_of_means_add_up(side: int) -> None:
    x = normal(1, 2, 3000, 128).to("cuda", torch.bfloat16)
    high, low = split_means(x, None, (side, side))[0].float()
    torch.testing.assert_close(high + low, reference.block_means(x, side), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 1000, 5000])
def test_mass_is_the_softmax_of_each_row(columns: int) -> None:
    scores = 9 * normal(2, 2, 40, columns).cuda()
    scores[0, 0, 1] = -torch.inf
    for causal_from in (None, 0, 3000):
        wanted = reference.block_mass(scores, (64, 64), 2500, causal_from)
        torch.testing.assert_close(
            to_mass(scores.clone(), (64, 64), 2500, causal_from), wanted, rtol=1e-4, atol=1e-7
        )


def test_maps_have_the_stored_blocks() -> None:
    mask = sk.BlockMask.sliding_window(20000, 3000, sinks=200, block=64, device="cuda")
    made = torch.zeros(1, 2, *mask.grid, dtype=torch.int8, device="cuda")
    mark(mask, made)
    assert torch.equal(made.bool().cpu(), chosen(mask.to("cpu")).expand(1, 2, -1, -1))


TILES = policies.SlidingTile((4, 32, 32), (3, 3, 3), (1, 8, 8), clamped=False)
ALL: list[Any] = [
    policies.MeanTopK(topk=6),
    policies.MeanTopK(density=0.2, block=64, causal=False),
    policies.SubBlock(density=0.2),
    policies.Nabla(0.6),
    policies.Nabla(0.3, tiles=TILES),
    policies.Nabla(0.5, block=128, causal=True),
    policies.VSA(topk=9),
    TILES,
    policies.Radial(8, 512, block=64),
    policies.Streaming(window=512, sinks=128),
    policies.MeanTopK(topk=4) | policies.Streaming(window=256),
    policies.SubBlock() & TILES,
]
# Masks by position alone are made once and kept.
CHOOSING = [
    each for each in ALL if not isinstance(each, (policies.SlidingTile, policies.Radial, policies.Streaming))
]


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.label)
@pytest.mark.parametrize("lengths", [False, True])
def test_a_policy_chooses_as_on_the_cpu(policy: Any, lengths: bool) -> None:
    q, k, v = (normal(2, heads, 4096, 64, seed=heads).to(torch.bfloat16) for heads in (4, 2, 2))
    held = lengths_of(4096 // policy.sides[1], policy.sides[1], 2, 3) if lengths else None
    here = policy.mask(q, k, kv_lengths=held)
    there = policy.mask(q.cuda(), k.cuda(), kv_lengths=None if held is None else held.cuda())
    there.verify(wait=True)
    a, b = chosen(here), chosen(there.to("cpu"))
    share = (a != b).float().mean() / a.float().mean()
    assert share < 0.002, (
        f"{share:.2%} of the blocks differ"
    )  # scores that differ by rounding may change places
    if share == 0 and lengths is False:
        q, k, v = (x.cuda() for x in (q, k, v))
        made = policy.mask(
            q, k
        )  # as new as the one of the call: `there` has exact sizes, and so another plan
        assert torch.equal(sk.attention(q, k, v, policy), sk.attention(q, k, v, made))


@pytest.mark.parametrize("policy", CHOOSING, ids=lambda policy: policy.label)
def test_a_cuda_graph_chooses_anew_at_each_replay(policy: Any) -> None:
    q, k = (normal(1, heads, 4096, 64, seed=heads).to("cuda", torch.bfloat16) for heads in (4, 2))
    policy.mask(q, k)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        policy.mask(q, k)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = policy.mask(q, k)
    for seed in (5, 6):
        q.copy_(normal(1, 4, 4096, 64, seed=seed))
        graph.replay()
        assert torch.equal(chosen(mask.to("cpu")), chosen(policy.mask(q, k).to("cpu")))


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.label)
def test_nothing_waits_for_the_gpu(policy: Any, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    q, k = (normal(1, heads, 4096, 64, seed=heads).to("cuda", torch.bfloat16) for heads in (4, 2))
    for _ in range(3):
        policy.mask(q, k)
        torch.cuda.synchronize()
        with no_sync():
            policy.mask(q, k)


@pytest.mark.parametrize("gated", [False, True])
def test_vsa_adds_its_coarse_branch(gated: bool) -> None:
    operands = [normal(1, 4, 1024, 64, seed=seed).to(torch.bfloat16) for seed in range(4 if gated else 3)]
    lengths = lengths_of(16, 64, 1, 3)
    policy = policies.VSA(topk=4)
    wanted = policy.attention(*(x.float() for x in operands), kv_lengths=lengths, q_lengths=lengths)
    there = lengths.cuda()
    found = policy.attention(*(x.cuda() for x in operands), kv_lengths=there, q_lengths=there)
    torch.testing.assert_close(found.float().cpu(), wanted, rtol=2e-2, atol=2e-2)
    after = (torch.arange(1024) % 64 >= lengths.repeat_interleave(64, -1).view(-1)).view(1, 1, -1, 1)
    assert not found.cpu().masked_fill(~after, 0).any()
