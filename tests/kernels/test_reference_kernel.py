"""reference.spmm behind the protocol: the reference itself, and the last choice of the planner."""

import pytest
import torch

from sparsek.core.device import card_named
from sparsek.kernels import load
from sparsek.reference.spmm import spmm
from sparsek.testing.cases import SPMM_CASES, Case
from tests.kernels.planned import multiply, problem
from tests.problems import spmm_problem

KERNEL = load("reference.spmm")


@pytest.mark.parametrize("case", SPMM_CASES, ids=str)
def test_it_gives_the_bits_of_the_reference(case: Case) -> None:
    a, b = case.make()
    assert torch.equal(multiply(KERNEL, a, b), spmm(a, b))


def test_it_runs_transposed_views_batches_and_inputs_that_need_gradients() -> None:
    a, _ = SPMM_CASES[0].make(dtype=torch.float64)
    a.values.requires_grad_()
    b = torch.randn(3, a.shape[0], 8, dtype=torch.float64, requires_grad=True)
    out = multiply(KERNEL, a.T, b)
    assert not out.requires_grad
    assert torch.equal(out, spmm(a.T, b).detach())


@pytest.mark.parametrize("case", SPMM_CASES, ids=str)
def test_it_refuses_nothing(case: Case) -> None:
    assert KERNEL.why_not(problem(*case.make())) == []


@pytest.mark.parametrize(("n", "block"), [(16, 32), (256, 64), (1024, 128)])
def test_it_is_predicted_slower_than_the_cpu_kernel(n: int, block: int) -> None:
    side = 2048
    blocks = (side // block) ** 2 // 8
    card = card_named("cpu")
    p = spmm_problem(side, side, n, (block, block), blocks, "fp32", card, row_max=side // block // 8)
    fast = load("cpu.spmm")
    assert KERNEL.seconds(p, KERNEL.default(p)) > fast.seconds(p, fast.default(p)) > 0
