"""The gates of products: they pass the reference, and nothing that is wrong. The cases: each is what its note says."""

import pytest
import torch
from torch.nn import functional

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.reference.linear import linear, swiglu
from sparsek.products.reference.sddmm import sddmm
from sparsek.products.reference.spgemm import pairs, spgemm
from sparsek.products.reference.spmm import spmm
from sparsek.testing.budget import budget, check_spmm, error
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_linear, check_sddmm, check_spgemm, check_swiglu, stored
from tests.products.cases import EPILOGUE_CASES, Case, judged_by, laid_out
from tests.products.pattern_cases import (
    SDDMM_CASES,
    SPGEMM_CASES,
    SddmmCase,
    SpgemmCase,
    unmet_blocks_poisoned,
    unmet_rows_poisoned,
)


@pytest.mark.parametrize(
    "cases", [SDDMM_CASES, SPGEMM_CASES, EPILOGUE_CASES], ids=["sddmm", "spgemm", "epilogue"]
)
def test_the_names_of_cases_are_unique(cases):
    assert len({str(case) for case in cases}) == len(cases)


@pytest.mark.parametrize("case", SDDMM_CASES, ids=str)
def test_the_reference_of_sddmm_is_within_budget(case: SddmmCase, device: str):
    x, y, pattern = case.make(device)
    x, y = unmet_rows_poisoned(x, y, pattern)
    gate = check_sddmm(x, y, sddmm(x, y, pattern))
    assert gate.passed, gate


@pytest.mark.parametrize("case", SPGEMM_CASES, ids=str)
@pytest.mark.parametrize("dense_out", [False, True])
def test_the_reference_of_spgemm_is_within_budget(case: SpgemmCase, dense_out: bool, device: str):
    a, b, wanted = case.make(device)
    wanted = None if dense_out else wanted
    a, b = unmet_blocks_poisoned(a, b, wanted)
    c = spgemm(a, b, wanted)
    gate = check_spgemm(a, b, c.to_dense() if dense_out else c)
    assert gate.passed, gate


@pytest.mark.parametrize("case", EPILOGUE_CASES, ids=str)
def test_the_reference_of_spmm_is_within_budget(case: Case, device: str):
    a, b, epilogue, out = case.make(device)
    gate = check_spmm(a, b, spmm(a, b, epilogue), judged_by(epilogue))
    assert gate.passed, gate
    assert out.shape == (*case.batch, case.m, case.n)
    assert case.in_place or bool(out.isnan().all())
    assert case.in_place == (epilogue.other is out)


def test_leading_dims_are_judged_as_a_sum():
    pattern = random_bsr(64, 96, 32, 0.5, device="cpu").pattern
    x = laid_out("row", (3, 64, 20), torch.bfloat16, "cpu", 1)
    y = laid_out("row", (3, 20, 96), torch.bfloat16, "cpu", 2)
    s = sddmm(x, y, pattern)
    assert check_sddmm(x, y, s).passed
    s.values[0, 3, 3] += 8
    assert not check_sddmm(x, y, s).passed


def test_the_gate_of_sddmm_is_twice_the_dense_error_at_the_stored_blocks():
    x, y, pattern = SDDMM_CASES[2].make()
    exact = sddmm(x.double(), y.double(), pattern).values
    assert check_sddmm(x, y, sddmm(x, y, pattern)).budget == 2 * error(stored(x @ y, pattern), exact)


def test_the_gate_of_spgemm_is_twice_the_dense_error():
    a, b, _ = SPGEMM_CASES[2].make()
    exact = a.to_dense().double() @ b.to_dense().double()
    gate = check_spgemm(a, b, spgemm(a, b).to_dense())
    assert gate.budget == pytest.approx(2 * error(a.to_dense() @ b.to_dense(), exact), rel=1e-9)


def test_the_gate_of_an_epilogue_is_twice_the_error_of_dense_steps():
    a, b, epilogue, _ = EPILOGUE_CASES[4].make()
    exact = functional.gelu(a.to_dense().double() @ b.double() + epilogue.bias.double()[:, None])  # type: ignore[union-attr]
    steps = functional.gelu(a.to_dense() @ b + epilogue.bias[:, None])  # type: ignore[index]
    assert budget(a.to_dense(), b, exact, epilogue) == 2 * error(steps, exact)


