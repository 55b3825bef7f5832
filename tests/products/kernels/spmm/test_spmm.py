"""Every kernel of A @ B that takes whole lists of cases, on its devices: within the error budget, or refused.

hopper.spmm and what it shares with portable.spmm: test_spmm_gpu.py. In Triton's interpreter: spmm_interpreted.py.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from sparsek.core import dtypes
from sparsek.engine.table import load
from sparsek.testing.budget import CORE
from tests.attn.kernels.planned import hold, problem
from tests.engine.launch.drawn import fresh
from tests.products.cases import (
    BSR24_CASES,
    COL,
    EPILOGUE_CASES,
    FP8_CASES,
    SEMI24_CASES,
    SPMM_CASES,
    Case,
)
from tests.sampling import sampled

Item = tuple[str, Case, torch.dtype]
LOW = (torch.bfloat16, torch.float16, torch.float32)
FLOATS = (*LOW, torch.float64)
OF_BSR = (*SPMM_CASES, *EPILOGUE_CASES)
NARROW = 64  # columns, of portable.spmm_skinny


def by_turns(name: str) -> Iterator[Item]:
    """FP8 cases, each with one dtype of C."""
    return ((name, case, LOW[at % 3]) for at, case in enumerate(FP8_CASES))


def drawn(cases: Iterable[Case], name: str = "") -> Iterator[Item]:
    """Each case in one dtype, in every run others. Without `name` by the portable kernel of its storage."""
    for case in cases:
        of = name or f"{'unpacked' if '24' in case.op else 'portable'}.{case.op}"
        yield from ((of, case, dtype) for dtype in sampled(LOW, 1, of=str(case)))


ON_A_CPU: list[Item] = [
    *sampled(
        [
            *product(("cpu.spmm",), OF_BSR, FLOATS),
            *product(("reference.semi24",), SEMI24_CASES, FLOATS),
            *product(("cpu.bsr24",), BSR24_CASES, FLOATS),
            *by_turns("reference.spmm_fp8"),
        ],
        115,
    ),
    *sampled(list(product(("vendor.dense",), OF_BSR, FLOATS)), 140),
    *by_turns("vendor.cublas_fp8"),
]
ON_A_GPU: list[Item] = [
    *product(("vendor.dense",), OF_BSR, LOW),
    *(
        (name, case, torch.bfloat16 if case.dtype == "fp16" else dtypes.parse(case.dtype))
        for name in ("portable.spmm", "portable.spmm_skinny")
        for case in EPILOGUE_CASES
        if name == "portable.spmm" or case.n <= NARROW
    ),
    *drawn((*SEMI24_CASES, *BSR24_CASES, *FP8_CASES)),
    *drawn(FP8_CASES, "vendor.cublas_fp8"),
]


def is_taken_by_cublas(case: Case) -> bool:
    assert case.scales is not None
    across = case.m if case.layouts == COL else case.n
    both_e5m2 = case.scales.dtype == case.scales.b_dtype == torch.float8_e5m2
    return bool(case.k and case.k % 16 == across % 16 == 0 and case.scales.a != "block" and not both_e5m2)


@pytest.mark.parametrize(
    ("device", "name", "case", "dtype"),
    [
        *(pytest.param("cpu", *item) for item in ON_A_CPU),
        *(pytest.param("cuda", *item, marks=pytest.mark.gpu) for item in ON_A_GPU),
    ],
    ids=str,
)
def test_every_case_is_within_budget_or_refused(
    device: str, name: str, case: Case, dtype: torch.dtype
) -> None:
    kernel: Any = load(name)
    seed = 0 if case.scales is None else fresh()
    a, b, epilogue, out = case.make(device, dtype, seed)
    p = problem(a, b, out, epilogue, turned=case.turned)
    why_not, empty = kernel.why_not(p), False
    if name == "vendor.cublas_fp8":
        if device == "cpu":
            assert bool(why_not) != is_taken_by_cublas(case)
        elif why_not:
            pytest.skip("the library does not take it")
        if why_not:
            return
    if name == "vendor.dense":  # what it refuses is right all the same, without NaN
        empty = not p.stats.touches_all_columns
        assert not empty or "block column of A is empty" in why_not[0]
    # On a CPU, kernels of SparseK sum FP8 in float32 throughout: nothing is lost as on a tensor core.
    core = 0.0 if device == "cpu" and not name.startswith("vendor") else CORE
    hold(kernel, case, dtype, device, seed, core=core, refused=empty)


def test_cublas_takes_enough_of_the_cases() -> None:
    assert sum(map(is_taken_by_cublas, FP8_CASES)) >= 8
