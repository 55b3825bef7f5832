"""cpu.sddmm against the reference in float64, on every case, dtype, layout and config; and its speed."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from sparsek.core.device import H200
from sparsek.kernels.sddmm.cpu import KERNEL, CpuSddmmConfig
from sparsek.matrix.random import random_bsr
from sparsek.reference.sddmm import sddmm as reference
from sparsek.testing.cases import laid_out
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_sddmm
from sparsek.testing.product_cases import SDDMM_CASES, SddmmCase, unmet_rows_poisoned
from tests.kernels.lang import timed
from tests.kernels.planned import sample, sddmm_problem
from tests.sampling import sampled

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
LAYOUTS = ["row", "col", "strided", "wide"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", SDDMM_CASES, ids=str)
def test_every_case_is_within_budget_in_every_dtype(case: SddmmCase, dtype: torch.dtype) -> None:
    x, y, pattern = case.make(dtype=dtype)
    x, y = unmet_rows_poisoned(x, y, pattern)
    gate = check_sddmm(x, y, sample(KERNEL, x, y, pattern))
    assert gate.passed, gate


@pytest.mark.parametrize(
    ("case", "strips", "dtype"),
    sampled(list(product(SDDMM_CASES, (False, True), (torch.float16, torch.float32))), 68),
    ids=str,
)
def test_steps_and_strips_are_within_budget(case: SddmmCase, strips: bool, dtype: torch.dtype) -> None:
    x, y, pattern = case.make(dtype=dtype)
    x, y = unmet_rows_poisoned(x, y, pattern)
    for step_bytes in (1, 1 << 14, 1 << 21):
        config = CpuSddmmConfig(step_bytes, dtype == torch.float16, strips)
        gate = check_sddmm(x, y, sample(KERNEL, x, y, pattern, config))
        assert gate.passed, (config, gate)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_config_is_within_budget(dtype: torch.dtype) -> None:
    pattern = random_bsr(200, 300, (48, 32), 0.4, pattern="powerlaw", device="cpu", seed=2).pattern
    x, y = laid_out("row", (200, 70), dtype, "cpu", 1), laid_out("col", (70, 300), dtype, "cpu", 2)
    for config in KERNEL.configs(sddmm_problem(x, y, pattern)):
        gate = check_sddmm(x, y, sample(KERNEL, x, y, pattern, config))
        assert gate.passed, (config, gate)


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_y", LAYOUTS)
@pytest.mark.parametrize("shape", [(96, 128), (90, 100)])
def test_any_strides_of_x_and_y_are_within_budget(shape, of_x: str, of_y: str, strips: bool) -> None:
    pattern = random_bsr(shape[0], shape[1], (32, 16), 0.4, pattern="powerlaw", device="cpu", seed=1).pattern
    x = laid_out(of_x, (shape[0], 33), torch.float32, "cpu", 1)
    y = laid_out(of_y, (33, shape[1]), torch.float32, "cpu", 2)
    gate = check_sddmm(x, y, sample(KERNEL, x, y, pattern, CpuSddmmConfig(1 << 14, False, strips)))
    assert gate.passed, gate


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nan_reaches_what_it_reaches_in_the_reference(dtype: torch.dtype, bad: float, strips: bool) -> None:
    pattern = random_bsr(128, 250, (32, 32), 0.3, device="cpu", seed=4).pattern
    x, y = laid_out("row", (128, 40), dtype, "cpu", 1), laid_out("row", (40, 250), dtype, "cpu", 2)
    x[17, 3] = y[4, 249] = y[5, 100] = bad
    s = sample(KERNEL, x, y, pattern, CpuSddmmConfig(strips=strips))
    right = reference(x, y, pattern).values
    assert torch.equal(s.values.isfinite(), right.isfinite())


def test_inputs_that_need_gradients_are_multiplied() -> None:
    pattern = random_bsr(64, 64, (32, 32), 0.5, device="cpu", seed=1).pattern
    x, y = torch.randn(64, 8, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    assert not sample(KERNEL, x, y, pattern).values.requires_grad


@pytest.mark.parametrize("strips", [False, True])
def test_the_same_call_gives_the_same_bits(strips: bool) -> None:
    pattern = random_bsr(512, 512, (32, 32), 0.2, pattern="powerlaw", device="cpu", seed=1).pattern
    x, y = torch.randn(512, 48), torch.randn(48, 512)
    config = CpuSddmmConfig(1 << 16, strips=strips)
    first = sample(KERNEL, x, y, pattern, config).values
    assert all(torch.equal(first, sample(KERNEL, x, y, pattern, config).values) for _ in range(10))


def test_only_the_values_are_written() -> None:
    pattern = random_bsr(100, 90, (32, 32), 0.5, device="cpu", seed=1).pattern
    x, y = torch.randn(100, 24), torch.randn(24, 90)
    before = x.clone(), y.clone()
    p = sddmm_problem(x, y, pattern)
    c = KERNEL.default(p)
    around = poisoned((pattern.nnzb + 2, 32, 32), torch.float32)
    KERNEL.launch(c, KERNEL.prepare(p, c, pattern), x, y, pattern, around[1:-1])
    assert bool(around[[0, -1]].isnan().all())
    assert bool(around[1:-1].isfinite().all())
    assert torch.equal(before[0], x)
    assert torch.equal(before[1], y)


def test_it_says_that_it_is_for_cpu_tensors() -> None:
    p = sddmm_problem(*SDDMM_CASES[0].make())
    assert KERNEL.why_not(p) == []
    assert KERNEL.why_not(replace(p, card=H200)) == ["runs on CPU tensors only"]


def test_configs_read_well() -> None:
    assert str(CpuSddmmConfig()) == "steps of 2048 KiB"
    assert str(CpuSddmmConfig(1 << 19, True)) == "steps of 512 KiB, in float32"
    assert str(CpuSddmmConfig(strips=True)) == "strips of X times all of Y, 2048 KiB of S each"


def test_strips_are_taken_where_small_blocks_fill_the_matrix() -> None:
    sparse, full = (random_bsr(512, 512, 16, each, device="cpu", seed=1).pattern for each in (0.1, 1.0))
    x, y = torch.empty(512, 256), torch.empty(256, 512)
    assert not KERNEL.default(sddmm_problem(x, y, sparse)).strips
    assert KERNEL.default(sddmm_problem(x, y, full)).strips


SIZES = [(1024, 64, 32), (1024, 256, 64), (1024, 256, 128)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("dtype", "size"), list(product([torch.float32, torch.bfloat16], SIZES)), ids=str)
def test_it_is_faster_than_dense(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    """12.5 % stored."""
    side, k, block = size
    pattern = random_bsr(side, side, block, 0.125, device="cpu", seed=1).pattern
    x, y = laid_out("row", (side, k), dtype, "cpu", 1), laid_out("row", (k, side), dtype, "cpu", 2)
    values, dense = x.new_empty(pattern.nnzb, block, block), x.new_empty(side, side)
    p = sddmm_problem(x, y, pattern)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, pattern)
    calls = {
        "cpu.sddmm": lambda: KERNEL.launch(c, work, x, y, pattern, values),
        "dense": lambda: torch.matmul(x, y, out=dense),
    }
    # In bf16 this size takes 0.9 to 1.1 of dense's time, by the hour (a Xeon, 2026-11-26).
    timed.hold(calls, 1.25 if (dtype, k, block) == (torch.bfloat16, 256, 64) else 1)
