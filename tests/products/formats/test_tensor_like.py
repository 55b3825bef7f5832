"""What matrices of every class share: names, reprs, pytrees, copies, moves, the operator, and where a tensor is
expected: vectors, casts, torch's functions and numpy's.
"""

import copy
import pickle
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from operator import attrgetter
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

import sparsek as sk
from sparsek.core import operations
from sparsek.core.errors import InvalidInput
from tests.products.formats.two_four import bsr24, same_bits, semi24

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
    "Quantized BSR by blocks": lambda: sk.quantize(bsr(), scale="block"),
    "Quantized view": lambda: sk.quantize(FLOATING["view"](), scale="tensor", fast_accum=True),
    "Quantized Semi24": lambda: sk.quantize(FLOATING["Semi24"](), scale="tensor"),
    "Quantized BSR24": lambda: sk.quantize(FLOATING["BSR24"](), fast_accum=True),
    "Quantized BSR24 by blocks": lambda: sk.quantize(FLOATING["BSR24"](), scale="block"),
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
        for part in ("pattern", "meta"):
            assert getattr(made, part, None) is getattr(a, part, None)
        assert (getattr(made, "order", None) is None) == (getattr(a, "order", None) is None)
    assert right.shape == a.shape
    if isinstance(a, (sk.Semi24, sk.BSR24)):
        assert torch.equal(a.to_dense(dtype), a.to_dense().to(dtype))
        with pytest.raises(InvalidInput, match=r"is torch.int32; use one of"):
            a.to_dense(torch.int32)
    with pytest.raises(InvalidInput, match=r"torch.int32; use one of"):
        a.to(dtype=torch.int32)
    with pytest.raises(InvalidInput, match="it must be a torch device"):
        a.to("nowhere")
    assert a.to(a.dtype) is a.to("cpu") is a.cpu() is a.float() is a
    with pytest.raises(InvalidInput, match=r"two dtypes; write .to\(device, dtype\)"):
        cast(Any, a).to(dtype, dtype)
    with pytest.raises(InvalidInput, match=r"sparsek.quantize\(A, torch.float8_e4m3fn\)"):
        a.to(torch.float8_e4m3fn)


@pytest.mark.gpu
@every
def test_cuda_and_cpu_move(make: Callable[..., Any]):
    a = make()
    for there in (a.cuda(), a.cuda(0), a.cuda("cuda:0"), a.to("cuda")):
        assert there.device == torch.device("cuda", 0)
        assert {leaf.device.type for leaf in tree_leaves(there)} == {"cuda"}
        assert repr(there.cpu()) == repr(a)
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


UNTURNED = {
    "Semi24": r"pairs lie along rows.*sparsek\.linear\(x, W\)",
    "BSR24": r"pairs lie along rows.*A\.to_bsr\(\)\.T is a BSR",
}


@every
def test_mt_is_t(make: Callable[..., Any]):
    a = make()
    inner = getattr(a, "matrix", a)
    if isinstance(inner, sk.BSR) and getattr(a, "kind", "") != "row":
        assert torch.equal(a.mT.to_dense(), a.to_dense().mT)
    else:
        for turn in (lambda: a.mT, lambda: a.T):
            with pytest.raises(InvalidInput, match=rf"has no \.T.*{UNTURNED.get(type(a).__name__, '')}"):
                turn()


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
    for to in (a.half, a.float, a.bfloat16, a.double, lambda: a.to(torch.float16)):
        with pytest.raises(InvalidInput, match=r"a Quantized is FP8; .dequantize\("):
            to()
    for asked in ({"device": torch.float32}, {"dtype": torch.float32}):
        with pytest.raises(InvalidInput, match=r"a Quantized is FP8; .dequantize\(torch.float32\)"):
            a.to(**asked)
    with pytest.raises(InvalidInput, match="it must be a torch device"):
        a.to("nowhere")
    assert a.to(a.dtype) is a.to() is a.to("cpu") is a.to(dtype=a.dtype) is a


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


KEYS: dict[str, list[str]] = {
    "BSR": [".pattern.indptr", ".pattern.indices", ".values"],
    "view": [".pattern.indptr", ".pattern.indices", ".values", ".order"],
    "Semi24": [".values", ".meta"],
    "BSR24": [".pattern.indptr", ".pattern.indices", ".values", ".meta"],
}


