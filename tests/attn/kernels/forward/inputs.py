"""q, k and v for the CPU kernels of attention and of its gradients: drawn, and in memory in every way."""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from tests.attn.attention_cases import random_bits

SMALL, LARGE = (64, 64), (128, 128)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def drawn_inputs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, BlockMask]:
    """q, k and v with a mask at random, of up to 300 queries and keys."""
    block = draw(st.sampled_from([SMALL, LARGE, (64, 128), (128, 64)]))
    s, t = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, items = draw(st.sampled_from([1, kv_heads, kv_heads * group])), draw(st.sampled_from([1, batch]))
    density, seed = draw(st.sampled_from([0.2, 0.6, 1.2])), draw(st.integers(0, 99))
    mask = random_bits("cpu", (s, t), block, heads=heads, batch=items, density=density, seed=seed)
    k, v = (normal(batch, kv_heads, t, d, seed=d) for d in (16, 24))
    return normal(batch, kv_heads * group, s, 16), k, v, mask


# How a tensor of this shape, drawn by `normal`, lies in memory.
LAYOUTS = {
    "bshd": lambda normal, b, h, s, d: normal(b, s, h, d).transpose(1, 2),
    "dims outside": lambda normal, b, h, s, d: normal(b, h, d, s).mT,
    "every other key": lambda normal, b, h, s, d: normal(b, h, 2 * s, d)[:, :, ::2],
    "every other dim": lambda normal, b, h, s, d: normal(b, h, s, 2 * d)[..., ::2],
    "part of a fused projection": lambda normal, b, h, s, d: normal(b, s, 3, h, d)[:, :, 1].transpose(1, 2),
    "one head repeated": lambda normal, b, h, s, d: normal(b, 1, s, d).expand(b, h, s, d),
    "backwards in memory": lambda normal, b, h, s, d: normal(h, b, s, d).transpose(0, 1),
}


def largest_product(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number: the bytes of the operands and the result of the largest torch.bmm from now on."""
    largest, plain = [0], torch.bmm

    def spying(left: Tensor, right: Tensor) -> Tensor:
        result = plain(left, right)
        largest[0] = max(largest[0], left.nbytes + right.nbytes + result.nbytes)
        return result

    monkeypatch.setattr(torch, "bmm", spying)
    return largest
