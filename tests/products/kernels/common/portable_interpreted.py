"""portable.sddmm and portable.spgemm in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.sddmm import portable as portable_sddmm
from sparsek.products.kernels.spgemm import portable as portable_spgemm
from sparsek.products.plan.matches import match
from sparsek.testing.product_budget import check_sddmm, check_spgemm
from tests.attn.kernels.planned import join, sample, sddmm_problem, spgemm_problem
from tests.products.pattern_cases import SDDMM_CASES, SPGEMM_CASES, unmet_blocks_poisoned, unmet_rows_poisoned
from tests.sampling import half

SDDMM, SPGEMM = portable_sddmm.KERNEL, portable_spgemm.KERNEL
LARGE_SDDMM = portable_sddmm.Config(128, 128, 256, 1, 1)
LARGE_SPGEMM = portable_spgemm.Config(128, 128, 128, 1, 1)
HALF = torch.float16
# The interpreter takes seconds for many small tiles; test_portable_gpu.py runs every case.
SLOW = (
    "banded", "block 16", "block over 128", "flat by upright", "full", "long sums", "powerlaw of small blocks",
    "powerlaw with empty rows", "tall", "wide",
)  # fmt: skip
OF_SDDMM = [c for c in SDDMM_CASES if c.dtype != "bf16" and c.note not in SLOW]
OF_SPGEMM = [c for c in SPGEMM_CASES if c.dtype != "bf16" and c.note not in SLOW]
DENSE = [c for c in OF_SPGEMM if c.wanted is None and max(c.m, c.k, c.n) <= 256]


def check_s(x, y, pattern, config=None):
    gate = check_sddmm(x, y, sample(SDDMM, x, y, pattern, config))
    assert gate.passed, f"{pattern} {config}: {gate}"


def check_c(a, b, wanted=None, *, dense_out, config=None):
    gate = check_spgemm(a, b, join(SPGEMM, a, b, wanted, dense_out=dense_out, config=config))
    assert gate.passed, f"{a} times {b} {config}: {gate}"


def numbers(a, b, dense, config=None):
    """What A @ B consists of: the dense matrix, or the values of a BSR."""
    found = join(SPGEMM, a, b, dense_out=dense, config=config)
    return found if isinstance(found, torch.Tensor) else found.values


@pytest.mark.parametrize("case", half(OF_SDDMM), ids=str)
def test_every_case_of_sddmm(case):
    x, y, pattern = case.make()
    check_s(*unmet_rows_poisoned(x, y, pattern), pattern, LARGE_SDDMM)


@pytest.mark.parametrize("case", half(OF_SPGEMM), ids=str)
def test_every_case_of_spgemm_at_a_pattern(case):
    a, b, wanted = case.make()
    if not any(case.views):
        a, b = unmet_blocks_poisoned(a, b, wanted)
    check_c(a, b, wanted, dense_out=False, config=LARGE_SPGEMM)


@pytest.mark.parametrize("case", DENSE[::2], ids=str)
def test_cases_of_spgemm_with_a_dense_product(case):
    a, b, _ = case.make()
    check_c(a, b, dense_out=True, config=LARGE_SPGEMM)


@pytest.mark.parametrize("block", [(16, 16), (32, 48), (48, 112)], ids=str)
def test_tiles_of_any_size(block):
    """Tiles that divide a block, join several, straddle two, or are higher than one."""
    rows, columns = 2 * block[0] + 7, 3 * block[1] - 5
    a = random_bsr(rows, columns, block, 0.7, dtype=HALF, device="cpu", seed=2)
    x, y = torch.randn(rows, 24).to(HALF), torch.randn(24, columns).to(HALF)
    b = random_bsr(columns, block[0] + 3, (block[1], block[0]), 0.7, dtype=HALF, device="cpu", seed=3)
    for tile_m, tile_n, tile_k in ((64, 32, 16), (32, 64, 64)):
        check_s(x, y, a.pattern, portable_sddmm.Config(tile_m, tile_n, tile_k, 1, 1, 2))
        check_c(a, b, dense_out=False, config=portable_spgemm.Config(tile_m, tile_n, tile_k, 1, 1))


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_defaults(dtype):
    a = random_bsr(100, 90, (32, 48), 0.5, dtype=dtype, device="cpu", seed=2)
    b = random_bsr(90, 70, (48, 16), 0.5, dtype=dtype, device="cpu", seed=3)
    check_s(torch.randn(100, 40).to(dtype), torch.randn(40, 90).to(dtype), a.pattern)
    check_c(a, b, dense_out=True)


def test_tf32():
    a = random_bsr(64, 64, (32, 32), 0.5, dtype=torch.float32, device="cpu", seed=2)
    x, y = torch.randn(64, 40), torch.randn(40, 64)
    p = replace(sddmm_problem(x, y, a.pattern), tf32=True)
    values, c = torch.empty_like(a.values), SDDMM.default(p)
    SDDMM.launch(c, SDDMM.prepare(p, c, a.pattern), x, y, a.pattern, values)
    assert torch.equal(values, sample(SDDMM, x, y, a.pattern, c).values)  # the interpreter sums both alike
    matches = match(a.pattern, a.pattern)
    p = replace(spgemm_problem(a, a, matches, True), tf32=True)
    out, c = torch.empty(64, 64), SPGEMM.default(p)
    SPGEMM.launch(c, SPGEMM.prepare(p, c, matches), a, a, matches, out)
    assert check_spgemm(a, a, out).passed


def test_offsets_of_64_bits_give_the_same_bits(monkeypatch):
    a = random_bsr(100, 96, (32, 48), 0.6, dtype=HALF, device="cpu", seed=2)
    x, y = torch.randn(100, 40).to(HALF), torch.randn(96, 40).to(HALF).mT
    b = random_bsr(70, 96, (16, 48), 0.6, dtype=HALF, device="cpu", seed=3).T
    config = portable_spgemm.Config(32, 32, 64, 1, 1)
    s = sample(SDDMM, x, y, a.pattern).values
    c = [numbers(a, b, dense, config) for dense in (True, False)]
    for module in (portable_sddmm, portable_spgemm):
        constants = module._constants
        monkeypatch.setattr(module, "_constants", lambda *args, made=constants: made(*args[:-1], 100))
    assert torch.equal(sample(SDDMM, x, y, a.pattern).values, s)
    assert all(torch.equal(numbers(a, b, dense, config), c[not dense]) for dense in (True, False))


def test_the_same_inputs_give_the_same_bits():
    a = random_bsr(96, 96, (32, 32), 0.6, dtype=HALF, device="cpu", seed=2)
    x, y = torch.randn(96, 40).to(HALF), torch.randn(40, 96).to(HALF)
    assert torch.equal(sample(SDDMM, x, y, a.pattern).values, sample(SDDMM, x, y, a.pattern).values)
    assert torch.equal(numbers(a, a, True), numbers(a, a, True))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_infinity_of_y_leaves_the_padding_zero():
    a = random_bsr(50, 50, (32, 32), 1.0, dtype=HALF, device="cpu", seed=2)
    x, y = torch.randn(50, 20).to(HALF), torch.randn(20, 50).to(HALF)
    y[:, 3] = float("inf")
    s = sample(SDDMM, x, y, a.pattern).values
    assert not s[2:, 18:].any()
    assert not s[0, :, 3].isfinite().any()
    values = a.values.clone()
    values[0, :, 3] = float("inf")
    c = numbers(a, BSR.unchecked(a.pattern, values), False)
    assert not c[2:, 18:].any()
