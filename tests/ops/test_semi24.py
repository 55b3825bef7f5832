"""spmm and linear with Semi24 and BSR24: what they multiply eagerly, in how many plans, and what they refuse."""

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.testing.budget import check_spmm
from tests.ops.storages import BF16, TWO_FOUR, matrix


@pytest.mark.parametrize("learns", [False, True], ids=["fused", "for training"])
def test_swiglu_takes_them(learns: bool, device: str):
    gate, up = matrix("semi24", torch.float32, device), matrix("bsr24", torch.float32, device)
    x = torch.randn(2, 5, 192, device=device, requires_grad=learns)
    y = sk.swiglu(x, gate, up)
    expected = torch.nn.functional.silu(x @ gate.to_dense().mT) * (x @ up.to_dense().mT)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_a_plan_for_an_h200_names_the_kernel_of_each_side(kind: str):
    a, b = matrix(kind), torch.randn(192, 64).to(BF16)
    assert sk.plan_spmm(a, b, device="h200").kernel == f"hopper.{kind}"
    back = sk.plan_spmm(b.mT.new_ones(64, 128), a, device="h200")
    assert back.kernel == f"unpacked.{kind}"
    assert back.problem.a.transposed


def test_an_aligned_plan_refuses_what_is_not():
    a = matrix("semi24")
    wide = torch.randn(192, 48).to(BF16)
    b, odd = wide[:, :40], wide[:, 3:43]
    plan = sk.plan_spmm(a, b)
    assert check_spmm(a, b, plan(a, b)).passed
    with pytest.raises(InvalidInput, match="multiples of 16 bytes"):
        plan(a, odd)
    assert check_spmm(a, b, sk.plan_spmm(a, b.contiguous())(a, b)).passed
