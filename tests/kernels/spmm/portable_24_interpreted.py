"""portable.semi24 and portable.bsr24 in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.kernels.spmm import portable_24 as semi24
from sparsek.kernels.spmm import portable_bsr24 as bsr24
from sparsek.kernels.spmm import unpack_24
from sparsek.kernels.spmm.unpack_24 import AMPERE, HOPPER, SINGLE, Config
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.semi24 import Semi24
from sparsek.testing.cases import BSR24_CASES, SEMI24_CASES, Case
from tests.kernels.planned import hold, multiply, problem, semi24_cases
from tests.sampling import half

F16, F32 = torch.float16, torch.float32
SMALL = Config(32, 32, 32, 1, 1, 2)


def kernel_of(case: Case):
    return semi24.KERNEL if case.block is None else bsr24.KERNEL


@pytest.mark.parametrize("case", half([*SEMI24_CASES, *BSR24_CASES]), ids=str)
def test_every_case_is_within_its_error_budget(case: Case):
    hold(kernel_of(case), case, F16)


@pytest.mark.parametrize("case", [*SEMI24_CASES[2:18:3], *BSR24_CASES[1:12:3]], ids=str)
def test_fp32_is_within_its_error_budget(case: Case):
    hold(kernel_of(case), case, F32)


@settings(max_examples=15)
@given(
    case=semi24_cases(),
    config=st.sampled_from([SMALL, Config(16, 16, 64, 1, 1, 3), Config(64, 16, 32, 1, 1, 1)]),
    seed=st.integers(0, 2**20),
)
def test_any_semi24_is_within_budget(case, config, seed):
    hold(semi24.KERNEL, case, F16, seed=seed, config=config)


@pytest.mark.parametrize("view", [False, True])
def test_every_config_of_the_tables_gives_the_same_product(view: bool):
    configs = {(c.tile_m, c.tile_n, c.tile_k): c for c in (*HOPPER, *AMPERE, *SINGLE)}
    for seed, c in enumerate(configs.values()):
        hold(semi24.KERNEL, Case(72, 72, 20, None, "any", view=view), F16, seed=seed, config=c)
        case = Case(128, 64, 20, (128, 64), "any", 1.0, two_four=True, view=view)
        hold(bsr24.KERNEL, case, F16, seed=seed, config=c)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_rows_of_b_without_a_block_never_reaches_c(bad: float):
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()
    a = BSR24.from_bsr(BSR.from_dense(torch.randn(192, 320).half(), 64, mask=mask))
    for turned, index in ((False, a.pattern.indices), (True, a.pattern.block_rows)):
        met = torch.zeros(a.grid[0 if turned else 1], dtype=torch.bool)
        met[index.long()] = True
        b = torch.randn(a.shape[0 if turned else 1], 24).half()
        clean = multiply(bsr24.KERNEL, a, b, turned=turned)
        b[~met.repeat_interleave(64)] = bad
        assert torch.equal(multiply(bsr24.KERNEL, a, b, turned=turned), clean)


def test_every_pair_of_columns_lands_where_its_nibble_says():
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    mask = torch.zeros(36, 8, dtype=torch.bool)
    for row, (low, high) in enumerate((p, q) for p in pairs for q in pairs):
        mask[row, list(low)] = True
        mask[row, [4 + at for at in high]] = True
    a = Semi24.from_dense(torch.randn(36, 8).half(), mask)
    eye = torch.eye(8).half()
    assert torch.equal(multiply(semi24.KERNEL, a, eye), a.to_dense())
    assert torch.equal(multiply(semi24.KERNEL, a, torch.eye(36).half(), turned=True), a.to_dense().mT)


@pytest.mark.parametrize("kernel", [semi24.KERNEL, bsr24.KERNEL], ids=["semi24", "bsr24"])
def test_slices_of_wider_tensors_are_read_and_written_in_place(kernel):
    case = (SEMI24_CASES if kernel is semi24.KERNEL else BSR24_CASES)[0]
    a, b, _, _ = case.make()
    k, n = b.shape
    wide, room = torch.full((k, 3 * n), torch.nan).half(), torch.full((a.shape[0], 2 * n), torch.nan).half()
    wide[:, n : 2 * n] = b
    multiply(kernel, a, wide[:, n : 2 * n], out=room[:, ::2])
    assert torch.equal(room[:, ::2], multiply(kernel, a, b))
    assert room[:, 1::2].isnan().all()


@pytest.mark.parametrize(
    "case", [SEMI24_CASES[2], SEMI24_CASES[13], BSR24_CASES[3], BSR24_CASES[10]], ids=str
)
def test_offsets_of_64_bits_and_a_second_run_give_the_same_bits(case: Case, monkeypatch):
    a, b, epilogue, out = case.make()
    kernel = kernel_of(case)
    narrow = multiply(kernel, a, b, epilogue, out.clone(), turned=case.turned)
    assert torch.equal(multiply(kernel, a, b, epilogue, out.clone(), turned=case.turned), narrow)
    with monkeypatch.context() as patch:
        patch.setattr(unpack_24, "SIZE_LIMIT", 1000)
        p = problem(a, b, out, epilogue, turned=case.turned)
        c = kernel.default(p)
        kernel.launch(c, kernel.prepare(p, c, a), a, b, out, epilogue)
    assert torch.equal(out, narrow)


@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
def test_fp32_has_both_precisions(tf32: bool):
    a, b, _, out = SEMI24_CASES[0].make(dtype=F32)
    assert isinstance(a, Semi24)
    semi24.KERNEL.launch(SMALL, semi24.Work(False, tf32), a, b, out)
    torch.testing.assert_close(out, a.to_dense() @ b)


def test_rows_of_blocks_are_scheduled_longest_first_with_ties_in_order():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1]]).bool()
    a = BSR24.from_bsr(BSR.from_dense(torch.randn(256, 192).half(), 64, mask=mask))
    b = torch.randn(192, 16).half()
    p = problem(a, b)
    work = bsr24.KERNEL.prepare(p, bsr24.KERNEL.default(p), a)
    assert work.rows.tolist() == [[1, 3, 0, 2], [1, 3, 0, 3], [2, 2, 1, 0]]
    assert work.order is None
    p = problem(a, torch.randn(256, 16).half(), turned=True)
    work = bsr24.KERNEL.prepare(p, bsr24.KERNEL.default(p), a)
    assert work.rows.tolist() == [[0, 1, 2], [0, 3, 4], [3, 1, 1]]
    assert work.order is not None
    assert work.order.tolist() == [0, 1, 3, 2, 4]


def test_bf16_is_refused_in_the_interpreter():
    for case in (SEMI24_CASES[0], BSR24_CASES[0]):
        a, b, _, _ = case.make(dtype=torch.bfloat16)
        assert "bf16 is wrong in Triton's interpreter" in kernel_of(case).why_not(problem(a, b))[0]
