"""Every kernel of A @ B that any GPU runs, in Triton's interpreter: cases, bits, NaN, slices, offsets, schedules.

The interpreter multiplies FP8 exactly, and bf16 wrongly.
"""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsek as sk
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.kernels.spmm import portable, portable_skinny
from sparsek.products.kernels.spmm.portable import Config
from sparsek.products.kernels.spmm.portable_fp8 import TABLE
from sparsek.testing.budget import CORE, check_spmm
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import hold, multiply, problem, semi24_cases
from tests.ops.storages import TWO_FOUR, matrix
from tests.problems import changed
from tests.products.cases import (
    BSR24_CASES,
    COL,
    E4M3,
    E5M2,
    EPILOGUE_CASES,
    FP8_CASES,
    ROW,
    SEMI24_CASES,
    SPMM_CASES,
    Case,
    ScaleScopes,
    laid_out,
)
from tests.sampling import half

F16, F32 = torch.float16, torch.float32
SPMM, SKINNY = portable.KERNEL, portable_skinny.KERNEL
FP8: Any = load("portable.spmm_fp8")
SEMI24, BSR24_ = load("unpacked.semi24"), load("unpacked.bsr24")
CUT = Config(32, 64, 64, 1, 1, 1, 2)
OF_BSR_FP8 = [case for case in FP8_CASES if case.op == "spmm_fp8"]
OF_24_FP8 = [case for case in FP8_CASES if "24" in case.op]
EPILOGUES = [case for case in EPILOGUE_CASES if case.dtype != "bf16"]
THIN = [case for case in EPILOGUES if case.n <= 64]


def kernel_of(case: Case) -> Any:
    return load(f"{'unpacked' if '24' in case.op else 'portable'}.{case.op}")


def seed() -> int:
    return int(torch.randint(2**31, ()))


def named(each: Any) -> str:
    return getattr(each, "name", str(each))


def layouts_of(kernel: Any, config: Config | None = None) -> list[Any]:
    """A @ B with B and C by rows and by columns, of few and many columns."""
    widths = (1, 7, 40) if kernel is SKINNY else (1, 7, 24, 130)
    return [
        (kernel, Case(70, 150, n, (32, 48), f"B {b} C {c}", 0.4, layouts=(b, c, "row")), F16, config)
        for n in widths
        for b in ("row", "col")
        for c in ("row", "col")
    ]


HELD: list[tuple[Any, Case, torch.dtype | None, Config | None]] = [
    *(
        (SPMM, case, None, None)
        for case in half([*(c for c in SPMM_CASES if c.dtype != "bf16"), *EPILOGUES[::3]])
    ),
    *((SKINNY, case, None, replace(CUT, part=1)) for case in THIN[::2]),
    *((SKINNY, case, None, None) for case in THIN[1::6]),
    *((kernel_of(case), case, F16, None) for case in half([*SEMI24_CASES, *BSR24_CASES])),
    *((kernel_of(case), case, F32, None) for case in (*SEMI24_CASES[2:18:3], *BSR24_CASES[1:12:3])),
    *((kernel_of(case), case, F32, None) for case in (*half(OF_BSR_FP8), *half(OF_24_FP8))),
    *((FP8, case, F16, None) for case in OF_BSR_FP8[1::6]),
    *half(layouts_of(SPMM)),
    *half(layouts_of(SKINNY, CUT)),
]


def held(
    kernel: Any, case: Case, dtype: torch.dtype | None = None, config: Any = None, drawn: int = 0
) -> None:
    core = 0.0 if case.scales else CORE  # sums of FP8 are in float32 throughout
    hold(kernel, case, dtype, seed=drawn or seed(), config=config, core=core)


@pytest.mark.parametrize(("kernel", "case", "dtype", "config"), HELD, ids=named)
def test_every_case_is_within_its_error_budget(kernel, case, dtype, config):
    held(kernel, case, dtype, config)


