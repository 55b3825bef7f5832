"""Gradients of products with Semi24 and BSR24, beyond test_gradients.py: any shape, views, functorch, refusals."""

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.ops.gradients import turning
from sparsek.products.ops.spmm import SPMM
from tests.ops.gradients import with_values
from tests.ops.operands import op_args
from tests.ops.storages import TWO_FOUR, matrix
from tests.sums import alike

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("kind", ["semi24", "bsr24"])
def test_the_kernel_named_for_a_product_multiplies_by_the_transpose_if_it_can(kind: str) -> None:
    named = [f"{family}.{kind}" for family in ("unpacked", "cpu", "reference")]
    assert [turning(name, two_four=True) for name in named] == named
    assert turning(f"hopper.{kind}", two_four=True) is None


@pytest.mark.parametrize("act", [None, "relu"])
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_what_learns_may_be_written_to_in_place(kind: str, act: str | None):
    a = matrix(kind, F32)
    x = torch.randn(2, 5, 192, requires_grad=True)
    for run in (lambda: sk.linear(x, a), lambda: sk.spmm(a, x.mT), lambda: sk.spmm(x[..., :128], a)):
        y = run()
        y += 1
        (found,) = torch.autograd.grad(y.sum(), x)
        assert alike(found, torch.autograd.grad(run().sum(), x)[0])


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_a_gradient_lies_as_its_operand_does(kind: str):
    a = matrix(kind, F32)
    for b in (torch.randn(192, 24), torch.randn(24, 192).mT):
        b.requires_grad_()
        (found,) = torch.autograd.grad((a @ b).square().sum(), b)
        assert found.stride() == b.stride()


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_the_op_refuses_epilogues_without_a_gradient(kind: str):
    a, b = matrix(kind, F32), torch.randn(192, 24)
    op = torch.ops.sparsek.spmm
    y = op(*op_args(a, b.requires_grad_(), act="gelu"))
    with pytest.raises(InvalidInput, match=r"torch.ops.sparsek.spmm has no gradient with this epilogue"):
        y.sum().backward()


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_vmap_of_the_dense_operand_is_one_product(kind: str, monkeypatch: pytest.MonkeyPatch):
    a = matrix(kind, F64)
    d, b = a.to_dense(), torch.randn(3, 192, 6, dtype=F64)
    x, rest = torch.randn(3, 7, 192, dtype=F64), torch.randn(3, 7, 128, dtype=F64)
    ran, real = [], SPMM.run
    monkeypatch.setattr(SPMM, "run", lambda *args: ran.append(1) or real(*args))
    for dim in (0, 2):
        moved = b.movedim(0, dim)
        torch.testing.assert_close(torch.vmap(lambda b: sk.spmm(a, b), dim)(moved), d @ b)
    torch.testing.assert_close(torch.vmap(lambda x: sk.linear(x, a))(x), x @ d.mT)
    residual = torch.vmap(lambda x, rest: sk.linear(x, a, None, None, rest))(x, rest)
    torch.testing.assert_close(residual, x @ d.mT + rest)
    assert len(ran) == 4
    values = torch.stack((a.values, -a.values, 2 * a.values))
    each = torch.vmap(lambda v, b: sk.spmm(with_values(a, v), b))(values, b)
    torch.testing.assert_close(each, torch.stack([d @ b[0], -d @ b[1], 2 * d @ b[2]]))
