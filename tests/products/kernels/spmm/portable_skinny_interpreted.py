"""portable.spmm_skinny in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.spmm import portable, portable_skinny
from sparsek.products.reference.epilogue import PLAIN
from sparsek.testing.budget import check_spmm
from sparsek.testing.cases import EPILOGUE_CASES, judged_by, laid_out
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import multiply, problem
from tests.problems import changed

HALF = torch.float16
KERNEL = portable_skinny.KERNEL
CUT = portable.Config(32, 64, 64, 1, 1, 1, 2)
CASES = [c for c in EPILOGUE_CASES if c.n <= 64 and c.dtype != "bf16"]


def heavy(block, dtype=HALF, seed=0):
    """Block rows of 9, 0, 1, 4 and 5 blocks, the last one ragged."""
    bm, bk = block
    lengths = [9, 0, 1, 4, 5]
    draw = torch.Generator().manual_seed(seed)
    picks = [torch.randperm(9, generator=draw)[:n].sort().values.int() for n in lengths]
    indptr = torch.tensor([0, *lengths]).cumsum(0).int()
    pattern = BlockPattern((5 * bm - 3, 9 * bk), block, indptr, torch.cat(picks))
    values = torch.randn(sum(lengths), *block, generator=draw).to(dtype)
    values[14:, bm - 3 :] = 0
    return BSR(pattern, values)


def operands(a, n, layout="row", out_layout="row"):
    b = laid_out(layout, (a.shape[1], n), a.dtype, "cpu", 3)
    out = poisoned((a.shape[0], n), a.dtype)
    return b, out if out_layout == "row" else poisoned((n, a.shape[0]), a.dtype).mT


def check(a, b, out, config=None, epilogue=PLAIN):
    judged = judged_by(epilogue)
    multiply(KERNEL, a, b, epilogue, out, config=config)
    gate = check_spmm(a, b, out, judged)
    assert gate.passed, f"{a} times {tuple(b.shape)} {config}: {gate}"


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_every_epilogue_with_cut_rows(case):
    a, b, epilogue, out = case.make()
    check(a, b, out, replace(CUT, part=1), epilogue)


@pytest.mark.parametrize("case", CASES[1::6], ids=str)
def test_epilogues_by_default(case):
    a, b, epilogue, out = case.make()
    check(a, b, out, None, epilogue)


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("out_layout", ["row", "col"])
@pytest.mark.parametrize("n", [1, 7, 40])
def test_every_layout_of_b_and_c(n, layout, out_layout):
    a = heavy((32, 32))
    check(a, *operands(a, n, layout, out_layout), CUT)


@pytest.mark.parametrize("block", [(16, 16), (48, 96), (128, 16), (80, 48)], ids=str)
@pytest.mark.parametrize("view", [False, True], ids=["stored", "view"])
def test_cut_rows_of_any_block_and_of_transposed_views(block, view):
    a = heavy(block).T if view else heavy(block)
    check(a, *operands(a, 16, "col", "col"), CUT if view else portable.Config(64, 16, 128, 1, 1, 1, 3))


def test_batches_that_no_view_joins():
    a = heavy((16, 32))
    b = torch.randn(2, 3, a.shape[1], 5).to(HALF).transpose(0, 1)
    check(a, b, poisoned((3, 2, a.shape[0], 5), HALF), CUT)


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
def test_fp32(tf32):
    a = heavy((32, 32), torch.float32)
    b, out = operands(a, 12, "row", "col")
    p = changed(problem(a, b, out), tf32=tf32)
    c = KERNEL.default(p)
    KERNEL.launch(c, KERNEL.prepare(p, c, a), a, b, out)
    assert check_spmm(a, b, out).passed


def test_every_tile_of_the_tables_gives_the_same_product():
    a = random_bsr(32, 288, (32, 32), 1.0, dtype=HALF, device="cpu", seed=3)
    for n, table in portable_skinny.LOW.items():
        b, out = operands(a, n, "col", "col")
        for tile_m, tile_k in sorted({sides[:2] for sides in table}):
            check(a, b, out, portable.Config(tile_m, n, tile_k, 1, 1, 1, 5))


def test_the_same_bits_again_and_counters_return_to_zero():
    a = heavy((32, 32))
    b, out = operands(a, 16)
    work = KERNEL.prepare(problem(a, b, out), CUT, a)
    KERNEL.launch(CUT, work, a, b, out)
    first = out.clone()
    ((sums, arrivals),) = work.rooms.values()
    for _ in range(2):
        KERNEL.launch(CUT, work, a, b, out.fill_(torch.nan))
        assert torch.equal(out, first)
        assert not arrivals.any()
    ((again, _),) = work.rooms.values()
    assert again is sums


def test_offsets_of_64_bits_give_the_same_bits(monkeypatch):
    a = heavy((32, 48))
    b, out = operands(a, 16, "col", "col")
    work = KERNEL.prepare(problem(a, b, out), CUT, a)
    KERNEL.launch(CUT, work, a, b, out)
    narrow = out.clone()
    monkeypatch.setattr(portable, "SIZE_LIMIT", 1000)
    KERNEL.launch(CUT, work, a, b, out.fill_(torch.nan))
    assert torch.equal(out, narrow)


def test_nan_in_untouched_rows_of_b_never_reaches_c():
    a = random_bsr(64, 256, (16, 32), 0.2, dtype=HALF, device="cpu", seed=1)
    b, out = operands(a, 16, "col", "col")
    unused = sorted(set(range(8)) - set(a.pattern.host.indices.tolist()))
    assert unused
    clean = multiply(KERNEL, a, b, out=out, config=CUT).clone()
    for j in unused:
        b[32 * j : 32 * j + 32] = float("nan")
    assert torch.equal(multiply(KERNEL, a, b, PLAIN, out.fill_(torch.nan), config=CUT), clean)


def test_slices_of_wider_tensors_are_read_and_written_in_place():
    a = heavy((32, 32))
    wide = torch.full((a.shape[1], 48), float("nan")).to(HALF)
    wide[:, 8:24] = torch.randn(a.shape[1], 16).to(HALF)
    room = poisoned((a.shape[0], 48), HALF)
    check(a, wide[:, 8:24], room[:, 16:32], CUT)
    assert room[:, :16].isnan().all()
    assert room[:, 32:].isnan().all()


@pytest.mark.parametrize("part", [1, 2, 3, 4, 7])
def test_parts_cover_every_row_once_within_the_bounds(part):
    a = random_bsr(800, 1600, (16, 16), 0.3, pattern="powerlaw", dtype=HALF, device="cpu", seed=part)
    b, out = operands(a, 16)
    work = KERNEL.prepare(problem(a, b, out), replace(CUT, part=part), a)
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
