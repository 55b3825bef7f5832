"""XAttention's estimate on a GPU against plain torch: every kernel, and repeated in a CUDA graph."""

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sparsek.attn.kernels.estimate import antidiagonals
from sparsek.attn.reference import antidiagonals as reference
from tests.engine.launch.covering import once

pytestmark = pytest.mark.gpu

# batch, q heads, kv heads, queries, keys, head dim
SIZES = [
    (1, 2, 1, 5000, 5000, 128),
    (2, 3, 3, 1000, 9001, 64),
    (1, 4, 2, 4096, 8192, 96),
    (1, 140, 2, 300, 700, 32),  # more row tiles than SMs
]
OPTIONS = [
    {},
    {"causal": False, "fp8": False},
    {"stride": 8, "block": (64, 128)},
    {"block": (128, 64), "fp8": False},
    {"q_offset": -77},
]


def operands(sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    batch, heads, kv_heads, q_len, kv_len, dim = sizes
    torch.manual_seed(sum(sizes))
    return [
        (2 * torch.randn(batch, length, n, dim, device="cuda")).to(dtype).transpose(1, 2)
        for n, length in ((heads, q_len), (kv_heads, kv_len))
    ]


def options_for(q: torch.Tensor, k: torch.Tensor, **changed: Any) -> dict[str, Any]:
    usual = {
        "stride": 16,
        "block": (128, 128),
        "causal": True,
        "q_offset": k.shape[2] - q.shape[2],
        "fp8": True,
    }
    return usual | changed


@pytest.mark.parametrize(
    ("sizes", "at", "usual"), once(product(SIZES, range(len(OPTIONS)), (True, False)), together=2), ids=str
)
def test_mass_is_that_of_the_specification(sizes: tuple[int, ...], at: int, usual: bool):
    q, k = operands(sizes)
    options = OPTIONS[at]
    config = None if usual else antidiagonals.SMALL
    said = options_for(q, k, **options)
    ours = antidiagonals.block_mass(q, k, config=config, **said)
    right = reference.block_mass(q, k, **said)
    # Tensor cores keep about 14 bits of a sum of FP8 products: 2048 of them, of scores up to 20.
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-3)
    assert torch.equal(ours == 0, right == 0)
    torch.testing.assert_close(ours.sum(-1), right.sum(-1), rtol=1e-4, atol=1e-4)


def test_blocks_with_lengths():
    q, k = operands((2, 2, 1, 1000, 3000, 64))
    lengths = torch.randint(0, 129, (2, 24), dtype=torch.int32, device="cuda")
    said = options_for(q, k, causal=False, kv_lengths=lengths)
    ours, right = (module.block_mass(q, k, **said) for module in (antidiagonals, reference))
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-3)


def test_a_graph_repeats_it_bit_for_bit_with_other_values():
    q, k = operands((1, 16, 4, 8192, 8192, 128))
    said = options_for(q, k)
    antidiagonals.block_mass(q, k, **said)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mass = antidiagonals.block_mass(q, k, **said)
    for round_ in range(20):
        q.copy_(torch.randn_like(q))
        mass.fill_(torch.nan)
        graph.replay()
        assert torch.equal(mass, antidiagonals.block_mass(q, k, **said)), round_
