"""hopper.attention_fp8: configs compiled for sm_90a, their texts, limits, reasons and predictions; scales on a GPU."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.attention_fp8 import AttentionFp8Problem
from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.testing.attention_fp8_budget import check_attention_fp8
from tests.attn.attention_cases import AttentionCase

pytest.importorskip("triton")

from sparsek.attn.kernels.forward.hopper_fp8 import Config
from sparsek.attn.kernels.forward.pipeline import fitted
from tests.attn.kernels.forward.problems import BLOCKS, attention_problem, hold_forward
from tests.attn.kernels.forward.test_attention_fwd import LOW, causal
from tests.attn.kernels.planned import attend
from tests.engine.launch.drawn import fresh
from tests.engine.launch.hopper_code import compiled
from tests.sampling import sampled

gpu = pytest.mark.gpu
KERNEL = load("hopper.attention_fp8")


def problem(dim: int = 128, v_dim: int | None = None, **more: Any) -> Any:
    return attention_problem(AttentionFp8Problem, dim, v_dim, **({"dtype": "e4m3"} | more))


def config(*sides: Any, **more: Any) -> Config:
    """Dims, block, warpgroups and keys, with as many stages as fit."""
    dim, v_dim, block, groups, keys = sides
    return fitted(Config(dim, v_dim, block, groups, keys, 2, 2, **more), H200.smem_bytes)


ALL: dict[str, Any] = {"interval": True, "bits": True, "split": True, "lse": True}
# Plain, with every rule and output, with scales of blocks; each tile, heads that are narrow and wide, 64 rows.
CORE = [
    (config(128, 128, (128, 128), 2, 128), "bf16"),
    (config(128, 128, (128, 128), 2, 128, pack=8, by_block=True, **ALL), "fp16"),
    (config(256, 128, (128, 128), 2, 64, interval=True), "bf16"),
    (config(64, 64, (64, 128), 1, 128, by_block=True, lse=True), "fp16"),
    (config(128, 128, (64, 64), 1, 64, **ALL), "bf16"),
]
OTHERS = [
    (config(dim, v_dim, block, groups, keys, by_block=by_block, **rules), "bf16")
    for dim, v_dim, (block, groups, keys), by_block, rules in product(
        (32, 64, 128, 256),
        (32, 64, 128),
        (((128, 128), 2, 128), ((128, 64), 2, 64), ((64, 64), 1, 64)),
        (True, False),
        ({}, {"interval": True, "lse": True}, {"bits": True, "split": True}),
    )
]


@pytest.mark.parametrize(("c", "dtype"), sampled([*CORE, *sampled(OTHERS, 5)], 1), ids=str)
def test_configs_compile_to_wgmma_and_tma_and_hide_the_softmax(c: Config, dtype: str) -> None:
    code = compiled(c, dtype)
    where = hold_forward(c, "e4m3", code, c.keys // 2 + 2, results=dtype)  # no product for a chain of its own
    assert code.stack <= 176, where
    assert code.spills <= 320, where
    plain = [loop for loop in code.loops if loop.loads <= (3 if c.by_block else 0)]
    assert len(plain) == c.groups, where
    assert not any(loop.local for loop in plain), f"a step without rules spills: {where}"


def test_operands_are_fewer_bytes_than_those_of_bf16() -> None:
    for dim, block in product((32, 64, 128), BLOCKS):
        p = problem(dim, block=block)
        assert p.compulsory_bytes < problem(dim, block=block, dtype="bf16").compulsory_bytes


def drawn(heads: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in bf16, of 128 columns."""
    q, k, v = torch.randn(3, 1, heads, length, 128, device="cuda", dtype=torch.bfloat16).unbind()
    return q, k, v


@gpu
@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("spread", [8, 60, 160])
def test_scales_of_values_that_lie_far_apart(rows: int, spread: int) -> None:
    """Up to 2^80 above and below their own: far enough that not every one can be the unit of a tile's sums."""
    torch.manual_seed(seed := fresh())
    heads, mask = sk.quantize_heads(*drawn(12, 3000), "block", rows=rows), causal("cuda")
    factor = torch.exp2((torch.rand_like(heads[2].scale) - 0.5) * spread)
    heads = (heads[0], heads[1], replace(heads[2], scale=heads[2].scale * factor))
    out, lse = attend(KERNEL, *heads, mask)
    gate = check_attention_fp8(*heads, mask, out, lse)
    assert gate.passed, f"seed {seed}: {gate}"


@gpu
def test_outputs_in_both_dtypes_in_one_process() -> None:
    seed = fresh()
    for dtype in (*LOW, *LOW):
        q, k, v, mask = AttentionCase("causal", causal, dims=(64, 64)).make("cuda", dtype, seed)
        heads = sk.quantize_heads(q, k, v, "block")
        out, lse = attend(KERNEL, *heads, mask)
        gate = check_attention_fp8(*heads, mask, out, lse)
        assert gate.passed, f"{dtype}, seed {seed}: {gate}"


@gpu
def test_sums_of_long_sequences_do_not_lose_bits() -> None:
    """Positive values over 32K keys: a sum that stayed in the tensor core would be wrong by percents."""
    torch.manual_seed(fresh())
    q, k, v = drawn(2, 32768)
    heads = sk.quantize_heads(q, k, v.abs())
    mask = BlockMask.full(q_len=32768, kv_len=32768, device="cuda")
    out, lse = attend(KERNEL, *heads, mask)
    gate = check_attention_fp8(*heads, mask, out, lse, rows=[0, 17, 255])
    assert gate.passed, gate
    assert gate.error < 5e-3, gate


@gpu
@pytest.mark.parametrize("scale", ["head", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantized_heads_have_the_bits_of_the_cpu(dtype: torch.dtype, scale: Any) -> None:
    torch.manual_seed(fresh())
    for length, dim in ((1, 16), (100, 48), (333, 128), (64, 320)):
        x = [torch.randn(2, length, 3, dim, device="cuda").to(dtype).transpose(1, 2) for _ in range(3)]
        x[0] = x[0] * torch.logspace(-8, 3, 3, device="cuda")[:, None, None].to(dtype)
        here = sk.quantize_heads(x[0], x[1], x[2], scale, rows=64)
        q, k, v = (each.cpu() for each in x)
        there = sk.quantize_heads(q, k, v, scale, rows=64)
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.scale.cpu(), b.scale)
            assert torch.equal(a.values.cpu().view(torch.uint8), b.values.view(torch.uint8))


@gpu
def test_calls_repeat_without_a_sync_and_in_a_graph(no_sync: Any) -> None:
    torch.manual_seed(fresh())
    heads = sk.quantize_heads(*drawn(4, 512))
    mask = BlockMask.causal(512, device="cuda")
    wanted = sk.attention(*heads, mask)
    torch.cuda.synchronize()
    with no_sync():
        repeated = [sk.attention(*heads, mask) for _ in range(5)]
    assert all(torch.equal(each, wanted) for each in repeated)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.attention(*heads, mask)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
