"""spmm and linear with FP8 matrices: what they multiply, eagerly and compiled, in how many plans, what they refuse."""

from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.ops.spmm import SPMM
from sparsek.products.plan.spmm import SpmmPlan
from sparsek.testing.budget import check_spmm, error
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_linear
from tests.ops.operands import op_args
from tests.ops.storages import BF16, F16, F32, IN_FP8, matrix


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("kind", IN_FP8)
def test_an_operand_rounded_before_gives_the_same_in_any_dtype(kind: str, dtype: torch.dtype, device: str):
    a, b = matrix(kind, device=device), torch.randn(192, 40, device=device).to(dtype)
    rounded = sk.quantize(b.mT).mT
    assert torch.equal(sk.spmm(a, rounded, dtype=dtype), a @ b)
    assert (a @ rounded).dtype == BF16
    assert torch.equal(a @ rounded, sk.spmm(a, b, dtype=BF16))


@pytest.mark.parametrize("kind", IN_FP8)
def test_an_operand_rounded_before_has_a_plan_of_its_own(kind: str, plans_made: list[str]):
    a, b = matrix(kind), torch.randn(192, 40).to(BF16)
    sk.spmm(a, b)
    sk.spmm(a, sk.quantize(b.mT).mT)
    assert len(plans_made) == 2


@pytest.mark.parametrize("kind", IN_FP8)
def test_fast_accum_is_a_problem_of_its_own(kind: str, plans_made: list[str]):
    a, x8 = matrix(kind), sk.quantize(torch.randn(32, 192))
    fast = a.with_fast_accum()
    for each in (a, fast, a, fast):
        gate = check_linear(x8, each, sk.linear(x8, each), core=0.0)
        assert gate.passed  # a CPU sums in float32 all the same
    assert len(plans_made) == 2
    plan = sk.plan_spmm(fast, x8.mT, device="h200")
    assert plan.problem.a.fast_accum
    assert ", C bf16, fast_accum, on NVIDIA H200" in plan.explain()
    with pytest.raises(InvalidInput, match="fast_accum; got"):
        sk.plan_spmm(fast, x8.mT)(a, x8.mT)
    dense = sk.plan_spmm(fast, x8.mT, kernel="vendor.cublas_fp8")
    assert "fast sums" in dense.explain()
    assert check_spmm(fast, x8.mT, dense(fast, x8.mT)).passed
    torch._dynamo.reset()
    compiled = torch.compile(lambda b: sk.spmm(fast, b), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x8.mT), fast @ x8.mT)


@pytest.mark.parametrize("scale", ["tensor", "block"])
def test_a_bsr_with_a_scale_for_all_or_a_block_stands_on_the_right_too(scale: str, device: str):
    a = matrix(f"bsr_fp8 {scale}", device=device)
    for x in (torch.randn(24, 128, device=device), torch.randn(2, 3, 128, device=device)):
        assert torch.equal(sk.spmm(sk.quantize(x), a, dtype=F32), x @ a)
        # Another layout: some processors take its sums in another order.
        torch.testing.assert_close(a.T @ x.mT, (x @ a).mT, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(192,), (1, 192), (2, 3, 4, 192), (0, 192)], ids=str)
@pytest.mark.parametrize("kind", IN_FP8)
def test_any_leading_dims_are_tokens_and_one_rounding_serves_many_products(
    kind: str, shape: tuple[int, ...], device: str
):
    w, other = matrix(kind, device=device), matrix(f"{kind} tensor", device=device)
    x = torch.randn(shape, device=device).to(BF16)
    rest = torch.randn(*shape[:-1], 128, device=device).to(BF16)
    for q in (sk.quantize(x), sk.quantize(x, torch.float8_e5m2, "tensor")):
        for each in (w, other):
            y = sk.linear(q, each, None, "silu", rest)
            assert (y.shape, y.dtype) == ((*shape[:-1], 128), BF16)
            assert check_linear(q, each, y, None, "silu", rest).passed
    assert torch.equal(sk.linear(sk.quantize(x), w), sk.linear(x, w))


