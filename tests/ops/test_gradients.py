"""Gradients of every product: against the float64 reference, of second order, for which inputs, and of what size."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import silu
from torch.testing import assert_close

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR, zero_padding
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops import gradients, library_args
from sparsek.products.ops.linear import LinearCall
from sparsek.products.ops.spmm import SPMM
from sparsek.products.plan.spmm import Product
from sparsek.products.reference.epilogue import ACTIVATIONS
from tests.engine.launch.covering import once
from tests.ops.gradients import FORMS, FORMS_24, SIZES_24, hold, inputs_of, with_values
from tests.ops.operands import Seen, pair
from tests.ops.storages import BF16, F16, F32, F64, IN_FP8, TWO_FOUR, matrix

SIZES = {"m": 150, "k": 120, "n": 70}  # none a multiple of its block
FAMILIES: dict[str, dict[str, str | None]] = {
    "cpu": {"spmm": "cpu.spmm", "sddmm": None, "spgemm": None},
    "reference": {"spmm": "reference.spmm", "sddmm": "reference.sddmm", "spgemm": "reference.spgemm"},
    "vendor": {"spmm": "vendor.dense", "sddmm": "vendor.sddmm", "spgemm": "vendor.spgemm"},
    "portable": {"spmm": "portable.spmm", "sddmm": "portable.sddmm", "spgemm": "portable.spgemm"},
}


def takes_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that learn write slopes, as on a device with a kernel that is fast at it."""

    monkeypatch.setattr(LinearCall, "writes_slope", lambda call: call.w.values.requires_grad)


