"""linear and swiglu: what they compute, in how many launches, from which layouts, and what they refuse."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.engine.call.recorded_calls import Calls, Slot
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops import recorded_products
from sparsek.products.reference import linear as reference
from sparsek.products.reference.epilogue import Activation, Epilogue
from sparsek.testing.product_budget import check_linear, check_swiglu
from tests.ops.operands import BF16, Seen, pair
from tests.sums import alike

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


def layer(
    dtype: torch.dtype = BF16, device: str = "cpu", shape: tuple[int, ...] = (2, 20, 96)
) -> tuple[Tensor, BSR, Tensor, Tensor]:
    """x [2, 20, 96], W [128, 96], bias [128], residual [2, 20, 128]."""
    w, _ = pair(dtype=dtype, device=device)
    draw = torch.Generator().manual_seed(2)
    shapes = shape, (128,), (*shape[:-1], 128)
    x, bias, residual = (torch.randn(s, generator=draw).to(device, dtype) for s in shapes)
    return x, w, bias, residual


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by columns": lambda x: x[0].mT.contiguous().mT,
    "swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "wider rows": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "odd start": lambda x: torch.cat((x[..., :1], x), -1)[..., 1:],
    "one token for all": lambda x: x[:1, :1].expand(2, 20, -1),
    "every second feature": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def test_a_transposed_weight_reads_the_values_where_they_are(device: str):
    _, w, _, _ = layer(device=device)
    x = torch.randn(5, 128, device=device).to(BF16)
    y = sk.linear(x, w.T)
    assert check_linear(x, w.T, y).passed
    assert torch.equal(y, x @ w)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_with_gradients_it_gives_the_same_within_the_error_budget(
    act: Activation | None, with_residual: bool
):
    x, w, bias, residual = layer()
    rest = residual if with_residual else None
    bias.requires_grad_()
    y = sk.linear(x, w, bias, act, rest)
    assert y.requires_grad
    gate = check_linear(x, w, y.detach(), bias.detach(), act, rest)
    assert gate.passed, gate


@pytest.mark.parametrize("shape", [(40, 96), (2, 20, 96)], ids=str)
def test_a_layer_that_learns_may_be_written_to_in_place(shape: tuple[int, ...]):
    x, w, bias, _ = layer(torch.float32, shape=shape)
    y = sk.linear(x, w.requires_grad_(), bias)
    y += 1
    y.sum().backward()
    found, w.values.grad = w.values.grad, None
    sk.linear(x, w, bias).sum().backward()
    assert found is not None
    assert w.values.grad is not None
    assert alike(found, w.values.grad)


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)], ids=str)
def test_a_layer_that_a_gpu_would_record_may_be_written_to_in_place(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
):
    def slot(a: Any, b: Any, settings: Any, also: Any = (), plan: Any = None, once: bool = False) -> Slot:
        matrix, dense = (b, a) if isinstance(a, Tensor) else (a, b)
        return Slot(Calls(), None, (*matrix.signature()[2], dense, *also), None, torch.is_grad_enabled())

    monkeypatch.setattr(recorded_products, "product", slot)
    w = sk.random_bsr(32, 64, block=16, density=0.5).requires_grad_()
    x = torch.randn(shape, requires_grad=True)
    sk.linear(x, w, torch.zeros(32)).add_(1).sum().backward()
    found = x.grad, w.values.grad
    x.grad = w.values.grad = None
    (sk.linear(x, w, torch.zeros(32)) + 1).sum().backward()
    for one, other in zip(found, (x.grad, w.values.grad), strict=True):
        assert one is not None
        assert other is not None
        assert alike(one, other)


@pytest.mark.parametrize("act", [None, "relu"])
def test_whoever_looks_at_ops_sees_the_op_and_the_same_gradients(act: Activation | None):
    x, w, bias, _ = layer(torch.float32)
    wanted = x.requires_grad_(), w.values.requires_grad_(), bias.requires_grad_()
    y = sk.linear(x, w, bias, act)
    found = torch.autograd.grad(y.square().sum(), wanted)
    with Seen() as seen:
        again = sk.linear(x, w, bias, act)
        with torch.no_grad():
            assert torch.equal(sk.linear(x, w, bias, act), y)
    assert (seen.count("spmm"), len(seen.of_sparsek)) == (2, 2)
    assert torch.equal(again, y)
    for each, expected in zip(torch.autograd.grad(again.square().sum(), wanted), found, strict=True):
        assert torch.equal(each, expected)


def test_a_layer_that_learns_keeps_nothing_alive_when_it_is_dropped():
    x, w, bias, _ = layer(torch.float32, shape=(40, 96))
    gc.disable()
    try:
        y = sk.linear(x, w.requires_grad_(), bias, "relu")
        kept = weakref.ref(y.grad_fn)
        del y
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("wanted", [False, True], ids=["fused", "for training"])
@pytest.mark.parametrize("kernel", [None, "reference.spmm"])
def test_swiglu_multiplies_the_gate_in_place(
    kernel: str | None, wanted: bool, device: str, plans_made: list[str]
):
    x, gate, _, _ = layer(device=device)
    up = random_bsr(128, 96, 32, 0.4, dtype=BF16, device=device, seed=7)
    x.requires_grad_(wanted)
    y = sk.swiglu(x, gate, up, kernel=kernel)
    assert y.shape == (2, 20, 128)
    assert y.is_contiguous()
    found = check_swiglu(x.detach(), gate, up, y.detach())
    assert found.passed, found
    assert len(plans_made) == 2


def test_a_dense_weight_goes_through_torch():
    x, w, bias, residual = layer(torch.float32)
    dense = w.to_dense().requires_grad_()
    for act in ACTIVATIONS:
        y = sk.linear(x, dense, bias, act, residual)
        torch.testing.assert_close(y, reference.linear(x, dense, bias, act, residual))
    y.sum().backward()
    assert dense.grad is not None


def test_a_plan_of_a_layer_explains_its_epilogue():
    x, w, bias, residual = layer()
    epilogue = Epilogue(bias=bias, activation="gelu", other=residual)
    plan = sk.plan_spmm(x, w.T, epilogue=epilogue)
    assert plan.explain().startswith(
        "C = gelu(B @ A + bias) + beta * other   A [96, 128] bf16, 8 blocks of 32x32 (66.7 % stored), B [40, 96] "
    )
    assert torch.equal(plan(x, w.T, None, epilogue), sk.linear(x, w, bias, "gelu", residual))
    for other in (Epilogue(), Epilogue(bias=bias, activation="silu", other=residual)):
        with pytest.raises(InvalidInput, match=r"made for C = gelu\(A @ B \+ bias\) \+ beta \* other; got"):
            plan(x, w.T, None, other)
    predicted = sk.plan_spmm(x, w.T, epilogue=epilogue, device="h200")
    assert predicted.problem.activation == "gelu"
    assert predicted.seconds > 0


def test_one_token_keeps_its_alignment():
    _, w, _, _ = layer()
    p = sk.plan_spmm(torch.randn(1, 96).to(BF16), w.T).problem
    assert (p.b.layout, p.c.layout, p.aligned, p.n) == ("col", "col", True, 1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("wanted", [False, True], ids=["fused", "for training"])
def test_autocast_casts_the_operands_and_nothing_behind_them(wanted: bool, compiled: bool):
    given = layer(torch.float32)
    given[0].requires_grad_(wanted)

    def run(x: Tensor, w: Any, bias: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        dense = sk.linear(x, w.values[0, :, :1].expand(32, 96), None, "gelu")
        return sk.linear(x, w, bias, "gelu", residual), sk.swiglu(x, w, w), dense

    x, w, bias, residual = given
    alone = run(x.to(BF16), w.to(dtype=BF16), bias.to(BF16), residual.to(BF16))
    torch._dynamo.reset()
    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    with torch.autocast("cpu", BF16):
        for mine, right in zip(call(*given), alone, strict=True):
            assert mine.dtype == BF16
            assert torch.equal(mine, right)


def test_dense_weights_on_the_meta_device():
    x, w, bias, residual = (torch.empty(n, device="meta") for n in ((5, 9), (7, 9), (7,), (5, 7)))
    down = torch.empty(3, 7, device="meta")
    with torch.autocast("cpu", torch.bfloat16):  # which has no key for meta
        made = sk.linear(x, w), sk.linear(x, w, bias, "gelu", residual), sk.mlp(x, w, down, bias)
    assert [(each.device.type, *each.shape) for each in made] == [
        ("meta", 5, 7),
        ("meta", 5, 7),
        ("meta", 5, 3),
    ]
