"""reference.sddmm, reference.spgemm and the epilogue of reference.spmm behind the protocol."""

from dataclasses import replace

import pytest
import torch

from sparsek.core.device import H200
from sparsek.matrix.bsr import BSR
from sparsek.matrix.random import random_bsr
from sparsek.plan.matches import match
from sparsek.reference.sddmm import sddmm
from sparsek.reference.spgemm import spgemm
from sparsek.reference.spmm import spmm
from sparsek.testing.product_cases import (
    EPILOGUE_CASES,
    SDDMM_CASES,
    SPGEMM_CASES,
    EpilogueCase,
    SddmmCase,
    SpgemmCase,
    judged_by,
)
from tests.kernels.planned_products import (
    epilogue_problem,
    join,
    kernel,
    multiply,
    sample,
    sddmm_problem,
    spgemm_problem,
)
from tests.problems import changed

SDDMM, SPGEMM, SPMM = kernel("reference.sddmm"), kernel("reference.spgemm"), kernel("reference.spmm")


@pytest.mark.parametrize("case", EPILOGUE_CASES, ids=str)
def test_epilogues_have_the_bits_of_the_reference(case: EpilogueCase) -> None:
    a, b, epilogue, out = case.make()
    right = spmm(a, b, judged_by(epilogue))
    assert torch.equal(multiply(SPMM, a, b, epilogue, out), right)


@pytest.mark.parametrize("case", SDDMM_CASES, ids=str)
def test_sddmm_has_the_bits_of_the_reference(case: SddmmCase) -> None:
    x, y, pattern = case.make()
    assert torch.equal(sample(SDDMM, x, y, pattern).values, sddmm(x, y, pattern).values)


@pytest.mark.parametrize("case", SPGEMM_CASES, ids=str)
def test_spgemm_has_the_bits_of_the_reference(case: SpgemmCase) -> None:
    a, b, wanted = case.make()
    made = join(SPGEMM, a, b, wanted, dense_out=False)
    assert isinstance(made, BSR)
    assert torch.equal(made.values, spgemm(a, b, wanted).values)
    dense = join(SPGEMM, a, b, dense_out=True)
    assert torch.equal(dense, spgemm(a, b).to_dense())  # type: ignore[arg-type]


def test_inputs_that_need_gradients_are_multiplied() -> None:
    a = random_bsr(64, 64, 16, 0.5, dtype=torch.float64, device="cpu", seed=1)
    a.values.requires_grad_()
    made = join(SPGEMM, a, a.T, dense_out=True)
    assert isinstance(made, torch.Tensor)
    assert not made.requires_grad
    x = torch.randn(64, 8, requires_grad=True)
    assert not sample(SDDMM, x, x.detach().mT, a.pattern).values.requires_grad


@pytest.mark.parametrize(("k", "block"), [(64, 32), (1024, 64), (4096, 128)])
def test_sddmm_is_predicted_slower_than_the_cpu_kernel(k: int, block: int) -> None:
    pattern = random_bsr(2048, 2048, block, 0.125, device="cpu", seed=1).pattern
    p = sddmm_problem(torch.empty(2048, k), torch.empty(k, 2048), pattern)
    fast = kernel("cpu.sddmm")
    assert SDDMM.seconds(p, SDDMM.default(p)) > fast.seconds(p, fast.default(p)) > 0


@pytest.mark.parametrize("dense_out", [False, True])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_spgemm_is_predicted_slower_than_the_cpu_kernel(block: int, dense_out: bool) -> None:
    a, b = (random_bsr(1024, 1024, block, 0.2, device="cpu", seed=seed) for seed in (1, 2))
    p = spgemm_problem(a, b, match(a.pattern, b.pattern), dense_out)
    fast = kernel("cpu.spgemm")
    assert SPGEMM.seconds(p, SPGEMM.default(p)) > fast.seconds(p, fast.default(p)) > 0


def test_an_epilogue_costs_time() -> None:
    a, b, epilogue, out = EPILOGUE_CASES[0].make()
    p = epilogue_problem(a, b, epilogue, out)
    plain = changed(p, bias=False, activation="")
    for name in ("reference.spmm", "cpu.spmm"):
        k = kernel(name)
        assert k.seconds(p, k.default(p)) > k.seconds(plain, k.default(plain))


def test_they_refuse_nothing() -> None:
    for case in SDDMM_CASES:
        p = sddmm_problem(*case.make())
        assert SDDMM.why_not(p) == SDDMM.why_not(replace(p, card=H200)) == []
    for case in SPGEMM_CASES:
        a, b, wanted = case.make()
        p = spgemm_problem(a, b, match(a.pattern, b.pattern, wanted), False)
        assert SPGEMM.why_not(p) == SPGEMM.why_not(replace(p, card=H200)) == []
