"""spmm and linear with Semi24 and BSR24: what they multiply eagerly, in how many plans, and what they refuse."""

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.reference.epilogue import Epilogue
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.ops.storages import BF16, TWO_FOUR, matrix


@pytest.mark.parametrize("learns", [False, True], ids=["fused", "for training"])
def test_swiglu_takes_them(learns: bool, device: str):
    gate, up = matrix("semi24", torch.float32, device), matrix("bsr24", torch.float32, device)
    x = torch.randn(2, 5, 192, device=device, requires_grad=learns)
    y = sk.swiglu(x, gate, up)
    expected = torch.nn.functional.silu(x @ gate.to_dense().mT) * (x @ up.to_dense().mT)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_a_plan_of_a_semi24_explains_itself_and_fits_others_of_its_shape():
    a, other = matrix("semi24"), matrix("semi24")
    b = torch.randn(192, 40).to(BF16)
    plan = sk.plan_spmm(a, b)
    text = plan.explain()
    assert text.startswith(
        "C = A @ B   A [128, 192] bf16, 2:4, B [192, 40] row-major, on cpu\n  kernel     reference.semi24"
    )
    assert "not        hopper.semi24: " in text
    assert torch.equal(plan(a, b), a @ b)
    assert torch.equal(plan(other, b), other @ b)
    out = poisoned((128, 40), BF16)
    into = sk.plan_spmm(a, b, out=out)
    assert into(a, b, out) is out
    assert torch.equal(out, a @ b)
    assert torch.equal(sk.spmm(a, b, plan=plan), a @ b)


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_a_plan_for_an_h200_names_the_kernel_of_each_side(kind: str):
    a, b = matrix(kind), torch.randn(192, 64).to(BF16)
    assert sk.plan_spmm(a, b, device="h200").kernel == f"hopper.{kind}"
    back = sk.plan_spmm(b.mT.new_ones(64, 128), a, device="h200")
    assert back.kernel == f"unpacked.{kind}"
    assert back.problem.a.transposed


def test_a_plan_of_a_bsr24_belongs_to_its_pattern():
    a, other = matrix("bsr24"), matrix("bsr24")
    x = torch.randn(3, 8, 128).to(BF16)
    plan = sk.plan_spmm(x, a, kernel="reference.bsr24")
    blocks = f"2:4 in {a.nnzb} blocks of 64x64 ({100 * a.pattern.density:.3g} % stored)"
    assert plan.explain().startswith(
        f"C = B @ A   A [128, 192] bf16, {blocks}, B [24, 128] row-major, on cpu\n"
    )
    twin = BSR24.unchecked(a.pattern, -a.values, a.meta)
    assert torch.equal(plan(x, twin), -plan(x, a))
    with pytest.raises(
        InvalidInput,
        match=r"made for another pattern of blocks; .* multiplies A \[128, 192\] .*; got BSR24\(128x192",
    ):
        plan(x, other)


