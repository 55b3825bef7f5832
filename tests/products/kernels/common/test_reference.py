"""The reference kernels of products behind the protocol: the references themselves, and the planner's last choice."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.plan.matches import match
from sparsek.products.reference.bsr24 import bsr24
from sparsek.products.reference.epilogue import Epilogue
from sparsek.products.reference.quantized import product as in_fp8
from sparsek.products.reference.sddmm import sddmm
from sparsek.products.reference.semi24 import semi24
from sparsek.products.reference.spgemm import spgemm
from sparsek.products.reference.spmm import spmm
from tests.attn.kernels.planned import join, multiply, problem, sample, sddmm_problem, spgemm_problem
from tests.problems import changed
from tests.products.cases import (
    BSR24_CASES,
    EPILOGUE_CASES,
    FP8_CASES,
    SEMI24_CASES,
    SPMM_CASES,
    Case,
    judged_by,
)
from tests.products.pattern_cases import SDDMM_CASES, SPGEMM_CASES, SddmmCase, SpgemmCase

SDDMM, SPGEMM, SPMM = load("reference.sddmm"), load("reference.spgemm"), load("reference.spmm")
LOW = [torch.bfloat16, torch.float16, torch.float32]
CASES = [
    *((case, None) for case in (*SPMM_CASES, *EPILOGUE_CASES)),
    *product((*SEMI24_CASES, *BSR24_CASES), [*LOW, torch.float64]),
    *((case, LOW[at % 3]) for at, case in enumerate(FP8_CASES)),
]


def reference(a: Any, b: Any, epilogue: Epilogue, turned: bool, dtype: torch.dtype) -> Tensor:
    if isinstance(a, Quantized):
        return in_fp8(a, b, epilogue, dtype)
    if isinstance(a, Semi24):
        return semi24(a, b, epilogue, transposed=turned)
    return bsr24(a, b, epilogue, transposed=turned) if isinstance(a, BSR24) else spmm(a, b, epilogue)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_products_have_the_bits_of_the_reference(case: Case, dtype: torch.dtype | None) -> None:
    a, b, epilogue, out = case.make(dtype=dtype)
    right = reference(a, b, judged_by(epilogue), case.turned, out.dtype)
    kernel = load("reference.spmm_fp8" if case.scales else f"reference.{case.op}")
    assert torch.equal(multiply(kernel, a, b, epilogue, out, turned=case.turned), right)


@pytest.mark.parametrize("family", ["reference", "vendor", "cpu"])
def test_inputs_that_need_gradients_are_multiplied(family: str) -> None:
    """A transposed view and a batch too."""
    a = random_bsr(64, 96, 16, 1.0, dtype=torch.float64, device="cpu", seed=1)
    a.values.requires_grad_()
    b = torch.randn(3, 64, 8, dtype=torch.float64, requires_grad=True)
    out = multiply(load("vendor.dense" if family == "vendor" else f"{family}.spmm"), a.T, b)
    assert not out.requires_grad
    torch.testing.assert_close(out, spmm(a.T, b).detach())
    if family != "cpu":
        for dense_out in (False, True):
            made = join(load(f"{family}.spgemm"), a, a.T, dense_out=dense_out)
            assert not (made.values if isinstance(made, BSR) else made).requires_grad
        x = b[0, :, :4]
        assert not sample(load(f"{family}.sddmm"), x, x.mT, (a @ a.T).pattern).values.requires_grad


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


def test_an_epilogue_costs_time() -> None:
    a, b, epilogue, out = EPILOGUE_CASES[0].make()
    p = problem(a, b, out, epilogue)
    plain = changed(p, bias=False, activation="")
    for name in ("reference.spmm", "cpu.spmm"):
        k = load(name)
        assert k.seconds(p, k.default(p)) > k.seconds(plain, k.default(plain))


def test_they_refuse_nothing() -> None:
    for case in SPMM_CASES:
        a, b, _, out = case.make()
        assert SPMM.why_not(problem(a, b, out)) == []
    for case in SDDMM_CASES:
        p = sddmm_problem(*case.make())
        assert SDDMM.why_not(p) == SDDMM.why_not(replace(p, card=H200)) == []
    for case in SPGEMM_CASES:
        a, b, wanted = case.make()
        p = spgemm_problem(a, b, match(a.pattern, b.pattern, wanted), False)
        assert SPGEMM.why_not(p) == SPGEMM.why_not(replace(p, card=H200)) == []
