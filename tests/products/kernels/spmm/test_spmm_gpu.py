"""Every kernel of C = A @ B on a GPU: right on every case, config and layout; the same bits; graphs; nothing leaks.

Inputs are fresh in every run; a failure prints the seed. Compiling dominates: under pytest-xdist every worker
compiles its own share, without it a pool of processes fills Triton's cache first.
"""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core import dtypes
from sparsek.engine import table as kernels
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Combine, Epilogue, EpilogueActivation
from sparsek.products.reference.spmm import spmm as reference
from sparsek.testing.budget import budget, check_spmm, error
from sparsek.testing.poison import poisoned
from sparsek_bench.suites.spmm import BY_BLOCK
from tests.attn.kernels.planned import default_and, multiply, problem
from tests.engine.launch.covering import once
from tests.engine.launch.drawn import fresh, randn
from tests.products.cases import SPMM_CASES, Case, ScaleScopes
from tests.sampling import dealt, sampled

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[3]
NAMES = kernels.names_for("spmm", "bsr")
FAST = ("hopper.spmm", "portable.spmm")
ONLY = {"hopper.spmm_mma": (16, 16)}  # blocks
LOW = ("bf16", "fp16")
HALF = torch.bfloat16


def matrix(
    m: int, k: int, block: tuple[int, int], density: float = 0.4, dtype: torch.dtype = HALF, seed: int = 0
) -> BSR:
    return random_bsr(m, k, block, density, pattern="powerlaw", dtype=dtype, device="cuda", seed=seed)


class Room(NamedTuple):
    """An output with padded rows inside a tensor full of NaN."""

    whole: Tensor
    out: Tensor

    def spoiled(self) -> bool:
        """True if something was written beside the output."""
        return not bool(self.whole[..., self.out.shape[-1] :].isnan().all())


