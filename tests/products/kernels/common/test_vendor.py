"""vendor.sddmm and vendor.spgemm: right within the budget, and honest about what they cost."""

import itertools
from dataclasses import replace

import pytest
import torch

from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.spmm.vendor_dense import dense_copy
from sparsek.products.plan.matches import match
from sparsek.products.reference.sddmm import sddmm as sddmm_reference
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_sddmm, check_spgemm
from tests.attn.kernels.planned import join, sample, sddmm_problem, spgemm_problem
from tests.products.cases import laid_out
from tests.products.pattern_cases import SDDMM_CASES, SPGEMM_CASES, SddmmCase, SpgemmCase, unmet_rows_poisoned
from tests.sampling import sampled

SDDMM, SPGEMM = load("vendor.sddmm"), load("vendor.spgemm")
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


GPU = pytest.mark.gpu
ON_A_CPU = list(itertools.product(("cpu",), SPGEMM_CASES, FLOATS, (False, True)))
ON_A_GPU = list(itertools.product(("cuda",), SPGEMM_CASES, FLOATS[:3], (False, True)))


@pytest.mark.parametrize(
    ("device", "case", "dtype"),
    [
        *itertools.product(("cpu",), SDDMM_CASES, FLOATS),
        *(pytest.param("cuda", *each, marks=GPU) for each in itertools.product(SDDMM_CASES, FLOATS[:3])),
    ],
    ids=str,
)
def test_every_case_of_sddmm_is_within_budget(device: str, case: SddmmCase, dtype: torch.dtype) -> None:
    x, y, pattern = case.make(device, dtype)
    x, y = unmet_rows_poisoned(x, y, pattern) if device == "cpu" else (x, y)
    gate = check_sddmm(x, y, sample(SDDMM, x, y, pattern))
    assert gate.passed, gate


@pytest.mark.parametrize(
    ("device", "case", "dtype", "dense_out"),
    [*sampled(ON_A_CPU, 72), *(pytest.param(*each, marks=GPU) for each in ON_A_GPU)],
    ids=str,
)
def test_every_case_of_spgemm_is_within_budget(
    device: str, case: SpgemmCase, dtype: torch.dtype, dense_out: bool
) -> None:
    a, b, wanted = case.make(device, dtype)
    gate = check_spgemm(a, b, join(SPGEMM, a, b, None if dense_out else wanted, dense_out=dense_out))
    assert gate.passed, gate


def test_nan_reaches_what_it_reaches_in_the_reference_of_sddmm() -> None:
    pattern = random_bsr(128, 250, (32, 32), 0.3, device="cpu", seed=4).pattern
    x, y = (laid_out("row", shape, torch.float32, "cpu", 1) for shape in ((128, 40), (40, 250)))
    x[17, 3] = y[4, 249] = torch.nan
    found = sample(SDDMM, x, y, pattern).values
    assert torch.equal(found.isnan(), sddmm_reference(x, y, pattern).values.isnan())


def test_the_copies_follow_the_values_and_are_shared_with_vendor_dense() -> None:
    a = random_bsr(90, 100, 32, 0.5, dtype=torch.float32, device="cpu", seed=1)
    matches = match(a.pattern, a.pattern.T)
    p = spgemm_problem(a, a.T, matches, True)
    c = SPGEMM.default(p)
    work = SPGEMM.prepare(p, c, matches)
    for factor in (1, -2, 3):
        with torch.no_grad():
            a.values.mul_(factor)
        out = poisoned((90, 90), torch.float32)
        SPGEMM.launch(c, work, a, a.T, matches, out)
        assert check_spgemm(a, a.T, out).passed
    assert dense_copy(a).data_ptr() == dense_copy(a).data_ptr()


def test_what_does_not_fit_the_memory_is_refused() -> None:
    p = replace(sddmm_problem(*SDDMM_CASES[0].make()), m=2**20, n=2**20)
    (reason,) = SDDMM.why_not(replace(p, card=H200))
    assert reason == "X @ Y takes 2048.0 GiB; at most 69.5 GiB are given to it"
    a, b, _ = SPGEMM_CASES[0].make()
    p = replace(spgemm_problem(a, b, match(a.pattern, b.pattern), True), m=2**17, k=2**18, n=2**17, card=H200)
    (reason,) = SPGEMM.why_not(p)
    assert reason == "dense copies of A and B take 128.0 GiB; at most 69.5 GiB are given to them"
    (reason,) = SPGEMM.why_not(replace(p, dense_out=False))
    assert reason == "dense copies of A, B and C take 160.0 GiB; at most 69.5 GiB are given to them"


def test_they_run_only_by_name_and_say_why() -> None:
    assert SDDMM.only_by_name == "it allocates all of X @ Y"
    assert SPGEMM.only_by_name == "it keeps dense copies of A and B"
    a, b, _ = SPGEMM_CASES[0].make()
    p = spgemm_problem(a, b, match(a.pattern, b.pattern), True)
    (note,) = SPGEMM.notes(p, SPGEMM.default(p))
    assert note.startswith("NaN or Inf in a block of A fills rows of C")


def test_predictions_do_not_depend_on_the_pairs() -> None:
    a, b, _ = SPGEMM_CASES[0].make()
    p = spgemm_problem(a, b, match(a.pattern, b.pattern), True)
    c = SPGEMM.default(p)
    assert SPGEMM.seconds(p, c) == SPGEMM.seconds(replace(p, pairs=1), c) > 0