@pytest.mark.parametrize("name", EVERY)
def test_leaves_of_the_pytree_are_the_parts(name: str):
    a = EVERY[name]()
    paths, spec = tree_flatten_with_path(a)
    keys = [keystr(path) for path, _ in paths]
    own = next(keys for start, keys in KEYS.items() if name.removeprefix("Quantized ").split()[0] == start)
    assert keys == (own if name in KEYS else [*(f".matrix{key}" for key in own), ".scale"])
    for key, (_, leaf) in zip(keys, paths, strict=True):
        assert attrgetter(key[1:])(a) is leaf
    again = tree_unflatten([leaf for _, leaf in paths], spec)
    assert repr(again) == repr(a)
    assert torch.equal(again.to_dense(), a.to_dense())
    doubled = tree_map_only(Tensor, torch.clone, a)
    assert torch.equal(doubled.to_dense(), a.to_dense())
    if keys == KEYS["view"]:
        assert torch.equal(again.T.to_dense(), a.to_dense().T)


@every
def test_copies_share_what_nobody_writes_to_and_deep_ones_own_their_values(make: Callable[..., Any]):
    a = make()
    shared, deep = copy.copy(a), copy.deepcopy(a)
    for made in (shared, deep):
        assert (type(made), repr(made)) == (type(a), repr(a))
        assert torch.equal(made.to_dense(), a.to_dense())
    of_a, of_shared, of_deep = (getattr(each, "matrix", each) for each in (a, shared, deep))
    assert of_shared.values is of_a.values
    assert getattr(of_deep, "pattern", None) is getattr(of_a, "pattern", None)
    assert getattr(deep, "scale", None) is None or deep.scale.data_ptr() != a.scale.data_ptr()
    before = a.to_dense()
    of_deep.values.view(torch.uint8).zero_()
    assert torch.equal(a.to_dense(), before)


@every
def test_2_4_in_16_bits_and_more_is_pickled_and_what_is_malformed_refused(make: Callable[..., Any]):
    a = make()
    if not isinstance(a, (sk.Semi24, sk.BSR24)):
        with pytest.raises(InvalidInput, match=r"not pickled.*sparsek\.save"):
            pickle.dumps(a)
        return
    again = pickle.loads(pickle.dumps(a))  # noqa: S301
    assert same_bits(again.values, a.values)
    assert torch.equal(again.meta, a.meta)
    assert not isinstance(a, sk.BSR24) or again.pattern.same_as(a.pattern)
    where = (a.pattern,) if isinstance(a, sk.BSR24) else ()
    content = pickle.dumps(type(a).unchecked(*where, a.values, a.meta * 0))
    groups = a.values.numel() // 2
    with pytest.raises(InvalidInput, match=f"{groups} of {groups} groups have malformed metadata"):
        pickle.loads(content)  # noqa: S301


def few(block: Any, dtype: torch.dtype = torch.bfloat16) -> sk.BSR:
    """A quarter of the blocks of 256 x 512."""
    return sk.random_bsr(256, 512, block, 0.25, dtype=dtype)


REPRS: dict[str, tuple[Callable[[], Any], str]] = {
    "BSR": (lambda: few((32, 16)), "BSR(256x512 bf16, block 32x16, 64 of 256 blocks, 25 %, 0.0655 MB, cpu)"),
    "view": (
        lambda: few((32, 16)).T,
        "BSR(512x256 bf16, block 16x32, 64 of 256 blocks, 25 %, 0.0655 MB, cpu, transposed view)",
    ),
    "Semi24": (lambda: semi24(64, 2048, torch.bfloat16), "Semi24(64x2048 bf16, 0.147 MB, cpu)"),
    "BSR24": (
        lambda: sk.BSR24.from_bsr(few((64, 128))),
        "BSR24(256x512 bf16, block 64x128, 4 of 16 blocks, 25 %, 0.0369 MB, cpu)",
    ),
    "Quantized BSR": (
        lambda: sk.quantize(sk.random_bsr(64, 128, 16, 0.5)),
        "Quantized(BSR 64x128 e4m3, block 16x16, 16 of 32 blocks, 50 %, scale per row, 0.00435 MB, cpu)",
    ),
    "Quantized view": (
        lambda: sk.quantize(sk.random_bsr(64, 128, 16, 0.5), torch.float8_e5m2, "tensor").T,
        (
            "Quantized(BSR 128x64 e5m2, block 16x16, 16 of 32 blocks, 50 %, scale per tensor, "
            "0.0041 MB, cpu, transposed view)"
        ),
    ),
    "Quantized Semi24": (
        lambda: sk.quantize(semi24(64, 64)),
        "Quantized(Semi24 64x64 e4m3, scale per row, 0.00282 MB, cpu)",
    ),
}


