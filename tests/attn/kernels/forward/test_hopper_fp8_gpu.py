"""hopper.attention_fp8 on a GPU: right on every case and config, over poisoned outputs, with the same bits every time.

Inputs are fresh in every run; a failure prints the seed.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.quantized_heads import AttentionHeads
from sparsek.attn.plan.attention_fp8 import AttendedFp8
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.core.device import card_of
from sparsek.engine.table import load
from sparsek.testing.attention_cases import ATTENTION_CASES, AttentionCase, random_bits
from sparsek.testing.attention_fp8_budget import check_attention_fp8
from sparsek.testing.poison import poisoned
from tests.attn.kernels.forward.test_hopper_fwd_gpu import BLOCKS, MANY, causal
from tests.attn.kernels.planned import default_and
from tests.engine.launch.drawn import fresh
from tests.sampling import dealt, half, sampled

pytestmark = pytest.mark.gpu
LOW = (torch.float16, torch.bfloat16)
DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 128), (64, 128), (128, 64), (16, 48))
KERNEL = load("hopper.attention_fp8")


def drawn(heads: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in bf16, of 128 columns."""
    q, k, v = torch.randn(3, 1, heads, length, 128, device="cuda", dtype=torch.bfloat16).unbind()
    return q, k, v


def attend(heads: AttentionHeads, mask: BlockMask, config: Any = None) -> tuple[Tensor, Tensor]:
    q, k, v = heads
    p = AttendedFp8(q, k, v, mask, return_lse=True).problem(card_of(q.device))
    assert KERNEL.why_not(p) == []
    c = KERNEL.default(p) if config is None else config
    out = poisoned((*q.shape[:3], v.shape[3]), q.source_dtype, q.device)
    lse = poisoned(q.shape[:3], torch.float32, q.device)
    KERNEL.launch(c, KERNEL.prepare(p, c, mask), AttentionCall(q, k, v, mask, q.shape[3] ** -0.5, out, lse))
    return out, lse


def hold(case: AttentionCase, dtype: torch.dtype, scale: Any = "head", rows: int = 128) -> None:
    """The default config and one of the others, twice: within the budget, and the same bits."""
    seed = fresh()
    q, k, v, mask = case.make("cuda", dtype, seed)
    # Keys and values that no query sees may hold NaN in these cases; scales are of what is finite.
    q, k, v = (x.nan_to_num(0, 0, 0) for x in (q, k, v))
    heads = sk.quantize_heads(q, k, v, scale, rows=rows)
    p = AttendedFp8(*heads, mask, return_lse=True).problem(card_of(q.device))
    for c in default_and(1, KERNEL, p, of=(str(case), dtype)):
        out, lse = attend(heads, mask, c)
        gate = check_attention_fp8(*heads, mask, out, lse)
        assert gate.passed, f"{c}, seed {seed}: {gate}"
        again = attend(heads, mask, c)
        assert torch.equal(out, again[0]), f"{c}, seed {seed}: other bits"
        assert torch.equal(lse, again[1]), f"{c}, seed {seed}: other bits of lse"
        # Scores of 0: a row's sum is the number of keys that its query sees, so that no key can hide in a norm.
        nothing = sk.quantize_heads(torch.zeros_like(q), k, v, scale, rows=rows)
        _, count = attend(nothing, mask, c)
        seen = mask.to_dense().sum(-1).to(torch.float32)
        wanted = seen.repeat_interleave(q.shape[1] // mask.heads, 1).expand(q.shape[:3])
        assert torch.equal(count.exp().round(), wanted), f"{c}: other keys seen"


HOW: tuple[tuple[torch.dtype, Any, int], ...] = ((torch.bfloat16, "head", 128), (torch.float16, "block", 64))


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_every_case_in_every_config(case: AttentionCase) -> None:
    q, _, v, _ = case.make("cuda", torch.bfloat16)
    if q.shape[3] % 16 or v.shape[3] % 16 or q.shape[3] > 256 or v.shape[3] > 128 or not q.numel():
        pytest.skip("hopper.attention_fp8 refuses such heads")
    for dtype, scale, rows in sampled(HOW, 1, of=str(case)):
        hold(case, dtype, scale, rows)


@pytest.mark.parametrize(("dims", "block"), half(product(DIMS, BLOCKS)), ids=str)
def test_every_head_dim_and_block(dims: tuple[int, int], block: tuple[int, int]) -> None:
    """Bits, intervals and whole blocks; ragged ends; two heads of q to one of k, each with its own list."""

    def mask(device: str) -> BlockMask:
        return random_bits(device, (333, 401), block, heads=4, seed=fresh())

    def window(device: str) -> BlockMask:
        return BlockMask.sliding_window(500, 150, sinks=5, block=block, device=device)

    hold(AttentionCase("bits", mask, heads=(4, 2), dims=dims), torch.bfloat16)
    hold(AttentionCase("window", window, dims=dims), torch.float16, "block")


@pytest.mark.parametrize("name", MANY)
def test_schedules(name: str) -> None:
    mask, heads = MANY[name]
    for dim, scale in dealt(((64, "block"), (128, "head")), 2, list(MANY).index(name)):
        hold(AttentionCase(name, mask, heads=heads, dims=(dim, dim), batch=2), torch.bfloat16, scale)


@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("spread", [8, 60, 160])
def test_scales_of_values_that_lie_far_apart(rows: int, spread: int) -> None:
    """Up to 2^80 above and below their own: far enough that not every one can be the unit of a tile's sums."""
    torch.manual_seed(seed := fresh())
    heads, mask = sk.quantize_heads(*drawn(12, 3000), "block", rows=rows), causal("cuda")
    factor = torch.exp2((torch.rand_like(heads[2].scale) - 0.5) * spread)
    heads = (heads[0], heads[1], replace(heads[2], scale=heads[2].scale * factor))
    out, lse = attend(heads, mask)
    gate = check_attention_fp8(*heads, mask, out, lse)
    assert gate.passed, f"seed {seed}: {gate}"


def test_outputs_in_both_dtypes_in_one_process() -> None:
    seed = fresh()
    for dtype in (*LOW, *LOW):
        q, k, v, mask = AttentionCase("causal", causal, dims=(64, 64)).make("cuda", dtype, seed)
        heads = sk.quantize_heads(q, k, v, "block")
        out, lse = attend(heads, mask)
        gate = check_attention_fp8(*heads, mask, out, lse)
        assert gate.passed, f"{dtype}, seed {seed}: {gate}"


def test_ten_thousand_launches_on_uneven_rows_give_the_same_bits() -> None:
    torch.manual_seed(fresh())
    heads = sk.quantize_heads(*drawn(12, 3000))
    mask = causal("cuda")
    first, lse = attend(heads, mask)
    plan = sk.plan_attention(*heads, mask, return_lse=True)
    for _ in range(100):
        results = [plan(*heads, mask) for _ in range(100)]
        assert all(torch.equal(out, first) and torch.equal(sums, lse) for out, sums in results)


def test_sums_of_long_sequences_do_not_lose_bits() -> None:
    """Positive values over 32K keys: a sum that stayed in the tensor core would be wrong by percents."""
    torch.manual_seed(fresh())
    q, k, v = drawn(2, 32768)
    heads = sk.quantize_heads(q, k, v.abs())
    mask = BlockMask.full(q_len=32768, kv_len=32768, device="cuda")
    out, lse = attend(heads, mask)
    gate = check_attention_fp8(*heads, mask, out, lse, rows=[0, 17, 255])
    assert gate.passed, gate
    assert gate.error < 5e-3, gate


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