def test_swiglu_rounds_x_once_for_both(device: str):
    gate, up = matrix("semi24_fp8", device=device), matrix("bsr24_fp8", device=device)
    x = torch.randn(2, 5, 192, device=device)
    q = sk.quantize(x)
    left, right = (q.dequantize(torch.float64) @ w.to_dense(torch.float64).mT for w in (gate, up))
    exact = torch.nn.functional.silu(left) * right
    assert error(sk.swiglu(x, gate, up), exact) < 2e-3
    y = sk.swiglu(q, gate, up)
    assert (y.dtype, y.shape) == (BF16, (2, 5, 128))
    assert error(y, exact) < 1e-2


def test_the_op_hands_kernels_values_and_scales_that_lie_as_they_read_them(monkeypatch: pytest.MonkeyPatch):
    """Whoever compiles a model may put gaps between the rows of what goes from one op to the next."""
    a, q = matrix("bsr_fp8"), sk.quantize(torch.randn(24, 192).to(BF16))
    values = torch.zeros(24, 256, dtype=q.dtype)[:, :192].copy_(q.values)
    scale = torch.zeros(24, 2)[:, 0].copy_(q.scale)
    seen, run = [], SPMM.run
    monkeypatch.setattr(SPMM, "run", lambda call, kernel: [seen.append(call), run(call, kernel)][1])
    made = torch.ops.sparsek.spmm(*op_args(a, values, b_scale=scale, dtype=F32))
    (b,) = (call.b for call in seen)
    assert b.values.is_contiguous()
    assert b.scale.is_contiguous()
    torch.testing.assert_close(made, sk.spmm(a, q.mT, dtype=F32), rtol=0, atol=0)


def test_out_may_not_lie_over_what_a_product_reads():
    a, q = matrix("bsr_fp8"), sk.quantize(torch.randn(24, 192).to(BF16))
    memory = torch.zeros(8192, dtype=torch.uint8)
    values = memory[: 24 * 192].view(q.dtype).view(24, 192)
    values.copy_(q.values)
    out = memory[2048:].view(BF16).view(128, 24)
    with pytest.raises(InvalidInput, match="out overlaps the memory of B's values"):
        sk.spmm(a, sk.QuantizedTensor(values, q.scale).mT, out=out)
    scale = torch.ones(128 * 24)
    with pytest.raises(InvalidInput, match="out overlaps the memory of B's scales"):
        sk.spmm(a, sk.QuantizedTensor(q.values, scale[:24]).mT, out=scale.view(128, 24))


def test_a_plan_explains_itself_and_fits_what_was_planned():
    a, b = matrix("bsr_fp8"), torch.randn(192, 40).to(BF16)
    plan = sk.plan_spmm(a, b)
    assert isinstance(plan, SpmmPlan)
    blocks = f"{a.matrix.nnzb} blocks of 64x64 ({100 * a.matrix.density:.3g} % stored)"
    assert plan.explain().startswith(
        f"C = A @ B   A [128, 192] e4m3, a scale per row, {blocks}, B [192, 40] bf16, rounded to e4m3, a scale per "
        "column, C bf16, on cpu\n  kernel     reference.spmm_fp8"
    )
    assert "  rounding   " in plan.explain()
    assert torch.equal(plan(a, b), a @ b)
    assert torch.equal(sk.spmm(a, b, plan=plan), a @ b)
    twin = Quantized.unchecked(a.matrix, 2 * a.scale, a.kind)
    assert torch.equal(plan(twin, b), 2 * plan(a, b))
    q = sk.quantize(b.mT).mT
    ready = sk.plan_spmm(a, q, dtype=F32)
    assert "rounding" not in ready.explain()
    assert torch.equal(ready(a, q), sk.spmm(a, b, dtype=F32))
    for wrong in (
        lambda: plan(matrix("bsr_fp8"), b),
        lambda: plan(a, b[:, :8]),
        lambda: plan(a, q),
        lambda: ready(a, b),
    ):
        with pytest.raises(InvalidInput, match=r"this plan (was made for|multiplies)"):
            wrong()
    out = poisoned((128, 40), F32)
    assert sk.plan_spmm(a, b, out=out)(a, b, out) is out
    assert torch.equal(out, sk.spmm(a, b, dtype=F32))


