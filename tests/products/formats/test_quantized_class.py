"""Quantized: its parts, transposes, copies, pytrees, what it refuses, and what comes of products."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import FORMATS, SPARSE, Quantized, Scale, quantize
from sparsek.products.formats.semi24 import Semi24
from tests.products.formats import fp8
from tests.products.formats.fp8 import CASES, E4M3, E5M2, FP8, KINDS, MAKERS, bsr, bsr24, semi24


@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_a_transposed_view_is_quantized_as_the_matrix_that_it_views(kind: Scale, device: str):
    a = bsr().to(device)
    q = quantize(a, scale=kind)
    t = quantize(a.T, scale=kind)
    assert fp8.same(t, q.T)
    assert torch.equal(t.to_dense(), q.to_dense().T)
    assert q.T.scale is q.scale
    assert q.T.matrix.values is q.matrix.values
    assert fp8.same(q.T.T, q)
    Quantized(t.matrix, t.scale, kind)
    assert t.error(a.T) == q.error(a)


def test_the_copy_of_a_transposed_view_has_scales_for_its_rows():
    a = bsr().T
    q = quantize(BSR(a.pattern, a.logical_values()))
    largest = a.to_dense().abs().amax(1)
    assert torch.equal(q.scale, torch.where(largest == 0, 1.0, largest / 448))


def test_where_there_is_no_transpose_the_error_says_why():
    with pytest.raises(InvalidInput, match=r"one for each column.*scale='tensor' or 'block'"):
        assert quantize(bsr()).T
    for make in (semi24, bsr24):
        with pytest.raises(InvalidInput, match=r"has no \.T: its pairs lie along rows"):
            assert quantize(make(), scale="tensor").T


def changed(
    part: str, change: Callable[[Any], Any], kind: Scale = "row", make: Any = bsr
) -> Callable[[], Quantized]:
    """A call that makes a Quantized with one part changed."""

    def build() -> Quantized:
        q = quantize(make(), scale=kind)
        parts = {"matrix": q.matrix, "scale": q.scale, "kind": q.kind}
        if part in parts:
            parts[part] = change(parts[part])
        else:
            a: Any = q.matrix
            inner = {name: getattr(a, name) for name in ("pattern", "values", "meta") if hasattr(a, name)}
            inner[part] = change(inner[part])
            parts["matrix"] = type(a).unchecked(**inner)
        return Quantized(**parts)

    return build


def put(at: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(part: torch.Tensor) -> torch.Tensor:
        part = part.clone()
        part.view(-1)[at] = value
        return part

    return change


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_parts_that_fit_are_taken_as_they_are(kind: Scale, dtype: torch.dtype):
    """NaN and the infinities of E5M2 are values that a matrix may have."""
    q = quantize(bsr(64, 64), dtype, kind)
    q.matrix.values.view(torch.uint8).view(-1)[:2] = torch.tensor([0x7F, 0x7C], dtype=torch.uint8)
    again = Quantized(q.matrix, q.scale, kind)
    assert again.matrix is q.matrix
    assert again.scale is q.scale


def test_the_formats_alone_still_refuse_fp8():
    a = bsr()
    with pytest.raises(InvalidInput, match=r"is torch.float8_e4m3fn; use one of"):
        BSR(a.pattern, a.values.to(E4M3))


@pytest.mark.parametrize("make", MAKERS)
def test_formats_are_registered_by_the_kind_of_their_storage(make: Callable[..., Any]):
    a = make()
    assert FORMATS[a.storage().kind] is type(a)
    assert set(SPARSE) == {*FORMATS.values(), Quantized}


@pytest.mark.parametrize("make", MAKERS)
def test_fast_accum_goes_wherever_the_matrix_goes(make: Callable[..., Any]):
    q = quantize(make(), fast_accum=True)
    assert (q.fast_accum, quantize(make()).fast_accum) == (True, False)
    assert "scale per row, fast_accum, " in repr(q)
    moved = [q.with_fast_accum(False).with_fast_accum(), copy.copy(q), copy.deepcopy(q)]
    assert all(each.fast_accum for each in [*moved, Quantized(q.matrix, q.scale, "row", True)])
    assert _pytree.tree_map(lambda leaf: leaf, q).fast_accum
    assert moved[0].matrix is q.matrix
    if make is bsr:
        assert quantize(make(), scale="tensor", fast_accum=True).T.fast_accum


def test_fast_accum_is_refused_where_it_means_nothing():
    with pytest.raises(InvalidInput, match="up to its sparse matrix"):
        quantize(torch.randn(4, 32), fast_accum=True)  # type: ignore[call-overload]
    a = quantize(bsr(), scale="block")
    for build in (
        lambda: quantize(bsr(), scale="block", fast_accum=True),
        a.with_fast_accum,
        lambda: Quantized(a.matrix, a.scale, "block", True),
    ):
        with pytest.raises(InvalidInput, match="a scale per block multiplies the float32 sum of a block"):
            build()
    with pytest.raises(InvalidInput, match="fast_accum is 1; it must be True or False"):
        quantize(bsr(), fast_accum=1)  # type: ignore[call-overload]


def test_values_without_a_gradient_refuse_to_ask_for_one():
    with pytest.raises(InvalidInput, match="a Quantized has FP8 values, for which products have no gradient"):
        quantize(bsr()).requires_grad_()
    assert semi24().requires_grad_().values.requires_grad


def test_it_takes_no_part_in_autograd():
    a = bsr()
    a.values.requires_grad_()
    q = quantize(a)
    assert not q.scale.requires_grad
    assert not q.to_dense().requires_grad
    assert q.error(a) > 0


def test_it_goes_through_torch_compile_and_is_made_there_without_the_check():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q: Quantized, a: Semi24) -> tuple[torch.Tensor, Quantized]:
        return q.to_dense() * 2, quantize(a, E5M2, check=False)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def checked(a: Semi24) -> Quantized:
        return quantize(a)

    # Each matrix and each scale once: every case compiles anew.
    for make, kind in (CASES[2], CASES[3], CASES[6]):
        q, a = quantize(make(), scale=kind), semi24()
        doubled, made = run(q, a)
        assert torch.equal(doubled, q.to_dense() * 2)
        assert fp8.same(made, quantize(a, E5M2))
    with pytest.raises(Exception, match=r"check=False"):
        checked(semi24())
