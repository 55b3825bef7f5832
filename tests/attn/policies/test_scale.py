"""The factor of q @ k: what a policy chooses with scale=s is what it chooses of s * sqrt(D) * q by default."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from tests.attn.policies.drawn import chosen, normal
from tests.refusals import refused

P = sk.policies
TILES = P.SlidingTile((2, 16, 16), (1, 3, 3), (1, 8, 8), clamped=False)
# By the softmax of scores, whose share of the mass depends on the factor.
SHARES: list[Any] = [
    P.XAttention(threshold=0.6, block=64, precision="full"),
    P.XAttention(threshold=0.6, block=64, causal=False),
    P.Nabla(0.4),
    P.Nabla(0.3, tiles=TILES),
    P.FlexPrefill(gamma=0.5, tau=0.5, min_budget=64, block=64),
    P.FlexPrefill(gamma=0.5, tau=0.0, min_budget=64, block=64),
]
OTHERS: list[Any] = [
    P.MeanTopK(topk=2, block=64),
    P.SubBlock(density=0.3),
    P.VSA(topk=2),
    P.VerticalSlash(40, 60, block=64),
    P.Streaming(window=128, sinks=64, block=64),
    P.XAttention(threshold=0.6, block=64) | P.Streaming(window=64, sinks=64, block=64),
    P.SubBlock() & TILES,
    sk.MaskPolicy(topk=2, window=64, block=64),
]
FACTOR = 4.0  # a power of two, so that q * FACTOR has no rounding


def given() -> tuple[Tensor, Tensor, Tensor]:
    return 2 * normal(1, 4, 512, 16), normal(1, 2, 512, 16, seed=1), normal(1, 2, 512, 8, seed=2)


@pytest.mark.parametrize("policy", SHARES + OTHERS, ids=lambda policy: policy.label)
def test_a_policy_chooses_with_the_scale_of_the_call(policy: Any) -> None:
    q, k, v = given()
    scale = FACTOR * 16**-0.5
    right = policy.mask_for(FACTOR * q, k)
    assert torch.equal(chosen(policy.mask_for(q, k, scale)), chosen(right))
    torch.testing.assert_close(
        sk.attention(q, k, v, policy, scale=scale), sk.attention(q, k, v, right, scale=scale)
    )
    if policy in SHARES:
        assert not torch.equal(chosen(right), chosen(policy.mask(q, k)))
        found, wanted = P.recall(policy, q, k, scale=scale), P.recall(policy, FACTOR * q, k)
        torch.testing.assert_close(found, wanted)
        pictures = P.plot(policy, q, k, scale=scale), P.plot(policy, FACTOR * q, k)
        assert pictures[0] == pictures[1]


def test_the_coarse_branch_of_vsa_chooses_with_its_scale() -> None:
    q, k, v = given()
    found = P.VSA(topk=3).attention(q, k, v, scale=FACTOR * 16**-0.5)
    torch.testing.assert_close(found, P.VSA(topk=3).attention(FACTOR * q, k, v))


def test_a_compiled_call_keeps_its_scale() -> None:
    torch._dynamo.reset()
    q, k, v = given()
    policy = SHARES[0]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sk.attention(q, k, v, policy, scale=1.0) + sk.attention(q, k, v, policy, scale=0.01)

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(q, k, v), run(q, k, v))
    torch._dynamo.reset()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), "1", True])
def test_a_scale_that_attention_refuses_is_refused(scale: Any) -> None:
    q, k, _ = given()
    refused("scale is", P.XAttention().mask, q, k, scale=scale)