BAD: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "no dense": (lambda a, b: a @ a, "B must be a dense torch.Tensor, got .*24; a .* dense matrices only"),
    "a list": (lambda a, b: sk.spmm(a, cast(Any, [1.0])), "B must be a dense torch.Tensor, got list"),
    "a BSR": (
        lambda a, b: sk.spmm(a, sk.random_bsr(192, 64, 64, 1.0)),
        "must be a dense torch.Tensor, got .*",
    ),
    "vector": (
        lambda a, b: sk.spmm(a, b[:, 0]),
        r"B must be \[K, N\] .* got 1-D; for a vector use B.unsqueeze\(-1\)",
    ),
    "vector left": (
        lambda a, b: sk.spmm(b[:128, 0], a),
        r"A must be \[M, K\] .* got 1-D; .* A.unsqueeze\(0\)",
    ),
    "rows": (lambda a, b: a @ b[:64], r"A is \[128, 192\] and B \[64, 40\]: B needs 192 rows"),
    "columns": (lambda a, b: sk.spmm(b, a), r"A is \[192, 40\] and B \[128, 192\]: A needs 128 columns"),
    "dtype": (lambda a, b: a @ b.double(), "A is torch.bfloat16 and B torch.float64; cast one of them"),
    "device": (lambda a, b: a @ b.to("meta"), "A is on cpu and B on meta; move one of them"),
    "sparse": (lambda a, b: a @ b.to_sparse(), "got layout torch.sparse_coo"),
    "transpose": (lambda a, b: b.T @ a.T, r"has no \.T.*sparsek.linear\(x, W\)"),
    "alpha": (lambda a, b: sk.spmm(a, b, alpha=True), "alpha is True; it must be a finite number"),
    "beta": (lambda a, b: sk.spmm(a, b, beta=2), "beta is 2 and there is no out="),
    "out shape": (lambda a, b: sk.spmm(a, b, out=b), r"out must be torch.bfloat16 \[128, 40\] on cpu"),
    "out shape left": (
        lambda a, b: sk.spmm(b.T.new_ones(4, 128), a, out=b),
        r"out must be torch.bfloat16 \[4, 192\]",
    ),
    "out strides": (
        lambda a, b: sk.spmm(a, b, out=b.new_ones(40, 128).T),
        r"out must have contiguous rows, got strides \(1, 128\)",
    ),
    "out is B": (
        lambda a, b: sk.spmm(a, b, out=b[:128]),
        "out overlaps the memory of B; C would be written where that is read",
    ),
    "other": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(other=b)),
        r"other is torch.bfloat16 \[192, 40\] on cpu; this product needs torch.bfloat16 \[128, 40\]",
    ),
    "bias": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(bias=b.new_ones(40))),
        r"bias is torch.bfloat16 \[40\] on cpu; this product needs",
    ),
    "config": (lambda a, b: sk.plan_spmm(a, b, config=1), "config= belongs to one kernel"),
    "plan": (
        lambda a, b: sk.spmm(a, b, plan=object()),  # pyright: ignore[reportArgumentType]
        "plan must come from plan_spmm",
    ),
    "plan of a BSR": (
        lambda a, b: sk.spmm(
            a, b, plan=sk.plan_spmm(sk.random_bsr(128, 192, 64, 1.0, dtype=BF16, device="cpu"), b)
        ),
        "made for another matrix; call plan_spmm",
    ),
    "plan and kernel": (
        lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(a, b), kernel="hopper.semi24"),
        "kernel='hopper.semi24' contradicts plan, which uses ",
    ),
    "plan of N": (
        lambda a, b: sk.plan_spmm(a, b)(a, b[:, :8]),
        r"multiplies bf16 B of 1 x \[192, 40\], row-major; got bf16 B of 1 x \[192, 8\]",
    ),
    "plan of a side": (
        lambda a, b: sk.plan_spmm(a, b)(b.new_ones(40, 128), a),
        r"made for a sparse matrix on the left; call plan_spmm\(A, B\) for this A",
    ),
    "linear x": (lambda a, b: sk.linear(b, a), r"x is \[192, 40\] and W \[N, K\] \[128, 192\]"),
    "linear bias": (lambda a, b: sk.linear(b.T, a, b.new_ones(192)), r"bias is \[192\]; it must be \[128\]"),
    "linear W": (
        lambda a, b: sk.linear(b.T, "w"),  # pyright: ignore[reportArgumentType]
        "W must be a BSR, a Semi24, a BSR24, a Quantized or a dense torch.Tensor, got str",
    ),
    "linear act": (
        lambda a, b: sk.linear(b.T, a, None, cast(Any, "tanh")),
        "activation is 'tanh'; use one of relu",
    ),
    "values": (
        lambda a, b: sk.spmm(_learning(a), b),
        r"the values of a .*24 require a gradient, .* use A.detach\(\)\. Gradients reach the dense operand",
    ),
    "values of a layer": (lambda a, b: sk.linear(b.T, _learning(a)), "require a gradient"),
    "values and a plan": (lambda a, b: sk.plan_spmm(a, b)(_learning(a), b), "a plan has no gradient"),
    "gradient and out": (
        lambda a, b: sk.spmm(a, b.clone().requires_grad_(), out=b.new_empty(128, 40)),
        "out= takes no part in autograd",
    ),
}


def _learning(a: Any) -> Any:
    values = a.values.clone().requires_grad_()
    return (
        BSR24.unchecked(a.pattern, values, a.meta)
        if isinstance(a, BSR24)
        else Semi24.unchecked(values, a.meta)
    )


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_what_does_not_fit_is_refused(kind: str, name: str):
    run, text = BAD[name]
    with pytest.raises(InvalidInput) as caught:
        run(matrix(kind), torch.randn(192, 40).to(BF16))
    assert re.search(text, str(caught.value)), caught.value


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_values_that_ask_for_a_gradient_multiply_where_nobody_learns(kind: str):
    a, b = matrix(kind), torch.randn(192, 40).to(BF16)
    with torch.no_grad():
        assert torch.equal(_learning(a) @ b, a @ b)
    assert torch.equal(_learning(a).detach() @ b, a @ b)


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_autocast_casts_the_operands_and_nothing_inside_a_kernel(kind: str):
    a, x = matrix(kind, torch.float32), torch.randn(5, 192)
    low, plan = a.to(dtype=BF16), sk.plan_spmm(a, x.mT)
    right, product = sk.linear(x.to(BF16), low, None, "gelu"), low @ x.mT.to(BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(sk.linear(x, a, None, "gelu"), right)
        assert torch.equal(a @ x.mT, product)
        assert torch.equal(sk.spmm(a, x.mT), product)
        assert sk.spmm(a, x.mT, plan=plan).dtype == torch.float32


def test_an_aligned_plan_refuses_what_is_not():
    a = matrix("semi24")
    wide = torch.randn(192, 48).to(BF16)
    b, odd = wide[:, :40], wide[:, 3:43]
    plan = sk.plan_spmm(a, b)
    assert check_spmm(a, b, plan(a, b)).passed
    with pytest.raises(InvalidInput, match="multiples of 16 bytes"):
        plan(a, odd)
    assert check_spmm(a, b, sk.plan_spmm(a, b.contiguous())(a, b)).passed
