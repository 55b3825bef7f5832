"""portable.spmm_skinny, portable.sddmm and portable.spgemm on a GPU: right on every case and config; the same bits;
streams that overlap; CUDA graphs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine import table as kernels
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.sddmm import portable as sddmm
from sparsek.products.kernels.spgemm import portable as spgemm
from sparsek.products.kernels.spmm import portable_skinny as spmm_skinny
from sparsek.products.reference.epilogue import PLAIN
from sparsek.testing.budget import check_spmm, using_tf32
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_sddmm, check_spgemm
from tests.attn.kernels.planned import join, multiply, problem, sample, sddmm_problem
from tests.products.cases import EPILOGUE_CASES, SPMM_CASES, judged_by, laid_out
from tests.products.pattern_cases import SDDMM_CASES, SPGEMM_CASES, unmet_blocks_poisoned, unmet_rows_poisoned
from tests.sampling import EVERY, dealt, sampled

pytestmark = pytest.mark.gpu
HALF = torch.bfloat16
SKINNY = spmm_skinny.KERNEL


def kind(case: Any) -> torch.dtype:
    """Half precision cases run in bf16, which the interpreter cannot."""
    return HALF if case.dtype == "fp16" else dtypes.parse(case.dtype)


def check_c(kernel: Any, a: BSR, b: Tensor, out: Tensor, config: Any = None, epilogue: Any = PLAIN) -> None:
    judged = judged_by(epilogue)
    multiply(kernel, a, b, epilogue, out, config=config)
    gate = check_spmm(a, b, out, judged)
    assert gate.passed, f"{kernel.name} {a} times {tuple(b.shape)} {config}: {gate}"


@pytest.mark.parametrize("case", [c for c in EPILOGUE_CASES if c.n <= spmm_skinny.WIDEST], ids=str)
def test_every_epilogue_with_cut_rows(case: Any) -> None:
    a, b, epilogue, out = case.make("cuda", kind(case))
    if a.nnzb and out.numel():
        c = replace(SKINNY.default(problem(a, b, out, epilogue)), part=1)
        check_c(SKINNY, a, b, out, c, epilogue)


@pytest.mark.parametrize("name", ["portable.spmm", "portable.spmm_skinny"])
def test_products_in_tf32(name: str) -> None:
    """Triton multiplies as TF32 where torch does."""
    a = random_bsr(256, 320, (64, 64), 0.4, device="cuda", dtype=torch.float32)
    b = torch.randn(320, 64, device="cuda", dtype=torch.float32)
    with using_tf32(True):
        p = problem(a, b)
        assert p.tf32
        out = multiply(kernels.load(name), a, b)
    gate = check_spmm(a, b, out, tf32=True)
    assert gate.passed, gate


@pytest.mark.parametrize("case", [c for c in SPMM_CASES if c.n <= 64], ids=str)
def test_every_narrow_case_in_every_layout(case: Any) -> None:
    (same, turned) = ((("row", "row"), ("col", "col")), (("row", "col"), ("col", "row")))
    for layout, out_layout in same + turned if EVERY else sampled((same, turned), 1, of=str(case))[0]:
        a, *_ = case.make("cuda", kind(case))
        b = laid_out(layout, (case.k, case.n), a.dtype, "cuda", 1)
        out = poisoned((case.m, case.n), a.dtype, "cuda")
        check_c(SKINNY, a, b, out if out_layout == "row" else poisoned(out.mT.shape, a.dtype, "cuda").mT)


@pytest.mark.parametrize("shape", [(2048, 512), (512, 2048)], ids=str)
@pytest.mark.parametrize("n", [1, 16, 64])
def test_every_config_of_the_skinny_path(shape: tuple[int, int], n: int) -> None:
    a = random_bsr(*shape, (128, 128), 0.5, pattern="powerlaw", dtype=HALF, device="cuda", seed=n)
    for hand, matrix in enumerate((a, a.T)):
        b = laid_out("col", (matrix.shape[1], n), HALF, "cuda", 1)
        out = poisoned((n, matrix.shape[0]), HALF, "cuda").mT
        p = problem(matrix, b, out)
        every = [*SKINNY.configs(p), *(replace(c, part=1) for c in SKINNY.configs(p))]
        for c in dealt(every, 4, 2 * hand + (shape[0] > shape[1]), of=n):
            check_c(SKINNY, matrix, b, out.fill_(torch.nan), c)


def cut_operands(seed: int) -> tuple[BSR, Tensor, Tensor, Any, Any]:
    a = random_bsr(1024, 8192, (128, 128), 0.5, dtype=HALF, device="cuda", seed=seed)
    b = laid_out("col", (8192, 16), HALF, "cuda", seed)
    out = poisoned((16, 1024), HALF, "cuda").mT
    p = problem(a, b, out)
    c = replace(SKINNY.default(p), part=2)
    return a, b, out, c, SKINNY.prepare(p, c, a)


def test_cut_rows_give_the_same_bits_and_leave_their_counters_zero() -> None:
    a, b, out, c, work = cut_operands(0)
    SKINNY.launch(c, work, a, b, out)
    first = out.clone()
    for _ in range(100):
        SKINNY.launch(c, work, a, b, out.fill_(torch.nan))
        assert torch.equal(out, first)
    assert not any(arrivals.any() for _, arrivals in work.rooms.values())


def test_calls_of_one_plan_on_two_streams_do_not_meet() -> None:
    a, b, out, c, work = cut_operands(1)
    others = [torch.randn_like(b) for _ in range(2)]
    right = [out.clone() for _ in others]
    for other, wanted in zip(others, right, strict=True):
        SKINNY.launch(c, work, a, other, wanted)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in others]
    found = [[torch.empty_like(out) for _ in range(50)] for _ in others]
    for at in range(50):
        for stream, other, mine in zip(streams, others, found, strict=True):
            with torch.cuda.stream(stream):
                SKINNY.launch(c, work, a, other, mine[at])
    torch.cuda.synchronize()
    assert len(work.rooms) == 3
    for wanted, mine in zip(right, found, strict=True):
        assert all(torch.equal(each, wanted) for each in mine)


def test_graphs_of_one_plan_replay_side_by_side_without_a_sync(no_sync: Any) -> None:
    a, b, out, c, work = cut_operands(2)
    SKINNY.launch(c, work, a, b, out)
    wanted = out.clone()
    graphs, outs = [], []
    for _ in range(spmm_skinny.SPARE + 2):  # the last two have no spare counters left
        graph, mine = torch.cuda.CUDAGraph(), torch.empty_like(out)
        with torch.cuda.graph(graph):
            SKINNY.launch(c, work, a, b, mine)
            SKINNY.launch(c, work, a, b, mine)
        graphs.append(graph)
        outs.append(mine)
    streams = [torch.cuda.Stream() for _ in graphs]
    with no_sync():
        for _ in range(20):
            for stream, graph, mine in zip(streams, graphs, outs, strict=True):
                with torch.cuda.stream(stream):
                    mine.fill_(torch.nan)
                    graph.replay()
        SKINNY.launch(c, work, a, b, out)
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in [*outs, out])


@pytest.mark.parametrize("case", SDDMM_CASES, ids=str)
def test_every_case_of_sddmm(case: Any) -> None:
    x, y, pattern = case.make("cuda", kind(case))
    x, y = unmet_rows_poisoned(x, y, pattern)
    every = sddmm.KERNEL.configs(sddmm_problem(x, y, pattern))
    for config in (None, *sampled(every, 3, of=str(case))):
        gate = check_sddmm(x, y, sample(sddmm.KERNEL, x, y, pattern, config))
        assert gate.passed, f"{case} {config}: {gate}"


@pytest.mark.parametrize("case", SPGEMM_CASES, ids=str)
def test_every_case_of_spgemm(case: Any) -> None:
    a, b, wanted = case.make("cuda", kind(case))
    if not any(case.views):
        a, b = unmet_blocks_poisoned(a, b, wanted)
    for dense in (True, False) if wanted is None else (False,):
        gate = check_spgemm(a, b, join(spgemm.KERNEL, a, b, wanted, dense_out=dense))
        assert gate.passed, f"{case} dense {dense}: {gate}"


def test_products_of_small_blocks_at_size_with_every_config(no_sync: Any) -> None:
    a = random_bsr(2048, 2048, (64, 64), 0.1, pattern="powerlaw", dtype=HALF, device="cuda", seed=4)
    x, y = torch.randn(2048, 1024, device="cuda").to(HALF), torch.randn(2048, 1024, device="cuda").to(HALF).mT
    p = sddmm_problem(x, y, a.pattern)
    for c in sddmm.KERNEL.configs(p):
        values = poisoned(a.values.shape, HALF, "cuda")
        with no_sync():
            sddmm.KERNEL.launch(c, sddmm.KERNEL.prepare(p, c, a.pattern), x, y, a.pattern, values)
        gate = check_sddmm(x, y, BSR.unchecked(a.pattern, values))
        assert gate.passed, f"{c}: {gate}"
    for dense in (True, False):
        found = [join(spgemm.KERNEL, a, a.T, dense_out=dense) for _ in range(2)]
        one, other = (each if isinstance(each, Tensor) else each.values for each in found)
        assert torch.equal(one, other)
        assert check_spgemm(a, a.T, found[0]).passed
