"""portable.spmm in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.spmm import portable
from sparsek.testing.budget import check_spmm
from sparsek.testing.cases import EPILOGUE_CASES, SPMM_CASES
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import hold, problem
from tests.problems import changed
from tests.sampling import half

HALF, KERNEL = torch.float16, portable.KERNEL


def run(a, b, config=None, out=None, tf32=False):
    p = changed(problem(a, b), tf32=tf32)
    assert KERNEL.why_not(p) == []
    c = config or KERNEL.default(p)
    out = poisoned((*b.shape[:-2], a.shape[0], b.shape[-1]), b.dtype, "cpu") if out is None else out
    KERNEL.launch(c, KERNEL.prepare(p, c, a), a, b, out)
    return out


def check(a, b, out):
    gate = check_spmm(a, b, out)
    assert gate.passed, f"{a} times {tuple(b.shape)}: {gate}"


def pair(m, k, n, block, density=0.4, dtype=HALF, seed=0):
    a = random_bsr(m, k, block, density, pattern="powerlaw", dtype=dtype, device="cpu", seed=seed)
    return a, torch.randn(k, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


OF_EPILOGUES = [c for c in EPILOGUE_CASES if c.dtype != "bf16"][::3]


@pytest.mark.parametrize(
    "case", half([*(c for c in SPMM_CASES if c.dtype != "bf16"), *OF_EPILOGUES]), ids=str
)
def test_every_case_is_within_its_error_budget(case):
    hold(KERNEL, case)


@pytest.mark.parametrize(
    "block", [(16, 16), (32, 32), (64, 64), (48, 96), (80, 48), (256, 128), (16, 64)], ids=str
)
def test_transposed_views_multiply_without_moving_values(block):
    a, _ = pair(3 * block[0] - 5, 4 * block[1] - 3, 1, block)
    b = torch.randn(a.shape[0], 40).to(HALF)
    assert a.T.values is a.values
    check(a.T, b, run(a.T, b))


@pytest.mark.parametrize("height", portable.HOPPER)
def test_every_config_of_the_tables_gives_the_same_product(height):
    a, b = pair(2 * height, 192, 136, (height, 16 if height < 64 else 64))
    tables = portable.HOPPER[height] + portable.AMPERE[height] + portable.TF32
    for c in {replace(c, num_warps=4, num_stages=1, group=1 + c.group % 3) for c in tables}:
        check(a, b, run(a, b, c))


@pytest.mark.parametrize("block", [(32, 16), (64, 64), (48, 112)], ids=str)
def test_nan_and_inf_in_untouched_rows_of_b_never_reach_c(block):
    a, b = pair(4 * block[0], 6 * block[1], 24, block, density=0.2)
    used = set(a.pattern.host.indices.tolist())
    unused = [j for j in range(a.grid[1]) if j not in used]
    assert unused
    clean = run(a, b)
    for at, j in enumerate(unused):
        b[j * block[1] : (j + 1) * block[1]] = float("nan") if at % 2 else float("inf")
    assert torch.equal(run(a, b), clean)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_inf_in_a_neighbouring_block_row_of_a_stays_in_its_row():
    a, b = pair(96, 192, 20, (48, 48), density=0.5)
    values = a.values.clone()
    last_of_first_row = int(a.pattern.host.indptr[1])
    values[last_of_first_row:] = float("inf")
    out = run(BSR.unchecked(a.pattern, values), b)
    assert torch.equal(out[:48], run(a, b)[:48])


@pytest.mark.parametrize("n", [1, 7, 24, 130])
def test_b_may_be_a_transposed_view_and_c_any_strides(n):
    a, _ = pair(70, 150, 1, (32, 48))
    b = torch.randn(n, 150).to(HALF).mT
    room = poisoned((n + 3, 2 * 70), HALF, "cpu")
    out = room[:n, ::2].mT
    run(a, b, out=out)
    check(a, b, out)
    assert room[:, 1::2].isnan().all()
    assert room[n:].isnan().all()


def test_slices_of_wider_tensors_are_read_and_written_in_place():
    a, _ = pair(64, 96, 1, (32, 32))
    wide = torch.full((96, 64), float("nan")).to(HALF)
    wide[:, 8:48] = torch.randn(96, 40).to(HALF)
    room = poisoned((64, 64), HALF, "cpu")
    run(a, wide[:, 8:48], out=room[:, 16:56])
    check(a, wide[:, 8:48], room[:, 16:56])
    assert room[:, :16].isnan().all()
    assert room[:, 56:].isnan().all()


def test_batches_of_any_strides_multiply_like_their_members():
    a, _ = pair(40, 72, 1, (16, 32))
    whole = torch.randn(2, 3, 72, 24).to(HALF)
    for b in (whole[:1], whole.transpose(0, 1), whole[0], whole[0, :1].expand(2, 72, 24)):
        out = run(a, b)
        check(a, b, out)
        flat = out.reshape(-1, 40, 24)
        for one, c in zip(b.reshape(-1, 72, 24), flat, strict=True):
            assert torch.equal(run(a, one), c)


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
def test_fp32_runs_with_and_without_tf32(tf32):
    a, b = pair(100, 160, 72, (64, 32), dtype=torch.float32)
    check(a, b, run(a, b, tf32=tf32))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 8), (64, 0, 8), (64, 64, 0), (0, 0, 0)])
def test_zero_sized_sides_give_empty_or_zero_products(m, k, n):
    a = BSR.from_dense(torch.zeros(m, k, dtype=HALF), (32, 32), threshold=0)
    out = run(a, torch.ones(k, n, dtype=HALF))
    assert out.shape == (m, n)
    assert not out.any()


def test_offsets_of_64_bits_give_the_same_bits(monkeypatch):
    for block in ((32, 16), (64, 64), (48, 112)):
        a, b = pair(130, 230, 40, block)
        for matrix, dense in ((a, b), (a.T, torch.randn(130, 40).to(HALF))):
            narrow = run(matrix, dense)
            with monkeypatch.context() as patch:
                patch.setattr(portable, "SIZE_LIMIT", 1000)
                p = problem(matrix, dense)
                c = KERNEL.default(p)
                wide = torch.empty_like(narrow)
                KERNEL.launch(c, KERNEL.prepare(p, c, matrix), matrix, dense, wide)
            assert torch.equal(wide, narrow)


def test_the_same_inputs_give_the_same_bits():
    a, b = pair(200, 300, 72, (32, 48))
    first = run(a, b)
    assert all(torch.equal(run(a, b), first) for _ in range(3))


def test_rows_are_scheduled_longest_first_with_ties_in_order():
    a, b = pair(512, 512, 16, (16, 16), density=0.3)
    p = problem(a, b)
    row, start, length = KERNEL.prepare(p, KERNEL.default(p), a).rows.T.tolist()
    host = a.pattern.host
    assert sorted(row) == list(range(32))
    assert start == [host.indptr[r] for r in row]
    assert [(-count, r) for count, r in zip(length, row, strict=True)] == sorted(
        (-int(host.indptr[r + 1] - host.indptr[r]), r) for r in range(32)
    )


def test_bf16_is_refused_in_the_interpreter():
    a, b = pair(32, 32, 8, (16, 16))
    p = problem(a.to(dtype=torch.bfloat16), b.bfloat16())
    assert "bf16 is wrong in Triton's interpreter" in KERNEL.why_not(p)[0]
