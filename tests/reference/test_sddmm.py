"""The reference of sddmm: against dense products, its gradients, and what may never reach its result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsek.products.formats.bsr import BSR, padding_nonzeros
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import PATTERNS, Spread, random_bsr
from sparsek.products.reference import sddmm as module
from sparsek.products.reference.sddmm import sddmm
from sparsek.products.reference.spmm import spmm
from tests.refusals import refused


def normal(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def blocks(m: int, n: int, block, density: float = 0.5, kind: Spread = "uniform", device: str = "cpu"):
    return random_bsr(m, n, block, density, pattern=kind, dtype=torch.float64, device=device, seed=m).pattern


def sampled(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """`dense` [M, N] with 0 outside the stored blocks."""
    return dense * BSR.unchecked(pattern, torch.ones(pattern.nnzb, *pattern.block).double()).to_dense()


@given(
    m=st.integers(0, 130),
    n=st.integers(0, 130),
    k=st.integers(0, 40),
    batch=st.sampled_from(((), (1,), (3,), (2, 2), (0,))),
    block=st.sampled_from(((16, 16), (32, 16), (16, 48), (64, 128))),
    density=st.sampled_from((0.0, 0.2, 0.6, 1.0)),
    kind=st.sampled_from(tuple(PATTERNS)),
    view=st.booleans(),
)
def test_it_is_the_dense_product_at_the_stored_blocks(m, n, k, batch, block, density, kind, view):
    pattern = blocks(m, n, block, density, kind)
    pattern = pattern.T if view else pattern
    x, y = normal(*batch, pattern.shape[0], k), normal(*batch, k, pattern.shape[1], seed=8)
    s = sddmm(x, y, pattern)
    assert s.pattern is pattern
    assert padding_nonzeros(s) == 0
    dense = (x @ y).reshape(x.shape[:-2].numel(), *pattern.shape).sum(0)
    torch.testing.assert_close(s.to_dense(), sampled(dense, pattern), rtol=1e-12, atol=1e-12)
    BSR(s.pattern, s.values)  # it stands every check of a BSR


def test_sums_of_half_precision_are_float32_over_leading_dims_too():
    pattern = blocks(16, 16, 16, 1.0)
    x, y = torch.ones(2, 16, 2048, dtype=torch.float16), torch.ones(2, 2048, 16, dtype=torch.float16)
    assert (sddmm(x, y, pattern).values == 4096).all()
    x, y = (torch.full(shape, 300.0, dtype=torch.float16) for shape in ((2, 16, 8), (2, 8, 16)))
    x[1] *= -1
    assert (sddmm(x, y, pattern).values == 0).all()


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_x_and_y_may_have_any_strides(layout: str):
    pattern = blocks(40, 64, 16)
    x, y = {
        "transposed": (normal(5, 40).T, normal(64, 5).T),
        "strided": (normal(80, 10)[::2, ::2], normal(10, 128)[1::2, ::2]),
        "expanded": (normal(40, 1).expand(3, 40, 5), normal(5, 64).expand(3, 5, 64)),
    }[layout]
    dense = (x @ y).reshape(-1, 40, 64).sum(0)
    torch.testing.assert_close(sddmm(x, y, pattern).to_dense(), sampled(dense, pattern))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("shape", [(32, 48), (20, 35)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_are_right(view: bool, shape: tuple[int, int], batch: tuple[int, ...]):
    pattern = blocks(*shape, 16, 0.5, "powerlaw")
    pattern = pattern.T if view else pattern
    x = normal(*batch, pattern.shape[0], 3).requires_grad_()
    y = normal(*batch, 3, pattern.shape[1], seed=8).requires_grad_()

    def product(x: Tensor, y: Tensor) -> Tensor:
        return sddmm(x, y, pattern).values

    assert torch.autograd.gradcheck(product, (x, y), fast_mode=True)
    assert torch.autograd.gradgradcheck(product, (x, y), fast_mode=True)


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("view", [False, True])
def test_it_is_the_adjoint_of_spmm_in_the_values(batch: tuple[int, ...], view: bool):
    a = random_bsr(40, 50, (16, 32), 0.5, dtype=torch.float64, device="cpu", seed=1)
    a.values.requires_grad_()
    seen = a.T if view else a
    b = normal(*batch, seen.shape[1], 6)
    grad = normal(*batch, seen.shape[0], 6, seed=8)
    spmm(seen, b).backward(grad)
    found = BSR.unchecked(a.pattern, a.values.grad) if a.values.grad is not None else None
    assert found is not None
    right = sddmm(grad, b.mT, seen.pattern).to_dense()
    inside = BSR.unchecked(a.pattern, torch.ones_like(a.values)).to_dense()
    torch.testing.assert_close(found.to_dense() * inside, right.T if view else right)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", [(96, 128), (90, 120)])
def test_rows_and_columns_without_blocks_never_reach_the_result(bad: float, shape, device: str):
    cells = torch.zeros(3, 4, dtype=torch.bool, device=device)
    cells[0, 1] = cells[2, 1] = cells[2, 3] = True
    pattern = BSR.from_dense(normal(*shape, device=device), 32, mask=cells).pattern
    x, y = normal(shape[0], 5, device=device), normal(5, shape[1], device=device)
    clean = sddmm(x, y, pattern).values
    x[32:64] = bad
    y[:, :32] = y[:, 64:96] = bad
    assert torch.equal(sddmm(x, y, pattern).values, clean)


def test_nan_stays_in_its_row_and_its_column():
    pattern = blocks(20, 40, 16, 1.0)
    x, y = normal(20, 3), normal(3, 40)
    x[17, 1] = torch.nan
    y[2, 33] = torch.inf
    s = sddmm(x, y, pattern)
    wrong = ~s.to_dense().isfinite()
    right = torch.zeros_like(wrong)
    right[17] = right[:, 33] = True
    assert torch.equal(wrong, right)
    assert padding_nonzeros(s) == 0


def test_bits_repeat(device: str):
    pattern = blocks(512, 512, 16, 0.3, "powerlaw", device)
    x, y = (
        normal(512, 64, dtype=torch.float32, device=device),
        normal(64, 512, dtype=torch.float32, device=device),
    )
    first = sddmm(x, y, pattern).values
    assert all(torch.equal(sddmm(x, y, pattern).values, first) for _ in range(5))


def test_many_steps_give_what_one_gives(monkeypatch: pytest.MonkeyPatch):
    pattern = blocks(100, 120, 16, 0.5)
    x, y = normal(100, 9), normal(9, 120)
    whole = sddmm(x, y, pattern).values
    monkeypatch.setattr(module, "STEP_ELEMENTS", 3 * 9 * 32)
    torch.testing.assert_close(sddmm(x, y, pattern).values, whole)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            torch.ones(31, 2),
            torch.ones(2, 48),
            r"x has shape \(31, 2\) and y \(2, 48\); S is 32x48 and needs",
        ),
        (torch.ones(32, 2), torch.ones(3, 48), "needs"),
        (torch.ones(2, 32, 2), torch.ones(2, 48), "same leading dims"),
        (torch.ones(32), torch.ones(2, 48), "needs"),
        (torch.ones(32, 2), torch.ones(2, 48).double(), "x is torch.float32 on cpu, y torch.float64"),
        (torch.ones(32, 2, device="meta"), torch.ones(2, 48), "x is torch.float32 on meta"),
        (torch.ones(32, 2, dtype=torch.int64), torch.ones(2, 48), "not supported"),
        ([[1.0]], torch.ones(2, 48), "got list, Tensor, BlockPattern"),
    ],
)
def test_what_does_not_fit_is_refused(x, y, message: str):
    refused(message, sddmm, x, y, blocks(32, 48, 16))
