"""portable.spmm_skinny_fp8 in Triton's interpreter: cases, and the bits of a B that the kernel rounds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.quantized_tensor import quantize_dense
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.spmm import portable
from sparsek.products.kernels.spmm.portable import Config
from sparsek.products.kernels.spmm.portable_skinny_fp8 import TILE
from sparsek.products.ops.linear import plan_layer
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import hold, multiply, problem
from tests.products.cases import E4M3, E5M2, FP8_CASES, Case, laid_out
from tests.sampling import half

KERNEL: Any = load("portable.spmm_skinny_fp8")
F16, F32 = torch.float16, torch.float32
CASES = [replace(case, n=min(case.n, KERNEL.widest)) for case in FP8_CASES if case.op == "spmm_fp8"]
CUT = Config(32, 64, 64, 1, 1, group=1, part=1)


def seed() -> int:
    return int(torch.randint(2**31, ()))


def rounded(x: Tensor) -> Any:
    """x [..., T, K] as the launch before the kernel rounds it."""
    return quantize_dense(x, E4M3, "row", check=False)


def spread(layout: str, sides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """B [K, N] with columns of all sizes, one of zeros, and numbers down to nothing beside the largest ones."""
    b = laid_out(layout, sides, dtype, "cpu", seed())
    b.mul_(torch.exp2(torch.randint(-14, 4, b.shape)).to(dtype))
    b[..., sides[-1] // 2].zero_()
    return b


def same(a: Any, b: Tensor, config: Config) -> None:
    """The kernel that rounds B itself gives the bits of the one that finds it rounded, and these are right."""
    inside = multiply(KERNEL, a, b, config=config)
    before = rounded(b.mT).mT
    out = poisoned(tuple(inside.shape), inside.dtype)
    wanted = multiply(KERNEL, a, before, out=out, config=config)
    assert torch.equal(inside, wanted)
    gate = check_spmm(a, before, inside, core=0.0)
    assert gate.passed, gate


@pytest.mark.parametrize("case", half(CASES), ids=str)
def test_every_case_is_within_its_error_budget(case: Case):
    for config in (None, CUT):
        hold(KERNEL, case, F32, seed=seed(), config=config, core=0.0)


@pytest.mark.parametrize("layout", ["col", "row", "strided", "wide"])
@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_b_of_any_layout_is_rounded_to_the_same_bits(n: int, layout: str):
    dtype = F16 if n % 2 else F32
    a = random_bsr(70, 150, (32, 48), 0.5, pattern="powerlaw", dtype=F32, device="cpu", seed=seed())
    same(quantize(a), spread(layout, (150, n), dtype), replace(CUT, part=n % 3))


@pytest.mark.parametrize("block", [(128, 128), (16, 16), (48, 96), (32, 160)], ids=str)
@pytest.mark.parametrize("scale", ["row", "block", "tensor"])
def test_blocks_and_scales_of_a_are_as_before(block: tuple[int, int], scale: Any):
    a = random_bsr(2 * block[0] - 3, 3 * block[1] - 5, block, 0.7, dtype=F32, device="cpu", seed=seed())
    q = quantize(a, E5M2 if scale == "tensor" else E4M3, scale)
    tile = Config(64 if block[0] == 128 else 16, 16, 32 if block[1] == 16 else 64, 1, 1, group=1)
    same(q, spread("col", (a.shape[1], 5), F16), tile)
    if scale != "row":
        same(q.T, spread("col", (a.shape[0], 5), F16), replace(tile, tile_m=16, tile_k=32))


def test_the_tile_of_cards_gives_the_same_product():
    a = random_bsr(128, 256, (128, 128), 1.0, dtype=F32, device="cpu", seed=seed())
    same(quantize(a), spread("col", (256, 3), F32), replace(TILE, num_warps=1, num_stages=1))


def test_rows_longer_than_what_is_read_at_once():
    a = random_bsr(32, 20000, (32, 160), 0.02, dtype=F32, device="cpu", seed=seed())
    for n in (1, 3):
        b = spread("col", (20000, n), F16)
        b[-1] = 1000.0  # the largest of all, in the last part
        same(quantize(a), b, Config(32, 16, 64, 1, 1, group=1))


def test_batches_and_offsets_of_64_bits(monkeypatch):
    a = quantize(random_bsr(40, 72, (16, 32), 0.6, dtype=F32, device="cpu", seed=seed()))
    b = spread("col", (2, 3, 72, 7), F16)
    for each in (b[0], b.transpose(0, 1), b):
        same(a, each, replace(CUT, part=0))
    first = multiply(KERNEL, a, b, config=CUT)
    monkeypatch.setattr(portable, "SIZE_LIMIT", 100)
    out = poisoned(tuple(first.shape), F16)
    KERNEL.launch(CUT, KERNEL.prepare(problem(a, b, out), CUT, a), a, b, out)
    assert torch.equal(out, first)


def test_every_number_of_fp8_and_every_tie_between_two():
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    around = torch.stack((ties.nextafter(ties * 0), ties, ties.nextafter(ties * 2 + 1)), 1).flatten()
    every = torch.cat((numbers, around, -numbers, -around)).contiguous()
    a = BSR.from_dense(torch.eye(len(every)), 16, threshold=0.0)
    b = (every[:, None] * torch.tensor([1.0, 3.0, 2.0**-100, 2.0**-135])).contiguous()
    same(quantize(a, scale="tensor"), b, Config(16, 16, 32, 1, 1, group=1))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_stay_in_their_column(bad: float):
    a = quantize(random_bsr(64, 128, (32, 32), 0.6, dtype=F32, device="cpu", seed=seed()))
    b = spread("col", (128, 6), F32)
    c = Config(32, 16, 32, 1, 1, group=1)
    clean = multiply(KERNEL, a, b, config=c)
    b[5, 2] = bad
    met = multiply(KERNEL, a, b, config=c)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(met[:, others], clean[:, others])
    assert not met[:, 2].isfinite().all()  # NaN; in FP8 that is 480 to the interpreter


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 8), (64, 0, 8), (64, 64, 0), (0, 0, 0)])
def test_zero_sized_sides_give_empty_or_zero_products(m: int, k: int, n: int):
    a = quantize(BSR.from_dense(torch.zeros(m, k), (32, 32), threshold=0))
    out = multiply(KERNEL, a, torch.ones(k, n), config=Config(32, 16, 32, 1, 1, group=1))
    assert out.shape == (m, n)
    assert not out.any()


def test_a_plan_rounds_b_first_where_c_may_lie_in_its_memory():
    a = quantize(random_bsr(64, 128, (32, 32), 0.6, dtype=F32, device="cpu", seed=seed()))
    x = spread("row", (128, 6), F16)
    plan = sk.plan_spmm(a, x, kernel=KERNEL.name)
    assert "the kernel rounds B from fp16 to e4m3; with out= a launch before it does" in plan.explain()
    layer = plan_layer(x.mT.contiguous(), a, kernel=KERNEL.name)
    assert "the kernel rounds B from fp16 to e4m3\n" in layer.explain()
    wanted = multiply(KERNEL, a, rounded(x.mT).mT, out=poisoned((64, 6), F16), config=plan.config)
    assert torch.equal(plan(a, x), wanted)
    into = sk.plan_spmm(a, x, out=x[:64], kernel=KERNEL.name)
    into(a, x, out=x[:64])
    assert torch.equal(x[:64], wanted)