def test_poison_and_small_faults_are_refused_in_sddmm():
    x, y, pattern = SDDMM_CASES[0].make()
    s = sddmm(x, y, pattern)
    assert not check_sddmm(x, y, BSR.unchecked(pattern, poisoned(s.values.shape, s.dtype))).passed
    s.values[1, 5, 5] += 1
    assert not check_sddmm(x, y, s).passed


def test_poison_and_small_faults_are_refused_in_spgemm():
    a, b, _ = SPGEMM_CASES[0].make()
    c = spgemm(a, b)
    assert not check_spgemm(a, b, poisoned(c.shape, c.dtype)).passed
    assert not check_spgemm(a, b, BSR.unchecked(c.pattern, poisoned(c.values.shape, c.dtype))).passed
    c.values[1, 5, 5] += 0.5
    assert not check_spgemm(a, b, c).passed
    assert not check_spgemm(a, b, c.to_dense()).passed


def test_padding_and_blocks_without_pairs_must_be_zero_however_small_the_fault():
    tiny = 1e-7
    x, y, pattern = SDDMM_CASES[12].make()
    s = sddmm(x, y, pattern)
    s.values[-1, -1, 0] = tiny
    assert not check_sddmm(x, y, s).passed
    a, b, wanted = next(case for case in SPGEMM_CASES if "no_pair_meets" in str(case)).make(
        dtype=torch.float32
    )
    found = pairs(a.pattern, b.pattern, wanted)
    empty = next(r for r in range(found.pattern.nnzb) if r not in found.target)
    c = spgemm(a, b, wanted)
    assert check_spgemm(a, b, c).passed
    assert check_spgemm(a, b, c.to_dense()).passed
    c.values[empty, 0, 0] = tiny
    assert not check_spgemm(a, b, c).passed
    assert not check_spgemm(a, b, c.to_dense()).passed


@pytest.mark.parametrize("fault", ["bias", "activation", "other", "alpha"])
def test_a_forgotten_part_of_the_epilogue_is_refused(fault: str):
    case = next(case for case in EPILOGUE_CASES if case.note == "everything added")
    a, b, epilogue, _ = case.make()
    parts = {"bias": None, "activation": "relu", "other": None, "alpha": 1.0}
    wrong = type(epilogue)(**{**epilogue.__dict__, fault: parts[fault]})
    assert not check_spmm(a, b, spmm(a, b, wrong), epilogue).passed


@pytest.mark.parametrize("lead", [(), (6,), (2, 3)], ids=str)
def test_layers_are_judged(lead):
    gate_w, up_w = (random_bsr(64, 96, 32, 0.4, dtype=torch.bfloat16, device="cpu", seed=s) for s in (1, 2))
    x, residual = (laid_out("row", (1, *lead, side), torch.bfloat16, "cpu", side)[0] for side in (96, 64))
    bias = laid_out("row", (1, 64), torch.bfloat16, "cpu", 3)[0]
    y = linear(x, gate_w, bias, "gelu", residual)
    assert check_linear(x, gate_w, y, bias, "gelu", residual).passed
    assert not check_linear(x, gate_w, y, bias, "relu", residual).passed
    assert not check_linear(x, gate_w, y, None, "gelu", residual).passed
    y = swiglu(x, gate_w, up_w)
    assert check_swiglu(x, gate_w, up_w, y).passed
    assert not check_swiglu(x, up_w, gate_w, y).passed


@pytest.mark.parametrize(
    ("layout", "strides"), [("row", (8, 1)), ("col", (1, 6)), ("strided", (16, 2)), ("wide", (13, 1))]
)
def test_matrices_lie_as_they_are_said_to(layout: str, strides: tuple[int, int]):
    x = laid_out(layout, (6, 8), torch.float16, "cpu", 1)
    assert (tuple(x.shape), x.stride()) == ((6, 8), strides)
    assert (x.data_ptr() % 16 != 0) == (layout == "wide")
