"""cpu.bsr24: every config, any sizes, and what may never reach C. test_spmm.py runs the cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.engine.launch.kinds import CpuConfig
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.kernels.spmm import cpu_bsr24
from tests.attn.kernels.planned import hold, multiply, problem
from tests.products.cases import BSR24_CASES, Case

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def test_every_config_gives_every_case_within_budget():
    kernel = cpu_bsr24.KERNEL
    for at, case in enumerate(BSR24_CASES):
        a, b, epilogue, out = case.make(dtype=torch.bfloat16)
        configs = list(kernel.configs(problem(a, b, out, epilogue, turned=case.turned)))
        assert len(configs) == 8
        for config in (configs[at % 8], CpuConfig(step_bytes=1, wide=bool(at % 2))):
            hold(kernel, case, torch.bfloat16, seed=at, config=config)


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