@settings(max_examples=8)
@given(
    m=st.integers(0, 70),
    k=st.integers(0, 90),
    n=st.integers(0, 40),
    block=st.sampled_from([(16, 16), (32, 16), (16, 64), (48, 80)]),
    scales=st.sampled_from(
        [ROW, ScaleScopes("block", "tensor", E5M2), ScaleScopes("tensor", "row", E4M3, E5M2)]
    ),
    view=st.booleans(),
    layouts=st.sampled_from([("col", "row", "row"), COL]),
    config=st.sampled_from([None, Config(32, 16, 32, 1, 1, 2), Config(16, 32, 64, 1, 1, 1)]),
    drawn=st.integers(0, 2**20),
)
def test_any_bsr_in_fp8_is_within_budget(m, k, n, block, scales, view, layouts, config, drawn):
    view = view and scales.a != "row"
    case = Case(m, k, n, block, "any", 0.6, scales=scales, view=view, bias=True, layouts=layouts)
    held(FP8, case, F32, config, drawn)


@settings(max_examples=15)
@given(case=semi24_cases())
def test_any_semi24_is_within_budget(case: Case):
    hold(SEMI24, case, F16)


@pytest.mark.parametrize(
    "block", [(16, 16), (32, 32), (64, 64), (48, 96), (80, 48), (256, 128), (16, 64)], ids=str
)
def test_transposed_views_multiply_without_moving_values(block):
    case = Case(
        4 * block[1] - 3, 3 * block[0] - 5, 40, block[::-1], "view", 0.4, view=True, pattern="powerlaw"
    )
    a, *_ = case.make()
    assert a.T.values is a.values
    held(SPMM, case)


@pytest.mark.parametrize("height", portable.HOPPER)
def test_every_config_of_the_tables_gives_the_same_product(height):
    case = Case(2 * height, 192, 136, (height, 16 if height < 64 else 64), "tables", 0.4, pattern="powerlaw")
    tables = portable.HOPPER[height] + portable.AMPERE[height] + portable.TF32
    for c in {replace(c, num_warps=4, num_stages=1, group=1 + c.group % 3) for c in tables}:
        held(SPMM, case, config=c)


def test_every_tile_of_the_other_tables_gives_the_same_product():
    for c in {(c.tile_m, c.tile_n, c.tile_k): c for c in TABLE}.values():
        held(FP8, Case(128, 128, 20, (128, 128), "tables", 1.0, scales=ROW), F32, c)
    for n, table in portable_skinny.LOW.items():
        case = Case(32, 288, n, (32, 32), "tables", 1.0, layouts=COL)
        for tile_m, tile_k in sorted({sides[:2] for sides in table}):
            held(SKINNY, case, config=Config(tile_m, n, tile_k, 1, 1, 1, 5))


@pytest.mark.parametrize("case", [SEMI24_CASES[2], BSR24_CASES[3]], ids=str)
def test_a_config_may_name_any_kernel_that_multiplies_the_unpacked_matrix(case: Case):
    a, b, epilogue, out = case.make(dtype=F16)
    p = problem(a, b, out, epilogue, turned=case.turned)
    named = {c.kernel: c for c in kernel_of(case).configs(p)}
    assert set(named) == {"portable.spmm", "portable.spmm_skinny"}
    for c in named.values():
        held(kernel_of(case), case, F16, c)


BLOCKS: dict[str, tuple[tuple[int, int], ...]] = {
    "portable.spmm": ((32, 16), (64, 64), (48, 112)),
    "portable.spmm_skinny": ((16, 32),),
    **dict.fromkeys(("portable.spmm_fp8", "unpacked.bsr24", "unpacked.bsr24_fp8"), ((64, 64),)),
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("name", "block"), [(name, block) for name in BLOCKS for block in BLOCKS[name]], ids=str
)
def test_nan_and_inf_in_rows_of_b_without_a_block_never_reach_c(
    name: str, block: tuple[int, int], bad: float
):
    kernel, (bm, bk) = load(name), block
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()
    a: Any = BSR.from_dense(torch.randn(3 * bm, 5 * bk).half(), block, mask=mask)
    a = BSR24.from_bsr(a) if "24" in name else a
    for turned in (False, True) if name == "unpacked.bsr24" else (False,):
        met = mask.any(1).repeat_interleave(bm) if turned else mask.any(0).repeat_interleave(bk)
        b: Any = torch.randn(a.shape[0 if turned else 1], 24).half()
        config = CUT if kernel is SKINNY else None
        if "fp8" in name:
            q, b = quantize(a), quantize(b.mT.contiguous()).mT
            clean = multiply(kernel, q, b)
            b.values.view(torch.uint8)[:, ~met] = 0x7F  # NaN, and 480 to the interpreter
            assert torch.equal(multiply(kernel, q, b), clean)
            continue
        clean = multiply(kernel, a, b, turned=turned, config=config)
        b[~met] = bad
        assert torch.equal(multiply(kernel, a, b, turned=turned, config=config), clean)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_inf_in_a_neighbouring_block_row_of_a_stays_in_its_row():
    a = random_bsr(96, 192, (48, 48), 0.5, pattern="powerlaw", dtype=F16, device="cpu", seed=0)
    b, values = torch.randn(192, 20).half(), a.values.clone()
    values[int(a.pattern.host.indptr[1]) :] = float("inf")
    assert torch.equal(multiply(SPMM, BSR.unchecked(a.pattern, values), b)[:48], multiply(SPMM, a, b)[:48])


