"""The references of 2:4 products: against dense torch in float64, their gradients, and what they refuse."""

import pytest
import torch
from torch.autograd import gradcheck

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.reference.bsr24 import bsr24
from sparsek.products.reference.epilogue import Epilogue
from sparsek.products.reference.semi24 import semi24
from sparsek.testing.budget import check_spmm
from sparsek.testing.product_budget import check_linear
from tests.products.cases import BSR24_CASES, SEMI24_CASES, Case
from tests.refusals import refused

F64 = torch.float64


@pytest.mark.parametrize("case", [*SEMI24_CASES, *BSR24_CASES], ids=str)
def test_it_is_the_dense_product(case: Case):
    a, b, epilogue, _ = case.make(dtype=F64, seed=5)
    dense = a.to_dense()
    dense = dense.mT if case.turned else dense
    if isinstance(a, Semi24):
        found = semi24(a, b, epilogue, transposed=case.turned)
    else:
        found = bsr24(a, b, epilogue, transposed=case.turned)
    assert found.is_contiguous()
    torch.testing.assert_close(found, epilogue.apply(dense @ b))


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_are_those_of_finite_differences(turned: bool):
    a = Semi24.from_dense(torch.randn(10, 16, dtype=F64))
    m, k = (16, 10) if turned else (10, 16)
    leaves = [a.values.clone(), torch.randn(2, k, 3, dtype=F64), torch.randn(m, dtype=F64)]

    def run(values, b, bias):
        return semi24(Semi24.unchecked(values, a.meta), b, Epilogue(0.5, bias, "silu"), transposed=turned)

    assert gradcheck(run, [x.requires_grad_() for x in leaves], fast_mode=True)


def test_a_low_precision_sum_is_rounded_once():
    a = Semi24.from_dense(torch.tensor([[1.0, 0, 2**-9, 0] * 2]).bfloat16())
    b = torch.ones(8, 1).bfloat16()
    assert semi24(a, b).item() == torch.tensor(2 + 2**-8).bfloat16().item()


def test_what_does_not_fit_is_refused():
    a = Semi24.from_dense(torch.randn(8, 16))
    refused(r"A is 8x16 and b \[8, 3\]; it needs \[..., 16, N\]", semi24, a, torch.randn(8, 3))
    with pytest.raises(InvalidInput, match=r"A is 16x8 and b \[16, 3\]; it needs \[..., 8, N\]"):
        semi24(a, torch.randn(16, 3), transposed=True)
    refused(r"A is torch.float32 on cpu and b torch.float64", semi24, a, torch.randn(16, 3, dtype=F64))
    with pytest.raises(InvalidInput, match=r"this product needs torch.float32"):
        semi24(a, torch.randn(16, 3), Epilogue(bias=torch.randn(16)))


def test_the_gate_sees_a_wrong_element_and_nothing_else():
    a = BSR24.from_bsr(random_bsr(128, 192, (64, 64), 0.5, dtype=torch.bfloat16, device="cpu", seed=3))
    b = torch.randn(192, 40).bfloat16()
    out = bsr24(a, b)
    assert check_spmm(a, b, out).passed
    b[~_met(a)] = torch.nan
    assert check_spmm(a, b, out).passed
    for wrong in (torch.nan, 3.0):
        bad = out.clone()
        bad[5, 7] += wrong * out.abs().max()
        assert not check_spmm(a, b, bad).passed
    x, bias, rest = torch.randn(3, 7, 192), torch.randn(128), torch.randn(3, 7, 128)
    wide = a.to(dtype=torch.float32)
    y = torch.relu(x @ wide.to_dense().mT + bias) + rest
    assert check_linear(x, wide, y, bias, "relu", rest).passed
    assert not check_linear(x, wide, y + 1e-4, bias, "relu", rest).passed


def _met(a: BSR24) -> torch.Tensor:
    met = torch.zeros(a.grid[1], dtype=torch.bool)
    met[a.pattern.indices.long()] = True
    return met.repeat_interleave(a.block[1])
