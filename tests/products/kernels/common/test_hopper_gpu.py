"""hopper.spmm with epilogues and transposed operands, hopper.sddmm and hopper.spgemm on a GPU.

Right on every case and config, the same bits, nothing written beside the output, CUDA graphs. Inputs are fresh in every
run; a failure names the seed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core import dtypes
from sparsek.engine import table as kernels
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.plan.matches import match
from sparsek.products.plan.operands import layout
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue, slope
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_sddmm, check_spgemm
from tests import sampling
from tests.attn.kernels.planned import problem, sddmm_problem, spgemm_problem
from tests.engine.launch.drawn import fresh
from tests.products.cases import EPILOGUE_CASES, Case, judged_by, laid_out
from tests.products.pattern_cases import (
    SDDMM_CASES,
    SPGEMM_CASES,
    SddmmCase,
    SpgemmCase,
    unmet_blocks_poisoned,
    unmet_rows_poisoned,
)

pytestmark = pytest.mark.gpu
SPMM, SDDMM, SPGEMM = (kernels.load(f"hopper.{op}") for op in ("spmm", "sddmm", "spgemm"))
LOW = ("bf16", "fp16")
HALF = torch.bfloat16
LAYOUTS = tuple(product(("row", "col"), repeat=2))
BLOCKS = (
    (128, 128),
    (64, 64),
    (32, 32),
    (16, 16),
    (48, 96),
    (80, 80),
    (512, 112),
    (192, 64),
    (128, 512),
    (16, 64),
)
COLUMNS = ("col", "col", "col")
EPILOGUES = (
    *EPILOGUE_CASES,
    Case(100, 77, 64, (32, 32), "ragged for TMA", 0.6, 0.5, True, "gelu", "add", 0.25),
    Case(104, 77, 61, (32, 32), "ragged linear for TMA", 0.6, 0.5, True, "silu", "mul", layouts=COLUMNS),
    Case(520, 224, 40, (512, 112), "tall blocks", bias=True, activation="relu", layouts=COLUMNS),
    Case(80, 160, 136, (80, 80), "slices that overlap", 0.9, bias=True, combine="mul"),
)
REFUSED = {  # what hopper.spmm has to leave to others, and why
    "C by columns other by rows": "16 bytes",
    "C by rows other by columns": "16 bytes",
    "other strided": "16 bytes",
    "other not aligned": "16 bytes",
    "ragged": "must hold a multiple of 8",
    "ragged linear": "must hold a multiple of 8",
    "one column": "must hold a multiple of 8",
}


def in_one_dtype(cases: Sequence[Any]) -> list[tuple[Any, str]]:
    """Each case in a dtype, in every run others: dtypes differ in conversions alone."""
    return [(case, dtype) for case in cases for dtype in sampling.sampled(LOW, 1, of=str(case))]


def padded(x: Tensor) -> Tensor:
    """The same matrices with a leading stride that TMA takes, and NaN beside them."""
    if layout(x) == "col":
        return padded(x.mT).mT
    rows, columns = x.shape[-2:]
    whole = poisoned((*x.shape[:-2], rows, -(-columns // 8) * 8 + 8), x.dtype, x.device)
    whole[..., :columns] = x
    return whole[..., :columns]


def room(like: str, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """An output full of NaN inside a tensor full of NaN, by rows or by columns."""
    if like == "col":
        *batch, rows, columns = shape
        return room("row", *batch, columns, rows, dtype=dtype).mT
    return padded(poisoned(shape, dtype, "cuda"))


def kept_inside(x: Tensor) -> bool:
    """True if all NaN beside x, which `padded` or `room` made, is still there."""
    whole = x._base
    assert whole is not None
    return int(whole.isnan().sum()) - int(x.isnan().sum()) == whole.numel() - x.numel()


def cut(p: SpmmProblem) -> Any:
    """The first config with split rows. A tile that is held is never a part."""
    return next(replace(c, split=True) for c in SPMM.configs(p) if not c.held)


def check_c(c: Any, p: SpmmProblem, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue, seed: int) -> None:
    """Launches one config and judges C. `out` is from `padded` or `room`."""
    assert SPMM.why_not(p) == []
    judged = replace(judged_by(epilogue), slope=None)
    if out.numel():
        SPMM.launch(c, SPMM.prepare(p, c, a), a, b, out, epilogue)
    gate = check_spmm(a, b, out, judged)
    assert gate.passed, f"{c} on {p}: {gate}, seed {seed}"
    assert kept_inside(out), f"{c} on {p} wrote beside C, seed {seed}"


def sampled(x: Tensor, y: Tensor, pattern: BlockPattern, c: Any = None) -> BSR:
    """X @ Y at `pattern`, between two blocks that must stay NaN."""
    p = sddmm_problem(x, y, pattern)
    assert SDDMM.why_not(p) == []
    c = SDDMM.default(p) if c is None else c
    whole = poisoned((pattern.nnzb + 2, *pattern.block), x.dtype, "cuda")
    SDDMM.launch(c, SDDMM.prepare(p, c, pattern), x, y, pattern, whole[1:-1])
    assert bool(whole[0].isnan().all()), f"{c} on {p} wrote before the values"
    assert bool(whole[-1].isnan().all()), f"{c} on {p} wrote behind the values"
    return BSR.unchecked(pattern, whole[1:-1])


def joined(
    a: BSR, b: BSR, wanted: BlockPattern | None, dense: bool, change: Callable[[Any], Any] | None = None
) -> Tensor | BSR:
    """A @ B: dense with NaN beside it that must stay, or between two blocks that must. `change` makes the config."""
    matches = match(a.pattern, b.pattern, wanted)
    p = spgemm_problem(a, b, matches, dense)
    assert SPGEMM.why_not(p) == []
    c = SPGEMM.default(p) if change is None else change(p)
    work = SPGEMM.prepare(p, c, matches)
    if dense:
        out = room("row", p.m, p.n, dtype=a.dtype)
        if out.numel():
            SPGEMM.launch(c, work, a, b, matches, out)
        assert kept_inside(out), f"{c} on {p} wrote beside C"
        return out
    whole = poisoned((matches.pattern.nnzb + 2, *p.block), a.dtype, "cuda")
    if matches.pattern.nnzb:
        SPGEMM.launch(c, work, a, b, matches, whole[1:-1])
    assert bool(whole[0].isnan().all()), f"{c} on {p} wrote before the values"
    assert bool(whole[-1].isnan().all()), f"{c} on {p} wrote behind the values"
    return BSR.unchecked(matches.pattern, whole[1:-1])


@pytest.mark.parametrize(("case", "dtype"), in_one_dtype(EPILOGUES), ids=str)
def test_every_epilogue(case: Case, dtype: str) -> None:
    kind, seed = dtypes.parse(dtype), fresh()

    def made() -> tuple[BSR, Tensor, Epilogue, Tensor]:
        a, b, epilogue, out = case.make("cuda", kind, seed)
        if epilogue.other is out:
            out = padded(out)
            return a, padded(b), replace(epilogue, other=out), out
        other = None if epilogue.other is None else padded(epilogue.other)
        return a, padded(b), replace(epilogue, other=other), padded(out)

    if case.note in REFUSED:
        a, b, epilogue, out = case.make("cuda", kind, seed)
        why = SPMM.why_not(problem(a, b, out, epilogue, case.layouts[1]))
        assert any(re.search(REFUSED[case.note], reason) for reason in why), why
        return
    a, b, epilogue, out = made()
    p = problem(a, b, out, epilogue, case.layouts[1])
    first = SPMM.default(p)
    others = replace(first, stages=2), cut(p)
    for c in dict.fromkeys((first, *sampling.dealt(others, 2, EPILOGUES.index(case)))):
        a, b, epilogue, out = made()
        check_c(c, p, a, b, out, epilogue, seed)


def form(name: str, m: int, k: int, n: int, block: tuple[int, int], density: float, **more: Any) -> Any:
    """A, B and C of a product as `launch` takes them. `name` is the product as its caller wrote it."""
    seed = more.pop("seed")
    a = random_bsr(m, k, block, density, dtype=HALF, device="cuda", seed=seed, **more)
    a = a.T if name in ("A.T @ B", "B @ A") else a
    b_lies, c_lies = {"A @ B": ("row", "row"), "A.T @ B": ("row", "row"), "A @ B.T": ("col", "row")}.get(
        name, ("col", "col")
    )
    b = padded(laid_out(b_lies, (a.shape[1], n), HALF, "cuda", seed + 1))
    return a, b, room(c_lies, a.shape[0], n), c_lies


FORMS = ("A @ B", "A @ B.T", "A.T @ B", "B @ A", "B @ A.T")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_product_in_every_block(name: str, block: tuple[int, int]) -> None:
    for n in sampling.dealt((328, 24), 2, FORMS.index(name) + BLOCKS.index(block)):
        seed = fresh()
        a, b, out, lies = form(name, 1000, 904, n, block, 0.4, seed=seed)
        p = problem(a, b, out, PLAIN, lies)
        check_c(SPMM.default(p), p, a, b, out, PLAIN, seed)


JOINED = (("gelu", "add"), ("", "add"), ("", "mul"))


@pytest.mark.parametrize(("activation", "combine"), JOINED)
@pytest.mark.parametrize("block", [(128, 128), (32, 32)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_every_config_of_every_form_with_an_epilogue(
    name: str, block: tuple[int, int], activation: Any, combine: Any
) -> None:
    """Each config takes two seconds to compile: it meets one of the fifteen forms and epilogues, and all meet some."""
    hand = len(JOINED) * FORMS.index(name) + JOINED.index((activation, combine))
    for n, seed in ((328, fresh()), (24, fresh())):
        a, b, out, lies = form(name, 1000, 648, n, block, 0.5, seed=seed)
        bias = torch.randn(a.shape[0], device="cuda").to(HALF)
        other = padded(laid_out(lies, tuple(out.shape), HALF, "cuda", seed + 2))
        epilogue = Epilogue(0.7, bias, activation, other, combine, -0.5)
        p = problem(a, b, out, epilogue, lies)
        for c in sampling.dealt(SPMM.configs(p), len(JOINED) * len(FORMS), hand, of=(block, n)):
            check_c(c, p, a, b, out.fill_(torch.nan), epilogue, seed)


SLOPES = ("gelu", "gelu_tanh", "silu")


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (48, 96)], ids=str)
def test_every_config_writes_the_slope_of_the_rounded_sum(
    block: tuple[int, int], dtype: str, activation: Any
) -> None:
    """C has the bits that it has with another slope, and the slope is that of the published formula."""
    kind = dtypes.parse(dtype)
    unit = torch.finfo(kind).eps
    for name, n, seed in (("B @ A.T", 328, fresh()), ("A @ B", 24, fresh())):
        a, b, out, lies = form(name, 1000, 648, n, block, 0.5, seed=seed)
        a, b, out = a.to(dtype=kind), padded(b.to(kind)), room(lies, *out.shape, dtype=kind)
        slopes = room(lies, *out.shape, dtype=kind)
        bias = torch.randn(a.shape[0], device="cuda").to(kind)
        epilogue = Epilogue(0.1, bias, activation, slope=slopes)
        p = problem(a, b, out, epilogue, lies)
        z = 0.1 * (a.to_dense().double() @ b.double()) + bias.double()[:, None]
        near = 2e-3 * (kind == HALF) + 2e-4 + 2 * unit * (1 + z.abs())
        hand = 2 * SLOPES.index(activation) + LOW.index(dtype)
        for c in sampling.dealt(SPMM.configs(p), 6, hand, of=(block, name)):
            slopes.fill_(torch.nan)
            check_c(c, p, a, b, out.fill_(torch.nan), replace(epilogue, slope=slopes), seed)
            wrong = (slopes.double() - slope(activation, z)).abs() > near
            assert not bool(wrong.any()), f"{c} on {p}: {int(wrong.sum())} slopes are wrong, seed {seed}"
            assert not bool(slopes.isnan().any()), f"{c} on {p} left slopes out, seed {seed}"
            assert kept_inside(slopes), f"{c} on {p} wrote beside the slopes, seed {seed}"


SPLIT = (
    *product(FORMS, ["full", "in place", "added", "added in place"]),
    ("A @ B", "plain"),
    ("B @ A.T", "plain"),
)


@pytest.mark.parametrize(("name", "kind"), SPLIT)
def test_every_config_with_split_rows(name: str, kind: str) -> None:
    """Rows of up to 32 blocks in parts of 4 or a few more."""
    seed = fresh()
    a, b, out, lies = form(name, 2048, 2048, 264, (64, 64), 0.2, seed=seed, pattern="powerlaw")
    epilogue = PLAIN
    if kind in ("full", "added"):
        bias = torch.randn(a.shape[0], device="cuda").to(HALF)
        other = padded(laid_out(lies, tuple(out.shape), HALF, "cuda", seed + 2))
        epilogue = Epilogue(0.7, bias, "gelu" if kind == "full" else "", other, "add", -2.0)
    in_place = kind.endswith("in place")
    if in_place:
        epilogue = Epilogue(other=out, beta=0.5, activation="silu" if kind == "in place" else "")
    p = problem(a, b, out, epilogue, lies)
    cuts = (replace(c, split=True) for c in SPMM.configs(p) if not c.held)
    # Each config meets two of the forms and kinds.
    for c in sampling.dealt(cuts, 11, SPLIT.index((name, kind)), of="split rows"):
        parts = SPMM.prepare(p, c, a).parts
        assert parts is not None
        assert parts.slots > 0, "nothing was split"
        check_c(c, p, a, b, out.fill_(1.0 if in_place else torch.nan), epilogue, seed)


@pytest.mark.parametrize("lies", ["row", "col"])
def test_batches_with_split_rows_share_one_workspace(lies: str) -> None:
    seed = fresh()
    a = random_bsr(1024, 2048, (64, 64), 0.3, pattern="powerlaw", dtype=HALF, device="cuda", seed=seed)
    b = padded(laid_out(lies, (2, 3, 2048, 136), HALF, "cuda", seed))
    out = room(lies, 2, 3, 1024, 136)
    other = padded(laid_out(lies, (2, 3, 1024, 136), HALF, "cuda", seed + 1))
    epilogue = Epilogue(other=other, combine="mul")
    p = problem(a, b, out, epilogue, lies)
    check_c(cut(p), p, a, b, out, epilogue, seed)


@pytest.mark.parametrize("m", [256, 0], ids=["inner side", "no inner side"])
@pytest.mark.parametrize("name", FORMS)
def test_no_stored_blocks_leave_the_epilogue_of_zero(name: str, m: int) -> None:
    """K = 0, or no blocks: there is no memory that TMA could be told of (an invalid tensor map, 2026-11-21)."""
    view = name in ("A.T @ B", "B @ A")
    a, b, out, lies = form(name, *((m, 192) if view else (192, m)), 72, (64, 64), 0.0, seed=fresh())
    bias = torch.randn(192, device="cuda").to(HALF)
    other = padded(laid_out(lies, (192, 72), HALF, "cuda", 1))
    every = (
        PLAIN,
        Epilogue(bias=bias),
        Epilogue(bias=bias, activation="relu"),
        Epilogue(0.5, bias, "gelu", other, "add", 2.0),
    )
    for epilogue in sampling.sampled(every, 2, of=(name, m)):
        p = problem(a, b, out, epilogue, lies)
        for c in (SPMM.default(p), cut(p)):
            check_c(c, p, a, b, out.fill_(torch.nan), epilogue, 0)
            if epilogue.other is None:
                exact = epilogue.apply(torch.zeros(192, 72, device="cuda")).to(HALF)
                assert torch.equal(out, exact), (c, epilogue)


def test_a_bias_may_begin_anywhere() -> None:
    """The first launch compiles for a bias at a multiple of 16 bytes, and is kept."""
    seed = fresh()
    a, b, out, _ = form("A @ B", 256, 256, 136, (64, 64), 0.5, seed=seed)
    long = torch.randn(264, device="cuda").to(HALF)
    for at in (0, 1, 3, 8):
        epilogue = Epilogue(bias=long[at : at + 256])
        p = problem(a, b, out, epilogue)
        check_c(SPMM.default(p), p, a, b, out.fill_(torch.nan), epilogue, seed)


@pytest.mark.parametrize("block", [(128, 128), (48, 96), (16, 64)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_nan_in_rows_of_b_without_blocks_never_reaches_c(name: str, block: tuple[int, int]) -> None:
    view = name in ("A.T @ B", "B @ A")
    sides = (6 * block[0], 5 * block[1])
    kept = torch.tensor([0, 1, 4], device="cuda")
    rows, columns = (kept, kept * 0 + 2) if view else (kept, kept)
    a = BSR.from_coo_blocks(rows, columns, torch.randn(3, *block, device="cuda").to(HALF), sides)
    a = a.T if view else a
    _, b, _, lies = form(name, *sides, 72, block, 0.1, seed=fresh())
    met = torch.zeros(a.grid[1], dtype=torch.bool, device="cuda")
    met[a.pattern.indices.long()] = True
    b[~met.repeat_interleave(a.block[1])] = torch.nan
    out = room(lies, a.shape[0], 72)
    p = problem(a, b, out, PLAIN, lies)
    for c in sampling.sampled(SPMM.configs(p), 2, of=(name, block)):
        check_c(c, p, a, b, out.fill_(torch.nan), PLAIN, 0)


@pytest.mark.parametrize(("case", "dtype"), in_one_dtype(SDDMM_CASES), ids=str)
def test_every_case_of_sddmm(case: SddmmCase, dtype: str) -> None:
    seed = fresh()
    x, y, pattern = case.make("cuda", dtypes.parse(dtype), seed)
    if case.k == 0 or "strided" in case.layouts:
        why = SDDMM.why_not(sddmm_problem(x, y, pattern))
        assert any(re.search("K is 0" if case.k == 0 else "gaps", reason) for reason in why), why
        return
    x, y = (padded(each) for each in unmet_rows_poisoned(x, y, pattern))
    if pattern.nnzb == 0:
        assert sampled(x, y, pattern).values.numel() == 0
        return
    c = SDDMM.default(sddmm_problem(x, y, pattern))
    for each in (c, replace(c, stages=2)):
        gate = check_sddmm(x, y, sampled(x, y, pattern, each))
        assert gate.passed, f"{case} {each}: {gate}, seed {seed}"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_sddmm_of_every_block_and_layout(block: tuple[int, int]) -> None:
    seed = fresh()
    pattern = random_bsr(1000, 1096, block, 0.4, dtype=HALF, device="cuda", seed=seed).pattern
    for x_lies, y_lies in LAYOUTS:
        x = padded(laid_out(x_lies, (1000, 200), HALF, "cuda", seed))
        y = padded(laid_out(y_lies, (200, 1096), HALF, "cuda", seed + 1))
        gate = check_sddmm(x, y, sampled(x, y, pattern))
        assert gate.passed, f"{block} {x_lies} {y_lies}: {gate}, seed {seed}"


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (16, 16), (128, 512)], ids=str)
@pytest.mark.parametrize("lies", LAYOUTS, ids=str)
def test_every_config_of_sddmm(lies: tuple[str, str], block: tuple[int, int]) -> None:
    """More tiles than there are CTAs, and rows from none to all blocks."""
    seed = fresh()
    m, n = (2048, 1984) if min(block) < 128 else (4096, 4032)
    pattern = random_bsr(m, n, block, 0.3, pattern="powerlaw", dtype=HALF, device="cuda", seed=seed).pattern
    x = padded(laid_out(lies[0], (m, 296), HALF, "cuda", seed))
    y = padded(laid_out(lies[1], (296, n), HALF, "cuda", seed + 1))
    p = sddmm_problem(x, y, pattern)
    gate = check_sddmm(x, y, first := sampled(x, y, pattern))
    assert gate.passed, f"{gate}, seed {seed}"
    for c in sampling.dealt(SDDMM.configs(p), 4, LAYOUTS.index(lies), of=block):
        gate = check_sddmm(x, y, sampled(x, y, pattern, c))
        assert gate.passed, f"{c}: {gate}, seed {seed}"
    for _ in range(20):
        assert torch.equal(sampled(x, y, pattern).values, first.values), f"seed {seed}"


def test_nan_of_x_and_y_stays_in_its_row_and_column_and_out_of_the_padding() -> None:
    pattern = random_bsr(250, 184, (64, 64), 1.0, dtype=HALF, device="cuda", seed=1).pattern
    x, y = (padded(laid_out("row", sides, HALF, "cuda", 2)) for sides in ((250, 72), (72, 184)))
    clean = sampled(x, y, pattern)
    x[77], y[:, 180] = torch.nan, torch.inf
    spoiled = sampled(x, y, pattern)
    padding = torch.zeros(256, 192, dtype=torch.bool, device="cuda")
    padding[250:], padding[:, 184:] = True, True
    blocks = padding.view(4, 64, 3, 64).transpose(1, 2)[pattern.block_rows.long(), pattern.indices.long()]
    assert not spoiled.values[blocks].any(), "the padding is 0"
    found, wanted = spoiled.to_dense(), clean.to_dense()
    assert bool(found[77].isnan().all())
    assert not bool(found[:, 180].isfinite().any())
    found[77], found[:, 180] = wanted[77], wanted[:, 180]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("case", "dtype"), in_one_dtype(SPGEMM_CASES), ids=str)
def test_every_case_of_spgemm(case: SpgemmCase, dtype: str) -> None:
    seed = fresh()
    a, b, wanted = case.make("cuda", dtypes.parse(dtype), seed)
    a, b = unmet_blocks_poisoned(a, b, wanted)
    for dense in (True, False) if wanted is None else (False,):
        if dense and case.n % 8:
            why = SPGEMM.why_not(spgemm_problem(a, b, match(a.pattern, b.pattern, wanted), dense))
            assert any("rows of a dense C that are multiples of 16 bytes" in reason for reason in why), why
            continue
        for direct in (True, False):
            out = joined(a, b, wanted, dense, lambda p, d=direct: replace(SPGEMM.default(p), direct=d))
            gate = check_spgemm(a, b, out)
            assert gate.passed, f"{case} dense {dense} direct {direct}: {gate}, seed {seed}"


PAIRED = (
    ((128, 128), (128, 128)),
    ((64, 64), (64, 64)),
    ((32, 32), (32, 48)),
    ((16, 16), (16, 16)),
    ((48, 96), (96, 80)),
    ((512, 112), (112, 128)),
    ((192, 64), (64, 384)),
    ((16, 64), (64, 16)),
    ((128, 128), (128, 512)),
)


@pytest.mark.parametrize("blocks", PAIRED, ids=str)
def test_spgemm_of_every_block_and_view(blocks: tuple[tuple[int, int], tuple[int, int]]) -> None:
    seed = fresh()
    (bm, bk), (_, bn) = blocks
    for a_view, b_view in product((False, True), repeat=2):
        of_a = (904, 1000, (bk, bm)) if a_view else (1000, 904, (bm, bk))
        of_b = (1096, 904, (bn, bk)) if b_view else (904, 1096, (bk, bn))
        a = random_bsr(*of_a, 0.3, dtype=HALF, device="cuda", seed=seed)
        b = random_bsr(*of_b, 0.3, dtype=HALF, device="cuda", seed=seed + 1)
        a, b = a.T if a_view else a, b.T if b_view else b
        for dense in (True, False):
            gate = check_spgemm(a, b, joined(a, b, None, dense))
            assert gate.passed, f"{blocks} views {a_view} {b_view} dense {dense}: {gate}, seed {seed}"


VIEWS = tuple(product((False, True), repeat=2))


@pytest.mark.parametrize("block", [128, 64, 16])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "bsr"])
@pytest.mark.parametrize("views", VIEWS, ids=str)
def test_every_config_of_spgemm(views: tuple[bool, bool], dense: bool, block: int) -> None:
    """More tiles than there are CTAs, and blocks of C with no pair up to all of K."""
    seed = fresh()
    side = {128: 2560, 64: 1600, 16: 496}[block]

    def made(view: bool, at: int) -> BSR:
        x = random_bsr(side, side, block, 0.15, pattern="powerlaw", dtype=HALF, device="cuda", seed=seed + at)
        return x.T if view else x

    a, b = made(views[0], 0), made(views[1], 1)
    p = spgemm_problem(a, b, match(a.pattern, b.pattern), dense)
    every = (replace(c, direct=d) for c in SPGEMM.configs(p) for d in (False, True))
    for c in sampling.dealt(every, 4, 2 * VIEWS.index(views) + dense, of=block):
        found = [joined(a, b, None, dense, lambda p, c=c: c) for _ in range(3)]
        gate = check_spgemm(a, b, found[0])
        assert gate.passed, f"{c}: {gate}, seed {seed}"
        first, *others = (x if isinstance(x, Tensor) else x.values for x in found)
        assert all(torch.equal(first, other) for other in others), f"{c}, seed {seed}"


def test_nan_of_a_block_of_a_stays_in_its_rows_and_out_of_the_padding() -> None:
    a = random_bsr(250, 190, (64, 64), 0.6, dtype=HALF, device="cuda", seed=1)
    b = random_bsr(190, 184, (64, 64), 1.0, dtype=HALF, device="cuda", seed=2)
    clean = joined(a, b, None, dense=False)
    values = a.values.clone()
    values[a.pattern.block_rows == 1, 7] = torch.nan
    spoiled = joined(BSR.unchecked(a.pattern, values), b, None, dense=False)
    assert isinstance(clean, BSR)
    assert isinstance(spoiled, BSR)
    last = spoiled.pattern.indices == 2
    assert not spoiled.values[last][:, :, 184 - 128 :].any(), "the padding is 0"
    found, wanted = spoiled.to_dense(), clean.to_dense()
    assert bool(found[64 + 7].isnan().all())
    found[64 + 7] = wanted[64 + 7]
    assert torch.equal(found, wanted)


def operands(op: str, sides: tuple[int, int, int], seed: int = 0) -> tuple[Callable[[], Any], Any, Any, Any]:
    """A call of the op by its Hopper kernel, what it reads, and how its result is judged."""
    m, k, n = sides
    a = random_bsr(m, k, (64, 64), 0.4, dtype=HALF, device="cuda", seed=seed)
    if op == "spgemm":
        b = random_bsr(k, n, (64, 64), 0.4, dtype=HALF, device="cuda", seed=seed + 1)
        call = lambda: sk.spgemm(a, b, out="bsr", kernel="hopper.spgemm")  # noqa: E731
        return call, a.values, b.values, lambda out: check_spgemm(a, b, out).passed
    if op == "sddmm":
        x, y = (laid_out("row", each, HALF, "cuda", seed) for each in ((m, n), (n, k)))
        call = lambda: sk.sddmm(x, y, a.pattern, kernel="hopper.sddmm")  # noqa: E731
        return call, x, y, lambda out: check_sddmm(x, y, out).passed
    x = laid_out("row", (n, k), HALF, "cuda", seed)
    bias = torch.randn(m, device="cuda").to(HALF)
    call = lambda: sk.linear(x, a, bias, "gelu", kernel="hopper.spmm")  # noqa: E731
    judged = Epilogue(bias=bias, activation="gelu")
    return call, a.values, x, lambda out: check_spmm(a, x.mT, out.mT, judged).passed


SIZES = {"whole": (512, 320, 192), "ragged": (504, 312, 200)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["spmm", "sddmm", "spgemm"])
def test_a_planned_call_never_waits_for_the_device(op: str, size: str, no_sync: Callable[[], Any]) -> None:
    call, _, _, right = operands(op, SIZES[size])
    call()
    torch.cuda.synchronize()
    with no_sync():
        out = call()
    assert right(out)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["spmm", "sddmm", "spgemm"])
def test_a_captured_graph_replays_with_new_values_in_place(op: str, size: str) -> None:
    seed = fresh()
    call, first, second, right = operands(op, SIZES[size], seed)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    found = out if isinstance(out, Tensor) else out.values
    for turn in range(3):
        for each in (first, second):
            each.mul_(-1.5 if turn % 2 else 0.75)  # what is 0 outside the matrix stays so
        found.fill_(torch.nan)
        graph.replay()
        assert right(out), f"replay {turn}, seed {seed}"


def test_a_view_first_multiplied_in_a_graph_multiplies_outside_of_it_too() -> None:
    """Where the blocks of a view lie is found at the first launch: a graph that is not replayed leaves it unknown."""
    for at in range(2):  # the first turn loads the kernel
        a = random_bsr(256, 320, (64, 64), 0.5, dtype=HALF, device="cuda", seed=at).T
        b = random_bsr(192, 256, (64, 64), 0.5, dtype=HALF, device="cuda", seed=at + 2).T
        plan = sk.plan_spgemm(a, b, "dense", kernel="hopper.spgemm")
        if at == 1:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                plan(a, b)
        assert check_spgemm(a, b, plan(a, b)).passed
