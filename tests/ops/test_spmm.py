"""spmm: what it multiplies eagerly, into what, and which plans it makes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine.plan.cache import LIMIT, PlanCache
from sparsek.products.plan.spmm import Product, SpmmPlan
from sparsek.testing.poison import poisoned
from tests.ops.operands import BF16, check, pair
from tests.ops.storages import LAYOUTS


@pytest.mark.parametrize("shape", [(40, 96), (1, 96), (3, 40, 96), (2, 3, 5, 96), (2, 0, 96)], ids=str)
def test_a_bsr_on_the_right_multiplies_by_views_only(shape: tuple[int, ...], device: str):
    a, _ = pair(device=device)
    x = torch.randn(shape, device=device).to(BF16)
    out = x @ a.T
    assert out.is_contiguous()
    assert torch.equal(torch.matmul(x, a.T), out)  # pyright: ignore[reportArgumentType]
    check(a, x.mT, out.mT)
    wide = torch.randn((*shape[:-1], 128), device=device).to(BF16)
    check(a.T, wide.mT, (wide @ a).mT)


def test_leading_dims_of_a_left_operand_are_rows_of_one_product():
    a, _ = pair()
    x = torch.randn(3, 8, 96).to(BF16)
    assert sk.plan_spmm(x, a.T).problem.batch == 1
    assert sk.plan_spmm(x, a.T).problem.n == 24
    assert sk.plan_spmm(x.transpose(0, 1), a.T).problem.batch == 8


def test_alpha_without_out_makes_a_new_matrix():
    a, b = pair(dtype=torch.float32)
    torch.testing.assert_close(sk.spmm(a, b, alpha=3), 3 * (a @ b))
    assert sk.spmm(a, b, alpha=1, beta=0).equal(a @ b)


def test_a_plan_of_a_right_product_says_so_and_gives_what_spmm_gives(device: str):
    a, _ = pair(device=device)
    x = torch.randn(2, 40, 96, device=device).to(BF16)
    plan = sk.plan_spmm(x, a.T)
    assert plan.on_right
    assert torch.equal(plan(x, a.T), x @ a.T)
    out = poisoned((2, 40, 128), BF16, device)
    assert sk.spmm(x, a.T, plan=plan, out=out) is out
    assert torch.equal(out, x @ a.T)
    assert plan.explain().startswith(
        f"C = B @ A   A [96, 128] bf16, {a.nnzb} blocks of 32x32 ({100 * a.density:.3g} % stored), B [80, 96] row-major"
    )


@pytest.mark.parametrize(
    "room",
    [
        lambda shape, device: poisoned(shape, BF16, device),
        lambda shape, device: poisoned((*shape[:-1], 64), BF16, device)[..., 8 : 8 + shape[-1]],
        lambda shape, device: poisoned((*shape[:-1], 43), BF16, device)[..., 3:],
        lambda shape, device: poisoned((shape[-2], 2, shape[-1]), BF16, device).transpose(0, 1),
    ],
    ids=["contiguous", "wider rows", "odd rows", "interleaved batch"],
)
def test_out_is_overwritten_and_returned(room: Any, device: str):
    a, b = pair(device=device)
    b = torch.stack((b, -b))
    out = room((2, 128, 40), device)
    assert sk.spmm(a, b, out=out) is out
    check(a, b, out)
    assert torch.equal(out, sk.spmm(a, b))


@pytest.mark.parametrize("planned", [False, True])
def test_autograd_sees_that_out_was_written(planned: bool, monkeypatch: pytest.MonkeyPatch):
    """By kernels too, which write by an address, as to `.data`."""
    a, b = pair()
    out = torch.zeros(128, 40, dtype=BF16)

    def written(plan: SpmmPlan, call: Product) -> tuple[torch.Tensor, None]:
        assert call.out is not None
        call.out.data.fill_(2)
        return call.out, None

    monkeypatch.setattr(SpmmPlan, "_allocated", written)
    plan = sk.plan_spmm(a, b, out=out) if planned else None
    x = torch.ones(128, 40, dtype=BF16, requires_grad=True)
    y = x * out
    sk.spmm(a, b, out=out, plan=plan)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():  # whose tensors have no version
        sk.spmm(a, b, out=torch.zeros(128, 40, dtype=BF16), plan=plan)


def test_out_of_one_column_may_have_any_strides(device: str):
    a, b = pair(n=1, device=device)
    out = poisoned((1, 128), BF16, device).T
    check(a, b, sk.spmm(a, b, out=out))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["odd start", "seven columns", "every second column"])
def test_what_tma_cannot_read_goes_through_another_kernel(name: str):
    a, whole = pair(device="cuda")
    b = LAYOUTS[name](whole)
    with pytest.raises(Unsupported, match="TMA"):
        sk.spmm(a, b, kernel="hopper.spmm")
    plan = sk.plan_spmm(a, b)
    assert plan.kernel != "hopper.spmm"
    check(a, b, plan(a, b))


@pytest.mark.parametrize("name", ["odd start", "seven columns", "every second column"])
def test_misaligned_b_is_planned_for_another_kernel(name: str):
    a, whole = pair(1024, 96, 40, (128, 32))
    assert sk.plan_spmm(a, whole, kernel="hopper.spmm", device="h200").seconds > 0
    plan = sk.plan_spmm(a, LAYOUTS[name](whole), device="h200")
    assert plan.kernel.startswith("portable.spmm")
    assert re.search(r"not +hopper.spmm: .*TMA", plan.explain())


def test_another_shape_layout_alignment_out_or_kernel_makes_another_plan(plans_made: list[str]):
    a, b = pair(dtype=torch.float32)
    calls: list[Callable[[], Tensor]] = [
        lambda: a @ b,
        lambda: a @ b[:, :20],
        lambda: a @ b[None],
        lambda: a @ LAYOUTS["col"](b),
        lambda: a @ LAYOUTS["odd start"](b),
        lambda: sk.spmm(a, b, out=torch.empty(128, 43)[:, :40]),
        lambda: sk.spmm(a, b, kernel="reference.spmm"),
        lambda: a.T @ torch.randn(128, 40),
        lambda: torch.randn(40, 96) @ a.T,
        lambda: sk.spmm(a, b, alpha=2),
        lambda: sk.spmm(a, b, beta=2, out=torch.empty(128, 40)),
    ]
    for round_ in range(2):
        for count, call in enumerate(calls, start=1):
            call()
            assert len(plans_made) == (count if round_ == 0 else len(calls))


def test_a_pattern_keeps_no_more_plans_than_the_limit():
    a = pair(64, 64, 8, (32, 32), torch.float32)[0]
    for n in range(1, LIMIT + 20):
        sk.spmm(a, torch.randn(64, n))
    assert len(a.pattern.derived(SpmmPlan, PlanCache)) == LIMIT


def test_autocast_leaves_out_plan_and_float64_alone():
    a, b = pair(128, 96, 40, (32, 32), torch.float32)
    alone, plan, out = a @ b, sk.plan_spmm(a, b), torch.empty(128, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sk.spmm(a, b, plan=plan), alone)
        assert torch.equal(plan(a, b), alone)
        assert sk.spmm(a, b, out=out) is out
        assert (a.to(dtype=torch.float64) @ b.double()).dtype == torch.float64
        with pytest.raises(InvalidInput, match=r"A is torch.bfloat16 and B torch.float64; cast one"):
            _ = a @ b.double()
        with pytest.raises(InvalidInput, match=r"out must be torch.float32 \[128, 40\]"):
            sk.spmm(a, b, out=out.bfloat16())
    assert torch.equal(out, alone)


def test_a_pattern_that_is_let_go_takes_its_plans_along():
    a, b = pair(dtype=torch.float32)
    plan = sk.plan_spmm(a, b)
    sk.spmm(a, b)
    del a
    assert plan.pattern is not None
    assert plan.pattern() is None, "a plan keeps no pattern alive, not even in a cycle"
