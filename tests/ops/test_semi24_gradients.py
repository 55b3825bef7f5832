"""Gradients of products with Semi24 and BSR24, beyond test_gradients.py: any shape, views, functorch, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.ops.gradients import turning
from sparsek.products.ops.spmm import SPMM
from sparsek.products.reference.epilogue import ACTIVATIONS
from tests.ops.gradients import at_values, with_values
from tests.ops.operands import op_args
from tests.ops.storages import TWO_FOUR, matrix
from tests.sums import alike

F32, F64 = torch.float32, torch.float64
DRAW = torch.Generator()


def _back(run: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    return list(
        torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=DRAW.manual_seed(3)).to(out))
    )


@pytest.mark.parametrize("kind", ["semi24", "bsr24"])
def test_the_kernel_named_for_a_product_multiplies_by_the_transpose_if_it_can(kind: str) -> None:
    named = [f"{family}.{kind}" for family in ("unpacked", "cpu", "reference")]
    assert [turning(name, two_four=True) for name in named] == named
    assert turning(f"hopper.{kind}", two_four=True) is None


@settings(max_examples=25)
@given(
    m=st.integers(0, 40),
    groups=st.integers(0, 8),
    n=st.integers(0, 20),
    left=st.booleans(),
    act=st.sampled_from([None, "relu", "silu"]),
    seed=st.integers(0, 2**20),
)
def test_gradients_hold_for_any_shape(m: int, groups: int, n: int, left: bool, act: Any, seed: int):
    draw = torch.Generator().manual_seed(seed)
    a = sk.Semi24.from_dense(torch.randn(m, 8 * groups, dtype=F64, generator=draw))
    d = a.to_dense()
    x = torch.randn(n, m if left else 8 * groups, dtype=F64, generator=draw)
    bias = torch.randn(m, dtype=F64, generator=draw)
    if left:
        found, exact = _back(lambda x: sk.spmm(x, a), [x]), _back(lambda x: x @ d, [x])
    else:
        found = _back(lambda x, bias: sk.linear(x, a, bias, act), [x, bias])
        exact = _back(lambda x, bias: ACTIVATIONS[act or ""](x @ d.mT + bias), [x, bias])
    for mine, right in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_a_bias_or_a_residual_may_learn_alone(kind: str):
    a, x = matrix(kind, F32), torch.randn(5, 192)
    bias, rest = torch.randn(128, requires_grad=True), torch.randn(5, 128, requires_grad=True)
    y = sk.linear(x, a, bias, None, rest)
    of_bias, of_rest = torch.autograd.grad(y, [bias, rest], torch.ones_like(y))
    assert torch.equal(of_bias, torch.full((128,), 5.0))
    assert torch.equal(of_rest, torch.ones(5, 128))


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
def test_functional_transforms_reach_the_dense_operand(kind: str):
    a, b, bias = matrix(kind, F64), torch.randn(192, 6, dtype=F64), torch.randn(128, dtype=F64)
    d = a.to_dense()
    found = torch.func.grad(lambda b: sk.spmm(a, b).square().sum())(b)
    torch.testing.assert_close(found, 2 * d.mT @ (d @ b))
    jacobian = torch.func.jacrev(lambda x: sk.linear(x, a, bias, "relu"))(b.mT[:2])
    expected = torch.func.jacrev(lambda x: torch.relu(x @ d.mT + bias))(b.mT[:2])
    torch.testing.assert_close(jacobian, expected)
    found = torch.func.grad(lambda v: sk.spmm(with_values(a, v), b).square().sum())(a.values)
    torch.testing.assert_close(found, at_values(2 * (d @ b) @ b.mT, a))


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


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_forward_mode_is_refused(kind: str):
    a, b = matrix(kind, F32), torch.randn(192, 6)
    with pytest.raises(InvalidInput, match="no forward-mode derivative"):
        torch.func.jvp(lambda b: sk.spmm(a, b), (b,), (b,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(b, b)
        with pytest.raises(InvalidInput, match="no forward-mode derivative"):
            sk.spmm(a, dual)
