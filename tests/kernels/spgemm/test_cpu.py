"""cpu.spgemm against the reference in float64, on every case, dtype and config; and its speed."""

import itertools
from dataclasses import replace
from itertools import product

import pytest
import torch

from sparsek.core.device import H200
from sparsek.kernels.spgemm.cpu import KERNEL, CpuSpgemmConfig
from sparsek.matrix.bsr import BSR
from sparsek.matrix.random import random_bsr
from sparsek.plan.matches import match
from sparsek.reference.spgemm import spgemm as reference
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_spgemm
from sparsek.testing.product_cases import SPGEMM_CASES, SpgemmCase, unmet_blocks_poisoned
from tests.kernels.lang import timed
from tests.kernels.planned import join, spgemm_problem
from tests.sampling import sampled

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("case", "dtype", "dense_out"),
    sampled(list(itertools.product(SPGEMM_CASES, FLOATS, (False, True))), 72),
    ids=str,
)
def test_every_case_is_within_budget_in_every_dtype(
    case: SpgemmCase, dtype: torch.dtype, dense_out: bool
) -> None:
    a, b, wanted = case.make(dtype=dtype)
    wanted = None if dense_out else wanted
    a, b = unmet_blocks_poisoned(a, b, wanted)
    gate = check_spgemm(a, b, join(KERNEL, a, b, wanted, dense_out=dense_out))
    assert gate.passed, gate


@pytest.mark.parametrize("dense_out", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_config_is_within_budget(dtype: torch.dtype, dense_out: bool) -> None:
    a = random_bsr(200, 300, (48, 32), 0.4, pattern="powerlaw", dtype=dtype, device="cpu", seed=2)
    b = random_bsr(300, 170, (32, 16), 0.4, pattern="powerlaw", dtype=dtype, device="cpu", seed=3)
    p = spgemm_problem(a, b, match(a.pattern, b.pattern), dense_out)
    for config in [*KERNEL.configs(p), CpuSpgemmConfig(1)]:
        gate = check_spgemm(a, b, join(KERNEL, a, b, dense_out=dense_out, config=config))
        assert gate.passed, (config, gate)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_reaches_what_it_reaches_in_the_reference(bad: float) -> None:
    a, b = (
        random_bsr(s[0], s[1], 16, 0.5, dtype=torch.float32, device="cpu", seed=s[0])
        for s in ((90, 100), (100, 70))
    )
    a.values[3, 2, 5] = b.values[4, 1, 1] = bad
    right = reference(a, b)
    made = join(KERNEL, a, b, dense_out=False)
    assert isinstance(made, BSR)
    assert torch.equal(made.values.isfinite(), right.values.isfinite())
    dense = join(KERNEL, a, b, dense_out=True)
    assert torch.equal(dense.isfinite(), right.to_dense().isfinite())  # type: ignore[union-attr]


def test_a_dense_output_with_gaps_between_its_rows_is_written() -> None:
    a = random_bsr(90, 100, 16, 0.3, dtype=torch.float32, device="cpu", seed=1)
    matches = match(a.pattern, a.pattern.T)
    p = spgemm_problem(a, a.T, matches, True)
    c = KERNEL.default(p)
    around = poisoned((90, 120), torch.float32)
    KERNEL.launch(c, KERNEL.prepare(p, c, matches), a, a.T, matches, around[:, 8:98])
    assert check_spgemm(a, a.T, around[:, 8:98]).passed
    assert bool(around[:, :8].isnan().all() & around[:, 98:].isnan().all())


def test_values_that_changed_after_prepare_are_used() -> None:
    a, b = (random_bsr(64, 64, 16, 0.5, dtype=torch.float32, device="cpu", seed=s) for s in (1, 2))
    matches = match(a.pattern, b.pattern)
    p = spgemm_problem(a, b, matches, True)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, matches)
    a.values.mul_(3)
    out = poisoned((64, 64), torch.float32)
    KERNEL.launch(c, work, a, b, matches, out)
    assert check_spgemm(a, b, out).passed


def test_inputs_that_need_gradients_are_multiplied() -> None:
    a, b = (random_bsr(64, 64, 16, 0.5, dtype=torch.float32, device="cpu", seed=s) for s in (1, 2))
    a.values.requires_grad_()
    b.values.requires_grad_()
    for dense_out in (False, True):
        made = join(KERNEL, a, b, dense_out=dense_out)
        assert not (made.values if isinstance(made, BSR) else made).requires_grad


def test_the_same_call_gives_the_same_bits() -> None:
    a = random_bsr(512, 512, (32, 32), 0.2, pattern="powerlaw", dtype=torch.float32, device="cpu", seed=1)
    first = join(KERNEL, a, a.T, dense_out=True)
    assert isinstance(first, torch.Tensor)
    assert all(torch.equal(first, join(KERNEL, a, a.T, dense_out=True)) for _ in range(10))  # type: ignore[arg-type]


def test_it_says_that_it_is_for_cpu_tensors() -> None:
    a, b, _ = SPGEMM_CASES[0].make()
    p = spgemm_problem(a, b, match(a.pattern, b.pattern), True)
    assert KERNEL.why_not(p) == []
    assert KERNEL.why_not(replace(p, card=H200)) == ["runs on CPU tensors only"]


def test_configs_read_well() -> None:
    assert str(CpuSpgemmConfig()) == "steps of 1024 KiB"
    assert str(CpuSpgemmConfig(1 << 19, wide=True)) == "steps of 512 KiB, in float32"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("dtype", "block"), list(product([torch.float32, torch.bfloat16], [32, 128])), ids=str
)
def test_it_is_faster_than_dense(dtype: torch.dtype, block: int) -> None:
    """12.5 % of both stored, dense output."""
    side = 1024
    a, b = (random_bsr(side, side, block, 0.125, dtype=dtype, device="cpu", seed=s) for s in (1, 2))
    left, right, out = a.to_dense(), b.to_dense(), torch.empty(side, side, dtype=dtype)
    matches = match(a.pattern, b.pattern)
    p = spgemm_problem(a, b, matches, True)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, matches)
    calls = {
        "cpu.spgemm": lambda: KERNEL.launch(c, work, a, b, matches, out),
        "dense": lambda: torch.matmul(left, right, out=out),
    }
    timed.hold(calls, 1)
