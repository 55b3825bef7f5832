"""CUDA graphs that hold the choice of a mask, its plan, attention and the gradients: 1,000 replays each, with other
inputs in every one, against the same calls outside of a graph, bit for bit.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import sparsek as sk
from sparsek.attn.mask.mask import BlockMask

pytestmark = pytest.mark.gpu

TOKENS, HEADS, REPLAYS = 2048, 4, 1000
Step = Callable[[], tuple[Tensor, ...]]


def scores(side: int) -> Tensor:
    return torch.randn(1, HEADS, TOKENS // side, TOKENS // side, device="cuda")


def edges() -> Tensor:
    inner = torch.randint(0, TOKENS + 1, (9,), device="cuda", dtype=torch.int32).sort().values
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), TOKENS)])


def ranks(x: Tensor) -> Tensor:
    return x.argsort(-1)[..., :3].to(torch.int32)


# What draws the input of a mask, and what makes the mask of it, q and k.
CASES: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, Tensor, Tensor], BlockMask]]] = {
    "topk": (lambda: scores(128), lambda x, q, k: BlockMask.topk(x, 4, True, (1, 2), TOKENS)),
    "topk, blocks of 64, budgets of heads": (
        lambda: scores(64),
        lambda x, q, k: BlockMask.topk(x, x[0, :, 0, :2].abs().argmax(-1) + 3, seq_len=TOKENS, block=64),
    ),
    "topk, blocks of 256": (
        lambda: scores(256),
        lambda x, q, k: BlockMask.topk(x, 3, True, seq_len=TOKENS, block=256),
    ),
    "short blocks": (
        lambda: scores(128),
        lambda x, q, k: BlockMask.topk(
            x, 5, seq_len=TOKENS, kv_lengths=(64 + x[0, 0, 0] * 16).clamp(0, 128).to(torch.int32)
        ),
    ),
    "cumulative": (
        lambda: scores(128).square(),
        lambda x, q, k: BlockMask.cumulative(x, 0.7, True, seq_len=TOKENS, least=2),
    ),
    "map": (lambda: scores(128), lambda x, q, k: BlockMask.from_block_map(x > 0.5, TOKENS, causal=True)),
    "indices": (lambda: ranks(scores(128)), lambda x, q, k: BlockMask.from_indices(x, seq_len=TOKENS)),
    "documents": (edges, lambda x, q, k: BlockMask.documents(x, TOKENS, window=700)),
    "XAttention": (lambda: scores(128), lambda x, q, k: sk.policies.XAttention(0.7).mask(q, k)),
    "SubBlock": (lambda: scores(128), lambda x, q, k: sk.policies.SubBlock().mask(q, k)),
}


@pytest.mark.parametrize("name", CASES)
def test_replays_have_the_bits_of_calls_outside_of_the_graph(name: str) -> None:
    draw, choose = CASES[name]
    given = draw()
    shapes = [(1, heads, TOKENS, 64) for heads in (HEADS, 2, 2, HEADS)]
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        mask = choose(given, q, k)
        out = sk.attention(q, k, v, mask)
        return (*mask.full[:2], *mask.partial[:2], out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        with torch.no_grad():
            given.copy_(draw())
            for x in (q, k, v, grad):
                x.normal_()
        for x in found[4:]:
            x.fill_(torch.nan)
        graph.replay()
        for a, b in zip(found, step(), strict=True):
            wrong += (a != b).sum()
    assert not wrong
    assert found[4].isfinite().all()
