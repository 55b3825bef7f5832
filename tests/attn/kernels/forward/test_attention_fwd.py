"""Every kernel of attention on a GPU: right on every case and config, over poisoned outputs, the same bits every time.

Inputs are fresh in every run; a failure prints the seed. Compiling dominates: run it under pytest-xdist.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.mask import BlockMask
from sparsek.engine.table import load
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.attention_fp8_budget import check_attention_fp8
from tests.attn.attention_cases import (
    ATTENTION_CASES,
    MEMBER_CASES,
    SPARSE_MEMBER_CASES,
    AttentionCase,
    random_bits,
)
from tests.attn.kernels.planned import attend, default_and
from tests.attn.kernels.planned import attention_problem as problem
from tests.engine.launch.covering import once
from tests.engine.launch.drawn import fresh
from tests.sampling import dealt, sampled

pytestmark = pytest.mark.gpu
HOPPER, FP8, PORTABLE = "hopper.attention_fwd", "hopper.attention_fp8", "portable.attention_fwd"
LOW = (torch.float16, torch.bfloat16)
NARROW = ((32, 32), (64, 64), (96, 96), (128, 128), (64, 128), (128, 64))
DIMS = {
    HOPPER: (*NARROW, (192, 192), (256, 256), (192, 128)),
    FP8: (*NARROW, (192, 128), (256, 128), (16, 48)),
}
BLOCKS = ((128, 128), (64, 64), (128, 64), (64, 128))


def judge(given: Any, mask: BlockMask, found: tuple[Tensor, Tensor]) -> Any:
    """The gate of out and lse of q, k and v, tensors or QuantizedHeads."""
    check: Any = check_attention if isinstance(given[0], Tensor) else check_attention_fp8
    return check(*given, mask, *found)


def hold(name: str, case: AttentionCase, dtype: torch.dtype, scale: Any = "head", rows: int = 128) -> None:
    """The default config and one of the others, twice: within the budget, and the same bits.

    The other config is the same for all cases of equal dims and blocks: it takes seconds to compile. `scale` and `rows`
    are of FP8.
    """
    kernel, seed = load(name), fresh()
    q, k, v, mask = case.make("cuda", dtype, seed)

    def of(q: Tensor) -> Any:
        if name != FP8:
            return q, k, v
        # Keys and values that no query sees may hold NaN in these cases; scales are of what is finite.
        x, y, z = (each.nan_to_num(0, 0, 0) for each in (q, k, v))
        return sk.quantize_heads(x, y, z, scale, rows=rows)

    given, nothing = of(q), of(torch.zeros_like(q))
    p = problem(*given, mask=mask)
    assert kernel.why_not(p) == []
    for c in default_and(1, kernel, p, of=(name, case.dims, mask.block, dtype)):
        found, again = (attend(kernel, *given, mask=mask, config=c) for _ in range(2))
        gate = judge(given, mask, found)
        assert gate.passed, f"{c}, seed {seed}: {gate}"
        assert torch.equal(found[0], again[0]), f"{c}, seed {seed}: other bits"
        assert torch.equal(found[1], again[1]), f"{c}, seed {seed}: other bits of lse"
        # Scores of 0: a row's sum is the number of keys that its query sees, so that no key can hide in a norm.
        _, count = attend(kernel, *nothing, mask=mask, config=c)
        seen = mask.to_dense().sum(-1).to(torch.float32)
        wanted = seen.repeat_interleave(q.shape[1] // mask.heads, 1).expand(q.shape[:3])
        assert torch.equal(count.exp().round(), wanted), f"{c}: other keys seen"


@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        (name, case, dtype)
        for name, case in product((HOPPER, PORTABLE), (*ATTENTION_CASES, *MEMBER_CASES))
        for dtype in sampled(LOW, 1, of=(name, str(case)))
    ],
    ids=str,
)
def test_every_case(name: str, case: AttentionCase, dtype: torch.dtype) -> None:
    """In several configs of the Hopper kernel, and in the default of the portable one."""
    kernel, seed = load(name), fresh()
    q, k, v, mask = case.make("cuda", dtype, seed)
    p = problem(q, k, v, mask)
    reasons = kernel.why_not(p)
    if name == PORTABLE:
        assert reasons == []
        gate = check_attention(q, k, v, mask, *attend(kernel, q, k, v, mask))
        assert gate.passed, f"seed {seed}: {gate}"
    elif reasons:
        assert q.shape[3] % 8 or v.shape[3] % 8 or not p.aligned, reasons
    else:
        hold(name, case, dtype)


@pytest.mark.parametrize("case", SPARSE_MEMBER_CASES, ids=str)
def test_lists_that_are_sparse_in_the_keys_are_computed_in_tiles_of_64_rows(case: AttentionCase) -> None:
    """Except with windows or sinks, for which every block is loaded."""
    q, k, v, mask = case.make("cuda")
    assert mask.members is not None
    c = load(HOPPER).default(problem(q, k, v, mask))
    assert c.passes != mask.members.at_ends
    hold(HOPPER, case, q.dtype)


HOW: tuple[tuple[torch.dtype, Any, int], ...] = ((torch.bfloat16, "head", 128), (torch.float16, "block", 64))


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_every_case_in_fp8(case: AttentionCase) -> None:
    q, _, v, _ = case.make("cuda", torch.bfloat16)
    if q.shape[3] % 16 or v.shape[3] % 16 or q.shape[3] > 256 or v.shape[3] > 128 or not q.numel():
        pytest.skip("hopper.attention_fp8 refuses such heads")
    for how in sampled(HOW, 1, of=str(case)):
        hold(FP8, case, *how)


def bits(block: tuple[int, int]) -> AttentionCase:
    """Two heads of q to one of k, each with its own list; ragged ends."""
    return AttentionCase(
        "bits", lambda device: random_bits(device, (333, 401), block, heads=4, seed=fresh()), heads=(4, 2)
    )


def window(block: tuple[int, int]) -> AttentionCase:
    """Intervals and whole blocks."""
    return AttentionCase(
        "window", lambda device: BlockMask.sliding_window(500, 150, sinks=5, block=block, device=device)
    )


def kinds(case: tuple[tuple[int, int], tuple[int, int], str]) -> list[tuple[object, ...]]:
    dims, block, rules = case
    return [("dims", dims, rules), ("block", block, rules)]


RULES = {"bits": (bits, torch.bfloat16, "head"), "window": (window, torch.float16, "block")}


@pytest.mark.parametrize(
    ("name", "dims", "block", "rules"),
    [(name, *each) for name in DIMS for each in once(product(DIMS[name], BLOCKS, RULES), kinds)],
    ids=str,
)
def test_every_head_dim_and_block(
    name: str, dims: tuple[int, int], block: tuple[int, int], rules: str
) -> None:
    """Every run has all dims and all blocks with both kinds of masks, and other pairs of dims and blocks."""
    make, dtype, scale = RULES[rules]
    hold(name, replace(make(block), dims=dims), dtype, scale)


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


@pytest.mark.parametrize("many", MANY)
@pytest.mark.parametrize("name", DIMS)
def test_schedules(name: str, many: str) -> None:
    mask, heads = MANY[many]
    for dim, scale in dealt(((64, "block"), (128, "head")), 2, list(MANY).index(many), of=name):
        hold(name, AttentionCase(many, mask, heads=heads, dims=(dim, dim), batch=2), torch.bfloat16, scale)


SLIM = ((192, 96), (80, 80), (40, 24), (8, 8))


@pytest.mark.parametrize("dims", SLIM, ids=str)
def test_cut_tiles_of_narrow_heads(dims: tuple[int, int]) -> None:
    """Parts are as wide as a tile, which is wider than these heads."""
    for name in dealt(("heads packed, keys split", "global rows split"), 2, SLIM.index(dims)):
        mask, heads = MANY[name]
        hold(HOPPER, AttentionCase("cut", mask, heads=heads, dims=dims), torch.bfloat16)


def test_cut_tiles_are_cut() -> None:
    kernel = load(HOPPER)
    for mask, heads in (MANY["heads packed, keys split"], MANY["global rows split"]):
        q, k, v, made = AttentionCase("cut", mask, heads=heads, dims=(128, 128)).make("cuda")
        made.verify(wait=True)
        assert kernel.default(problem(q, k, v, made)).split


@pytest.mark.parametrize(
    ("name", "scale"), [(HOPPER, ""), (FP8, "head"), (FP8, "block"), (PORTABLE, "")], ids=str
)
def test_a_query_of_nan_gives_nan_and_changes_no_other(name: str, scale: Any) -> None:
    """Also where a tile is cut and its parts are merged: rows 0 to 255 see all keys."""
    mask, heads = MANY["global rows split"]
    q, k, v, made = AttentionCase("cut", mask, heads=heads, dims=(128, 128)).make(
        "cuda", torch.bfloat16, fresh()
    )
    made.verify(wait=True)
    rows = torch.tensor([100, 1500], device="cuda")
    kernel = load(name)
    if name == FP8:
        given = sk.quantize_heads(q, k, v, scale)
        assert kernel.default(problem(*given, mask=made)).split
        clean = attend(kernel, *given, made)
        given[0].values.view(torch.uint8)[:, :, rows] = 0x7F  # NaN
    else:
        given = q, k, v
        assert name == PORTABLE or kernel.default(problem(*given, mask=made)).split
        clean = attend(kernel, *given, made)
        q[:, :, rows] = torch.nan
    others = torch.ones(6000, dtype=torch.bool, device="cuda").index_fill(0, rows, False)
    for found, wanted in zip(attend(kernel, *given, made), clean, strict=True):
        assert found[:, :, rows].isnan().all()
        assert torch.equal(found[:, :, others], wanted[:, :, others])


def of_twelve_heads() -> tuple[Tensor, Tensor, Tensor, BlockMask]:
    return AttentionCase("causal", causal, heads=(12, 12), dims=(128, 128)).make(
        "cuda", torch.bfloat16, fresh()
    )


def test_a_hundred_runs_give_the_same_bits() -> None:
    given = of_twelve_heads()
    first, lse = attend(load(HOPPER), *given)
    for _ in range(100):
        out, other = attend(load(HOPPER), *given)
        assert torch.equal(out, first)
        assert torch.equal(other, lse)


def test_ten_thousand_launches_on_uneven_rows_give_the_same_bits_in_fp8() -> None:
    q, k, v, mask = of_twelve_heads()
    heads = sk.quantize_heads(q, k, v)
    first, lse = attend(load(FP8), *heads, mask)
    plan = sk.plan_attention(*heads, mask, return_lse=True)
    for _ in range(100):
        results = [plan(*heads, mask) for _ in range(100)]
        assert all(torch.equal(out, first) and torch.equal(sums, lse) for out, sums in results)


def test_keys_expanded_over_heads_are_read_in_place() -> None:
    q, k, v, mask = AttentionCase("causal", causal, heads=(4, 1), dims=(64, 64)).make(
        "cuda", torch.bfloat16, fresh()
    )
    k, v = (x.expand(-1, 4, -1, -1) for x in (k, v))
    gate = check_attention(q, k, v, mask, *attend(load(HOPPER), q, k, v, mask))
    assert gate.passed, gate


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_long_sequences_stay_near_float64(dtype: torch.dtype) -> None:
    kernel, length = load(HOPPER), 65536
    torch.manual_seed(fresh())
    q, k, v = (torch.randn(1, 2, length, 128, device="cuda", dtype=dtype) for _ in range(3))
    mask = BlockMask.sliding_window(length, 2048, sinks=100, device="cuda")
    out, lse = attend(kernel, q, k, v, mask)
    gate = check_attention(q, k, v, mask, out, lse, rows=[0, 15, 16, 17, 255, 511])
    assert gate.passed, gate
    if dtype == torch.float16:
        assert gate.largest < 2e-3, gate