@pytest.fixture
def sloped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that write slopes during a test."""
    kernels: list[str] = []
    run = SPMM.run

    def watched(call: Product, kernel: str | None) -> Any:
        if call.epilogue.slope is not None:
            kernels.append(SPMM.cached(call, kernel, False).kernel)
        return run(call, kernel)

    monkeypatch.setattr(SPMM, "run", watched)
    return kernels


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("family", ["cpu", "reference", "vendor"])
def test_the_gradients_of_every_kernel_are_within_the_error_budget(family: str, name: str):
    form = FORMS[name]
    hold(form, *inputs_of(form, SIZES, F32), FAMILIES[family][form.op])


@pytest.mark.parametrize("name", ["A @ B", "linear gelu", "sddmm", "A @ A2, dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_16_bits_are_within_the_error_budget(dtype: torch.dtype, name: str):
    form = FORMS[name]
    hold(form, *inputs_of(form, SIZES, dtype), None)


@pytest.mark.parametrize(
    ("kind", "dtype", "name"), once(product(TWO_FOUR, (F32, F64, BF16), FORMS_24), together=2), ids=str
)
def test_gradients_of_2_4_are_within_the_error_budget(kind: str, dtype: torch.dtype, name: str):
    kernel = f"reference.{kind}" if dtype == F64 else None
    hold(FORMS_24[name], *inputs_of(FORMS_24[name], SIZES_24, dtype, storage=kind), kernel)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "name"), once(product(TWO_FOUR, (BF16, F16, F32), FORMS_24), together=2), ids=str
)
def test_gradients_of_2_4_on_a_gpu_are_within_the_error_budget(kind: str, dtype: torch.dtype, name: str):
    hold(FORMS_24[name], *inputs_of(FORMS_24[name], SIZES_24, dtype, "cuda", storage=kind), None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("family", "dtype"), [(None, torch.bfloat16), ("portable", torch.float32)], ids=str)
def test_gradients_on_a_gpu_are_within_the_error_budget(family: str | None, dtype: torch.dtype, name: str):
    form = FORMS[name]
    kernel = None if family is None else FAMILIES[family][form.op]
    hold(form, *inputs_of(form, {"m": 512, "k": 384, "n": 256}, dtype, "cuda"), kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["linear gelu", "linear gelu_tanh", "linear silu", "mlp gelu", "mlp silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_slopes_on_a_gpu_are_within_the_error_budget(dtype: torch.dtype, name: str, sloped: list[str]):
    form = FORMS[name]
    hold(form, *inputs_of(form, {"m": 1024, "k": 512, "n": 392}, dtype, "cuda"), None)
    assert len(sloped) == (torch.cuda.get_device_capability() == (9, 0))
    sloped.clear()
    (up, *down), (x, *rest) = inputs_of(form, {"m": 64, "k": 64, "n": 96}, dtype, "cuda")
    frozen = form.mine(up, *down, x.requires_grad_(), *rest, kernel=None)
    assert frozen.requires_grad
    assert sloped == []


@pytest.mark.parametrize("name", ["linear gelu", "linear gelu_tanh", "linear silu", "mlp gelu", "mlp silu"])
def test_slopes_by_the_reference_are_within_the_error_budget(
    name: str, monkeypatch: pytest.MonkeyPatch, sloped: list[str]
):
    """On the CPU no kernel but the reference writes slopes, and none is chosen for that."""
    takes_slopes(monkeypatch)
    form = FORMS[name]
    hold(form, *inputs_of(form, SIZES, F32), None)
    assert sloped == ["reference.spmm"]


@pytest.mark.parametrize("name", ["linear gelu", "linear gelu_tanh", "linear silu", "mlp gelu", "mlp silu"])
def test_first_and_second_derivatives_by_slopes_are_those_of_finite_differences(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    takes_slopes(monkeypatch)
    form = FORMS[name]
    matrices, tensors = inputs_of(form, {"m": 35, "k": 20, "n": 50}, torch.float64)
    count = len(matrices)

    def run(*inputs: Tensor) -> Tensor:
        made = [BSR.unchecked(a.pattern, v) for a, v in zip(matrices, inputs, strict=False)]
        return form.mine(*made, *inputs[count:], kernel=None)

    leaves = [x.clone().requires_grad_() for x in (*(a.values for a in matrices), *tensors)]
    assert gradcheck(run, leaves, fast_mode=True)
    assert gradgradcheck(run, leaves, fast_mode=True)


STACKS: dict[str, Any] = {
    "the same layers twice": lambda mlp, x, w, v: mlp(mlp(x, w, v), w, v),
    "a weight twice": lambda mlp, x, w, v: mlp(x, w, w) + mlp(x, v, v),
    "tied": lambda mlp, x, w, v: mlp(x, w.T, w) + mlp(x, v, v),
    "x of a weight": lambda mlp, x, w, v: mlp(sk.linear(x, w), w, v),
}


@pytest.mark.parametrize("stack", STACKS)
def test_an_mlp_whose_weights_stand_in_several_places_has_the_derivatives_of_two_layers(
    stack: str, monkeypatch: pytest.MonkeyPatch
):
    """With create_graph=True, of first and second order (2026-11-26: what stood in two places was counted twice)."""
    w, v = (random_bsr(48, 48, 16, 0.5, dtype=torch.float64, seed=seed).requires_grad_() for seed in (1, 2))
    x = torch.randn(5, 48, dtype=torch.float64, requires_grad=True)

    def derivatives(mlp: Any) -> list[Tensor]:
        leaves = [x, w.values, v.values]
        first = torch.autograd.grad(STACKS[stack](mlp, x, w, v).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(torch.cat([each.flatten() for each in first]).square().sum(), leaves)
        return [*first, *second]

    right = derivatives(lambda x, up, down: sk.linear(sk.linear(x, up, None, "gelu"), down))
    takes_slopes(monkeypatch)
    for found, exact in zip(derivatives(sk.mlp), right, strict=True):
        assert (found - exact).norm() <= 1e-12 * exact.norm()


@pytest.mark.parametrize("name", ["linear gelu", "mlp gelu", "mlp silu"])
def test_biases_may_change_in_place_before_a_backward_pass_but_not_before_a_second_derivative(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """Their values are saved for no first derivative (2026-11-26: the change of one was refused)."""
    takes_slopes(monkeypatch)
    form = FORMS[name]
    matrices, tensors = inputs_of(form, SIZES, torch.float64)
    matrices = [a.requires_grad_() for a in matrices]
    leaves = [x.requires_grad_() for x in tensors]
    inputs = [*(a.values for a in matrices), *leaves]

    def backward(change: tuple[Tensor, ...], **more: Any) -> tuple[Tensor, ...]:
        y = form.mine(*matrices, *leaves, kernel=None)
        with torch.no_grad():
            for bias in change:
                bias += 1
        found = torch.autograd.grad(y.square().sum(), inputs, **more)
        with torch.no_grad():
            for bias in change:
                bias -= 1
        return found

    _, up, *down = leaves
    right = backward(())
    for found, exact in zip(backward((up, *down)), right, strict=True):
        assert torch.equal(found, exact)
    for found, exact in zip(backward(tuple(down), create_graph=True), right, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    with pytest.raises(InvalidInput, match=r"bias.* was changed in place after the forward pass"):
        backward((up,), create_graph=True)


def test_a_derivative_by_the_last_bias_alone_can_be_differentiated(monkeypatch: pytest.MonkeyPatch):
    takes_slopes(monkeypatch)
    form = FORMS["mlp gelu"]
    matrices, tensors = inputs_of(form, SIZES, torch.float64)
    *_, bias = tensors = [x.requires_grad_() for x in tensors]
    y = form.mine(*(a.requires_grad_() for a in matrices), *tensors, kernel=None)
    (first,) = torch.autograd.grad(y.square().sum(), bias, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), bias)
    torch.testing.assert_close(second, torch.full_like(bias, 2.0 * y.shape[:-1].numel()))


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=5)
@given(
    sizes=st.fixed_dictionaries({side: st.integers(0, 3) | st.integers(1, 130) for side in "mkn"}),
    seed=st.integers(0, 99),
)
def test_gradients_hold_for_any_shape(name: str, sizes: dict[str, int], seed: int):
    form = FORMS[name]
    hold(form, *inputs_of(form, sizes, torch.float64, seed=seed), None)


@pytest.mark.parametrize(
    ("storage", "name"), [*product(("bsr",), FORMS), *product(TWO_FOUR, FORMS_24)], ids=str
)
def test_first_and_second_derivatives_are_those_of_finite_differences(storage: str, name: str):
    form = FORMS.get(name) or FORMS_24[name]
    sizes = {"m": 35, "k": 20, "n": 50} if storage == "bsr" else SIZES_24
    matrices, tensors = inputs_of(form, sizes, F64, storage=storage)

    def run(*inputs: Tensor) -> Tensor:
        made = map(with_values, matrices, inputs)
        return form.mine(*made, *inputs[len(matrices) :], kernel=None)

    leaves = [x.clone().requires_grad_() for x in (*(a.values for a in matrices), *tensors)]
    assert gradcheck(run, leaves, fast_mode=True)
    assert gradgradcheck(run, leaves, fast_mode=True)


def test_values_outside_the_matrix_have_no_gradient_and_give_none():
    pattern = pair(100, 90, 7, 32, torch.float64)[0].pattern
    x, y = (
        torch.randn(100, 7, dtype=torch.float64, requires_grad=True),
        torch.randn(7, 90, dtype=torch.float64),
    )
    s = sk.sddmm(x, y, pattern)
    inside = zero_padding(pattern, torch.ones_like(s.values)) == 1
    assert not inside.all()
    (expected,) = torch.autograd.grad(s.values.sum(), x)
    (found,) = torch.autograd.grad(
        sk.sddmm(x, y, pattern).values, x, torch.where(inside, 1.0, torch.nan).double()
    )
    assert torch.equal(found, expected)
    values = torch.randn_like(s.values).requires_grad_()
    (of_values,) = torch.autograd.grad(sk.spmm(BSR.unchecked(pattern, values), y.mT).sum(), values)
    assert of_values.masked_select(~inside).count_nonzero() == 0


@pytest.mark.parametrize("wanted", ["values", "x", "bias"])
def test_only_gradients_that_are_wanted_are_computed(wanted: str):
    w, _ = pair(dtype=F32)
    inputs = {"values": w.values.clone(), "x": torch.randn(5, 96), "bias": torch.randn(128)}
    inputs[wanted].requires_grad_()
    y = sk.linear(inputs["x"], BSR.unchecked(w.pattern, inputs["values"]), inputs["bias"], "relu")
    with Seen() as seen:
        y.sum().backward()
    assert (seen.count("sddmm"), seen.count("spmm")) == (wanted == "values", wanted == "x")
    assert inputs[wanted].grad is not None


@pytest.mark.parametrize("wanted", ["values", "x"])
def test_what_no_gradient_reads_is_not_kept(wanted: str):
    w, _ = pair(dtype=F32)
    values, x = w.values.clone(), torch.randn(5, 96)
    (values if wanted == "values" else x).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        sk.linear(x, BSR.unchecked(w.pattern, values))
    assert sum(kept) == (x.numel() if wanted == "values" else values.numel())


@pytest.mark.parametrize("name", ["A @ B", "B @ A", "linear gelu", "A @ A2, dense", "A @ A2", "sddmm"])
def test_a_backward_pass_makes_nothing_as_large_as_a_dense_matrix(name: str):
    form = FORMS[name]
    thin = {"m": 640, "k": 640, "n": 640 if "A2" in name else 8}
    if name == "sddmm":
        thin = {"m": 640, "k": 8, "n": 640}
    matrices, tensors = inputs_of(form, thin, F32)
    matrices = [random_bsr(*a.shape, a.block, 0.02, dtype=F32, seed=1) for a in matrices]
    for a in matrices:
        a.values.requires_grad_()
    for x in tensors:
        x.requires_grad_()
    if name == "sddmm":
        out = sk.sddmm(tensors[0], tensors[1], random_bsr(640, 640, 32, 0.02, seed=1).pattern).values
    elif name == "A @ A2":
        out = (matrices[0] @ matrices[1]).values
    else:
        out = form.mine(*matrices, *tensors, kernel=None)
    cotangent = torch.randn_like(out)
    with Seen() as seen:
        out.backward(cotangent)
    assert 0 < seen.largest < 640 * 640 / 8


def test_a_batch_is_joined_with_the_columns_and_copied_only_where_it_lies_otherwise():
    a, _ = pair(dtype=F32)
    a.requires_grad_()
    lies_so = torch.randn(96, 3, 8).movedim(1, 0)
    for b, copies in ((lies_so, False), (torch.randn(3, 96, 8), True)):
        c = sk.spmm(a, b)
        cotangent = torch.randn(128, 3, 8).movedim(1, 0) if not copies else torch.randn(3, 128, 8)
        with Seen() as seen:
            c.backward(cotangent)
        assert any("clone" in name for name in seen.names) == copies


def test_gradients_of_a_view_come_in_the_order_of_the_matrix_it_was_taken_from():
    a, _ = pair(dtype=torch.float64)
    values = a.values.clone().requires_grad_()
    b = torch.randn(128, 5, dtype=torch.float64)
    sk.spmm(BSR.unchecked(a.pattern, values).T, b).pow(2).sum().backward()
    dense = a.to_dense().requires_grad_()
    (dense.T @ b).pow(2).sum().backward()
    assert values.grad is not None
    assert dense.grad is not None
    kept = BSR.unchecked(a.pattern, torch.ones_like(values)).to_dense()
    torch.testing.assert_close(BSR.unchecked(a.pattern, values.grad).to_dense(), dense.grad * kept.detach())


def test_gradients_that_lie_oddly_in_memory_are_taken():
    a, b = pair(dtype=torch.float64)
    learning = BSR.unchecked(a.pattern, a.values.clone().requires_grad_())
    (sk.spmm(learning, b).sum()).backward()  # an expanded gradient
    s = sk.sddmm(b.requires_grad_(), torch.randn(40, 128, dtype=torch.float64), a.pattern.T)
    s.values.sum().backward()
    odd = torch.randn(a.values.numel() + 1, dtype=torch.float64)[1:].view_as(s.values)
    expected = torch.autograd.grad(sk.sddmm(b, b.new_ones(40, 128), a.pattern.T).values, b, odd.clone())
    assert torch.equal(
        torch.autograd.grad(sk.sddmm(b, b.new_ones(40, 128), a.pattern.T).values, b, odd)[0], *expected
    )


def test_a_second_step_makes_no_new_plan(plans_made: list[str]):
    w, _ = pair(dtype=F32)
    a, a2 = pair(dtype=F32)[0], pair(96, 64, dtype=F32)[0]
    made = []
    for _ in range(3):
        for each in (w, a, a2):
            each.requires_grad_()
        sk.linear(torch.randn(5, 96, requires_grad=True), w, None, "silu").sum().backward()
        (sk.spgemm(a, a2).sum() + (a @ a2).values.sum()).backward()
        made.append(len(plans_made))
    assert made[0] == made[1] == made[2]


def test_named_kernels_lead_to_their_family():
    assert gradients.same_family(None, "spmm") is None
    assert gradients.same_family("cpu.spmm", "sddmm") is None
    assert gradients.same_family("portable.spmm_skinny", "spmm") == "portable.spmm_skinny"
    assert gradients.same_family("portable.sddmm", "spmm") == "portable.spmm"
    assert gradients.same_family("vendor.dense", "sddmm") == "vendor.sddmm"


def test_a_backward_pass_runs_the_kernels_of_the_family(plans_made: list[str]):
    w, _ = pair(dtype=F32)
    w.requires_grad_()
    sk.linear(torch.randn(5, 96, requires_grad=True), w, kernel="reference.spmm").sum().backward()
    assert plans_made == ["reference.spmm", "reference.sddmm", "reference.spmm"]


def test_a_training_step_under_autocast_keeps_the_dtypes_of_the_operands():
    w, _ = pair(dtype=F32)
    w.requires_grad_()
    x = torch.randn(5, 96)
    with torch.autocast("cpu", torch.bfloat16):
        sk.linear(x, w, None, "relu").sum().backward()
    assert w.values.grad is not None
    low = sk.linear(x.bfloat16(), w.to(dtype=torch.bfloat16), None, "relu")
    (alone,) = torch.autograd.grad(low.sum(), w.values)
    assert w.values.grad.dtype == F32
    assert torch.equal(w.values.grad, alone)


def test_gradients_outlive_the_matrix(plans_made: list[str]):
    b = torch.randn(96, 5, requires_grad=True)
    a = pair(dtype=F32)[0]
    dense = a.to_dense()
    c = a @ b
    assert library_args.flat_pattern(a.pattern)[0] is a.pattern.indptr
    del a
    c.sum().backward()
    torch.testing.assert_close(b.grad, dense.T @ torch.ones(128, 5))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("by_op", [False, True])
def test_the_gradients_of_an_alpha_of_0_are_zeros_beside_nan(right: bool, by_op: bool):
    """Of the values and of the dense operand, eagerly and by the op, which a dispatch mode sees; once and twice."""
    a, b = pair(dtype=F32)
    x = torch.full((7, a.shape[0]) if right else tuple(b.shape), torch.nan, requires_grad=True)
    values = torch.full_like(a.values, torch.inf).requires_grad_()
    a = BSR.unchecked(a.pattern, values)
    with Seen() if by_op else torch.enable_grad():
        c = sk.spmm(x, a, alpha=0.0) if right else sk.spmm(a, x, alpha=0.0)
    assert not c.any()
    found = torch.autograd.grad(c, (values, x), torch.ones_like(c), create_graph=True)
    for grad, like in zip(found, (values, x), strict=True):
        assert torch.equal(grad, torch.zeros_like(like))


FP8_SCALES = [
    (kind, scale)
    for kind, scale in product(IN_FP8, ("row", "tensor", "block"))
    if (kind, scale) != ("semi24_fp8", "block")
]


@pytest.mark.parametrize(("x_dtype", "dtype"), [(F32, None), (BF16, None), (F16, None), (F32, BF16)], ids=str)
@pytest.mark.parametrize(("kind", "scale"), FP8_SCALES, ids=str)
def test_through_weights_in_fp8_x_has_the_gradient_of_float64(
    kind: str, scale: str, x_dtype: Any, dtype: Any
):
    """x is rounded to E4M3 by the product, straight-through: dx = dz @ W."""
    w = matrix(f"{kind} {scale}")
    tensors = [
        torch.randn(3, 7, 192).to(x_dtype),
        *(torch.randn(sides).to(dtype or x_dtype) for sides in (128, (3, 7, 128))),
    ]
    x, bias, residual = (each.requires_grad_() for each in tensors)
    for act in (None, "relu", "silu"):
        y = sk.linear(x, w, bias, act, residual, dtype=dtype)
        dy = torch.randn(y.shape).to(y.dtype)
        z = sk.linear(x.detach(), w, bias.detach(), dtype=dtype).requires_grad_()
        (dz,) = torch.autograd.grad(ACTIVATIONS[act or ""](z), z, dy)
        found = torch.autograd.grad(y, tensors, dy)
        assert [each.dtype for each in found] == [each.dtype for each in tensors]
        exact = dz.double() @ w.to_dense(F64)
        dense = dz @ w.to_dense(dz.dtype)
        assert (found[0] - exact).norm() <= 2 * (dense.to(x_dtype) - exact).norm()
        assert (found[1] - dz.double().sum((0, 1))).norm() <= 2**-7 * dz.double().sum((0, 1)).norm()
        assert torch.equal(found[2], dy)


@pytest.mark.parametrize(("kind", "scale"), FP8_SCALES, ids=str)
def test_all_products_in_fp8_learn(kind: str, scale: str):
    w = matrix(f"{kind} {scale}")
    dense, b = w.to_dense(), torch.randn(192, 5, requires_grad=True)
    runs = [(lambda b: sk.spmm(w, b, alpha=2.0), 2 * dense), (lambda b: w @ b[None], dense)]
    runs += [
        (lambda b: sk.linear(b.mT, w).mT, dense),
        (torch.compile(lambda b: w @ b, backend="aot_eager"), dense),
    ]
    if kind == "bsr_fp8" and scale != "row":
        runs += [(lambda b: (b.mT @ w.T).mT, dense), (lambda b: sk.spmm(w.T.T, b), dense)]
    for run, d in runs:
        found = torch.autograd.grad(run(b).sum(), b)[0]
        assert_close(found, d.sum(0)[:, None].expand(192, 5), atol=1e-4, rtol=1e-5)  # sums in another order
    found = torch.func.grad(lambda b: sk.spmm(w, b).sum())(b.detach())
    assert_close(found, dense.sum(0)[:, None].expand(192, 5), atol=1e-4, rtol=1e-5)
    (first,) = torch.autograd.grad(sk.spmm(w, b).square().sum(), b, create_graph=True)
    second = 2 * (dense.mT @ dense).sum(0)[:, None].expand(192, 5)
    assert_close(torch.autograd.grad(first.sum(), b)[0], second, atol=0.5, rtol=0.1)  # of rounded gradients
    both = torch.func.vmap(lambda b: sk.spmm(w, b))(torch.stack((b, -b)).detach())
    assert_close(both[0], -both[1], atol=1e-4, rtol=1e-5)
    x = b.mT.detach().requires_grad_()
    y = sk.swiglu(x, w, w)
    gate = sk.linear(x, w)
    assert_close(
        torch.autograd.grad(y.sum(), x),
        torch.autograd.grad((silu(gate) * gate).sum(), x),
        atol=1e-4,
        rtol=1e-3,
    )
    assert "that of B dequantizes A to bf16, into a workspace of" in sk.plan_spmm(w, b.bfloat16()).explain()
    assert "dequantizes" not in sk.plan_spmm(w, sk.quantize(b.mT.detach()).mT).explain()
    bias = torch.zeros(128, dtype=BF16, requires_grad=True)
    sk.linear(sk.quantize(x.detach()), w, bias, "relu").sum().backward()
    assert bias.grad is not None


def test_codes_that_change_after_the_forward_pass_are_refused_by_autograd():
    w, x = matrix("bsr_fp8"), torch.randn(4, 192, requires_grad=True)
    for part in (w.values, w.scale):
        y = sk.linear(x, w)
        part.copy_(part.clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
