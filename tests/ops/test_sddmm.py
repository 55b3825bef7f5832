"""sddmm: what it computes, from which layouts, and which plans it makes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine.plan.cache import PlanCache
from sparsek.products.formats.bsr import padding_nonzeros
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.ops import library_args
from sparsek.products.plan.sddmm import SddmmPlan
from sparsek.testing.product_budget import check_sddmm
from tests.ops.operands import BF16, pair

Given = tuple[Tensor, Tensor, BlockPattern]


def given(
    m: int = 128, k: int = 40, n: int = 96, block: Any = 32, dtype: torch.dtype = BF16, device: str = "cpu"
) -> Given:
    """X [m, k] and Y [k, n] of N(0, 1), and a pattern with block rows of uneven lengths."""
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(s, generator=draw).to(device, dtype) for s in ((m, k), (k, n)))
    return x, y, pair(m, n, 1, block, dtype, device)[0].pattern


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", [None, "reference.sddmm", "vendor.sddmm"])
def test_it_computes_the_stored_blocks(kernel: str | None, dtype: torch.dtype):
    x, y, pattern = given(120, 40, 90, dtype=dtype)
    s = sk.sddmm(x, y, pattern, kernel=kernel)
    assert s.pattern is pattern
    assert s.dtype == dtype
    gate = check_sddmm(x, y, s)
    assert gate.passed, gate
    assert padding_nonzeros(s) == 0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x,
    "col": lambda x: x.T.contiguous().T,
    "wider rows": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "odd start": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row for all": lambda x: x[:1].expand(x.shape),
}


def test_the_pattern_of_a_view_serves_as_any_other(device: str):
    x, y, pattern = given(96, 40, 128, device=device)
    flipped = given(128, 40, 96, device=device)[2].T
    assert flipped.shape == pattern.shape
    assert check_sddmm(x, y, sk.sddmm(x, y, flipped)).passed


def test_a_plan_gives_what_sddmm_gives_for_new_operands(device: str):
    x, y, pattern = given(device=device)
    plan = sk.plan_sddmm(x, y, pattern)
    assert torch.equal(plan(x, y, pattern).values, sk.sddmm(x, y, pattern).values)
    x2, y2 = torch.randn_like(x), torch.randn_like(y)
    assert check_sddmm(x2, y2, sk.sddmm(x2, y2, pattern, plan=plan)).passed


def test_a_second_call_makes_no_new_plan_and_another_layout_does(plans_made: list[str]):
    x, y, pattern = given(dtype=torch.float32)
    calls: list[Callable[[], Any]] = [
        lambda: sk.sddmm(x, y, pattern),
        lambda: sk.sddmm(LAYOUTS["col"](x), y, pattern),
        lambda: sk.sddmm(x, LAYOUTS["odd start"](y), pattern),
        lambda: sk.sddmm(x[:, :8], y[:8], pattern),
        lambda: sk.sddmm(x, y, pattern, kernel="reference.sddmm"),
    ]
    for round_ in range(2):
        for count, call in enumerate(calls, start=1):
            call()
            assert len(plans_made) == (count if round_ == 0 else len(calls))
    assert len(pattern.derived(SddmmPlan, PlanCache)) == len(calls)


def test_a_plan_for_an_h200_is_made_on_any_machine_and_predicts():
    x, y, pattern = given(4096, 4096, 4096, 128)
    plan = sk.plan_sddmm(x, y.T.contiguous().T, pattern, device="h200")
    assert plan.bound_seconds < plan.seconds < 1e-2
    first, *rest = plan.explain().splitlines()
    assert first == (
        f"S = X @ Y at a pattern   S [4096, 4096] bf16, {pattern.nnzb} blocks of 128x128 "
        f"({100 * pattern.density:.3g} % stored), X [4096, 4096] row-major, Y [4096, 4096] col-major, on NVIDIA H200"
    )
    assert any("reference.sddmm: " in line for line in rest)
    with pytest.raises(InvalidInput, match="prediction for NVIDIA H200"):
        plan(x, y, pattern)


def test_a_named_kernel_that_cannot_run_says_why_and_which_can():
    with pytest.raises(Unsupported, match=r"hopper.sddmm cannot run this; .*reference.sddmm can"):
        sk.sddmm(*given(), kernel="hopper.sddmm")


@pytest.mark.parametrize("lies", ["row", "col"])
@pytest.mark.parametrize("sizes", [(128, 40, 96), (100, 7, 90), (64, 0, 64)], ids=str)
def test_the_op_passes_torchs_own_checks(sizes: tuple[int, int, int], lies: str):
    x, y, pattern = given(*sizes, dtype=torch.float32)
    x, y = (LAYOUTS[lies](each).detach().requires_grad_() for each in (x, y))
    torch.library.opcheck(torch.ops.sparsek.sddmm.default, (x, y, *library_args.flat_pattern(pattern), None))


def test_compiled_it_gives_the_same_matrix():
    torch._dynamo.reset()
    x, y, pattern = given(dtype=torch.float32)

    def run(x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
        s = sk.sddmm(x, y, pattern)
        return s, s.T @ x

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    (s, c), (expected, product) = compiled(x, y), run(x, y)
    assert s.pattern is pattern
    assert torch.equal(s.values, expected.values)
    assert torch.equal(c, product)
