"""Matrices where a tensor is expected: vectors, casts, copies, torch's functions and numpy's."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional
from torch.utils._pytree import tree_map_only

import sparsek as sk
from sparsek.core.errors import InvalidInput
from tests.products.formats.two_four import bsr24, semi24

F32 = torch.float32


def bsr(dtype: torch.dtype = F32) -> sk.BSR:
    return sk.random_bsr(72, 104, 16, 0.4, dtype=dtype)  # ragged


FLOATING: dict[str, Callable[..., Any]] = {
    "BSR": bsr,
    "view": lambda dtype=F32: sk.random_bsr(104, 72, 16, 0.4, dtype=dtype).T,
    "Semi24": lambda dtype=F32: semi24(72, 104, dtype),
    "BSR24": lambda dtype=F32: bsr24(150, 190, dtype),
}
QUANTIZED: dict[str, Callable[[], Any]] = {
    "Quantized BSR": lambda: sk.quantize(bsr()),
    "Quantized view": lambda: sk.quantize(FLOATING["view"](), scale="tensor"),
    "Quantized Semi24": lambda: sk.quantize(FLOATING["Semi24"](), scale="tensor"),
    "Quantized BSR24": lambda: sk.quantize(FLOATING["BSR24"]()),
}
EVERY = {**FLOATING, **QUANTIZED}
floating = pytest.mark.parametrize("make", FLOATING.values(), ids=FLOATING)
quantized = pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED)
every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)


@floating
def test_a_vector_is_multiplied_as_by_a_dense_matrix(make: Callable[..., Any]):
    a = make()
    dense = a.to_dense()
    right, left = torch.randn(2 * a.shape[1])[::2], torch.randn(2 * a.shape[0])[::2]
    for v in (right, right.contiguous(), right[:1].expand(a.shape[1])):
        assert (a @ v).shape == (a.shape[0],)
        torch.testing.assert_close(a @ v, dense @ v)
        torch.testing.assert_close(torch.mv(a, v), dense @ v)
        torch.testing.assert_close(torch.matmul(a, v), dense @ v)
    for v in (left, left.contiguous()):
        assert (v @ a).shape == (a.shape[1],)
        torch.testing.assert_close(v @ a, v @ dense)
    with pytest.raises(InvalidInput):
        _ = a @ torch.randn(a.shape[1] + 1)
    with pytest.raises(InvalidInput):
        _ = torch.randn(a.shape[0] + 1) @ a


@every
def test_a_vector_is_a_matrix_of_one_column(make: Callable[..., Any]):
    a = make()
    v = torch.randn(a.shape[1])
    assert torch.equal(a @ v, (a @ v[:, None])[:, 0])


def test_a_vector_has_gradients_and_goes_through_torch_func():
    a, v = bsr(), torch.randn(104)
    dense = a.to_dense()
    values = a.values.requires_grad_()
    (a @ v.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(v.grad, 2 * dense.T @ (dense @ v))
    assert values.grad is not None
    with torch.no_grad():
        found = grad(lambda x: (a.detach() @ x).square().sum())(v)
        torch.testing.assert_close(found, 2 * dense.T @ (dense @ v))
        many = torch.randn(3, 104)
        torch.testing.assert_close(vmap(lambda x: a.detach() @ x)(many), many @ dense.T)


@floating
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_to_takes_a_dtype_a_device_or_both(make: Callable[..., Any], dtype: torch.dtype):
    a, right = make(), make().to_dense().to(dtype)
    named = {torch.bfloat16: "bfloat16", torch.float16: "half", F32: "float", torch.float64: "double"}[dtype]
    for made in (a.to(dtype), a.to("cpu", dtype), a.to(dtype=dtype), a.to(None, dtype), getattr(a, named)()):
        assert (type(made), made.dtype, made.shape) == (type(a), dtype, a.shape)
        assert torch.equal(made.to_dense(), a.to_dense().to(dtype))
    assert right.shape == a.shape
    assert a.to(a.dtype) is a.to("cpu") is a.cpu() is a.float() is a
    with pytest.raises(InvalidInput, match=r"two dtypes; write .to\(device, dtype\)"):
        a.to(dtype, dtype)
    with pytest.raises(InvalidInput, match=r"sparsek.quantize\(A, torch.float8_e4m3fn\)"):
        a.to(torch.float8_e4m3fn)


@pytest.mark.gpu
@every
def test_cuda_and_cpu_move(make: Callable[..., Any]):
    a = make()
    for there in (a.cuda(), a.cuda(0), a.cuda("cuda:0")):
        assert there.device == torch.device("cuda", 0)
        assert torch.equal(there.cpu().to_dense(), a.to_dense())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@every
def test_cuda_says_what_is_missing(make: Callable[..., Any]):
    for call in (lambda: make().cuda(), lambda: make().cuda(1)):
        with pytest.raises(InvalidInput, match="torch sees 0 CUDA devices"):
            call()


def test_casts_and_clones_are_differentiable():
    a = bsr().requires_grad_()
    (a.bfloat16().float().clone().map(torch.square).to_dense()).sum().backward()
    torch.testing.assert_close(a.values.grad, 2 * a.values.detach().bfloat16().float())
    assert not a.detach().requires_grad


@every
def test_sizes_are_a_tensors(make: Callable[..., Any]):
    a = make()
    dense = a.to_dense()
    assert (a.ndim, a.dim(), a.numel(), a.size()) == (2, 2, dense.numel(), dense.size())
    assert (a.size(0), a.size(-1)) == tuple(dense.shape)
    with pytest.raises(InvalidInput, match="dim is 2; it must be an int from -2 to 1"):
        a.size(2)


@every
def test_clones_have_values_of_their_own(make: Callable[..., Any]):
    a = make()
    inner, copied = (getattr(each, "matrix", each) for each in (a, a.clone()))
    assert torch.equal(a.clone().to_dense(), a.to_dense())
    assert copied.values.data_ptr() != inner.values.data_ptr()
    if hasattr(inner, "pattern"):
        assert copied.pattern is inner.pattern
    detached = a.detach()
    assert getattr(detached, "matrix", detached).values.data_ptr() == inner.values.data_ptr()


@every
def test_mt_is_t(make: Callable[..., Any]):
    a = make()
    inner = getattr(a, "matrix", a)
    if isinstance(inner, sk.BSR) and getattr(a, "kind", "") != "row":
        assert torch.equal(a.mT.to_dense(), a.to_dense().mT)
    else:
        with pytest.raises(InvalidInput, match=r"has no \.T"):
            _ = a.mT


@floating
def test_map_changes_stored_values_only(make: Callable[..., Any]):
    a = make()
    stored = a.map(torch.ones_like).to_dense() != 0
    assert torch.equal(a.map(torch.relu).to_dense(), a.to_dense().relu())
    shifted = a.map(lambda x: x + 1)
    assert type(shifted) is type(a)
    assert torch.equal(shifted.to_dense(), (a.to_dense() + 1) * stored)
    assert torch.equal(a.map(torch.Tensor.double).to_dense(), a.to_dense().double())
    strided = a.map(lambda x: x.mT.contiguous().mT * 2)  # the constructor refuses such strides
    assert torch.equal(strided.to_dense(), 2 * a.to_dense())
    if not isinstance(a, sk.Semi24):  # the parts pass the constructor's checks: nothing outside the matrix
        view = getattr(a, "order", None) is not None
        checked = shifted.T if view else shifted
        parts = [checked.pattern, checked.values, *([a.meta] if isinstance(a, sk.BSR24) else [])]
        type(a)(*parts)
    refused: Any = (
        (lambda x: x.sum(), "it must work element by element"),
        (lambda x: x > 0, "use one of"),
        (lambda x: 3, "what fn returns must be a dense torch.Tensor"),
    )
    for fn, text in refused:
        with pytest.raises(InvalidInput, match=text):
            a.map(fn)


@quantized
def test_a_quantized_matrix_refuses_what_needs_other_scales(make: Callable[..., Any]):
    a = make()
    with pytest.raises(InvalidInput, match=r"quantize\(A.dequantize\(\).map\(fn\)\)"):
        a.map(torch.relu)
    for cast in (a.half, a.float, a.bfloat16, a.double, lambda: a.to(torch.float16)):
        with pytest.raises(InvalidInput, match=r"a Quantized is FP8; .dequantize\("):
            cast()
    assert a.to(a.dtype) is a


@floating
def test_f_linear_is_a_product(make: Callable[..., Any]):
    a = make()
    n, k = a.shape
    dense, bias = a.to_dense(), torch.randn(n)
    for lead in ((), (5,), (2, 3), (0,)):
        x = torch.randn(*lead, k)
        for found in (functional.linear(x, a, bias), functional.linear(x, weight=a, bias=bias)):
            assert found.is_contiguous()
            torch.testing.assert_close(found, functional.linear(x, dense, bias))
        torch.testing.assert_close(functional.linear(x, a), functional.linear(x, dense))
    for call, text in (
        (lambda: functional.linear(torch.randn(5, k + 1), a), f"the last dim of x must be {k}"),
        (
            lambda: functional.linear(torch.randn(5, k), a, torch.randn(n + 1)),
            "a number for every output feature",
        ),
        (
            lambda: functional.linear(torch.randn(5, k), a, bias.double()),
            "bias torch.float64; cast one of them",
        ),
        (lambda: functional.linear(a, torch.randn(5, k)), r"A @ B is the product of others"),
    ):
        with pytest.raises(InvalidInput, match=text):
            call()


@every
def test_f_linear_and_torchs_products_are_the_operator(make: Callable[..., Any]):
    a = make()
    x = torch.randn(6, a.shape[1])
    torch.testing.assert_close(functional.linear(x, a), (a @ x.mT).mT)
    for product in (torch.mm, torch.matmul):
        assert torch.equal(product(a, x.mT), a @ x.mT)
    if isinstance(a, sk.BSR):
        turned: Any = a.T
        torch.testing.assert_close(torch.mm(x, turned), x @ a.to_dense().T)
        torch.testing.assert_close(x @ a.T, x @ a.to_dense().T)


def test_f_linear_has_gradients():
    a: Any
    a, x, bias = (
        bsr().requires_grad_(),
        torch.randn(5, 104, requires_grad=True),
        torch.randn(72, requires_grad=True),
    )
    dense = a.detach().to_dense()
    weights = torch.randn(5, 72)
    (functional.linear(x, a, bias) * weights).sum().backward()
    torch.testing.assert_close(x.grad, weights @ dense)
    torch.testing.assert_close(bias.grad, weights.sum(0))
    assert a.grad is not None
    right = (weights.T @ x.detach()) * (a.detach().map(torch.ones_like).to_dense() != 0)
    torch.testing.assert_close(a.grad.to_dense(), right)


@every
def test_other_functions_of_torch_name_the_right_call(make: Callable[..., Any]):
    a = make()
    b = torch.randn(a.shape[1], 4)
    calls: list[Callable[[], Any]] = [
        lambda: torch.relu(a),
        lambda: torch.addmm(b, a, b),
        lambda: torch.matmul(a, b, out=b),
        lambda: torch.cat([a, a]),
        lambda: functional.softmax(a, dim=-1),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match=r"takes dense tensors.*sparsek.spmm\(A, B\).*A.to_dense\(\)"):
            call()
        with pytest.raises(TypeError):
            call()


def test_numpy_gets_no_object_array():
    for a in (make() for make in EVERY.values()):
        for call in (
            np.asarray,
            np.array,
            lambda a: np.asarray(a, dtype=np.float32),
            lambda a: np.array([a, a]),
        ):
            with pytest.raises(InvalidInput, match=r"A.to_dense\(\) is a dense tensor"):
                call(a)
    with pytest.raises(TypeError, match=r"x.dequantize\(\)"):
        np.asarray(sk.quantize(torch.randn(4, 16)))
    with pytest.raises(InvalidInput):
        _ = np.ones((3, 72)) @ bsr()


@every
def test_they_stay_pytrees_and_are_copied(make: Callable[..., Any]):
    a = make()
    doubled = tree_map_only(Tensor, torch.clone, a)
    assert torch.equal(doubled.to_dense(), a.to_dense())
    for made in (copy.copy(a), copy.deepcopy(a)):
        assert type(made) is type(a)
        assert torch.equal(made.to_dense(), a.to_dense())
    if isinstance(a, (sk.Semi24, sk.BSR24)):
        assert torch.equal(pickle.loads(pickle.dumps(a)).to_dense(), a.to_dense())  # noqa: S301
    else:
        with pytest.raises(InvalidInput, match="is not pickled"):
            pickle.dumps(a)


@floating
def test_they_go_through_torch_compile(make: Callable[..., Any]):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(a: Any, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b = a.map(torch.relu).double().clone()
        return functional.linear(x, a), a @ v, b.to_dense()

    a = make()
    x, v = torch.randn(6, a.shape[1]), torch.randn(a.shape[1])
    found = run(a, x, v)
    for got, wanted in zip(found, (x @ a.to_dense().T, a @ v, a.to_dense().relu().double()), strict=True):
        torch.testing.assert_close(got, wanted)
