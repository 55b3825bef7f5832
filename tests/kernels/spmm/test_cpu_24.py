"""cpu.semi24 and cpu.bsr24: every config, any sizes, and what may never reach C. test_cpu.py runs the cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.device import CPU, H200
from sparsek.kernels.spmm import cpu as cpu_spmm
from sparsek.kernels.spmm import cpu_24 as cpu_semi24
from sparsek.kernels.spmm import cpu_bsr24
from sparsek.kernels.table import load
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.semi24 import Semi24
from sparsek.testing.cases import BSR24_CASES, SEMI24_CASES, Case
from tests.kernels.planned import hold, multiply, problem, semi24_cases
from tests.problems import spmm_problem

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("cases", [SEMI24_CASES, BSR24_CASES], ids=["semi24", "bsr24"])
def test_every_config_gives_every_case_within_budget(cases: tuple[Case, ...]):
    kernel = load(f"cpu.{cases[0].op}")
    smallest = cpu_semi24.Pieces if cases is SEMI24_CASES else cpu_spmm.CpuConfig
    for at, case in enumerate(cases):
        a, b, epilogue, out = case.make(dtype=torch.bfloat16)
        configs = list(kernel.configs(problem(a, b, out, epilogue, turned=case.turned)))
        assert len(configs) == 8
        for config in (configs[at % 8], smallest(step_bytes=1, wide=bool(at % 2))):
            hold(kernel, case, torch.bfloat16, seed=at, config=config)


@settings(max_examples=30)
@given(case=semi24_cases(), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 2**20))
def test_any_semi24_is_within_budget(case, dtype, seed):
    config = cpu_semi24.Pieces(step_bytes=4096, wide=dtype == torch.float16)
    hold(cpu_semi24.KERNEL, case, dtype, seed=seed, config=config)


@settings(max_examples=20)
@given(
    m=st.integers(0, 200),
    k=st.integers(0, 200),
    n=st.integers(0, 24),
    block=st.sampled_from([(64, 64), (128, 64), (64, 128)]),
    density=st.sampled_from([0.0, 0.4, 1.0]),
    view=st.booleans(),
    bias=st.booleans(),
    layouts=st.tuples(st.sampled_from(["row", "col"]), st.sampled_from(["row", "col"]), st.just("row")),
    seed=st.integers(0, 2**20),
)
def test_any_bsr24_is_within_budget(m, k, n, block, density, view, bias, layouts, seed):
    how = {"view": view, "bias": bias, "activation": "silu", "combine": "add", "beta": -1.0}
    case = Case(m, k, n, block, "any", density, two_four=True, layouts=layouts, **how)
    hold(cpu_bsr24.KERNEL, case, torch.float32, seed=seed)


def test_a_sum_is_rounded_once_where_it_is_wide():
    a = Semi24.from_dense(torch.eye(16, dtype=torch.bfloat16))
    b = torch.full((16, 8), 1 + 2.0**-7, dtype=torch.bfloat16)
    out = multiply(cpu_semi24.KERNEL, a, b, config=cpu_semi24.Pieces(wide=True))
    assert torch.equal(out, b)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("family", ["cpu", "reference"])
def test_nan_in_rows_of_b_without_a_block_never_reaches_c(family: str, bad: float):
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()
    a = BSR24.from_bsr(BSR.from_dense(torch.randn(192, 320), 64, mask=mask))
    for turned in (False, True):
        index = a.pattern.block_rows if turned else a.pattern.indices
        met = torch.zeros(a.grid[0 if turned else 1], dtype=torch.bool)
        met[index.long()] = True
        assert not bool(met.all())
        b = torch.randn(a.shape[0 if turned else 1], 24)
        clean = multiply(load(f"{family}.bsr24"), a, b, turned=turned)
        b[~met.repeat_interleave(64)] = bad
        assert torch.equal(multiply(load(f"{family}.bsr24"), a, b, turned=turned), clean)


def test_values_that_ask_for_a_gradient_are_read_and_c_does_not():
    a, b, epilogue, out = SEMI24_CASES[2].make(dtype=torch.float32)
    assert isinstance(a, Semi24)
    learning = Semi24.unchecked(a.values.clone().requires_grad_(), a.meta)
    found = multiply(cpu_semi24.KERNEL, learning, b.requires_grad_(), epilogue, out)
    assert not found.requires_grad


@pytest.mark.parametrize("n", [1, 16, 256, 1024])
def test_the_cpu_kernels_are_predicted_faster_than_the_references(n: int):
    for more in ({}, {"block": (64, 64), "nnzb": 256, "row_max": 8}):
        for dtype in ("bf16", "fp32", "fp64"):
            p = spmm_problem(two_four=True, m=2048, k=2048, n=n, dtype=dtype, card=CPU, **more)
            fast, slow = load(f"cpu.{p.a.kind}"), load(f"reference.{p.a.kind}")
            assert slow.seconds(p, slow.default(p)) > fast.seconds(p, fast.default(p)) > 0


def test_the_cpu_kernels_refuse_cuda_tensors():
    for p in (
        spmm_problem(two_four=True, m=64, k=64, n=8, dtype="bf16", card=H200),
        spmm_problem(two_four=True, m=64, k=64, n=8, dtype="bf16", card=H200, block=(64, 64), nnzb=1),
    ):
        assert load(f"cpu.{p.a.kind}").why_not(p) == ["runs on CPU tensors only"]
        assert load(f"reference.{p.a.kind}").why_not(p) == []