PLACED = [
    (SPMM, Case(64, 96, 40, (32, 32), "slices"), F16, None),
    (SPMM, Case(70, 150, 24, (32, 48), "slices by columns", layouts=COL), F16, None),
    (SKINNY, Case(93, 288, 16, (32, 32), "slices"), F16, CUT),
    (FP8, OF_BSR_FP8[0], F32, None),
    (SEMI24, SEMI24_CASES[0], F16, None),
    (BSR24_, BSR24_CASES[0], F16, None),
]


@pytest.mark.parametrize(("kernel", "case", "dtype", "config"), PLACED, ids=named)
def test_slices_of_wider_tensors_are_read_and_written_in_place(kernel, case, dtype, config):
    a, b, _, out = case.make(dtype=dtype)
    if isinstance(b, Tensor):
        wide = torch.full((len(b), 3 * case.n), torch.nan, dtype=dtype)
        wide[:, case.n : 2 * case.n] = b
        b = wide[:, case.n : 2 * case.n]
    by_columns = case.layouts[1] == "col"
    rows, columns = out.mT.shape if by_columns else out.shape
    for at in (slice(columns, 2 * columns), slice(0, None, 3)):
        room = poisoned((rows + 3, 3 * columns), dtype)
        made = room[:rows, at]
        multiply(kernel, a, b, out=made.mT if by_columns else made, config=config)
        gate = check_spmm(a, b, made.mT if by_columns else made, core=0.0 if case.scales else CORE)
        assert gate.passed, gate
        made.fill_(torch.nan)
        assert room.isnan().all()


AGAIN: list[tuple[Any, Case, Config | None]] = [
    *((SPMM, Case(130, 230, 40, block, "again", 0.4), None) for block in ((32, 16), (64, 64), (48, 112))),
    *((SPMM, Case(230, 130, 40, block, "again", 0.4, view=True), None) for block in ((16, 32), (112, 48))),
    (SKINNY, Case(157, 432, 16, (32, 48), "again", layouts=COL), CUT),
    *((FP8, OF_BSR_FP8[at], None) for at in (5, 11)),
    *((kernel_of(case), case, None) for case in (*SEMI24_CASES[2:14:11], *BSR24_CASES[3:11:7], OF_24_FP8[5])),
]


@pytest.mark.parametrize(("kernel", "case", "config"), AGAIN, ids=named)
def test_a_second_run_and_offsets_of_64_bits_give_the_same_bits(kernel, case, config, monkeypatch):
    a, b, epilogue, out = case.make()
    how = {"turned": case.turned, "config": config}
    first = multiply(kernel, a, b, epilogue, out.clone(), **how)
    assert torch.equal(multiply(kernel, a, b, epilogue, out.clone(), **how), first)
    p = problem(a, b, out, epilogue, turned=case.turned)
    c = config or kernel.default(p)
    work = kernel.prepare(p, c, a)
    monkeypatch.setattr(portable, "SIZE_LIMIT", 100)
    kernel.launch(c, work, a, b, out, epilogue)
    assert torch.equal(out, first)


