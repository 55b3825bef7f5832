"""The reference of FP8 products against sums by hand, and what its error budget lets pass and catches."""

import pytest
import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.reference.epilogue import Epilogue
from sparsek.products.reference.quantized import product
from sparsek.testing.budget import check_spmm, tensor_core_error
from sparsek.testing.product_budget import check_linear
from tests.products.cases import FP8_CASES, ROW, Case
from tests.refusals import refused

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_the_reference_is_the_product_of_the_values_times_their_scales(case: Case):
    a, b, epilogue, _ = case.make(dtype=F64, seed=int(torch.randint(2**31, ())))
    z = a.to_dense(F64) @ b.dequantize(F64)
    expected = epilogue.apply(z)
    assert torch.allclose(product(a, b, epilogue, F64), expected, rtol=1e-12, atol=1e-12)


def test_scales_of_rows_and_columns_come_out_of_the_sums():
    a, b = quantize(Semi24.from_dense(torch.randn(5, 16))), quantize(torch.randn(3, 16)).mT
    assert isinstance(a.matrix, Semi24)
    plain = Semi24.unchecked(a.matrix.values.double(), a.matrix.meta).to_dense() @ b.values.double().mT
    by_hand = a.scale.double()[:, None] * plain * b.scale.double()
    assert torch.allclose(product(a, b, dtype=F64), by_hand, rtol=1e-12)


def test_operands_that_do_not_fit_are_refused():
    a, b = quantize(BSR.from_dense(torch.randn(32, 64), 32, threshold=0)), quantize(torch.randn(3, 64)).mT
    with pytest.raises(
        InvalidInput, match="needs a Quantized and a QuantizedTensor, got Quantized and Tensor"
    ):
        product(a, torch.randn(64, 3))  # pyright: ignore[reportArgumentType]
    refused(r"A is \[32, 64\] and b \[3, 64\]", product, a, b.mT)
    refused(r"bias is torch.float32 \[32\]", product, a, b, Epilogue(bias=torch.randn(32)))


def core(a: Tensor, b: Tensor, promoted: int, bits: int = 13) -> Tensor:
    """a [M, K] @ b [K, N] as Hopper's tensor cores sum FP8: 32 products at a time are aligned with the running sum to
    the largest of them, and cut `bits` below it. Every `promoted` of K the sum moves to float32 and starts anew."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for first in range(0, a.shape[1], promoted):
        running = torch.zeros_like(total)
        for k in range(first, min(first + promoted, a.shape[1]), 32):
            each = torch.cat((a[:, k : k + 32, None] * b[None, k : k + 32], running[:, None]), 1)
            unit = 2.0 ** (torch.frexp(each.abs().amax(1)).exponent - 1 - bits).float()
            running = (torch.trunc(each / unit[:, None]) * unit[:, None]).sum(1)
        total += running
    return total


@pytest.mark.parametrize("shifted", [0.0, 0.5], ids=["random signs", "mostly positive"])
def test_long_sums_pass_if_a_tensor_core_is_relieved_and_not_if_it_is_left_alone(shifted: float):
    for k in (2048, 16384):
        w, x = torch.randn(16, k) + shifted, torch.randn(8, k) + shifted
        a, b = quantize(BSR.from_dense(w, 16, threshold=0)), quantize(x).mT
        values, stretch = a.to_dense() / a.scale[:, None], a.scale[:, None] * b.scale
        relieved = core(values, b.values.float().mT, 128) * stretch
        alone = core(values, b.values.float().mT, k) * stretch
        for dtype in (BF16, torch.float16, F32):
            assert check_spmm(a, b, relieved.to(dtype)).passed
        if k > 2048:
            assert not check_spmm(a, b, alone).passed
        if shifted and k > 2048:  # also after C has been rounded
            assert not check_spmm(a, b, alone.to(BF16)).passed


MADE = {
    "random signs": torch.randn,
    "mostly positive": lambda *shape: torch.randn(*shape) + 0.5,
    "positive": lambda *shape: torch.randn(*shape).abs(),
}


@pytest.mark.parametrize("name", MADE)
def test_sums_left_alone_pass_where_fast_accum_allows_them(name: str):
    for k in (2048, 8192):
        a, b = quantize(BSR.from_dense(MADE[name](16, k), 16, threshold=0)), quantize(MADE[name](8, k)).mT
        fast, stretch = a.with_fast_accum(), a.scale[:, None] * b.scale
        values = a.to_dense() / a.scale[:, None], b.values.float().mT
        alone = core(*values, k) * stretch
        assert check_spmm(fast, b, alone).passed
        assert check_spmm(fast, b, alone.to(BF16)).passed
        assert not check_spmm(fast, b, alone, core=0.0).passed  # for kernels that make no use of it
        lost = torch.linalg.vector_norm(alone.double() - product(a, b, dtype=F64))
        expected = torch.linalg.vector_norm(tensor_core_error(a.to_dense(), b.dequantize(F32)))
        assert 1 < expected / lost < 4
        if k == 2048:  # of a longer sum of one sign so much is lost that fewer bits lose little more
            assert not check_spmm(fast, b, core(*values, k, bits=9) * stretch).passed


def test_what_is_wrong_does_not_pass():
    case = Case(64, 128, 32, (32, 32), "x", 0.7, scales=ROW)
    a, b, _, _ = case.make(seed=int(torch.randint(2**31, ())))
    right = product(a, b, dtype=F32)
    assert check_spmm(a, b, right).passed
    assert check_spmm(a, b, right, core=0.0).passed
    one_row = QuantizedTensor.unchecked(b.values, b.scale.roll(1), True)
    for wrong in (
        right * 1.01,
        right.roll(1, 0),
        product(a, one_row, dtype=F32),
        right.masked_fill(right > 2, torch.nan),
    ):
        assert not check_spmm(a, b, wrong).passed
    assert not check_spmm(a, b, right.to(BF16).float(), core=0.0).passed


def test_a_layer_is_judged_as_the_product_that_it_is():
    w, x = quantize(BSR.from_dense(torch.randn(32, 64), 32, threshold=0)), quantize(torch.randn(2, 5, 64))
    bias, rest = torch.randn(32), torch.randn(2, 5, 32)
    y = torch.relu(x.dequantize() @ w.to_dense().mT + bias) + rest
    assert check_linear(x, w, y, bias, "relu", rest, core=0.0).passed
    assert not check_linear(x, w, y, bias, None, rest, core=0.0).passed