def test_a_bsr_and_a_bsr24_of_one_pattern_have_plans_of_their_own():
    bsr = sk.random_bsr(128, 192, 64, 0.6, dtype=F32, device="cpu")
    whole, half, b = sk.quantize(bsr), sk.quantize(sk.BSR24.from_bsr(bsr)), torch.randn(192, 40)
    plan = sk.plan_spmm(whole, b)
    for a in (whole, half, whole):
        assert check_spmm(a, sk.quantize(b.mT).mT, a @ b, core=0.0).passed
    with pytest.raises(InvalidInput, match="this plan was made for another matrix"):
        plan(half, b)


@pytest.mark.parametrize("low", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_casts_the_dense_operand_and_decides_the_dtype_of_the_result(low: torch.dtype):
    a, x, bias = matrix("bsr_fp8"), torch.randn(5, 192), torch.randn(matrix("bsr_fp8").shape[0])
    right, x8 = sk.linear(x.to(low), a, bias.to(low), "gelu"), sk.quantize(x)
    given, wide = sk.linear(x, a, bias, "gelu", dtype=F32), sk.spmm(a, x8.mT, dtype=low)
    gated, plan = sk.swiglu(x.to(low), a, a), sk.plan_spmm(a, x.mT)
    with torch.autocast("cpu", dtype=low):
        assert torch.equal(sk.linear(x, a, bias, "gelu"), right)
        assert torch.equal(sk.linear(x, a, bias, "gelu", dtype=F32), given)
        assert torch.equal(sk.spmm(a, x8.mT), wide)
        assert torch.equal(a @ x8.mT, wide)
        assert torch.equal(sk.swiglu(x, a, a), gated)
        assert (
            sk.swiglu(x8, a, a).dtype
            == (x @ sk.random_bsr(192, 64, 64, 1.0)).dtype
            == (a @ x.mT).dtype
            == low
        )
        assert sk.spmm(a, x.mT, plan=plan).dtype == F32


@pytest.mark.gpu
@pytest.mark.parametrize("kind", IN_FP8)
def test_every_kernel_of_the_gpu_agrees_for_long_k(kind: str):
    w, x = matrix(kind, device="cuda", m=256, k=16384), torch.randn(192, 16384, device="cuda").to(BF16)
    q, own = sk.quantize(x), kind.replace("bsr_", "spmm_")
    family = "unpacked" if "24" in kind else "portable"
    for name in (f"{family}.{own}", "vendor.cublas_fp8", "reference.spmm_fp8", None):
        for dtype in (BF16, F16, F32):
            gate = check_linear(q, w, sk.linear(q, w, kernel=name, dtype=dtype))
            assert gate.passed, f"{name} {dtype}: {gate}"


def test_compiled_a_bsr_stands_on_the_right_too():
    torch._dynamo.reset()
    a, x = matrix("bsr_fp8 block"), torch.randn(5, 128)
    compiled = torch.compile(lambda x: sk.spmm(x, a), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x @ a)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", IN_FP8)
def test_the_op_passes_torchs_own_checks(kind: str):
    """Of its schema torch cannot judge: that would multiply FP8 by a number (torch 2.13)."""
    a, x = matrix(kind), torch.randn(24, 192)
    q = sk.quantize(x)
    for dense in ((x.mT, None), (q.values, q.scale)):
        for by_columns in (False, True):
            epilogue: dict[str, Any] = {"bias": torch.randn(128), "act": "gelu", "dtype": F32}
            epilogue |= {"b_scale": dense[1], "by_columns": by_columns, "kernel": "reference.spmm_fp8"}
            args = tuple(op_args(a, dense[0], **epilogue))
            torch.library.opcheck(torch.ops.sparsek.spmm.default, args, test_utils="test_faketensor")
    with pytest.raises(InvalidInput, match=r"A of the product is \[128, 192\] and B \[24, 192\]"):
        torch.ops.sparsek.spmm(*op_args(a, x))


def test_an_operand_that_learns_multiplies_where_nobody_learns():
    a, x = matrix("bsr_fp8"), torch.randn(5, 192, requires_grad=True)
    with torch.no_grad():
        y = sk.linear(x, a)
    assert not y.requires_grad
    assert isinstance(sk.quantize(x), QuantizedTensor)
