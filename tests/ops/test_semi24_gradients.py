"""Gradients of products with Semi24 and BSR24: to the dense operand, the bias and the residual, never to values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.ops.spmm import SPMM
from sparsek.products.reference.epilogue import ACTIVATION_NAMES, ACTIVATIONS
from sparsek.testing.chain_budget import chain_bounds
from tests.ops.operands import op_args
from tests.ops.storages import TWO_FOUR, matrix
from tests.sums import alike

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

# How a product is called, with A [128, 192]; the shapes of its dense tensors; the same densely.
Run = Callable[..., Tensor]
FORMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], Run]] = {
    "A @ B": (lambda a, b, kernel: sk.spmm(a, b, kernel=kernel), ((192, 24),), lambda d, b: d @ b),
    "batch of alpha A @ B": (
        lambda a, b, kernel: sk.spmm(a, b, alpha=-2.0, kernel=kernel),
        ((2, 3, 192, 8),),
        lambda d, b: -2 * (d @ b),
    ),
    "A @ B by columns": (
        lambda a, x, kernel: sk.spmm(a, x.mT, kernel=kernel),
        ((24, 192),),
        lambda d, x: d @ x.mT,
    ),
    "X @ A": (lambda a, x, kernel: sk.spmm(x, a, kernel=kernel), ((24, 128),), lambda d, x: x @ d),
    "batch of X @ A": (lambda a, x, kernel: sk.spmm(x, a, kernel=kernel), ((2, 3, 128),), lambda d, x: x @ d),
    "swapped batch of X @ A": (
        lambda a, x, kernel: sk.spmm(x.transpose(0, 1), a, kernel=kernel),
        ((5, 2, 128),),
        lambda d, x: x.transpose(0, 1) @ d,
    ),
    **{
        f"linear {act}": (
            lambda a, x, bias, kernel, act=act: sk.linear(x, a, bias, act, kernel=kernel),
            ((2, 5, 192), (128,)),
            lambda d, x, bias, act=act: ACTIVATIONS[act or ""](x @ d.mT + bias),
        )
        for act in (None, *ACTIVATION_NAMES)
    },
    **{
        f"linear {act} with a residual": (
            lambda a, x, bias, rest, kernel, act=act: sk.linear(x, a, bias, act, rest, kernel=kernel),
            ((7, 192), (128,), (7, 128)),
            lambda d, x, bias, rest, act=act: ACTIVATIONS[act or ""](x @ d.mT + bias) + rest,
        )
        for act in (None, ACTIVATION_NAMES[0])
    },
    "swiglu": (
        lambda a, x, kernel: sk.swiglu(x, a, a, kernel=kernel),
        ((5, 192),),
        lambda d, x: torch.nn.functional.silu(x @ d.mT) * (x @ d.mT),
    ),
}


def _back(run: Run, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    draw = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=draw).to(out.device, BF16).to(out.dtype)
    return list(torch.autograd.grad(out, leaves, cotangent))


def hold(name: str, kind: str, kernel: str | None, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every gradient is as near to float64 as `testing/chain_budget.py` wants it."""
    run, shapes, dense = FORMS[name]
    a = matrix(kind, dtype, device)
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    found = _back(lambda *x: run(a, *x, kernel=kernel), tensors)
    plain = _back(lambda *x: dense(a.to_dense(), *x), tensors)
    wide, right = a.to_dense(F64), [x.double() for x in tensors]

    def in_float64() -> list[Tensor]:
        return _back(lambda *x: dense(wide, *x), right)

    bounds = chain_bounds(in_float64, in_float64(), plain, dtype)
    for mine, bound, x in zip(found, bounds, tensors, strict=True):
        assert (mine.shape, mine.dtype) == (x.shape, x.dtype)
        gate = bound.judge(mine)
        assert gate.passed, gate


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("family", "dtype"), [(None, F32), ("reference", F64), (None, BF16)], ids=str)
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_gradients_are_within_the_error_budget(kind: str, family: str | None, dtype: torch.dtype, name: str):
    hold(name, kind, None if family is None else f"{family}.{kind}", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32], ids=str)
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_gradients_on_a_gpu_are_within_the_error_budget(kind: str, dtype: torch.dtype, name: str):
    hold(name, kind, None, dtype, "cuda")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_first_and_second_derivatives_are_those_of_finite_differences(kind: str, name: str):
    run, shapes, _ = FORMS[name]
    a = matrix(kind, F64)
    leaves = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]
    assert gradcheck(lambda *x: run(a, *x, kernel=None), leaves, fast_mode=True)
    assert gradgradcheck(lambda *x: run(a, *x, kernel=None), leaves, fast_mode=True)


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
def test_the_op_refuses_values_that_learn_and_epilogues_without_a_gradient(kind: str):
    a, b = matrix(kind, F32), torch.randn(192, 24)
    op = torch.ops.sparsek.spmm
    with pytest.raises(
        InvalidInput, match=rf"the values of a {kind.capitalize() if kind == 'semi24' else 'BSR24'}"
    ):
        op(*op_args(a, b)._replace(values=a.values.clone().requires_grad_()))
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
    with pytest.raises(InvalidInput, match="require a gradient"):
        torch.func.grad(lambda v: sk.spmm(_with(a, v), b).sum())(a.values)


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
    each = torch.vmap(lambda v, b: sk.spmm(_with(a, v), b))(values, b)
    torch.testing.assert_close(each, torch.stack([d @ b[0], -d @ b[1], 2 * d @ b[2]]))


def _with(a: Any, values: Tensor) -> Any:
    if isinstance(a, sk.BSR24):
        return sk.BSR24.unchecked(a.pattern, values, a.meta)
    return sk.Semi24.unchecked(values, a.meta)


@pytest.mark.parametrize("kind", TWO_FOUR)
def test_forward_mode_is_refused(kind: str):
    a, b = matrix(kind, F32), torch.randn(192, 6)
    with pytest.raises(InvalidInput, match="no forward-mode derivative"):
        torch.func.jvp(lambda b: sk.spmm(a, b), (b,), (b,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(b, b)
        with pytest.raises(InvalidInput, match="no forward-mode derivative"):
            sk.spmm(a, dual)