def test_batches_of_any_strides_multiply_like_their_members():
    a = random_bsr(40, 72, (16, 32), 0.4, pattern="powerlaw", dtype=F16, device="cpu", seed=0)
    whole = torch.randn(2, 3, 72, 24).half()
    for b in (whole[:1], whole.transpose(0, 1), whole[0], whole[0, :1].expand(2, 72, 24)):
        out = multiply(SPMM, a, b)
        assert check_spmm(a, b, out).passed
        for one, c in zip(b.reshape(-1, 72, 24), out.reshape(-1, 40, 24), strict=True):
            assert torch.equal(multiply(SPMM, a, one), c)


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("kernel", [SPMM, SKINNY], ids=["spmm", "skinny"])
def test_fp32_runs_with_and_without_tf32(kernel, tf32):
    case = (
        Case(100, 160, 72, (64, 32), "fp32", 0.4) if kernel is SPMM else Case(157, 288, 12, (32, 32), "fp32")
    )
    a, b, _, out = case.make(dtype=F32)
    p = changed(problem(a, b, out), tf32=tf32)
    assert kernel.why_not(p) == []
    c = kernel.default(p)
    kernel.launch(c, kernel.prepare(p, c, a), a, b, out)
    assert check_spmm(a, b, out).passed


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 8), (64, 0, 8), (64, 64, 0), (0, 0, 0)])
def test_zero_sized_sides_give_empty_or_zero_products(m, k, n):
    out = multiply(
        SPMM, BSR.from_dense(torch.zeros(m, k).half(), (32, 32), threshold=0), torch.ones(k, n).half()
    )
    assert out.shape == (m, n)
    assert not out.any()


def test_rows_are_scheduled_longest_first_with_ties_in_order():
    a = random_bsr(512, 512, (16, 16), 0.3, pattern="powerlaw", dtype=F16, device="cpu", seed=0)
    p = problem(a, torch.randn(512, 16).half())
    row, start, length = SPMM.prepare(p, SPMM.default(p), a).rows.T.tolist()
    host = a.pattern.host
    assert sorted(row) == list(range(32))
    assert start == [host.indptr[r] for r in row]
    assert [(-count, r) for count, r in zip(length, row, strict=True)] == sorted(
        (-int(host.indptr[r + 1] - host.indptr[r]), r) for r in range(32)
    )


@pytest.mark.parametrize("case", [SPMM_CASES[0], FP8_CASES[0], SEMI24_CASES[0], BSR24_CASES[0]], ids=str)
def test_bf16_is_refused_in_the_interpreter(case: Case):
    a, b, _, out = case.make(dtype=torch.bfloat16)
    assert "bf16 is wrong in Triton's interpreter" in kernel_of(case).why_not(problem(a, b, out))[0]


def heavy(block):
    """Block rows of 9, 0, 1, 4 and 5 blocks, the last one ragged: rows that portable.spmm_skinny cuts."""
    bm, bk = block
    lengths = [9, 0, 1, 4, 5]
    picks = [torch.randperm(9)[:n].sort().values.int() for n in lengths]
    indptr = torch.tensor([0, *lengths]).cumsum(0).int()
    values = torch.randn(sum(lengths), *block).half()
    values[14:, bm - 3 :] = 0
    return BSR(BlockPattern((5 * bm - 3, 9 * bk), block, indptr, torch.cat(picks)), values)


def cut_product(a, n, layouts=("col", "col"), config=CUT):
    """Operands, and what the kernel makes of them, which is judged."""
    b = laid_out(layouts[0], (a.shape[1], n), F16, "cpu", 3)
    out = poisoned((a.shape[0], n), F16) if layouts[1] == "row" else poisoned((n, a.shape[0]), F16).mT
    multiply(SKINNY, a, b, out=out, config=config)
    gate = check_spmm(a, b, out)
    assert gate.passed, f"{a} {config}: {gate}"
    return b, out


@pytest.mark.parametrize("layouts", [(b, c) for b in ("row", "col") for c in ("row", "col")], ids=str)
@pytest.mark.parametrize("n", [1, 7, 40])
def test_cut_rows_in_every_layout_of_b_and_c(n, layouts):
    cut_product(heavy((32, 32)), n, layouts)


@pytest.mark.parametrize("block", [(16, 16), (48, 96), (128, 16), (80, 48)], ids=str)
@pytest.mark.parametrize("view", [False, True], ids=["stored", "view"])
def test_cut_rows_of_any_block_and_of_transposed_views(block, view):
    cut_product(
        heavy(block).T if view else heavy(block), 16, config=CUT if view else Config(64, 16, 128, 1, 1, 1, 3)
    )


def test_cut_rows_of_batches_that_no_view_joins():
    a = heavy((16, 32))
    b, out = torch.randn(2, 3, a.shape[1], 5).half().transpose(0, 1), poisoned((3, 2, a.shape[0], 5), F16)
    assert check_spmm(a, b, multiply(SKINNY, a, b, out=out, config=CUT)).passed