@pytest.mark.parametrize("name", REPRS)
def test_repr_is_one_line_of_facts(name: str):
    make, text = REPRS[name]
    a = make()
    assert repr(a) == text
    shown = repr(tree_map(lambda leaf: None, a))
    assert shown.endswith("values not concrete)")
    if isinstance(a, sk.BSR24):
        leaves, spec = tree_flatten(a)
        hollow = tree_unflatten([*leaves[:2], None, None], spec)
        assert repr(hollow) == "BSR24(256x512, block 64x128, values not concrete)"


def test_they_have_names_at_the_top():
    for module, names in (
        ("bsr", ("BSR",)),
        ("semi24", ("Semi24",)),
        ("bsr24", ("BSR24",)),
        ("quantized", ("Quantized", "quantize")),
        ("quantized_tensor", ("QuantizedTensor",)),
    ):
        for name in names:
            assert getattr(import_module(f"sparsek.products.formats.{module}"), name) is getattr(sk, name)


@pytest.mark.parametrize("name", ["BSR", "Semi24", "BSR24", "Quantized BSR", "Quantized Semi24"])
def test_the_operator_calls_what_was_registered_on_both_sides(name: str, monkeypatch: pytest.MonkeyPatch):
    a = EVERY[name]()
    b = torch.ones(a.shape[1], 2)
    operations.load()  # registers what multiplies, once in a process
    others = {
        each: each._matmul for each in (sk.BSR, sk.Semi24, sk.BSR24, sk.Quantized) if each is not type(a)
    }
    monkeypatch.setattr(type(a), "_matmul", None)
    spec: Any = find_spec("sparsek.products.formats.base")
    anew = module_from_spec(spec)  # as it is before anything was registered
    spec.loader.exec_module(anew)
    monkeypatch.setattr(type(a), "__matmul__", anew.Multiplied.__matmul__)
    for multiply in (lambda: a @ b, lambda: b @ a, lambda: np.ones((3, 72)) @ a, lambda: torch.matmul(a, b)):
        with pytest.raises(InvalidInput, match="import sparsek"):
            multiply()
    type(a).register_matmul(lambda first, second: ("called", first, second))
    assert a @ 7 == ("called", a, 7)
    lefts: list[Any] = [b, np.ones((2, 6)), 7]
    for left in lefts:
        called, first, second = left @ a
        assert called == "called"
        assert first is left
        assert second is a
    found: Any = torch.matmul(a, b)
    assert found[1] is a
    with pytest.raises(TypeError):
        torch.add(a, b)
    assert all(each._matmul is was for each, was in others.items()), "each class has its own"


def test_no_blocks_is_a_matrix_of_zeros():
    pattern = sk.BlockPattern(
        (70, 0), (64, 64), torch.zeros(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    )
    a = sk.BSR(pattern, torch.zeros(0, 64, 64))
    b = sk.BSR24(pattern, torch.zeros(0, 64, 32), torch.zeros(0, 64, 8, dtype=torch.uint8))
    assert a.to_dense().shape == b.to_dense().shape == (70, 0)
    assert a.T.to_dense().shape == (0, 70)
    assert sk.BSR24.from_bsr(b.to_bsr(), exact=True).shape == (70, 0)
    assert repr(a)


PRUNE: dict[str, Callable[[Tensor], Any]] = {
    "Semi24": sk.Semi24.from_dense,
    "BSR24": lambda w: sk.BSR24.from_dense(w, 64, keep=0.5),
}


@pytest.mark.parametrize("name", PRUNE)
def test_gradients_reach_the_kept_elements(name: str):
    w = torch.randn(150, 200, dtype=torch.float64, requires_grad=True)
    a = PRUNE[name](w)
    assert a.requires_grad
    assert not a.detach().requires_grad
    assert a.detach().values.data_ptr() == a.values.data_ptr()
    factor = torch.randn(150, 200, dtype=torch.float64)
    (a.to_dense() * factor).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.where(a.to_dense() != 0, factor, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PRUNE)
def test_kept_norm_is_the_share_of_the_norm(name: str, dtype: torch.dtype, device: str):
    w = torch.randn(200, 328, device=device).to(dtype)
    a = PRUNE[name](w)
    right = np.linalg.norm(a.to_dense().double().cpu().numpy()) / np.linalg.norm(w.double().cpu().numpy())
    assert isinstance(a.kept_norm(w), float)
    assert a.kept_norm(w) == pytest.approx(right, rel=1e-5)
    assert 0.6 < right < (1 if name == "Semi24" else 0.9)
    refused: Any = (
        (w.T, f"w is 328x200 on {w.device}; this matrix is 200x328 on {w.device}"),
        (w.int(), "is torch.int32; use one of"),
        ([1], r"w must be a dense torch.Tensor, got list"),
    )
    for other, text in refused:
        with pytest.raises(InvalidInput, match=text):
            a.kept_norm(other)


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
