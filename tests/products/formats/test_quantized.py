"""FP8 with scales: rounding against the numbers that the bits stand for, scales, and what is refused."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.float8 import rounded
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import Quantized, quantize
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from tests.products.formats import fp8
from tests.products.formats.fp8 import (
    CASES,
    E4M3,
    E5M2,
    FP8,
    KINDS,
    MAKERS,
    bsr,
    bsr24,
    codes,
    grid,
    kinds,
    rows_of,
    semi24,
)
from tests.products.formats.two_four import DTYPES, pruned, same_bits

TINY = 2.0**-126


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_byte_is_the_number_that_its_bits_say(dtype: torch.dtype):
    found = torch.arange(256, dtype=torch.uint8).view(dtype).double().tolist()
    right = [fp8.number(code, fp8.LAYOUTS[dtype]) for code in range(256)]
    assert [math.isnan(x) for x in found] == [math.isnan(x) for x in right]
    assert [x for x in found if not math.isnan(x)] == [x for x in right if not math.isnan(x)]
    assert (grid(dtype)[1], grid(dtype)[-1]) == {E4M3: (2.0**-9, 448.0), E5M2: (2.0**-16, 57344.0)}[dtype]


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_ties_go_to_the_even_byte_and_a_hair_beside_them_to_the_nearer_one(
    dtype: torch.dtype, wide: torch.dtype, device: str
):
    numbers = np.array(grid(dtype))
    halves = (numbers[1:] + numbers[:-1]) / 2
    at = np.arange(halves.size)
    size = {torch.float32: np.float32, torch.float64: np.float64}[wide]
    for x, right in (
        (numbers, np.arange(numbers.size)),
        (halves, at + at % 2),
        (np.nextafter(halves.astype(size), size(0)), at),
        (np.nextafter(halves.astype(size), size(np.inf)), at + 1),
    ):
        for sign, bit in ((1, 0), (-1, 0x80)):
            made = rounded(torch.tensor(sign * x, dtype=wide, device=device), dtype)
            assert np.array_equal(codes(made), right | bit)
            assert np.array_equal(fp8.all_nearest(sign * x, dtype), right | bit)  # the other tests' yardstick


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("wide", DTYPES, ids=str)
def test_what_is_beyond_the_largest_number_becomes_it(dtype: torch.dtype, wide: torch.dtype, device: str):
    top = grid(dtype)[-1]
    beyond = [top, min(top * 1.5, 65504.0), torch.finfo(wide).max, math.inf]
    x = torch.tensor([*beyond, *(-each for each in beyond), math.nan], dtype=wide, device=device)
    found = rounded(x, dtype).double().tolist()
    assert found[:8] == [top] * 4 + [-top] * 4
    assert math.isnan(found[8])


def right_scales(a: Any, kind: Any, top: float) -> np.ndarray:
    """The scales of a matrix, one for each stored value, by hand."""
    wide = np.float64 if a.dtype == torch.float64 else np.float32
    sizes = a.values.abs().to(torch.promote_types(a.dtype, torch.float32)).cpu().numpy()
    shared = {
        "tensor": lambda: np.zeros(sizes.shape, dtype=np.int64),
        "row": lambda: rows_of(a),
        "block": lambda: np.broadcast_to(np.arange(len(sizes))[:, None, None], sizes.shape),
    }[kind]()
    largest = np.zeros(int(shared.max(initial=0)) + 1, dtype=wide)
    np.maximum.at(largest, shared.reshape(-1), sizes.reshape(-1))
    scales = np.maximum((largest / wide(top)).astype(np.float32), np.float32(TINY))
    return np.where(largest == 0, np.float32(1), scales)[shared]


def check(a: Any, q: Quantized, kind: Any, dtype: torch.dtype) -> None:
    """Scales and bytes as they must be, and the same pattern and metadata."""
    assert isinstance(q.matrix, type(a))
    for part in ("pattern", "meta"):
        assert getattr(q.matrix, part, None) is getattr(a, part, None)
    assert (q.shape, q.dtype, q.device, q.kind) == (a.shape, dtype, a.device, kind)
    scales = right_scales(a, kind, grid(dtype)[-1])
    if kind == "row":
        of_row = np.ones(a.shape[0], dtype=np.float32)
        inside = rows_of(a) < a.shape[0]
        of_row[rows_of(a)[inside]] = scales[inside]
        assert np.array_equal(q.scale.cpu().numpy(), of_row)
    else:
        first = scales.reshape(q.scale.numel(), -1)[:, 0] if scales.size else np.ones(q.scale.numel())
        assert np.array_equal(q.scale.cpu().numpy().reshape(-1), first)
    assert q.scale.ndim == (kind != "tensor")
    values = a.values.to(torch.promote_types(a.dtype, torch.float32)).cpu().numpy()
    with np.errstate(under="ignore"):
        assert np.array_equal(codes(q.matrix.values), fp8.all_nearest(values / scales, dtype))


@pytest.mark.parametrize(("make", "kind"), CASES)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_values_over_their_scale_are_rounded(
    make: Callable[..., Any], kind: Any, source: torch.dtype, dtype: torch.dtype, device: str
):
    a = make(dtype=source).to(device)
    q = quantize(a, dtype, kind)
    check(a, q, kind, dtype)
    assert Quantized(q.matrix, q.scale, q.kind).matrix is q.matrix
    top = grid(dtype)[-1]
    largest = q.matrix.values.double().abs()
    if kind == "block":
        assert (largest.amax((1, 2)) == top).all()
    assert largest.max() == top


@given(data=st.data())
def test_any_finite_values_are_scaled_and_rounded(data: st.DataObject):
    """Also zeros, rows of zeros, and magnitudes from one end of the dtype to the other."""
    source, dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(FP8))
    m, k = data.draw(st.integers(1, 4)), 8 * data.draw(st.integers(1, 3))
    most = min(torch.finfo(source).max, 448 * torch.finfo(torch.float32).max)
    magnitude = st.one_of(
        st.floats(-most, most), st.floats(-1, 1), st.sampled_from([0.0, -0.0, most, 1e-7, 1e-38, 5e-324])
    )
    rows = [
        data.draw(st.lists(magnitude, min_size=k, max_size=k)) if data.draw(st.integers(0, 5)) else [0.0] * k
        for _ in range(m)
    ]
    w = torch.tensor(rows, dtype=torch.float64).to(source).clamp(-most, most)
    for a in (Semi24.from_dense(w), BSR.from_dense(w, 16, threshold=0)):
        for kind in kinds(a):
            q = quantize(a, dtype, kind)
            check(a, q, kind, dtype)
            assert not q.to_dense(torch.float64).isnan().any()


def test_the_default_is_e4m3_with_a_scale_for_each_row():
    a = bsr()
    assert fp8.same(quantize(a), quantize(a, E4M3, "row"))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_have_scale_one_and_stay_zeros(kind: Any, device: str):
    a = bsr(64, 64, density=1.0).to(device)
    a.values[1] = 0
    a.values[0, 3] = 0
    q = quantize(a, scale=kind)
    assert (q.matrix.values[1].float() == 0).all()
    assert (q.matrix.values[0, 3].float() == 0).all()
    if kind == "block":
        assert q.scale[1] == 1
        assert (q.scale == 1).sum() == 1
    a.values.zero_()
    nothing = quantize(a, scale=kind)
    assert (nothing.scale == 1).all()
    assert not codes(nothing.matrix.values).any()
    assert nothing.error(a) == 0.0


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_small_values_of_a_row_become_subnormals_and_then_zeros(dtype: torch.dtype, device: str):
    """Powers of two beside the largest number, so that the scale is one."""
    top, least = grid(dtype)[-1], grid(dtype)[1]
    powers = [2.0**-p for p in range(40)]
    w = torch.zeros(1, 160, device=device)
    w[0, ::4] = torch.tensor(powers)
    w[0, 1] = top
    q = quantize(Semi24.from_dense(w), dtype)
    assert q.scale.tolist() == [1.0]
    kept = [p if p >= least else 0.0 for p in powers]  # half of the least is a tie, and zero is even
    assert q.to_dense()[0, ::4].tolist() == kept


@pytest.mark.parametrize("make", [bsr, bsr24])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_values_outside_a_ragged_matrix_stay_zero(make: Callable[..., Any], dtype: torch.dtype, device: str):
    w = torch.randn(70, 74, device=device).abs() + 1
    a = BSR.from_dense(w, 64, threshold=0) if make is bsr else BSR24.from_dense(w, 64, threshold=0)
    for kind in KINDS:
        q = quantize(a, dtype, kind)
        Quantized(q.matrix, q.scale, q.kind)  # looks outside the matrix
        back = q.dequantize()
        assert torch.count_nonzero(back.values) == torch.count_nonzero(a.values) > 0
        assert torch.equal(back.to_dense() != 0, a.to_dense() != 0)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (64, 64)], ids=str)
def test_a_matrix_without_values_has_scales_of_one(shape: tuple[int, int], device: str):
    blocks = random_bsr(*shape, 64, 0.0, device=device)
    without = Semi24.from_dense(torch.zeros(*shape, device=device))
    for a in (blocks, BSR24.from_bsr(blocks), without):
        for kind in kinds(a):
            q = quantize(a, E5M2, kind)
            Quantized(q.matrix, q.scale, q.kind)
            assert q.scale.shape == {"tensor": (), "row": shape[:1], "block": (0,)}[kind]
            assert (q.scale == 1).all()
            assert q.to_dense(torch.bfloat16).shape == shape
            assert q.error(a) == 0.0


@pytest.mark.parametrize(("make", "kind"), CASES)
def test_back_in_a_wider_dtype_values_are_multiplied_and_rounded_once(
    make: Callable[..., Any], kind: Any, device: str
):
    a = make().to(device)
    q = quantize(a, E4M3, kind)
    scales = right_scales(a, kind, 448.0)
    exact = q.matrix.values.double().cpu().numpy() * scales
    for dtype in DTYPES:
        back = q.dequantize(dtype)
        assert (type(back), back.dtype, back.device) == (type(a), dtype, a.device)
        assert getattr(back, "pattern", None) is getattr(a, "pattern", None)
        right = torch.tensor(exact if dtype == torch.float64 else exact.astype(np.float32)).to(dtype)
        assert same_bits(back.values.cpu(), right)
        assert same_bits(q.to_dense(dtype), back.to_dense())
    assert q.to_dense().dtype == torch.float32
    with pytest.raises(InvalidInput, match=r"is torch.int32; use one of"):
        q.dequantize(torch.int32)


@pytest.mark.parametrize(("make", "kind"), CASES)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_error_is_the_relative_frobenius_error(
    make: Callable[..., Any], kind: Any, source: torch.dtype, device: str
):
    a = make(dtype=source).to(device)
    before = a.values.clone()
    found = {}
    for dtype in FP8:
        q = quantize(a, dtype, kind)
        w, made = (x.to_dense().double().cpu().numpy() for x in (a, q.dequantize(torch.float64)))
        right = np.linalg.norm(made - w) / np.linalg.norm(w)
        found[dtype] = q.error(a)
        assert isinstance(found[dtype], float)
        assert found[dtype] == pytest.approx(right, rel=1e-9)
    assert same_bits(a.values, before)
    assert 0 < found[E4M3] < 2.0**-4
    assert 0 < found[E5M2] < 2.0**-3


def test_error_neither_over_nor_underflows_and_is_zero_for_what_fits():
    w = torch.tensor([[3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 5.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    right = quantize(Semi24.from_dense(w)).error(Semi24.from_dense(w))
    assert right > 0.001
    for scale in (2.0**-100, 2.0**110):
        a = Semi24.from_dense(w * scale)
        assert quantize(a).error(a) == pytest.approx(right, rel=1e-6)
    tiny = Semi24.from_dense(w.double() * 1e-250)
    assert quantize(tiny).error(tiny) == 1.0  # below the least scale nothing is left
    fits = Semi24.from_dense(torch.tensor([[448.0, 0.875, 0, 0, -13.0, 2.0**-9, 0, 0]]))
    assert quantize(fits).error(fits) == 0.0


def test_a_row_of_small_values_loses_nothing_to_rows_of_large_ones():
    a = bsr(128, 128, density=1.0)
    a.values[:] = torch.randn_like(a.values)
    a.values[:4] *= 2.0**-30  # the first block row
    small = [
        (quantize(a, scale=kind).to_dense() - a.to_dense())[:16].norm() / a.to_dense()[:16].norm()
        for kind in KINDS
    ]
    assert small[0] == 1.0  # one scale for all leaves nothing of them
    assert max(small[1:]) < 0.04


def test_error_refuses_what_this_was_not_made_of():
    a = bsr24()
    q = quantize(a)
    others: list[tuple[Any, str]] = [
        (a.to_bsr(), r"quantized form of a BSR24 \(150, 190\) .* got BSR"),
        (bsr24(150, 180), "got BSR24"),
        (a.to_dense(), r"got a torch.Tensor, torch.float32 \[150, 190\]"),
        (BSR24.unchecked(a.pattern, a.values, a.meta.flip(0)), "stores other elements"),
        (q.matrix, "is torch.float8_e4m3fn; use one of"),
    ]
    for other, message in others:
        with pytest.raises(InvalidInput, match=message):
            q.error(other)
    again = BSR24(
        BlockPattern(a.shape, a.block, a.pattern.indptr, a.pattern.indices), a.values, a.meta.clone()
    )
    assert q.error(again) == q.error(a)
    moved, other = (random_bsr(64, 64, 16, 0.5, seed=seed) for seed in (1, 2))
    assert not moved.pattern.same_as(other.pattern)
    assert moved.nnzb == other.nnzb
    p = quantize(moved, scale="tensor")
    with pytest.raises(InvalidInput, match="stores other elements"):
        p.error(other)
    with pytest.raises(InvalidInput, match="stores other elements"):
        p.T.error(moved)
    assert p.T.error(moved.T) == p.error(moved)
    whole = random_bsr(64, 64, 16, 1.0)  # whose transpose stores the same blocks
    with pytest.raises(InvalidInput, match="stores other elements"):
        quantize(whole, scale="tensor").T.error(whole)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_counted_and_placed(make: Callable[..., Any], bad: float, device: str):
    a = make(dtype=torch.bfloat16).to(device)
    flat = a.values.view(-1)
    right = flat.clone()
    inside = torch.nonzero(flat)[:, 0]
    at = inside[torch.randperm(inside.numel(), device=device)[:5]]
    flat[at] = bad
    row, column = first(a, at.min())
    for kind in kinds(a):
        with pytest.raises(
            InvalidInput,
            match=f"5 of {flat.numel()} stored values are NaN or Inf; the first is at row {row}, column {column};",
        ):
            quantize(a, scale=kind)
    flat.copy_(right)
    quantize(a)


def first(a: Any, at: torch.Tensor) -> tuple[int, int]:
    """Where the stored value `at` lies: mark it alone and look for the mark."""
    marks = torch.zeros_like(a.values)
    marks.view(-1)[at] = 1
    if isinstance(a, BSR):
        marked: Any = BSR(a.pattern, marks)
    elif isinstance(a, BSR24):
        marked = BSR24(a.pattern, marks, a.meta)
    else:
        marked = Semi24(marks, a.meta)
    ((row, column),) = torch.nonzero(marked.to_dense()).tolist()
    return row, column


def test_the_place_in_a_transposed_view_is_that_of_the_view():
    a = bsr()
    at = int(torch.nonzero(a.values.view(-1))[7])
    a.values.view(-1)[at] = math.nan
    row, column = first(a, torch.tensor(at))
    with pytest.raises(InvalidInput, match=f"the first is at row {column}, column {row};"):
        quantize(a.T, scale="tensor")


def test_values_whose_scale_leaves_float32_are_refused():
    edge = 448 * torch.finfo(torch.float32).max
    w = torch.zeros(2, 8, dtype=torch.float64)
    w[1, 6] = edge
    q = quantize(Semi24.from_dense(w))
    assert q.to_dense(torch.float64)[1, 6] == edge
    w[1, 6] = -edge * (1 + 2.0**-40)
    with pytest.raises(
        InvalidInput, match=r"1 of 8 stored values are NaN or Inf or beyond 1.52e\+41.* row 1, column 6"
    ):
        quantize(Semi24.from_dense(w))
    quantize(Semi24.from_dense(w), E5M2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unchecked_nan_and_inf_make_nan_of_what_shares_their_scale(bad: float, device: str):
    w = torch.randn(3, 16, device=device)
    w[1, 5] = bad
    a = pruned(w)
    made = quantize(a, check=False).to_dense()
    kept = a.to_dense() != 0
    assert made[1][kept[1]].isnan().all()
    assert made[[0, 2]].isfinite().all()
    assert quantize(a, scale="tensor", check=False).to_dense()[kept].isnan().all()
    w[1, 5] = 0
    a = Semi24.from_dense(w)
    assert fp8.same(quantize(a), quantize(a, check=False))


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "kind"), CASES)
def test_without_the_check_nothing_waits_for_the_gpu(
    make: Callable[..., Any], kind: Any, no_sync: Callable[[], AbstractContextManager[None]]
):
    a = make().to("cuda")
    with no_sync():
        q = quantize(a, scale=kind, check=False)
        q.dequantize(torch.bfloat16)
    right = quantize(a.to("cpu"), scale=kind)
    assert fp8.same(q.to("cpu"), right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": [1.0, 2.0]}, "expected a BSR, Semi24, BSR24 or dense torch.Tensor, got "),
        ({"a": None}, "got None"),
        (
            {"dtype": torch.bfloat16},
            "dtype is torch.bfloat16; use one of torch.float8_e4m3fn, torch.float8_e5m2",
        ),
        ({"dtype": torch.float8_e4m3fnuz}, "dtype is .*; use one of torch.float8_e4m3fn, torch.float8_e5m2"),
        ({"dtype": "e4m3"}, "dtype is .*; use one of torch.float8_e4m3fn, torch.float8_e5m2"),
        ({"scale": "column"}, "scale is 'column'; use one of tensor, row, block"),
        ({"scale": 1.0}, "scale is 1.0"),
        ({"a": semi24(), "scale": "block"}, "a Semi24 has no blocks"),
        ({"a": bsr().T}, r"transposed view, whose rows are columns .*logical_values\(\)"),
        ({"a": quantize(bsr())}, "got a Quantized"),
        ({"a": quantize(bsr()).matrix}, "is torch.float8_e4m3fn; use one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_quantized_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        quantize(**{"a": bsr(), **change})
