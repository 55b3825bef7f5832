"""portable.attention_bwd in Triton's interpreter."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.backward import bwd_walks
from sparsek.attn.kernels.backward import portable_bwd as portable
from sparsek.attn.kernels.backward.portable_bwd import Config, Tile
from sparsek.attn.kernels.backward.sinks import launched
from sparsek.attn.kernels.forward.portable_tiles import DIMS
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.attn.reference.scores import sink_gradients
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import AttentionCase, random_bits
from tests.attn.kernels.backward.grad_cases import (
    cases,
    differentiate,
    inputs,
    judged,
    problem,
)
from tests.attn.kernels.conformance import Backward
from tests.engine.launch.covering import once
from tests.sampling import sampled

HALF = torch.float16
KERNEL: Any = portable.KERNEL
SMALL, LARGE = (64, 64), (128, 128)
# As many of a block as its smallest side has: fewest steps.
FEW = Config(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1))
APART = replace(FEW, apart=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def operands(
    mask: BlockMask, heads: tuple[int, int] = (1, 1), dim: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for `mask`, whose batch they have."""
    hq, hkv = heads
    lengths = ((hq, mask.q_len), (hkv, mask.kv_len), (hkv, mask.kv_len))
    q, k, v = (normal(mask.batch, h, n, dim, seed=at) for at, (h, n) in enumerate(lengths))
    return q, k, v


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, config: Config | None = None, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, after the gate."""
    given = inputs(q, k, v, mask, **more)
    found = differentiate(KERNEL, given, config)
    gate = judged(given, found)
    assert gate.passed, f"{mask} {config}: {gate}"
    return found


class TestPortable(Backward):
    kernel, dtype, dims, lengths, heads, narrow = KERNEL, HALF, (32, 32), (70, 100), (2, 1), APART


def quick(case: AttentionCase) -> bool:
    """A few seconds at most; the others are left to the GPU."""
    return case.dtype == "fp16" and problem(*case.make()).useful_flops < 1.8e8


CASES = [case for case in cases() if quick(case)]


@pytest.mark.parametrize("case", sampled(CASES, 4), ids=str)
def test_quick_cases_are_within_budget(case: AttentionCase) -> None:
    given = case.make()
    assert KERNEL.why_not(problem(*given)) == []
    check(*given, with_lse=len(str(case)) % 2 == 0)


def test_most_cases_are_quick() -> None:
    assert len(CASES) > 30


SMALLER = (
    (LARGE, Config(Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))),
    ((128, 64), Config(Tile(32, 64, 4, 2), Tile(128, 16, 4, 2), True)),
    ((64, 128), Config(Tile(16, 64, 4, 2), Tile(16, 128, 4, 2))),
)


@pytest.mark.parametrize(
    ("block", "config", "rules"),
    [
        (*sizes, rules)
        for sizes, rules in once(itertools.product(SMALLER, ("interval", "bits", "both", "none")))
    ],
    ids=str,
)
def test_tiles_smaller_than_blocks_are_within_budget(
    block: tuple[int, int], config: Config, rules: str
) -> None:
    """Several to a block either way, and with fewer keys than a word has bits."""
    window = BlockMask.sliding_window(q_len=150, kv_len=170, window=50, block=block, device="cpu")
    bits = random_bits("cpu", (150, 170), block, density=1.5)
    whole = BlockMask.full(q_len=150, kv_len=256, block=block, device="cpu")
    mask = {"interval": window, "bits": bits, "both": window | bits, "none": whole}[rules]
    check(*operands(mask), mask, config)


@pytest.mark.parametrize("dim", sampled(DIMS, 2))
def test_every_pair_of_head_dims_is_within_budget(dim: int) -> None:
    mask = BlockMask.causal(90, block=SMALL, device="cpu")
    for v_dim, config in ((32, FEW), (96, APART), (256, FEW)):
        q, k, v = normal(1, 1, 90, dim), normal(1, 1, 90, dim, seed=1), normal(1, 1, 90, v_dim, seed=2)
        check(q, k, v, mask, config)


def by_groups(batch: int, heads: int) -> BlockMask:
    """A window for every batch item and head of the mask."""

    def window(b: int, h: int) -> BlockMask:
        return BlockMask.sliding_window(150, 20 + 70 * b + 20 * h, block=SMALL, device="cpu")

    return BlockMask.per_batch(
        [BlockMask.per_head([window(b, h) for h in range(heads)]) for b in range(batch)]
    )


@pytest.mark.parametrize(
    ("batch", "heads", "part"), sampled(list(itertools.product((1, 2), (1, 2, 4), (2, 1000))), 2)
)
def test_lists_and_parts_may_differ_by_item_and_by_head_of_keys_or_queries(
    batch: int, heads: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bwd_walks, "longest_part", lambda *given: part)
    mask = by_groups(batch, heads)
    q, k, v = normal(2, 4, 150, 32), normal(2, 2, 150, 32, seed=1), normal(2, 2, 150, 32, seed=2)
    p = problem(q, k, v, mask)
    work: Any = KERNEL.prepare(p, FEW, mask)
    assert (work.keys.slots > 0, work.queries.slots > 0) == (part < 1000, part < p.longest)
    check(q, k, v, mask, APART if heads == 2 else FEW)


@pytest.mark.parametrize("part", sampled([1, 3], 1))
def test_tiles_in_parts_are_within_budget_and_give_the_same_bits(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of partial and full blocks; key tiles that no query visits; rules of bits; blocks that differ in size."""
    monkeypatch.setattr(bwd_walks, "longest_part", lambda *given: part)
    sinks = BlockMask.sliding_window(200, 70, sinks=3, block=SMALL, device="cpu")
    bits = random_bits("cpu", (200, 140), (64, 128), heads=2, density=0.8)
    absent = BlockMask.from_blocks([0, 2, 4, 6], [0, 3, 0, 3, 0, 4], 150, 300, SMALL, device="cpu")
    for mask, config in (
        (sinks, FEW),
        (bits, Config(Tile(128, 32, 4, 1), Tile(64, 64, 4, 1))),
        (absent, APART),
    ):
        q, k, v = operands(mask, (2, 1))
        work: Any = KERNEL.prepare(problem(q, k, v, mask), config, mask)
        assert work.keys.slots > 0
        assert work.queries.slots > 0 or mask is not sinks
        found = check(q, k, v, mask, config, with_lse=True)
        again = differentiate(KERNEL, inputs(q, k, v, mask, with_lse=True), config)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_that_saw_nothing_give_nothing_whatever_their_gradients() -> None:
    mask = BlockMask.causal(q_len=150, kv_len=90, block=SMALL, device="cpu")
    given = inputs(*operands(mask), mask, with_lse=True)
    assert given.grad_lse is not None
    assert (given.lse == -torch.inf).sum() == 60
    expected = differentiate(KERNEL, given)
    assert judged(given, expected).passed
    assert (expected[0][:, :, :60] == 0).all()
    given.grad_lse[:, :, :60] = torch.nan
    found = differentiate(KERNEL, given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_offsets_of_64_bits_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockMask.sliding_window(150, 40, block=SMALL, device="cpu")
    given = inputs(*operands(mask, (2, 1)), mask)
    narrow = differentiate(KERNEL, given)
    assert not portable.common.is_wide(FEW.keys.rows, *given[:3])
    monkeypatch.setattr(portable.common, "is_wide", lambda *given: True)
    assert all(torch.equal(a, b) for a, b in zip(narrow, differentiate(KERNEL, given), strict=True))


@pytest.mark.parametrize(("lead", "section"), sampled([(0, 1), (1, 3), (2, 8), (3, 2)], 1))
def test_every_order_of_heads_gives_the_same_bits(lead: int, section: int) -> None:
    mask = BlockMask.causal(150, block=SMALL, device="cpu")
    q, k, v = normal(2, 2, 150, 32), normal(2, 1, 150, 32, seed=1), normal(2, 1, 150, 32, seed=2)
    given = inputs(q, k, v, mask)
    expected = differentiate(KERNEL, given, FEW)
    work: Any = KERNEL.prepare(problem(q, k, v, mask), FEW, mask)
    other = replace(
        work, **{x: replace(getattr(work, x), lead=lead, section=section) for x in ("keys", "queries")}
    )
    found = [poisoned(x.shape, HALF) for x in (q, k, v)]
    KERNEL.launch(FEW, other, AttentionGradCall(*given[:9], found[0], found[1], found[2]))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_bf16_is_refused_in_the_interpreter() -> None:
    mask = BlockMask.causal(64, block=SMALL, device="cpu")
    q, k, v = (x.bfloat16() for x in operands(mask))
    assert "bf16 is wrong in Triton's interpreter" in KERNEL.why_not(problem(q, k, v, mask))[0]


def test_the_gradient_of_sinks_is_that_of_the_reference() -> None:
    draw = torch.Generator().manual_seed(0)
    out, grad = (torch.randn(2, 3, 2500, 40, generator=draw).to(HALF) for _ in range(2))
    lse, grad_lse = torch.randn(2, 3, 2500, generator=draw), torch.randn(2, 3, 2500, generator=draw)
    lse[:, 1, 7] = -torch.inf
    sinks = torch.tensor([0.3, -torch.inf, 2.0]).to(HALF)
    right = sink_gradients(out.double(), lse.double(), grad.double(), grad_lse.double(), sinks)
    torch.testing.assert_close(
        launched(out, lse, grad, grad_lse, sinks).double(), right, rtol=1e-4, atol=1e-3
    )
