"""The reference: against dense products and SciPy, its gradients, and what may never reach its result."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import PATTERNS, random_bsr
from sparsek.products.reference.spmm import spmm
from sparsek.testing.budget import budget, check_spmm, error
from sparsek.testing.poison import poisoned
from tests.products.cases import SPMM_CASES, Case
from tests.refusals import refused


def normal(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device, dtype)


@given(
    m=st.integers(0, 130),
    k=st.integers(0, 130),
    batch=st.sampled_from(((), (1,), (3,), (2, 2), (0,))),
    n=st.integers(0, 20),
    block=st.sampled_from(((16, 16), (32, 16), (16, 48), (64, 128))),
    density=st.sampled_from((0.0, 0.2, 0.6, 1.0)),
    pattern=st.sampled_from(tuple(PATTERNS)),
    view=st.booleans(),
)
def test_it_is_the_dense_product(m, k, batch, n, block, density, pattern, view):
    a = random_bsr(m, k, block, density, pattern=pattern, dtype=torch.float64, seed=m)
    a = a.T if view else a
    b = normal(*batch, a.shape[1], n)
    c = spmm(a, b)
    assert c.shape == (*batch, a.shape[0], n)
    assert c.is_contiguous()
    torch.testing.assert_close(c, a.to_dense() @ b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", SPMM_CASES, ids=str)
@pytest.mark.parametrize("view", [False, True])
def test_every_case_is_within_its_budget(case: Case, view: bool, device: str):
    a, b, *_ = case.make(device)
    if view:
        bm, bk = a.block
        a = BSR.from_dense(a.to_dense().T, (bk, bm), threshold=0).T
    gate = check_spmm(a, b, spmm(a, b))
    assert gate.passed, gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scipy_agrees(dtype: torch.dtype):
    a = random_bsr(128, 192, (32, 48), 0.4, dtype=dtype)
    b = normal(192, 31, dtype=dtype)
    np.testing.assert_allclose(spmm(a, b), a.to_scipy() @ b.numpy(), rtol=1e-5, atol=1e-5)


def test_sums_of_half_precision_are_float32():
    a = BSR.from_dense(torch.ones(16, 4096, dtype=torch.float16), 16, threshold=0)
    assert (spmm(a, torch.ones(4096, 1, dtype=torch.float16)) == 4096).all()
    a = BSR.from_dense(torch.full((16, 32), 300.0, dtype=torch.float16), 16, threshold=0)
    b = torch.full((32, 1), 300.0, dtype=torch.float16)
    b[16:] *= -1
    assert (spmm(a, b) == 0).all()


@pytest.mark.parametrize("layout", ["transposed", "strided", "batch first", "expanded"])
def test_b_may_have_any_strides(layout: str):
    a = random_bsr(64, 48, 16, 0.5, dtype=torch.float64)
    b = {
        "transposed": normal(5, 48).T,
        "strided": normal(96, 10)[::2, 1::2],
        "batch first": normal(48, 2, 5).movedim(0, 1),
        "expanded": normal(48, 1).expand(3, 48, 5),
    }[layout]
    torch.testing.assert_close(spmm(a, b), a.to_dense() @ b)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("shape", [(32, 48), (20, 35)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_are_right(view: bool, shape: tuple[int, int], batch: tuple[int, ...]):
    a = random_bsr(*shape, 16, 0.5, pattern="powerlaw", dtype=torch.float64)
    a = a.T if view else a
    b = normal(*batch, a.shape[1], 2).requires_grad_()

    def product(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return spmm(BSR.unchecked(a.pattern, values, a.order), b)

    assert torch.autograd.gradcheck(product, (a.values.requires_grad_(), b), fast_mode=True)
    assert torch.autograd.gradgradcheck(product, (a.values, b), fast_mode=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("k", [128, 120])
def test_rows_of_b_without_blocks_never_reach_the_result(bad: float, k: int, device: str):
    cells = torch.zeros(3, 4, dtype=torch.bool, device=device)
    cells[0, 1] = cells[2, 1] = cells[2, 3] = True
    a = BSR.from_dense(normal(96, k, device=device), 32, mask=cells)
    clean = normal(k, 5, device=device)
    b = clean.clone()
    b[:32] = b[64:96] = bad
    c = spmm(a, b)
    assert torch.equal(c, spmm(a, clean))
    assert (c[32:64] == 0).all()
    assert check_spmm(a, b, c).passed


def test_nan_that_a_block_meets_does_reach_the_result():
    a = BSR.from_dense(torch.ones(16, 16), 16, threshold=0)
    b = torch.ones(16, 2)
    b[3, 1] = torch.nan
    assert spmm(a, b).isnan().tolist() == [[False, True]] * 16


def test_bits_repeat(device: str):
    a, b, *_ = Case(512, 512, 64, (16, 16), "", 0.3, pattern="powerlaw", dtype="fp32").make(device)
    first = spmm(a, b)
    assert all(torch.equal(spmm(a, b), first) for _ in range(5))


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (torch.ones(31, 2), r"b has shape \(31, 2\); A is 32x32 and needs \[..., K, N\]"),
        (torch.ones(32), "needs"),
        (torch.ones(32, 2, dtype=torch.float64), "A is torch.float32 on cpu and b torch.float64"),
        (torch.ones(32, 2, device="meta"), "b torch.float32 on meta"),
        (torch.ones(32, 2, dtype=torch.int64), "not supported"),
        ([[1.0]], "got BSR and list"),
    ],
)
def test_what_does_not_fit_is_refused(b: object, message: str):
    refused(message, spmm, random_bsr(32, 32, 16, 0.5), b)


def test_errors_are_relative_and_never_hide_nan():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert error(exact.float(), exact) == 0
    assert error(torch.tensor([3.0, 4.5]), exact) == 0.1
    assert error(torch.zeros(2), torch.zeros(2).double()) == 0
    assert error(torch.ones(2), torch.zeros(2).double()) == float("inf")
    assert error(torch.tensor([3.0, torch.nan]), exact) == float("inf")
    assert error(torch.tensor([3.0, torch.inf]), exact) == float("inf")
    refused("out has shape", error, torch.zeros(3), exact)


def test_the_budget_is_twice_the_error_of_the_dense_product():
    w, b = normal(64, 64, dtype=torch.bfloat16), normal(64, 8, dtype=torch.bfloat16)
    exact = w.double() @ b.double()
    assert budget(w, b, exact) == 2 * error(w @ b, exact)
    assert budget(w.double(), b.double(), exact) == 1e-12


def test_the_gate_refuses_poison_and_small_faults():
    a, b, *_ = Case(128, 128, 16, (32, 32), "", 0.5).make()
    c = spmm(a, b)
    assert check_spmm(a, b, c).passed
    assert not check_spmm(a, b, poisoned(c.shape, c.dtype)).passed
    c[5, 5] += 0.125
    assert not check_spmm(a, b, c).passed


def test_poison_is_nan_everywhere():
    assert poisoned((2, 3), torch.float16).isnan().all()


def test_the_names_of_cases_are_unique():
    assert len({str(case) for case in SPMM_CASES}) == len(SPMM_CASES)