def room(m: int, n: int, dtype: torch.dtype, *batch: int) -> Room:
    whole = poisoned((*batch, m, -(-n // 8) * 8 + 8), dtype, "cuda")
    return Room(whole, whole[..., :n])


def operands(case: Case, dtype: str, layout: str, seed: int) -> tuple[BSR, Tensor]:
    """A of the case, and B with a padded leading stride that is a multiple of 16 bytes."""
    kind = dtypes.parse(dtype)
    torch.manual_seed(seed)
    a, *_ = case.make("cuda", dtype=kind, seed=seed)
    if layout == "row":
        return a, randn(case.k, -(-case.n // 8) * 8 + 8, dtype=kind)[:, : case.n]
    return a, randn(case.n, -(-case.k // 8) * 8 + 8, dtype=kind)[:, : case.k].mT


def configs(kernel: Any, p: SpmmProblem) -> list[Any]:
    """The kernel's default, that with the shortest ring, where slots are used again soonest, and two of the others."""
    if kernel.name != "hopper.spmm":
        return [kernel.default(p)]
    default, *others = default_and(2, kernel, p, of=p)
    return list(dict.fromkeys((default, replace(default, stages=2), *others)))


class Judge:
    """The exact product of one pair, and how wrong an output may be."""

    def __init__(self, a: BSR, b: Tensor) -> None:
        self.exact = reference(a.to(dtype=torch.float64), b.double())
        self.allowed = budget(a.to_dense(), b, self.exact)

    def check(self, out: Tensor, what: object) -> None:
        found = error(out, self.exact)
        assert found <= self.allowed, f"{what}: error {found:.3g}, allowed {self.allowed:.3g}"


def launched(kernel: Any, p: SpmmProblem, c: Any, a: BSR, b: Tensor, out: Tensor) -> None:
    """One call without the planner's choice."""
    if out.numel():
        kernel.launch(c, kernel.prepare(p, c, a), a, b, out)


Item = tuple[str, int, str, str]


def kinds(item: Item) -> list[tuple[object, ...]]:
    """What each run holds: every case by each kernel, and every block of A in each dtype and with each layout of B."""
    name, at, dtype, layout = item
    block = SPMM_CASES[at].block
    return [(name, at), (name, block, dtype), (name, block, layout), (name, dtype, layout)]


ITEMS = once(
    [
        (name, at, dtype, layout)
        for at, case in enumerate(SPMM_CASES)
        for name, dtype, layout in product(FAST, LOW, ("row", "col"))
        if not (case.n == 1 and layout == "col")  # one column is row-major whatever its stride
    ],
    kinds,
)


def multiply_case(item: Item) -> None:
    name, at, dtype, layout = item
    case, kernel, seed = SPMM_CASES[at], kernels.load(name), fresh()
    a, b = operands(case, dtype, layout, seed)
    judge = Judge(a, b)
    target = room(case.m, case.n, b.dtype)
    p = problem(a, b, target.out)
    if name == "hopper.spmm" and case.n % 8:
        assert any("multiple of 8" in reason for reason in kernel.why_not(p))
        return
    assert kernel.why_not(p) == []
    for c in configs(kernel, p):
        target.whole.fill_(float("nan"))
        launched(kernel, p, c, a, b, target.out)
        judge.check(target.out, f"{case} {dtype} {layout} {name}: {c}, seed {seed}")
        assert not target.spoiled(), f"{case} {dtype} {layout} {name}: {c} wrote beside C, seed {seed}"


def _compile_ahead(item: Item) -> None:
    try:
        multiply_case(item)
    except Exception as problem:  # the test itself will say it
        print(item, problem)


@pytest.fixture(scope="module", autouse=True)
def warm_cache() -> None:
    """Without pytest-xdist: every case once in a pool of processes, which leave compiled kernels in Triton's cache."""
    workers = min(12, (os.cpu_count() or 1) - 2)
    if "PYTEST_XDIST_WORKER" not in os.environ and workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(_compile_ahead, ITEMS, chunksize=1))


@pytest.mark.parametrize("item", ITEMS, ids=lambda i: f"{i[0]}-{SPMM_CASES[i[1]]}-in-{i[2]}-{i[3]}")
def test_every_case_config_and_layout_is_within_budget(item: Item) -> None:
    multiply_case(item)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in NAMES if name not in FAST for dtype in sampled(LOW, 1, of=name)],
)
def test_every_other_kernel_that_can_is_within_budget_or_says_why_not(name: str, dtype: str) -> None:
    kernel, ran = kernels.load(name), 0
    for case in SPMM_CASES:
        seed = fresh()
        a, b = operands(case, dtype, "row", seed)
        target = room(case.m, case.n, b.dtype)
        p = problem(a, b, target.out)
        if kernel.why_not(p):
            assert all(isinstance(reason, str) and reason for reason in kernel.why_not(p))
            continue
        launched(kernel, p, kernel.default(p), a, b, target.out)
        Judge(a, b).check(target.out, f"{name} {case} seed {seed}")
        ran += 1
    assert ran or name == "cpu.spmm"


@pytest.mark.parametrize("entry", BY_BLOCK, ids=lambda e: f"{e.case.name}-{e.case.op}")
def test_every_row_of_the_speed_table_is_right_at_full_size(entry: Any) -> None:
    case, seed = entry.case, fresh()
    a, b, *_ = case.make(torch.device("cuda"), seed=seed)
    dense = a.to_dense()
    # Every value is finite, so the dense float64 product is exact too, and takes a tenth of the reference's time.
    exact = dense.double() @ b.double()
    allowed = budget(dense, b, exact)
    del dense
    for name in (*FAST, "vendor.dense"):
        kernel, out = kernels.load(name), poisoned((case.m, case.n), b.dtype, "cuda")
        p = problem(a, b, out)
        if kernel.why_not(p):
            assert name == "vendor.dense", kernel.why_not(p)
            assert not p.stats.touches_all_columns, kernel.why_not(p)
            continue
        sk.spmm(a, b, out=out, kernel=name)
        found = error(out, exact)
        assert found <= allowed, f"{name}: error {found:.3g}, allowed {allowed:.3g}, seed {seed}"


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("layout", ["row", "col"])
def test_batches_of_any_leading_strides_multiply_like_their_members(name: str, layout: str) -> None:
    seed = fresh()
    torch.manual_seed(seed)
    a = matrix(200, 160, (32, 32), seed=seed)
    whole = (
        randn(2, 3, 168, 120)[:, :, :160, :104] if layout == "row" else randn(2, 3, 112, 168)[..., :160].mT
    )
    n = whole.shape[-1]
    for b in (whole, whole.transpose(0, 1), whole[0], whole[:, :1], whole[0, :1].expand(4, 160, n)):
        target = room(200, n, b.dtype, *b.shape[:-2])
        sk.spmm(a, b, out=target.out, kernel=name)
        assert not target.spoiled()
        assert check_spmm(a, b, target.out).passed, f"seed {seed}"
        flat_b, flat_out = b.reshape(-1, 160, n), target.out.reshape(-1, 200, n)
        for one_b, one_out in zip(flat_b, flat_out, strict=True):
            assert torch.equal(sk.spmm(a, one_b.contiguous(), kernel=name), one_out), f"seed {seed}"


UNEVEN = {
    "small": (100, 96, 64, (32, 32)),
    "large and uneven": (4000, 4096, 1000, (128, 64)),
    "slices that overlap": (1000, 640, 520, (80, 80)),
    "merged rows": (4096, 2048, 512, (16, 16)),
}


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("size", UNEVEN)
def test_a_hundred_runs_give_the_same_bits(size: str, name: str) -> None:
    (m, k, n, block), seed = UNEVEN[size], fresh()
    torch.manual_seed(seed)
    a, b = matrix(m, k, block, 0.3, seed=seed), randn(k, n)
    first = sk.spmm(a, b, kernel=name)
    assert check_spmm(a, b, first).passed, f"seed {seed}"
    out = torch.empty_like(first)
    for turn in range(100):
        out.fill_(float("nan"))
        sk.spmm(a, b, out=out, kernel=name)
        assert torch.equal(out.view(torch.int16), first.view(torch.int16)), f"run {turn}, seed {seed}"


@pytest.mark.parametrize(("rows", "found"), [(1, {0.0, 1.0}), (12, {0.0})], ids=["even", "lopsided"])
def test_every_other_tile_of_a_cta_adds_its_blocks_backwards_unless_rows_are_lopsided(
    rows: int, found: set[float]
) -> None:
    """In float32, (1 + 2^26) - 2^26 is 0, and (-2^26 + 2^26) + 1 is 1. Of the rows only the first has blocks."""
    kernel = kernels.load("hopper.spmm")
    dense = torch.zeros(128 * rows, 3 * 128, dtype=HALF, device="cuda")
    dense[:128, 0], dense[:128, 128], dense[:128, 256] = 1, 2.0**26, -(2.0**26)
    a, b = (
        BSR.from_dense(dense, block=128, threshold=0),
        torch.ones(3 * 128, 256 * (500 // rows), dtype=HALF, device="cuda"),
    )
    p = problem(a, b)
    c = kernel.default(p)
    tiles, starts, *_ = kernel.prepare(p, c, a)
    right = torch.full((b.shape[1],), float("nan"))
    for first, last in pairwise(starts.tolist()):
        for t in range(first, last):
            if tiles[t, 2] == 0:
                right[int(tiles[t, 3]) :][: c.block_cols] = (t - first) % 2 if rows == 1 else 0
    out = multiply(kernel, a, b, config=c)
    assert torch.equal(out[:128].float().cpu(), right.expand(128, -1))
    assert set(right.tolist()) == found
    assert not out[128:].any()


REPLAYED: dict[str, tuple[tuple[int, int, int], tuple[int, int]]] = {
    **dict.fromkeys(FAST, ((500, 512, 200), (64, 64))),
    "hopper.spmm_paired": ((1024, 512, 576), (32, 32)),
    "hopper.spmm_mma": ((1000, 512, 576), (16, 16)),
}


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrix", "batch"])
def test_a_captured_graph_replays_with_new_values_in_place(name: str, batch: tuple[int, ...]) -> None:
    seed = fresh()
    torch.manual_seed(seed)
    (m, k, n), block = REPLAYED[name]
    a, b = matrix(m, k, block, seed=seed), randn(*batch, k, n)
    out = poisoned((*batch, m, n), b.dtype, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sk.spmm(a, b, out=out, kernel=name)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sk.spmm(a, b, out=out, kernel=name)
    for _ in range(3):
        b.copy_(torch.randn_like(b))
        values = torch.randn_like(a.values)
        if m % block[0]:  # the rows of padding
            values[a.pattern.block_rows.long() == a.grid[0] - 1, m % block[0] :] = 0
        a.values.copy_(values)
        out.fill_(float("nan"))
        graph.replay()
        assert check_spmm(a, b, out).passed, f"seed {seed}"


LARGE: list[tuple[str, Case]] = [
    ("hopper.semi24", Case(2048, 4096, 3072, None, "large")),
    ("hopper.bsr24", Case(2048, 4096, 3072, (128, 128), "large", 0.3, two_four=True)),
    *(
        ("hopper.semi24_skinny", Case(2048, 8192, n, None, "large", layouts=("col", "row", "row")))
        for n in (16, 32)
    ),
    *(
        ("hopper.semi24_fp8", Case(2048, 4096, 2048, None, "large", scales=ScaleScopes(fast=fast)))
        for fast in (False, True)
    ),
]


@pytest.mark.parametrize(("name", "case"), LARGE, ids=str)
def test_all_configs_and_all_runs_give_the_same_bits(name: str, case: Case) -> None:
    """Sums go in the order of k whatever the tile; a race would show as a run that differs."""
    kernel, seed = kernels.load(name), fresh()
    a, b, epilogue, out = case.make("cuda", HALF, seed)
    first = None
    for c in kernel.configs(problem(a, b, out, epilogue)):
        if name == "hopper.semi24_skinny":
            first = None  # how many parts a sum has, its config says
        for _ in range(8):
            multiply(kernel, a, b, epilogue, out.fill_(float("nan")), config=c)
            first = out.clone() if first is None else first
            assert torch.equal(out, first), f"{c}, seed {seed}"


OF_2_4 = {"hopper.semi24": (96, 136, 256), "hopper.semi24_skinny": (256, 16, 16)}


@pytest.mark.parametrize(
    ("name", "joined"), [("hopper.semi24", False), ("hopper.semi24", True), ("hopper.semi24_skinny", False)]
)
def test_nothing_is_written_beside_the_output_nor_read_beside_the_other_matrix(
    name: str, joined: bool
) -> None:
    kernel, (k, n, _) = kernels.load(name), OF_2_4[name]
    a, b = sk.Semi24.from_dense(randn(200, k)), randn(k, n)
    around = poisoned((202, n + 16), HALF, "cuda")
    around[1:-1, 8:-8] = randn(200, n)
    epilogue = Epilogue(other=around[1:-1, 8:-8]) if joined else PLAIN
    for c in kernel.configs(problem(a, b, epilogue=epilogue)):
        whole = poisoned((202, n + 16), HALF, "cuda")
        out = whole[1:-1, 8:-8]
        multiply(kernel, a, b, epilogue, out, config=c)
        assert check_spmm(a, b, out, epilogue).passed, c
        out.fill_(torch.nan)
        assert whole.isnan().all(), c


@pytest.mark.parametrize("name", OF_2_4)
def test_nan_in_a_row_of_b_stays_with_the_rows_of_a_2_4_matrix_that_name_it(name: str) -> None:
    a, b = sk.Semi24.from_dense(randn(256, 128)), randn(128, OF_2_4[name][2])
    b[37] = torch.nan
    out = multiply(kernels.load(name), a, b)
    named = a.to_dense()[:, 37] != 0
    assert out[named].isnan().all()
    assert not out[~named].isnan().any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (48, 96), (16, 16)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nan_and_inf_in_untouched_rows_of_b_never_reach_c(
    bad: float, block: tuple[int, int], name: str
) -> None:
    kernel = kernels.load(name)
    a = BSR.from_coo_blocks(
        torch.tensor([0, 0, 1, 3], device="cuda"),
        torch.tensor([1, 4, 4, 1], device="cuda"),
        randn(4, *block),
        (5 * block[0], 6 * block[1]),
    )
    n = {"portable.spmm_skinny": 40, "hopper.spmm_paired": 128}.get(name, 72)  # at most 64, panels of 64
    b = randn(a.shape[1], n)
    for j in (0, 2, 3, 5):
        b[j * block[1] : (j + 1) * block[1]] = bad
    out = poisoned((a.shape[0], n), b.dtype, "cuda")
    p = problem(a, b, out)
    if kernel.why_not(p):
        blocks = {"hopper.spmm_paired": ((64, 64), (16, 16)), "hopper.spmm_mma": ((16, 16),)}.get(name)
        assert (blocks and block not in blocks) or name in ("vendor.dense", "cpu.spmm"), kernel.why_not(p)
        return
    for c in configs(kernel, p):
        out.fill_(float("nan"))
        launched(kernel, p, c, a, b, out)
        assert bool(out.isfinite().all()), c
        assert check_spmm(a, b, out).passed, c


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("block", [(48, 96), (80, 80), (16, 64), (112, 16), (192, 64)], ids=str)
def test_nan_in_a_neighbouring_block_of_a_stays_in_its_row(block: tuple[int, int], name: str) -> None:
    kernel, seed = kernels.load(name), fresh()
    torch.manual_seed(seed)
    a = random_bsr(4 * block[0], 8 * block[1], block, 0.4, dtype=HALF, device="cuda", seed=seed)
    b = randn(a.shape[1], 136)
    out = poisoned((a.shape[0], 136), b.dtype, "cuda")
    p = problem(a, b, out)
    spoiled = a.values.clone()
    odd = a.pattern.block_rows.long() % 2 == 1
    spoiled[odd] = float("nan")
    for c in configs(kernel, p):
        launched(kernel, p, c, a, b, out)
        clean = out.clone()
        out.zero_()
        launched(kernel, p, c, BSR.unchecked(a.pattern, spoiled), b, out)
        for row in range(4):
            rows = slice(row * block[0], (row + 1) * block[0])
            assert torch.equal(out[rows], clean[rows]) if row % 2 == 0 else bool(out[rows].isnan().all()), (
                c,
                row,
            )


@pytest.mark.parametrize("combine", ["add", "mul"])
def test_tiles_that_wait_in_registers_take_turns_with_another_matrix(combine: Combine) -> None:
    """Every CTA has several tiles, whose pieces meet the other matrix in the same boxes of shared memory."""
    kernel, seed = kernels.load("hopper.spmm"), fresh()
    a, b, other = matrix(4096, 1024, (128, 128), 0.3, seed=seed), randn(1024, 2048), randn(4096, 2048)
    epilogue = Epilogue(0.7, other=other, combine=combine, beta=-0.5)
    configs = [c for c in kernel.configs(problem(a, b, epilogue=epilogue)) if c.held]
    assert configs
    for c in dealt(configs, 2, ["add", "mul"].index(combine)):
        out = multiply(kernel, a, b, epilogue, config=c)
        assert check_spmm(a, b, out, epilogue).passed, f"{c}, seed {seed}"


@pytest.mark.parametrize("activation", ["", "gelu"])
@pytest.mark.parametrize("name", FAST)
def test_another_matrix_in_bf16_may_have_numbers_beyond_fp16(
    name: str, activation: EpilogueActivation
) -> None:
    seed = fresh()
    a, b, other = matrix(256, 256, (64, 64), seed=seed), randn(256, 136), 2.0**30 * randn(256, 136)
    epilogue = Epilogue(activation=activation, other=other, combine="mul")
    out = multiply(kernels.load(name), a, b, epilogue)
    assert check_spmm(a, b, out, epilogue).passed, f"seed {seed}"


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activations_in_fp16_are_as_exact_as_their_fits(activation: EpilogueActivation) -> None:
    """Of every fp16 number up to 1000, by the product with an identity: 2.6e-5, and one rounding."""
    z = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).cuda().view(torch.float16)
    z = torch.where(z.abs() <= 1000, z, 0.0).view(64, 1024)
    a = BSR.from_dense(torch.eye(64, dtype=torch.float16, device="cuda"), block=64, threshold=0)
    epilogue = Epilogue(activation=activation)
    found = multiply(kernels.load("hopper.spmm"), a, z, epilogue).double()
    right = epilogue.apply(z.double())
    assert bool(((found - right).abs() <= 3e-5 + 2.0**-11 * right.abs()).all())


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cpu.spmm"])
def test_out_is_reused_without_a_trace_of_what_it_held(name: str) -> None:
    seed = fresh()
    torch.manual_seed(seed)
    a = random_bsr(256, 256, ONLY.get(name, (64, 64)), 1.0, dtype=HALF, device="cuda", seed=seed)
    out = poisoned((256, 64), HALF, "cuda")
    for _ in range(3):
        b = randn(256, 64)
        assert sk.spmm(a, b, out=out, kernel=name) is out
        assert check_spmm(a, b, out).passed, f"seed {seed}"


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cpu.spmm"])
def test_a_planned_call_never_waits_for_the_device(name: str, no_sync: Callable[[], Any]) -> None:
    block = ONLY.get(name, (64, 64))
    a, b = random_bsr(256, 256, block, 1.0, dtype=HALF, device="cuda", seed=1), randn(256, 64)
    out = poisoned((256, 64), HALF, "cuda")
    plan = sk.plan_spmm(a, b, kernel=name)
    calls = (
        lambda: sk.spmm(a, b, kernel=name),
        lambda: sk.spmm(a, b, out=out, kernel=name),
        lambda: plan(a, b),
        lambda: plan(a, b, out),
    )
    for call in calls:
        call()
    torch.cuda.synchronize()
    with no_sync():
        for call in calls:
            call()
    assert check_spmm(a, b, out).passed


def _row_block(a: BSR, b: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """One block row of A @ B in float64, and A's dense block row."""
    bm, bk = a.block
    indptr = a.pattern.host.indptr
    dense = a.values.new_zeros(bm, a.grid[1] * bk)
    for s in range(int(indptr[row]), int(indptr[row + 1])):
        j = int(a.pattern.host.indices[s])
        dense[:, j * bk : (j + 1) * bk] = a.values[s]
    dense = dense[:, : a.shape[1]]
    return dense.double() @ b.double(), dense


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(
    ("m", "k", "n", "density"),
    [(65536, 64, 33000, 1.0), (33024, 65536, 16, 1.0), (256, 66048, 33000, 0.05)],
    ids=["C", "A", "B"],
)
def test_offsets_past_31_bits_are_right(m: int, k: int, n: int, density: float, name: str) -> None:
    seed = fresh()
    torch.manual_seed(seed)
    block = (128, 128) if k > 64 else (64, 64)
    pattern = sk.BlockPattern.unchecked  # patterns are made by hand: a random one of this size takes a minute
    rows, columns = m // block[0], k // block[1]
    each = max(1, round(density * columns))
    indices = torch.stack([torch.randperm(columns)[:each].sort().values for _ in range(rows)]).int().flatten()
    indptr = torch.arange(rows + 1, dtype=torch.int32) * each
    values = torch.empty(rows * each, *block, dtype=HALF, device="cuda").normal_()
    a = BSR.unchecked(pattern((m, k), block, indptr.cuda(), indices.cuda()), values)
    b = torch.empty(k, n, dtype=HALF, device="cuda").normal_()
    out = torch.empty(m, n, dtype=HALF, device="cuda")
    assert max(out.numel(), b.numel(), values.numel()) >= 2**31
    sk.spmm(a, b, out=out, kernel=name)
    strips = [slice(0, n)] if n < 1000 else [slice(0, 500), slice(n - 500, n)]
    for row, strip in product((0, rows // 2, rows - 1), strips):
        exact, dense = _row_block(a, b[:, strip], row)
        found = error(out[row * block[0] : (row + 1) * block[0], strip], exact)
        assert found <= budget(dense, b[:, strip], exact), f"block row {row}, seed {seed}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [None, *FAST])
def test_torch_compile_sees_one_node(name: "str | None") -> None:
    seed = fresh()
    torch.manual_seed(seed)
    a, b = matrix(256, 320, (64, 64), seed=seed), randn(320, 128)
    step = torch.compile(lambda x: sk.spmm(a, x, kernel=name) + 0, fullgraph=True)
    for x in (b, randn(320, 128)):
        assert check_spmm(a, x, step(x)).passed, f"seed {seed}"
