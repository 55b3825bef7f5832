"""Gradients of the reference of attention: of finite differences, for every builder, and in formulas."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention, attention_backward
from tests.attn.attention_cases import AttentionCase, random_bits
from tests.attn.kernels.backward.grad_cases import cases
from tests.sampling import sampled

SMALL = (64, 64)
SIZE = {"q_len": 70, "kv_len": 90, "block": SMALL, "device": "cpu"}


def topk(batch: int, heads: int) -> BlockMask:
    scores = torch.rand(batch, heads, 2, 2, generator=torch.Generator().manual_seed(0))
    return BlockMask.topk(scores, 1, q_len=70, kv_len=90, block=SMALL)


BUILDERS: dict[str, Callable[[], BlockMask]] = {
    "full": lambda: BlockMask.full(**SIZE),
    "causal": lambda: BlockMask.causal(**SIZE),
    "causal, the first see nothing": lambda: BlockMask.causal(**SIZE, q_offset=-30),
    "window and sinks": lambda: BlockMask.sliding_window(window=9, sinks=5, **SIZE),
    "window both ways": lambda: BlockMask.sliding_window(window=9, causal=False, **SIZE),
    "documents": lambda: BlockMask.block_diagonal([20, 1, 49], block=SMALL, device="cpu"),
    "strided": lambda: BlockMask.strided(stride=64, window=32, **SIZE),
    "dilated": lambda: BlockMask.dilated(window=64, dilation=2, **SIZE),
    "bigbird": lambda: BlockMask.bigbird(window=64, globals=3, random=1, **SIZE),
    "top k": lambda: topk(1, 1),
    "top k per item and head": lambda: topk(2, 4),
    "blocks": lambda: BlockMask.from_blocks([0, 1, 2], [1, 0], 70, 90, SMALL, device="cpu"),
    "bits": lambda: random_bits("cpu", (70, 90), SMALL, density=1.5),
    "per head": lambda: BlockMask.per_head([BlockMask.causal(**SIZE), BlockMask.full(**SIZE)]),
    "per batch": lambda: BlockMask.per_batch([BlockMask.causal(**SIZE), BlockMask.full(**SIZE)]),
}


def leaves(mask: BlockMask) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 4, mask.q_len, 3), (2, 2, mask.kv_len, 3), (2, 2, mask.kv_len, 2)
    made = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    mask = BUILDERS[name]()

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, mask, scale=0.7)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert gradcheck(run, leaves(mask), fast_mode=True)


def by_formulas(case: AttentionCase, with_lse: bool) -> None:
    *tensors, mask = case.make(dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in tensors)
    out, lse = attention(q, k, v, mask, scale=0.2)
    draw = torch.Generator().manual_seed(1)
    grad, grad_lse = (torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (out, lse))
    outputs = [(out, grad), (lse, grad_lse)][: 2 if with_lse else 1]
    expected = torch.autograd.grad([x for x, _ in outputs], (q, k, v), [g for _, g in outputs])
    with torch.no_grad():
        found = attention_backward(q, k, v, mask, out, lse, grad, grad_lse if with_lse else None, scale=0.2)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("case", "with_lse"), sampled(product(cases(), (True, False)), 18), ids=str)
def test_the_formulas_give_what_autograd_gives(case: AttentionCase, with_lse: bool) -> None:
    by_formulas(case, with_lse=with_lse)


def test_rows_that_see_nothing_give_nothing_whatever_their_gradient_is() -> None:
    mask = BlockMask.causal(q_len=130, kv_len=60, block=SMALL, device="cpu")
    q, k, v = (x.detach() for x in leaves(mask))
    out, lse = attention(q, k, v, mask)
    grad, grad_lse = torch.ones_like(out), torch.ones_like(lse)
    clean = attention_backward(q, k, v, mask, out, lse, grad, grad_lse)
    grad[:, :, :70], grad_lse[:, :, :70] = torch.nan, torch.inf
    dirty = attention_backward(q, k, v, mask, out, lse, grad, grad_lse)
    assert not clean[0][:, :, :70].any()
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
