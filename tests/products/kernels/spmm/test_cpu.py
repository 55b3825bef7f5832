"""cpu.spmm: views, layouts, configs, memory and speed. test_spmm.py runs the cases."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.spmm.cpu import CpuConfig
from sparsek.products.reference.epilogue import Epilogue
from sparsek.products.reference.spmm import spmm as reference
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import hold, multiply, problem
from tests.engine.launch import timed
from tests.engine.launch.covering import once
from tests.products.cases import (
    EPILOGUE_CASES,
    SPMM_CASES,
    Case,
    judged_by,
)

KERNEL = load("cpu.spmm")
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", SPMM_CASES, ids=str)
def test_transposed_views_are_within_budget(case: Case, dtype: torch.dtype) -> None:
    assert case.block is not None
    bm, bk = case.block
    turned = replace(case, m=case.k, k=case.m, n=min(case.n, 64), block=(bk, bm), view=True)
    hold(KERNEL, turned, dtype)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("case", EPILOGUE_CASES, ids=str)
def test_every_epilogue_is_within_budget_in_small_steps(case: Case, wide: bool) -> None:
    hold(KERNEL, case, torch.bfloat16 if wide else torch.float32, config=CpuConfig(1, wide))


def test_wide_products_are_rounded_once() -> None:
    a = BSR.from_dense(torch.eye(32, dtype=torch.bfloat16), 16, threshold=0)
    b = torch.full((32, 8), 1 + 2.0**-7, dtype=torch.bfloat16)
    epilogue = Epilogue(alpha=1 + 2.0**-7, bias=torch.full((32,), -1.0, dtype=torch.bfloat16))
    out = multiply(KERNEL, a, b, epilogue, poisoned((32, 8), b.dtype), config=CpuConfig(wide=True))
    assert torch.equal(out, reference(a, b, epilogue))


def test_the_epilogue_reaches_a_batch_that_no_view_can_join() -> None:
    a = random_bsr(70, 64, (32, 32), 0.5, dtype=torch.float32, device="cpu", seed=1)
    b, bias = torch.randn(2, 3, 64, 8), torch.randn(70)
    out = torch.randn(3, 2, 70, 8).transpose(0, 1)
    for other in (torch.randn(2, 3, 70, 8), torch.randn(70, 8).expand(2, 3, 70, 8), out):
        epilogue = Epilogue(bias=bias, activation="silu", other=other)
        judged = judged_by(epilogue)
        assert check_spmm(a, b, multiply(KERNEL, a, b, epilogue, out), judged).passed


def _layouts(k: int, n: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {
        "row-major": torch.randn(k, n, generator=draw),
        "transpose view": torch.randn(n, k, generator=draw).mT,
        "every other column": torch.randn(k, 2 * n, generator=draw)[:, ::2],
        "wider leading stride": torch.randn(k, n + 24, generator=draw)[:, 8 : 8 + n],
        "one column repeated": torch.randn(k, 1, generator=draw).expand(k, n),
        "batch": torch.randn(3, k, n, generator=draw),
        "two batch dims, swapped": torch.randn(2, 3, k, n, generator=draw).transpose(0, 1),
        "batch of transpose views": torch.randn(3, n, k, generator=draw).mT,
        "one matrix repeated": torch.randn(k, n, generator=draw).expand(4, k, n),
        "empty batch": torch.randn(0, k, n, generator=draw),
    }


@pytest.mark.parametrize("layout", list(_layouts(1, 1)))
@pytest.mark.parametrize("n", [9, 1100])
def test_any_strides_and_batch_of_b_are_within_budget(layout: str, n: int) -> None:
    a = random_bsr(100, 90, (32, 16), 0.4, pattern="powerlaw", dtype=torch.float32, device="cpu", seed=1)
    b = _layouts(90, n)[layout]
    gate = check_spmm(a, b, multiply(KERNEL, a, b))
    assert gate.passed, gate


@pytest.mark.parametrize("shape", [(100, 40), (3, 100, 40)])
def test_a_transposed_or_strided_output_is_fully_written(shape: tuple[int, ...]) -> None:
    a = random_bsr(100, 90, (32, 16), 0.4, pattern="powerlaw", dtype=torch.float32, device="cpu", seed=1)
    b = torch.randn(*shape[:-2], 90, 40)
    flipped = poisoned((*shape[:-2], 40, 100), torch.float32).mT
    strided = poisoned((*shape[:-1], 80), torch.float32)[..., ::2]
    swapped = poisoned((*shape[:-2], 2, *shape[-2:]), torch.float32)[..., 1, :, :]
    for out in (flipped, strided, swapped):
        assert check_spmm(a, b, multiply(KERNEL, a, b, out=out)).passed


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_config_is_within_budget(dtype: torch.dtype) -> None:
    a = random_bsr(200, 300, (48, 32), 0.4, pattern="powerlaw", dtype=dtype, device="cpu", seed=2)
    b = torch.randn(300, 70).to(dtype)
    tiny = CpuConfig(step_bytes=1)
    for config in [*KERNEL.configs(problem(a, b)), tiny]:
        gate = check_spmm(a, b, multiply(KERNEL, a, b, config=config))
        assert gate.passed, (config, gate)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_in_untouched_rows_of_b_never_reach_c(bad: float) -> None:
    a = random_bsr(128, 250, (32, 32), 0.2, dtype=torch.float32, device="cpu", seed=4)
    b = torch.randn(250, 40)
    touched = torch.zeros(8, dtype=torch.bool)
    touched[a.pattern.indices.long()] = True
    assert not bool(touched.all())
    b[~touched.repeat_interleave(32)[:250]] = bad
    out = multiply(KERNEL, a, b)
    assert bool(out.isfinite().all())
    assert check_spmm(a, b, out).passed


def test_inf_in_a_ragged_last_block_stays_inf() -> None:
    a = random_bsr(16, 20, (16, 16), 1.0, dtype=torch.float32, device="cpu", seed=4)
    b = torch.ones(20, 3)
    b[19] = torch.inf
    assert bool(multiply(KERNEL, a, b).isinf().all())


def test_values_that_changed_after_prepare_are_used() -> None:
    a = random_bsr(64, 64, (32, 32), 0.5, dtype=torch.float32, device="cpu", seed=1)
    b = torch.randn(64, 8)
    p = problem(a, b)
    work = KERNEL.prepare(p, KERNEL.default(p), a)
    a.values.mul_(3)
    out = poisoned((64, 8), torch.float32)
    KERNEL.launch(KERNEL.default(p), work, a, b, out)
    assert check_spmm(a, b, out).passed


def test_the_same_call_gives_the_same_bits() -> None:
    a = random_bsr(512, 512, (32, 32), 0.2, pattern="powerlaw", dtype=torch.float32, device="cpu", seed=1)
    b = torch.randn(512, 48)
    first = multiply(KERNEL, a, b)
    assert all(torch.equal(first, multiply(KERNEL, a, b)) for _ in range(10))


def test_memory_stays_within_some_steps_and_the_columns_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that a step makes, with a row of A that alone would gather all of B many times."""
    a = random_bsr(4096, 4096, (16, 16), 0.5, dtype=torch.float32, device="cpu", seed=1)
    b = torch.randn(4096, 512)
    largest = 0
    plain = torch.bmm

    def spying(left: Tensor, right: Tensor, **rest: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, left.nbytes, right.nbytes)
        return plain(left, right, **rest)

    monkeypatch.setattr(torch, "bmm", spying)
    config = CpuConfig()
    multiply(KERNEL, a, b, config=config)
    assert 0 < largest <= 8 * config.step_bytes


SIZES = [(1024, 16, 32), (1024, 256, 32), (1024, 1024, 64), (2048, 16, 64), (2048, 64, 128), (2048, 256, 32)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("dtype", "size"), once(product([torch.float32, torch.bfloat16], SIZES)), ids=str)
def test_it_stays_within_twice_the_faster_of_torch_sparse_and_dense(
    dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    """12.5 % stored."""
    side, n, block = size
    a = random_bsr(side, side, (block, block), 0.125, dtype=dtype, device="cpu", seed=1)
    b = torch.randn(side, n).to(dtype)
    dense, bsr = a.to_dense(), a.to_torch()
    out = torch.empty(side, n, dtype=dtype)
    p = problem(a, b)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, a)
    calls = {
        "cpu.spmm": lambda: KERNEL.launch(c, work, a, b, out),
        "dense": lambda: torch.matmul(dense, b, out=out),
        "torch.sparse": lambda: torch.mm(bsr, b),
    }
    if dtype not in (torch.float32, torch.float64):
        del calls["torch.sparse"]  # torch has no BSR product of 16-bit values on the CPU
    timed.hold(calls, 2)
