"""XAttention's estimate: the specification, code for cards that are not there, and kernels on a GPU against torch."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from sparsek.attn.kernels.estimate import antidiagonals, groups
from sparsek.attn.reference import antidiagonals as reference
from tests.engine.launch import portable_code
from tests.engine.launch.covering import once
from tests.problems import CARDS
from tests.sampling import sampled


def by_loops(
    q: torch.Tensor, k: torch.Tensor, stride: int, block: tuple[int, int], causal: bool, q_offset: int
) -> torch.Tensor:
    """One head, group by group, in float64."""
    (q_len, dim), kv_len = q.shape, k.shape[0]
    mass = torch.zeros(-(-q_len // block[0]), -(-kv_len // block[1]), dtype=torch.float64)
    for i in range(0, q_len, stride):
        seen, last = [], q_offset + min(i + stride, q_len) - 1
        for j in range(0, kv_len, stride):
            if not causal or j <= last:
                pairs = [(i + stride - 1 - a, j + a) for a in range(stride)]
                exist = [q[x].double() @ k[y].double() for x, y in pairs if x < q_len and y < kv_len]
                seen.append(sum(exist, torch.zeros((), dtype=torch.float64)) / stride / dim**0.5)
        if seen:
            for j, share in enumerate(torch.stack(seen).softmax(0)):
                mass[i // block[0], j * stride // block[1]] += share
    return mass


@given(st.data())
@settings(max_examples=12)
def test_the_specification_is_the_sum_over_pairs_of_groups(data: st.DataObject):
    q_len, kv_len = (data.draw(st.integers(1, 150)) for _ in range(2))
    stride = data.draw(st.sampled_from((8, 16)))
    block = data.draw(st.tuples(*[st.sampled_from((64, 128))] * 2))
    causal, offset = data.draw(st.booleans()), data.draw(st.integers(-40, 160))
    torch.manual_seed(q_len)
    q, k = torch.randn(1, 2, q_len, 8), torch.randn(1, 1, kv_len, 8)
    mass = reference.block_mass(q, k, stride=stride, block=block, causal=causal, q_offset=offset)
    for h in range(2):
        right = by_loops(q[0, h], k[0, 0], stride, block, causal, offset)
        torch.testing.assert_close(mass[0, h].double(), right, rtol=1e-5, atol=1e-6)


def test_rounding_keeps_a_relative_error_of_a_sixteenth_at_any_scale():
    torch.manual_seed(0)
    x = torch.randn(1, 1, 4, 16, 8) * torch.tensor([1e-30, 1e-3, 1.0, 1e30])[:, None, None]
    made = reference.rounded(x)
    large = x.abs() > x.abs().amax((-2, -1), keepdim=True) / 2**12
    assert ((made - x).abs() <= x.abs() / 16)[large].all()
    assert torch.equal(reference.rounded(made), made)
    assert not reference.rounded(torch.zeros(1, 1, 1, 8, 4)).any()


@pytest.mark.parametrize("card", sampled(["sm_90", "sm_80"], 1))
def test_portable_kernels_copy_asynchronously(card: str):
    c = antidiagonals.SMALL
    types = dict.fromkeys(("parts", "tops", "out"), "*fp32") | {"q": "*bf16", "k": "*bf16", "factor": "fp32"}
    constants: dict[str, Any] = {
        "q_scale": None, "k_scale": None, "k_bias": None, "STRIDE": 16, "CAUSAL": True, "TMA": False, "K": 2048,
        "TM": c.tile_m, "TN": c.tile_n, "DEPTH": c.depth // 2, "RQ": 8, "RK": 8, "FOLDED": c.folded,
        "STAGES": c.num_stages, "LANES": c.lanes,
    }  # fmt: skip
    code = portable_code.compiled(
        antidiagonals._estimate, types, constants, CARDS[card], c.num_warps, c.num_stages
    )
    assert (code.stack, code.copies) == (0, True)
    assert code.shared <= CARDS[card].smem_bytes // 2  # two programs on an SM


@pytest.mark.parametrize("block", sampled([64, 128], 1))
def test_a_thread_adds_the_columns_of_a_block(block: int):
    """No shuffle for each block: those left are of whole rows, and of the sums at the end of a row tile."""
    c = antidiagonals.FP8
    types = dict.fromkeys(("parts", "tops", "out", "q_scale", "k_scale"), "*fp32") | {
        "q": f"tensordesc<fp8e4nv[{c.tile_m}, {c.depth}]>", "k": f"tensordesc<fp8e4nv[{c.tile_n}, {c.depth}]>",
        "factor": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "k_bias": None, "STRIDE": 16, "CAUSAL": True, "TMA": True, "K": 2048, "TM": c.tile_m, "TN": c.tile_n,
        "DEPTH": c.depth, "RQ": 8, "RK": block // 16, "FOLDED": c.folded, "STAGES": c.num_stages, "LANES": c.lanes,
    }  # fmt: skip
    code = portable_code.compiled(
        antidiagonals._estimate, types, constants, CARDS["sm_90"], c.num_warps, c.num_stages, aligned=()
    )
    assert "wgmma.mma_async" in code.ptx
    assert code.shared <= CARDS["sm_90"].smem_bytes
    assert code.ptx.count("shfl.sync") < 128, "each block took two of its own: 128 of a key tile"


@pytest.mark.parametrize("fp8", [True, False])
def test_grouping_reads_and_writes_16_bytes_at_once(fp8: bool):
    made = "*fp8e4nv" if fp8 else "*bf16"
    types = {"q": "*bf16", "k": "*bf16", "q_out": made, "k_out": made, "q_scale": "*fp32", "k_scale": "*fp32"}
    constants: dict[str, Any] = {
        "k_bias": None, "lengths": None, "STRIDE": 16, "BLOCK": 128, "D": 128, "WIDTH": 128, "ROWS": groups.ROWS,
        "sq_d": 1, "sk_d": 1, "TILE": 256, "LANES": 4,
    }  # fmt: skip
    if not fp8:
        constants |= {"q_scale": None, "k_scale": None}
    code = portable_code.compiled(groups._group, types, constants, CARDS["sm_90"], groups.WARPS, 3)
    assert code.stack == 0
    assert "ld.global.v4.b32" in code.ptx
    assert "v4.b32" in code.stores


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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_blocks_with_lengths():
    q, k = operands((2, 2, 1, 1000, 3000, 64))
    lengths = torch.randint(0, 129, (2, 24), dtype=torch.int32, device="cuda")
    said = options_for(q, k, causal=False, kv_lengths=lengths)
    ours, right = (module.block_mass(q, k, **said) for module in (antidiagonals, reference))
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
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
