"""Policies inside torch.compile: one graph, whose mask is that of an eager call, for every policy."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import sparsek as sk
from tests.sampling import sampled

P = sk.policies
LENGTH = 512
TILES = P.SlidingTile((2, 16, 16), window=(1, 3, 3), tile=(1, 8, 8), clamped=False)
POLICIES: dict[str, Callable[[], Any]] = {
    "MeanTopK": lambda: P.MeanTopK(topk=2),
    "SubBlock": lambda: P.SubBlock(density=0.3),
    "XAttention": lambda: P.XAttention(threshold=0.6),
    "FlexPrefill": lambda: P.FlexPrefill(gamma=0.8),
    "VerticalSlash": lambda: P.VerticalSlash(vertical=40, slash=60),
    "Nabla": lambda: P.Nabla(threshold=0.4),
    "Nabla, tiles": lambda: P.Nabla(threshold=0.4, tiles=TILES),
    "VSA": lambda: P.VSA(topk=3),
    "Streaming": lambda: P.Streaming(window=128, sinks=64),
    "SlidingTile": lambda: TILES,
    "or": lambda: P.MeanTopK(topk=1) | P.Streaming(window=128),
    "and": lambda: P.XAttention(threshold=0.9) & P.Streaming(window=256),
    "NSA": lambda: P.NSA(topk=4),
    "MoBAGate": lambda: P.MoBAGate(topk=2, block=128),
    "MaskPolicy": lambda: sk.MaskPolicy(topk=2, window=100, sinks=3, block=64),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(count: int = 3) -> list[Tensor]:
    return [torch.randn(1, heads, LENGTH, 32, requires_grad=True) for heads in (4, 2, 2, 4)[:count]]


def graphs(run: Callable[..., Tensor], draw: Callable[[], list[Tensor]], backend: str = "eager") -> int:
    """The graphs of some calls, each of which gives what an eager call does, with the same gradients."""
    counting = CompileCounterWithBackend(backend)
    compiled = torch.compile(run, fullgraph=True, backend=counting)
    for _ in range(2):
        given = draw()
        out, expected = compiled(*given), run(*given)
        torch.testing.assert_close(out, expected)
        wanted, grad = [x for x in given if x.requires_grad], torch.randn_like(out)
        found, right = (torch.autograd.grad(each, wanted, grad) for each in (out, expected))
        torch.testing.assert_close(found, right)
    return counting.frame_count


@pytest.mark.parametrize("name", sampled(POLICIES, 5))
def test_a_policy_and_attention_are_one_graph(name: str):
    policy = POLICIES[name]()
    assert graphs(lambda q, k, v: sk.attention(q, k, v, policy), qkv) == 1


@pytest.mark.parametrize(
    "name", sampled(["Nabla, tiles", "or", "Streaming", "NSA", "MaskPolicy", "window"], 3)
)
def test_a_policy_made_in_the_graph_keeps_its_options(name: str):
    made = {
        "Nabla, tiles": lambda: P.Nabla(
            threshold=0.3, tiles=P.SlidingTile((2, 16, 16), window=(1, 3, 3), tile=(1, 8, 8), clamped=False)
        ),
        "or": lambda: P.MeanTopK(topk=1) | P.Streaming(window=64),
        "Streaming": lambda: P.Streaming(window=64, sinks=0),
        "NSA": lambda: P.NSA(topk=3, block=32, always=(0, 1), stride=8),
        "MaskPolicy": lambda: sk.MaskPolicy(topk=3, window=70),
        "window": lambda: sk.MaskPolicy(window=64, stride=128, block=64),
    }[name]
    assert graphs(lambda q, k, v: sk.attention(q, k, v, made()), qkv) == 1


def test_lengths_of_blocks_and_an_offset():
    def draw() -> list[Tensor]:
        return [*qkv(), torch.randint(1, 65, (8,)).int()]

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        best = P.SubBlock(causal=True).mask(q[:, :, :300], k, q_offset=100, kv_lengths=lengths)
        near = P.Streaming(window=128, block=64).mask(q[:, :, :300], k, q_offset=100, kv_lengths=lengths)
        return sk.attention(q[:, :, :300], k, v, best) + sk.attention(q[:, :, :300], k, v, near)

    assert graphs(run, draw) == 1


@pytest.mark.parametrize("gated", sampled([False, True], 1))
def test_the_coarse_branch_of_vsa_and_its_gate_keep_their_gradients(gated: bool):
    policy = P.VSA(topk=3)

    def run(*given: Tensor) -> Tensor:
        *qkv, lengths = given
        return policy.attention(*qkv, kv_lengths=lengths, q_lengths=lengths)

    def draw() -> list[Tensor]:
        return [*qkv(4 if gated else 3), torch.randint(1, 65, (8,)).int()]

    assert graphs(run, draw, "aot_eager") == 1
