"""Under torch.autocast the verbs and layers give the dtypes that torch's own give, forward and backward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.engine.call.autocast import follow_autocast
from sparsek.products.formats.bsr import BSR
from tests.ops.storages import KERNELS, WIDE, matrix

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = pytest.mark.parametrize("low", [BF16, F16], ids=["bf16", "fp16"])
GIVEN = pytest.mark.parametrize("given", [F32, BF16, F16], ids=["from fp32", "from bf16", "from fp16"])


def layers(dtype: torch.dtype = F32) -> tuple[sk.nn.BlockSparseLinear, nn.Linear]:
    """The same layer, sparse and dense."""
    dense = nn.Linear(96, 64, dtype=dtype)
    return sk.nn.BlockSparseLinear.from_dense(dense, 32, keep=1.0), dense


def learned(call: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = call()
    return out, torch.autograd.grad(out.float().square().sum(), leaves)


@GIVEN
@LOW
def test_a_layer_has_the_dtypes_of_a_dense_layer(low: torch.dtype, given: torch.dtype):
    mine, dense = layers(given)
    x = torch.randn(5, 96, requires_grad=True)
    assert dense.bias is not None
    assert mine.bias is not None
    with torch.autocast("cpu", low):
        out, grads = learned(lambda: mine(x), x, mine.values, mine.bias)
        right, right_grads = learned(lambda: dense(x), x, dense.weight, dense.bias)
    assert out.dtype == right.dtype == low
    assert [g.dtype for g in grads] == [g.dtype for g in right_grads] == [F32, given, given]
    torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(grads[0], right_grads[0], rtol=5e-2, atol=5e-2)


@GIVEN
@LOW
def test_attention_has_the_dtypes_of_torchs(low: torch.dtype, given: torch.dtype):
    q, k, v = (torch.randn(1, 2, 64, 16, dtype=given, requires_grad=True) for _ in "qkv")
    with torch.autocast("cpu", low):
        out, grads = learned(lambda: sk.attention(q, k, v), q, k, v)
        right, right_grads = learned(lambda: functional.scaled_dot_product_attention(q, k, v), q, k, v)
        lse = sk.attention(q, k, v, return_lse=True)[1]
    assert out.dtype == right.dtype == low
    assert lse.dtype == F32
    assert [g.dtype for g in grads] == [g.dtype for g in right_grads] == [given] * 3
    torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
    for mine, other in zip(grads, right_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-2, atol=5e-2)


@LOW
def test_packed_attention_and_its_layer_follow(low: torch.dtype):
    q, k, v = packed = tuple(torch.randn(100, 2, 16, requires_grad=True) for _ in "qkv")
    ends, layer = torch.tensor([0, 40, 100], dtype=torch.int32), sk.nn.SparseAttention(32, 4)
    with torch.autocast("cpu", low):
        out = sk.attention_varlen(q, k, v, ends, mask=sk.MaskPolicy())
        assert layer(torch.randn(1, 64, 32)).dtype == low
        mixed = sk.attention_varlen(q, k.to(low), v.to(low), ends, mask=sk.MaskPolicy())
    assert out.dtype == low
    assert torch.equal(mixed, out)
    assert all(g.dtype == F32 for g in torch.autograd.grad(out.sum(), packed))


def product(a: BSR, x: Tensor, p: sk.BlockPattern) -> dict[str, Any]:
    return {
        "a @ b": a @ x.mT,
        "b @ a.T": x @ a.T,
        "spmm": sk.spmm(a, x.mT, alpha=2.0),
        "linear": sk.linear(x, a, activation="silu"),
        "dense": sk.linear(x, a.to_dense()),
        "swiglu": sk.swiglu(x, a, a),
        "sddmm": sk.sddmm(x, x.mT, p).values,
        "a @ a.T": (a @ a.T).values,
        "spgemm": sk.spgemm(a, a.T),
    }


@LOW
def test_every_product_is_that_of_operands_cast_by_hand(low: torch.dtype):
    a, x = sk.random_bsr(128, 96, 32, 0.5, seed=0), torch.randn(64, 96)
    p = sk.random_bsr(64, 64, 32, 0.5, seed=1).pattern
    right = product(a.to(dtype=low), x.to(low), p)
    with torch.autocast("cpu", low):
        found = product(a, x, p)
        wide = product(a.to(dtype=F64), x.double(), p)
    for name, each in found.items():
        assert each.dtype == low, name
        assert torch.equal(each, right[name]), name
        assert wide[name].dtype == F64, name


def multiplied(op: str, a: Any, x: Tensor, y: Tensor, *, plan: bool = False, **how: Any) -> Any:
    """A product of A [128, 192], X [128, 40] and Y [192, 40] by one verb, or its plan with the operands."""
    if op == "linear":
        return sk.linear(y.mT, a, None, "gelu", **how)
    operands = (a, y) if op == "spmm" else (a, a.T) if op == "spgemm" else (x, y.mT, a.pattern)
    if plan:
        return getattr(sk, f"plan_{op}")(*operands), operands
    return getattr(sk, op)(*operands, **how)


@pytest.mark.parametrize(
    ("op", "storage", "kernel"),
    [
        *(("spmm", storage, kernel) for storage in WIDE for kernel in (None, *KERNELS[storage])),
        *(
            (op, "bsr", kernel)
            for op in ("sddmm", "spgemm")
            for kernel in (None, f"reference.{op}", f"vendor.{op}")
        ),
    ],
)
def test_nothing_is_cast_inside_a_kernel_and_a_plan_keeps_its_dtype(
    op: str, storage: str, kernel: str | None
):
    a, x, y = matrix(storage, F32), torch.randn(128, 40), torch.randn(192, 40)
    plan, operands = multiplied(op, a, x, y, plan=True)
    right = multiplied(op, a.to(dtype=BF16), x.to(BF16), y.to(BF16), kernel=kernel)
    with torch.autocast("cpu", BF16):
        found, planned = multiplied(op, a, x, y, kernel=kernel), plan(*operands)
        assert multiplied(op, a.to(dtype=F64), x.double(), y.double()).dtype == F64
        assert getattr(sk, op)(*operands, plan=plan).dtype == F32
        layer = multiplied("linear", a, x, y) if kernel is None else None
    if layer is not None:
        assert torch.equal(layer, multiplied("linear", a.to(dtype=BF16), x, y.to(BF16)))
    assert (found.dtype, planned.dtype) == (BF16, F32)
    assert torch.equal(*(each if isinstance(each, Tensor) else each.values for each in (found, right)))


def test_gradients_of_every_product_come_in_the_operands_dtypes():
    a, x = sk.random_bsr(128, 96, 32, 0.5, seed=0), torch.randn(64, 96, requires_grad=True)
    a.requires_grad_()
    p = sk.random_bsr(64, 64, 32, 0.5, seed=1).pattern
    with torch.autocast("cpu", BF16):
        found = product(a, x, p)
    for name, each in found.items():
        of_a, of_x = torch.autograd.grad(each.sum(), (a.values, x), retain_graph=True, allow_unused=True)
        assert {g.dtype for g in (of_a, of_x) if g is not None} == {F32}, name


W = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
CONVERSIONS: dict[str, Callable[[Tensor], Any]] = {
    "Semi24": lambda w: sk.Semi24.from_dense(w).to_dense(),
    "Semi24 by a mask": lambda w: sk.Semi24.from_dense(w, sk.Semi24.from_dense(w).to_dense() != 0).values,
    "Semi24, learned": lambda w: sk.Semi24.from_dense(w.clone().requires_grad_()).values.detach(),
    "BSR": lambda w: sk.BSR.from_dense(w, 32, keep=0.5).to_dense(),
    "BSR24": lambda w: sk.BSR24.from_dense(w, 64, keep=1.0).to_bsr().T.to_dense(),
    "BSR24 of a BSR": lambda w: sk.BSR24.from_bsr(sk.BSR.from_dense(w, 64, keep=1.0)).to_dense(),
    "quantized": lambda w: sk.quantize(sk.Semi24.from_dense(w)).to_dense(w.dtype),
    "rounded": lambda w: sk.quantize(w).dequantize(w.dtype),
    "recall": lambda w: sk.policies.recall(
        sk.MaskPolicy(window=8, block=64), w[None, None], w[None, None], samples=8
    ),
}


@GIVEN
@LOW
@pytest.mark.parametrize("name", CONVERSIONS)
def test_no_conversion_depends_on_it(name: str, low: torch.dtype, given: torch.dtype):
    w, convert = W.to(given), CONVERSIONS[name]
    right = convert(w)
    with torch.autocast("cpu", low):
        found = convert(w)
    assert found.dtype == right.dtype
    assert torch.equal(found, right)


@LOW
def test_a_format_is_chosen_and_saved_as_without_it(low: torch.dtype, tmp_path: Path):
    w = W.to(BF16 if low is F16 else F16)
    with torch.autocast("cpu", low):
        sk.choose_format(w, w, formats=["dense", "semi24"])
        sk.save(sk.Semi24.from_dense(w), tmp_path / "w.safetensors")
    assert torch.equal(sk.load(tmp_path / "w.safetensors").to_dense(), sk.Semi24.from_dense(w).to_dense())


@LOW
def test_gradients_and_items_of_the_other_half_stack(low: torch.dtype):
    a = sk.random_bsr(64, 64, 32, 0.5, dtype=BF16 if low is F16 else F16)
    x = W.to(a.dtype).requires_grad_()
    y = a @ x
    grads = torch.stack((y, y)).detach()
    with torch.autocast("cpu", low):
        (found,) = torch.autograd.grad(y, x, grads, is_grads_batched=True)
        assert torch.vmap(lambda b: a @ b)(x.detach()[None]).dtype == low
    assert found.dtype == a.dtype


def test_what_is_not_dense_is_not_cast():
    x = W.to_mkldnn()
    with torch.autocast("cpu", BF16), pytest.raises(InvalidInput, match="to_dense"):
        sk.swiglu(x, sk.random_bsr(64, 64, 32, 0.5), sk.random_bsr(64, 64, 32, 0.5))


@LOW
def test_compiled_it_gives_the_same(low: torch.dtype):
    torch._dynamo.reset()
    mine, _ = layers()
    x, q = torch.randn(5, 96, requires_grad=True), torch.randn(1, 2, 64, 16)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return mine(x), sk.attention(q, q, q)

    def inside(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", low):
            return run(x)

    right = inside(x)
    (grad,) = torch.autograd.grad(right[0].sum(), x)
    with torch.autocast("cpu", low):
        around = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    for found in (around, torch.compile(inside, fullgraph=True, backend="aot_eager")(x)):
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
        assert torch.equal(torch.autograd.grad(found[0].sum(), x)[0], grad)


def test_without_autocast_operands_are_passed_on_as_they_are():
    a, x = sk.random_bsr(64, 64, 32, 0.5, seed=0), torch.randn(64, 8)
    assert all(b is c for b, c in zip(follow_autocast(a, x, None), (a, x, None), strict=True))
    with torch.autocast("cpu", BF16):
        b, y, text = follow_autocast(a.T, x, "x")
        assert b.order is a.T.order
        assert (b.pattern, b.dtype, y.dtype, text) == (a.T.pattern, BF16, BF16, "x")
        with torch.autocast("cpu", enabled=False):
            assert follow_autocast(x)[0] is x
    with torch.autocast("cuda", BF16, enabled=torch.cuda.is_available()):
        assert follow_autocast(x)[0] is x
