"""spmm and linear with Semi24 and BSR24: what they multiply eagerly, in how many plans, and what they refuse."""

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr24 import BSR24
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


def test_an_aligned_plan_refuses_what_is_not():
    a = matrix("semi24")
    wide = torch.randn(192, 48).to(BF16)
    b, odd = wide[:, :40], wide[:, 3:43]
    plan = sk.plan_spmm(a, b)
    assert check_spmm(a, b, plan(a, b)).passed
    with pytest.raises(InvalidInput, match="multiples of 16 bytes"):
        plan(a, odd)
    assert check_spmm(a, b, sk.plan_spmm(a, b.contiguous())(a, b)).passed
