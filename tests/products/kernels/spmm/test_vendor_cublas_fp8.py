"""vendor.cublas_fp8 and reference.spmm_fp8 on a CPU. test_spmm.py runs the cases."""

from typing import Any

import pytest
import torch

from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import Quantized, quantize
from sparsek.products.formats.quantized_tensor import DenseScale, QuantizedTensor
from sparsek.products.kernels.spmm import vendor_cublas_fp8 as cublas_fp8
from tests.attn.kernels.planned import hold, multiply
from tests.problems import changed, fp8_problem
from tests.products.cases import COL, FP8_CASES, ROW, Case, ScaleScopes

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, F16, F32]
STORAGES = ("bsr_fp8", "semi24_fp8", "bsr24_fp8")
BLOCKS: dict[str, Any] = {"block": (64, 64), "nnzb": 256, "row_max": 8}


def problems(**more: Any) -> list[Any]:
    return [
        fp8_problem(**more, **BLOCKS),
        fp8_problem(two_four=True, **more),
        fp8_problem(two_four=True, **more, **BLOCKS),
    ]


@pytest.mark.parametrize("layouts", [("col", "row", "row"), COL], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "scales", [("row", "row"), ("tensor", "tensor"), ("row", "tensor"), ("tensor", "row")]
)
def test_the_library_takes_all_scales_and_a_bias(
    scales: tuple[DenseScale, DenseScale], layouts: tuple[str, str, str]
):
    case = Case(64, 96, 32, (32, 32), "x", 0.7, scales=ScaleScopes(*scales), bias=True, layouts=layouts)
    for dtype in DTYPES:
        hold(cublas_fp8.KERNEL, case, dtype, seed=int(torch.randint(2**31, ())))


def test_a_nan_scale_of_a_column_stays_in_that_column():
    a, b, _, _ = FP8_CASES[0].make()
    kernel = load("reference.spmm_fp8")
    clean = multiply(kernel, a, b)
    b.scale[3] = torch.nan
    found = multiply(kernel, a, b)
    others = torch.arange(b.shape[-1]) != 3
    assert torch.equal(found[:, others], clean[:, others])
    assert found[:, 3].isnan().any()


def test_the_dense_copy_follows_the_values_and_views():
    a, b, _, _ = Case(128, 64, 32, (64, 64), "x", scales=ROW).make()
    first = multiply(cublas_fp8.KERNEL, a, b)
    a.matrix.values.copy_((-a.matrix.values.float()).to(a.dtype))
    assert torch.equal(multiply(cublas_fp8.KERNEL, a, b), -first)
    a.matrix.values.data = (-a.matrix.values.float()).to(a.dtype)  # torch counts no write
    assert torch.equal(multiply(cublas_fp8.KERNEL, a, b), first)
    square = quantize(BSR.from_dense(torch.randn(64, 64), 32, threshold=0), scale="tensor")
    x: QuantizedTensor = quantize(torch.randn(16, 64)).mT
    for each in (square, square.T, square):
        dense = each.to_dense() @ x.dequantize()
        torch.testing.assert_close(multiply(cublas_fp8.KERNEL, each, x), dense, rtol=1e-3, atol=1e-3)


def test_a_dense_copy_holds_the_bytes_of_the_values():
    every = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = every.view(dtype).view(1, 16, 16)
        finite = values.float().isfinite()
        pattern = BSR.from_dense(torch.ones(16, 16), 16, threshold=0).pattern
        found = cublas_fp8.written_out(BSR.unchecked(pattern, values)).view(1, 16, 16)
        assert torch.equal(found.view(torch.uint8)[finite], values.view(torch.uint8)[finite])


def test_the_library_refuses_in_words():
    shared: dict[str, Any] = {"m": 64, "k": 64, "n": 16, "dtype": "e4m3", "card": H200}
    why_not = cublas_fp8.KERNEL.why_not
    for p in problems(**shared):
        assert why_not(p) == []
    p = changed(fp8_problem(**shared, **BLOCKS, a_scale="block"), n=17)
    assert [each[:24] for each in why_not(p)] == ["a scale per block of A l", "K and N must be multiple"]
    p = fp8_problem(two_four=True, **shared)
    assert "E5M2 with E5M2" in why_not(changed(p, dtype="e5m2", b_dtype="e5m2"))[0]
    assert "GiB" in why_not(changed(p, m=1 << 20, k=1 << 20))[0]
    assert cublas_fp8.VendorCublasFp8.only_by_name


def test_a_scaled_needs_no_copy_of_its_values():
    a, b, _, _ = FP8_CASES[0].make()
    assert isinstance(a, Quantized)
    kept = a.matrix.values.clone()
    multiply(load("reference.spmm_fp8"), a, b)
    assert torch.equal(kept.view(torch.uint8), a.matrix.values.view(torch.uint8))
