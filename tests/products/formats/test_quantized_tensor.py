"""Dense tensors in FP8: scales and rounding against numbers by hand, views, and what is refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.quantized_tensor import DenseScale, QuantizedTensor
from tests.products.formats import fp8
from tests.products.formats.fp8 import E4M3, E5M2, FP8, codes, grid
from tests.products.formats.two_four import DTYPES

TINY = 2.0**-126
HALF: Any = torch.float16
SHAPES = [(5, 40), (40,), (2, 3, 24), (1, 1), (0, 8), (3, 0)]


def dense(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Normal numbers whose rows differ in size by powers of two."""
    x = torch.randn(shape, dtype=torch.float64)
    return (x * 2.0 ** torch.randint(-8, 5, (*shape[:-1], 1))).to(device, dtype)


def right(x: Tensor, dtype: torch.dtype, kind: DenseScale) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales of x, by numpy."""
    values = x.to(torch.promote_types(x.dtype, torch.float32)).cpu().numpy()
    top = grid(dtype)[-1]
    if kind == "row":
        largest = np.abs(values).max(-1, initial=0)
    else:
        largest = np.asarray(np.abs(values).max(initial=0))
    scale = np.maximum((largest / values.dtype.type(top)).astype(np.float32), np.float32(TINY))
    scale = np.where(largest == 0, np.float32(1), scale).astype(np.float32)
    with np.errstate(under="ignore"):
        return fp8.all_nearest(values / (scale[..., None] if kind == "row" else scale), dtype), scale


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["row", "tensor"])
def test_values_over_their_scale_are_rounded(
    kind: DenseScale, source: torch.dtype, dtype: torch.dtype, device: str
):
    for shape in SHAPES:
        x = dense(shape, source, device)
        for each in (x, x.mT if x.ndim > 1 else x, x[..., ::2]):
            q = quantize(each, dtype, kind)
            values, scale = right(each, dtype, kind)
            assert (q.shape, q.dtype, q.device, q.turned) == (each.shape, dtype, x.device, False)
            assert q.scale.shape == (each.shape[:-1] if kind == "row" else ())
            assert q.values.is_contiguous()
            assert np.array_equal(q.scale.cpu().numpy(), scale)
            assert np.array_equal(codes(q.values), values)
            QuantizedTensor(q.values, q.scale)


def test_the_default_is_e4m3_with_a_scale_for_each_row():
    q = quantize(dense((4, 16), torch.float32))
    assert (q.dtype, q.kind) == (E4M3, "row")


@pytest.mark.parametrize("kind", ["row", "tensor"])
def test_back_in_a_wider_dtype_it_is_value_times_scale(kind: DenseScale):
    x = dense((2, 5, 24), torch.float32)
    q = quantize(x, E5M2, kind)
    exact = q.values.double() * (q.scale.double().unsqueeze(-1) if kind == "row" else q.scale.double())
    assert torch.equal(q.dequantize(torch.float64), exact)
    assert torch.equal(q.dequantize(), exact.float())
    assert torch.equal(q.dequantize(torch.bfloat16), exact.float().to(torch.bfloat16))
    off = torch.linalg.vector_norm(exact - x) / torch.linalg.vector_norm(x.double())
    assert q.error(x) == pytest.approx(float(off), rel=1e-12)
    assert 0.02 < q.error(x) < 0.08
    assert q.mT.error(x.mT) == pytest.approx(q.error(x), rel=1e-12)
    assert quantize(torch.zeros(3, 8)).error(torch.zeros(3, 8)) == 0


def test_a_transpose_is_a_view_and_leading_dims_join():
    x = dense((2, 5, 24), torch.float32)
    q = quantize(x)
    turned = q.mT
    assert (turned.shape, turned.turned, turned.ndim) == ((2, 24, 5), True, 3)
    assert turned.values is q.values
    assert turned.scale is q.scale
    assert torch.equal(turned.dequantize(), q.dequantize().mT)
    assert torch.equal(turned.mT.dequantize(), q.dequantize())
    rows = q.rows()
    assert (rows.shape, rows.scale.shape) == ((10, 24), (10,))
    assert torch.equal(rows.dequantize(), q.dequantize().view(10, 24))
    assert quantize(x, scale="tensor").rows().kind == "tensor"
    vector = quantize(x[0, 0]).rows()
    assert (vector.shape, vector.scale.shape, vector.kind) == ((1, 24), (1,), "row")
    matrix = quantize(x[0])
    assert torch.equal(matrix.T.dequantize(), matrix.dequantize().T)


def test_it_moves_prints_and_is_a_pytree():
    q = quantize(dense((4, 16), torch.float32), scale="tensor")
    assert q.to("cpu") is q
    assert q.to() is q
    with pytest.raises(InvalidInput, match="use a CUDA device or the CPU"):
        q.to("meta")
    assert repr(q) == "QuantizedTensor(4x16 e4m3, scale per tensor, 6.8e-05 MB, cpu)"
    assert repr(q.T) == "QuantizedTensor(16x4 e4m3, scale per tensor, 6.8e-05 MB, cpu, transposed view)"
    leaves, spec = _pytree.tree_flatten(q.T)
    assert leaves[0] is q.values
    back = _pytree.tree_unflatten(leaves, spec)
    assert (back.turned, back.scale is q.scale) == (True, True)
    assert repr(_pytree.tree_unflatten([None, None], spec)) == "QuantizedTensor(values not concrete)"


def test_the_result_is_outside_autograd():
    q = quantize(torch.randn(3, 8, requires_grad=True))
    assert not q.values.requires_grad
    assert not q.scale.requires_grad


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_are_counted_and_placed(bad: float):
    x = torch.randn(3, 4, 8)
    x[1, 2, 5] = x[2, 0, 0] = bad
    with pytest.raises(InvalidInput, match=r"2 of 96 values are NaN or Inf; the first is at \[1, 2, 5\]"):
        quantize(x)
    q = quantize(x, check=False)
    assert q.dequantize()[1, 2].isnan().any()
    assert q.dequantize()[0].isfinite().all()
    with pytest.raises(InvalidInput, match="scales leave float32"):
        quantize(torch.full((1, 8), 1e300, dtype=torch.float64))


@pytest.mark.gpu
def test_without_the_check_nothing_waits_for_the_gpu(no_sync: Callable[[], AbstractContextManager[None]]):
    for source in (torch.bfloat16, torch.float16, torch.float32):
        x = dense((130, 4100), source, "cuda")
        for each in (x, x.mT, x[:, ::2], x.mT[:, 1:]):
            quantize(each, check=False)  # loads the kernel
            with no_sync():
                made = quantize(each, check=False)
            right = quantize(each.cpu())
            assert torch.equal(made.values.cpu().view(torch.uint8), right.values.view(torch.uint8))
            assert torch.equal(made.scale.cpu(), right.scale)


def test_it_goes_through_torch_compile_without_the_check():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        q = quantize(x, check=False)
        return q.values, q.mT.dequantize()

    x = dense((4, 16), torch.float32)
    values, back = run(x)
    assert np.array_equal(codes(values), codes(quantize(x).values))
    assert torch.equal(back, quantize(x).mT.dequantize())
    with pytest.raises(Exception, match="check=False"):
        torch.compile(quantize, fullgraph=True, backend="aot_eager")(x)
    torch._dynamo.reset()


def of(values: Any = None, scale: Any = None, turned: bool = False) -> QuantizedTensor:
    q = quantize(torch.randn(4, 16))
    return QuantizedTensor(
        q.values if values is None else values(q.values), q.scale if scale is None else scale(q.scale), turned
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "scale": (
        lambda: quantize(torch.ones(2, 8), scale=cast(Any, "block")),
        "scale is 'block'; use one of tensor, row",
    ),
    "dtype": (
        lambda: quantize(torch.ones(2, 8), torch.float16),
        "dtype is .*; use one of torch.float8_e4m3fn, torch.float8_e5m2",
    ),
    "ints": (lambda: quantize(torch.ones(2, 8, dtype=torch.int32)), "is torch.int32; use one of"),
    "number": (lambda: quantize(torch.ones(())), r"x must be \[..., K\], got a single number"),
    "sparse": (lambda: quantize(torch.eye(8).to_sparse()), "got layout torch.sparse_coo"),
    "bf16": (lambda: of(lambda v: v.bfloat16()), "values must be FP8, .* got torch.bfloat16"),
    "no tensor": (lambda: of(lambda v: None), "values must be a dense torch.Tensor, got NoneType"),
    "strided": (lambda: of(lambda v: v[:, ::2]), "contiguous"),
    "offset": (lambda: of(lambda v: v.flatten()[1:]), "1 bytes past a multiple of 16"),
    "double scale": (
        lambda: of(scale=lambda s: s.double()),
        "dtype of scale is torch.float64; it must be torch.float32",
    ),
    "no scale": (lambda: of(scale=lambda s: 1.0), "scale must be a dense torch.Tensor, got float"),
    "shape of scale": (
        lambda: of(scale=lambda s: s[:3]),
        r"scale has shape \[3\]; values \[4, 16\] need \[4\]",
    ),
    "device": (lambda: of(scale=lambda s: s.to("meta")), "scale is on meta, which is not supported"),
    "negative": (lambda: of(scale=lambda s: -s), "4 of 4 scales are not positive and finite"),
    "gaps": (lambda: of(scale=lambda s: s.repeat_interleave(2)[::2]), "scale must be contiguous"),
    "vector": (lambda: of(lambda v: v[0], lambda s: s[0], True), "a vector, which has no transpose"),
    "vector.mT": (lambda: quantize(torch.ones(8)).mT, "a transpose needs two dims"),
    "batch.T": (lambda: quantize(torch.ones(2, 2, 8)).T, r"\.T is for matrices, .* use \.mT"),
    "rows of a view": (quantize(torch.ones(2, 8)).T.rows, "rows of a transpose do not lie"),
    "to a dtype": (lambda: quantize(torch.ones(2, 8)).to(HALF), r"\.dequantize\(torch.float16\)"),
    "error of what": (
        lambda: quantize(torch.ones(2, 8)).error(torch.ones(8, 2)),
        r"quantized form of a tensor \[2, 8\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str):
    make, text = REFUSED[name]
    with pytest.raises(InvalidInput, match=text):
        make()
