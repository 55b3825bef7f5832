"""hopper.attention_fwd on a GPU: right on every case and config, over poisoned outputs, with the same bits every time.

Inputs are fresh in every run; a failure prints the seed. Compiling dominates: run it under pytest-xdist.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.engine.table import load
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.attention_cases import ATTENTION_CASES, AttentionCase, random_bits
from tests.attn.kernels.planned import attend, default_and
from tests.attn.kernels.planned import attention_problem as problem
from tests.engine.launch.drawn import fresh
from tests.sampling import dealt, half, sampled

pytestmark = pytest.mark.gpu
LOW = (torch.float16, torch.bfloat16)
DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (64, 128), (128, 64), (192, 128))
BLOCKS = ((128, 128), (64, 64), (128, 64), (64, 128))


def hold(case: AttentionCase, dtype: torch.dtype) -> None:
    """The default config and two of the others, twice: within the budget, and the same bits."""
    kernel, seed = load("hopper.attention_fwd"), fresh()
    q, k, v, mask = case.make("cuda", dtype, seed)
    p = problem(q, k, v, mask)
    assert kernel.why_not(p) == []
    for c in default_and(2, kernel, p, of=(str(case), dtype)):
        out, lse = attend(kernel, q, k, v, mask, c)
        gate = check_attention(q, k, v, mask, out, lse)
        assert gate.passed, f"{c}, seed {seed}: {gate}"
        again = attend(kernel, q, k, v, mask, c)
        assert torch.equal(out, again[0]), f"{c}, seed {seed}: other bits"
        assert torch.equal(lse, again[1]), f"{c}, seed {seed}: other bits of lse"
        # Scores of 0: a row's sum is the number of keys that its query sees, so that no key can hide in a norm.
        _, count = attend(kernel, torch.zeros_like(q), k, v, mask, c)
        seen = mask.to_dense().sum(-1).to(torch.float32)
        heads = q.shape[1] // mask.heads
        wanted = seen.repeat_interleave(heads, 1).expand(q.shape[:3])
        assert torch.equal(count.exp().round(), wanted), f"{c}: other keys seen"


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in ATTENTION_CASES for dtype in sampled(LOW, 1, of=str(case))],
    ids=str,
)
def test_every_case_in_every_config(case: AttentionCase, dtype: torch.dtype) -> None:
    q, k, v, mask = case.make("cuda", dtype)
    reasons = load("hopper.attention_fwd").why_not(problem(q, k, v, mask))
    if reasons:
        assert q.shape[3] % 8 or v.shape[3] % 8 or not problem(q, k, v, mask).aligned, reasons
        return
    hold(case, dtype)


@pytest.mark.parametrize(("dims", "block"), half(product(DIMS, BLOCKS)), ids=str)
def test_every_head_dim_and_block(dims: tuple[int, int], block: tuple[int, int]) -> None:
    """Bits, intervals and whole blocks; ragged ends; two heads of q to one of k, each with its own list."""

    def mask(device: str) -> BlockMask:
        return random_bits(device, (333, 401), block, heads=4, seed=fresh())

    def window(device: str) -> BlockMask:
        return BlockMask.sliding_window(500, 150, sinks=5, block=block, device=device)

    hold(AttentionCase("bits", mask, heads=(4, 2), dims=dims), torch.bfloat16)
    hold(AttentionCase("window", window, dims=dims), torch.float16)


def causal(device: str) -> BlockMask:
    return BlockMask.causal(3000, device=device)


def few_queries(device: str) -> BlockMask:
    return BlockMask.causal(q_len=5, kv_len=3000, device=device)


def global_rows(device: str) -> BlockMask:
    return BlockMask.bigbird(6000, window=384, globals=256, random=2, seed=fresh() % 1000, device=device)


def per_head(device: str) -> BlockMask:
    return BlockMask.per_head(
        [BlockMask.causal(1500, device=device), BlockMask.sliding_window(1500, 300, sinks=4, device=device)]
    )


MANY: dict[str, tuple[Callable[[str], BlockMask], tuple[int, int]]] = {
    "more tiles than CTAs": (causal, (12, 12)),
    "heads packed, keys split": (few_queries, (16, 2)),
    "global rows split": (global_rows, (6, 6)),
    "a list per head of k": (per_head, (8, 2)),
}


@pytest.mark.parametrize("name", MANY)
def test_schedules(name: str) -> None:
    mask, heads = MANY[name]
    for dim in dealt((64, 128), 2, list(MANY).index(name)):
        hold(AttentionCase(name, mask, heads=heads, dims=(dim, dim), batch=2), torch.bfloat16)


def test_cut_tiles_are_cut() -> None:
    kernel = load("hopper.attention_fwd")
    for mask, heads in (MANY["heads packed, keys split"], MANY["global rows split"]):
        q, k, v, made = AttentionCase("cut", mask, heads=heads, dims=(128, 128)).make("cuda")
        made.verify(wait=True)
        assert kernel.default(problem(q, k, v, made)).split


NARROW = ((192, 96), (80, 80), (40, 24), (8, 8))


@pytest.mark.parametrize("dims", NARROW, ids=str)
def test_cut_tiles_of_narrow_heads(dims: tuple[int, int]) -> None:
    """Parts are as wide as a tile, which is wider than these heads."""
    for name in dealt(("heads packed, keys split", "global rows split"), 2, NARROW.index(dims)):
        mask, heads = MANY[name]
        hold(AttentionCase("cut", mask, heads=heads, dims=dims), torch.bfloat16)


def test_keys_expanded_over_heads_are_read_in_place() -> None:
    kernel = load("hopper.attention_fwd")
    q, k, v, mask = AttentionCase("causal", causal, heads=(4, 1), dims=(64, 64)).make(
        "cuda", torch.bfloat16, fresh()
    )
    k, v = (x.expand(-1, 4, -1, -1) for x in (k, v))
    out, lse = attend(kernel, q, k, v, mask)
    gate = check_attention(q, k, v, mask, out, lse)
    assert gate.passed, gate


def test_a_hundred_runs_give_the_same_bits() -> None:
    kernel = load("hopper.attention_fwd")
    q, k, v, mask = AttentionCase("causal", causal, heads=(12, 12), dims=(128, 128)).make(
        "cuda", torch.bfloat16, fresh()
    )
    first, lse = attend(kernel, q, k, v, mask)
    for _ in range(100):
        out, other = attend(kernel, q, k, v, mask)
        assert torch.equal(out, first)
        assert torch.equal(other, lse)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_long_sequences_stay_near_float64(dtype: torch.dtype) -> None:
    kernel, length = load("hopper.attention_fwd"), 65536
    torch.manual_seed(fresh())
    q, k, v = (torch.randn(1, 2, length, 128, device="cuda", dtype=dtype) for _ in range(3))
    mask = BlockMask.sliding_window(length, 2048, sinks=100, device="cuda")
    out, lse = attend(kernel, q, k, v, mask)
    gate = check_attention(q, k, v, mask, out, lse, rows=[0, 15, 16, 17, 255, 511])
    assert gate.passed, gate
    if dtype == torch.float16:
        assert gate.largest < 2e-3, gate