def test_cut_rows_give_the_same_bits_again_and_counters_return_to_zero(monkeypatch):
    a = heavy((32, 48))
    b, out = cut_product(a, 16)
    work = SKINNY.prepare(problem(a, b, out), CUT, a)
    first = out.clone()
    for limit in (portable.SIZE_LIMIT, portable.SIZE_LIMIT, 1000):
        monkeypatch.setattr(portable, "SIZE_LIMIT", limit)
        SKINNY.launch(CUT, work, a, b, out.fill_(torch.nan))
        assert torch.equal(out, first)
        ((sums, arrivals),) = work.rooms.values()
        assert not arrivals.any()
    ((again, _),) = work.rooms.values()
    assert again is sums


@pytest.mark.parametrize("part", [1, 2, 3, 4, 7])
def test_parts_cover_every_row_once_within_the_bounds(part):
    a = random_bsr(800, 1600, (16, 16), 0.3, pattern="powerlaw", dtype=F16, device="cpu", seed=part)
    work = SKINNY.prepare(problem(a, torch.randn(1600, 16).half()), replace(CUT, part=part), a)
    indptr = a.pattern.host.indptr
    table = [entry[:7] for entry in work.rows.tolist() if entry[0] >= 0]
    lengths = [length for _, _, length, *_ in table]
    assert lengths == sorted(lengths, reverse=True)
    rows: dict[int, list[list[int]]] = {}
    for row, *fields in table:
        rows.setdefault(row, []).append(fields)
    assert sorted(rows) == list(range(a.grid[0]))
    used_slots, used_counters = [], []
    for row, parts in rows.items():
        parts.sort()
        starts, counts, slots, first_slots, of_row, counters = zip(*parts, strict=True)
        assert starts[0] == indptr[row]
        assert [s + n for s, n in zip(starts, counts, strict=True)] == [*starts[1:], indptr[row + 1]]
        assert set(of_row) == {len(parts)}
        if len(parts) > 1:
            assert list(slots) == list(range(first_slots[0], first_slots[0] + len(parts)))
            assert all(2 * part <= 3 * n + 2 and 2 * n <= 3 * part + 2 for n in counts)
            used_slots += slots
            used_counters.append(counters[0])
    assert len(set(used_slots)) == len(used_slots)
    assert max(used_slots) < work.slots
    assert sorted(used_counters) == list(range(len(used_counters)))
    assert len(used_counters) <= work.counters


def test_every_pair_of_columns_lands_where_its_nibble_says():
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    mask = torch.zeros(36, 8, dtype=torch.bool)
    for row, (low, high) in enumerate((p, q) for p in pairs for q in pairs):
        mask[row, list(low)] = True
        mask[row, [4 + at for at in high]] = True
    a = Semi24.from_dense(torch.randn(36, 8).half(), mask)
    assert torch.equal(multiply(SEMI24, a, torch.eye(8).half()), a.to_dense())
    assert torch.equal(multiply(SEMI24, a, torch.eye(36).half(), turned=True), a.to_dense().mT)


def test_plans_of_one_matrix_share_the_pattern_of_all_blocks():
    a, b, _, _ = SEMI24_CASES[0].make(dtype=F16)
    lists = []
    for turned, dense in ((False, b), (False, b[:, :3]), (True, torch.randn(a.shape[0], 5).half())):
        p = problem(a, dense, turned=turned)
        lists.append(SEMI24.prepare(p, SEMI24.default(p), a).lists)
    pattern = a.plan_owner().known("all blocks")
    assert (pattern.density, pattern.shape) == (1, a.shape)
    assert lists[0][1] is lists[1][1] is pattern.indices
    assert lists[2][1] is pattern.T.indices


@pytest.mark.parametrize("turned", [False, True], ids=["A @ B", "X @ A"])
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_plans_go_with_the_matrix(kind: str, turned: bool):
    a = matrix(kind, F16)
    x = torch.randn((3, a.shape[0]) if turned else (a.shape[1], 3)).half()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            sk.spmm(*((x, a) if turned else (a, x)), kernel=f"unpacked.{kind}")
        gone = weakref.ref(a.plan_owner())
        del a
        assert gone() is None
    finally:
        gc.enable()
