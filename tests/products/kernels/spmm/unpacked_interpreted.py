"""The products of unpacked 2:4 matrices in Triton's interpreter."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings

import sparsek as sk
from sparsek.engine.table import load
from sparsek.products.formats import two_four
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.kernels.pack import to_24
from sparsek.products.kernels.spmm import unpacked
from sparsek.testing.cases import BSR24_CASES, FP8_CASES, SEMI24_CASES, Case
from tests.attn.kernels.planned import hold, multiply, problem, semi24_cases
from tests.ops.storages import TWO_FOUR, matrix
from tests.products.formats.two_four import same_bits
from tests.sampling import half

F16, F32 = torch.float16, torch.float32
SEMI24, BSR24_ = unpacked.KERNELS["unpacked.semi24"], unpacked.KERNELS["unpacked.bsr24"]
IN_FP8 = [case for case in FP8_CASES if "24" in case.op]


def kernel_of(case: Case):
    return load(f"unpacked.{case.op}")


@pytest.mark.parametrize("case", half([*SEMI24_CASES, *BSR24_CASES]), ids=str)
def test_every_case_is_within_its_error_budget(case: Case):
    hold(kernel_of(case), case, F16)


@pytest.mark.parametrize("case", [*SEMI24_CASES[2:18:3], *BSR24_CASES[1:12:3]], ids=str)
def test_fp32_is_within_its_error_budget(case: Case):
    hold(kernel_of(case), case, F32)


@pytest.mark.parametrize("case", half(IN_FP8), ids=str)
def test_fp8_is_within_the_budget_of_float32_sums(case: Case):
    hold(kernel_of(case), case, F32, core=0.0)


@settings(max_examples=15)
@given(case=semi24_cases())
def test_any_semi24_is_within_budget(case: Case):
    hold(SEMI24, case, F16)


@pytest.mark.parametrize("case", [SEMI24_CASES[2], BSR24_CASES[3]], ids=str)
def test_a_config_may_name_any_kernel_that_multiplies_the_unpacked_matrix(case: Case):
    a, b, epilogue, out = case.make(dtype=F16)
    p = problem(a, b, out, epilogue, turned=case.turned)
    named = {c.kernel: c for c in kernel_of(case).configs(p)}
    assert set(named) == {"portable.spmm", "portable.spmm_skinny"}
    for c in named.values():
        hold(kernel_of(case), case, F16, config=c)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, F16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (130, 136), (128, 256), (300, 72), (0, 16), (16, 0)], ids=str)
def test_a_matrix_is_unpacked_to_the_bits_of_its_blocks_with_zeros_around(shape, dtype, poisoned_memory):
    wide = torch.float64 if dtype.itemsize == 1 else dtype
    a = Semi24.from_dense(torch.randn(shape, dtype=wide))
    made = to_24.unpacked_blocks(a.values.to(dtype), a.meta, (128, 128))
    rows, columns = -(-shape[0] // 128), -(-shape[1] // 128)
    padded = torch.zeros(rows * 128, columns * 128, dtype=wide)
    padded[: shape[0], : shape[1]] = a.to_dense()
    right = padded.view(rows, 128, columns, 128).transpose(1, 2).reshape(-1, 128, 128).to(dtype)
    assert torch.equal(made.view(to_24.INTEGERS[dtype.itemsize]), right.view(to_24.INTEGERS[dtype.itemsize]))


def test_stored_blocks_keep_their_order():
    a = BSR24.from_bsr(BSR.from_dense(torch.randn(192, 320).half(), 64, keep=0.4))
    made = to_24.unpacked_blocks(a.values, a.meta, a.block)
    assert same_bits(made, two_four.unpack(a.values, a.meta))


@pytest.mark.parametrize("fp8", [False, True], ids=["fp16", "fp8"])
def test_nan_in_rows_of_b_without_a_block_never_reaches_c(fp8: bool):
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()
    a = BSR24.from_bsr(BSR.from_dense(torch.randn(192, 320).half(), 64, mask=mask))
    for turned, index in ((False, a.pattern.indices), (True, a.pattern.block_rows)):
        met = torch.zeros(a.grid[0 if turned else 1], dtype=torch.bool)
        met[index.long()] = True
        unmet = ~met.repeat_interleave(64)
        b = torch.randn(a.shape[0 if turned else 1], 24).half()
        if fp8 and not turned:
            q, b8 = quantize(a), quantize(b.mT.contiguous()).mT
            clean = multiply(load("unpacked.bsr24_fp8"), q, b8)
            b8.values.view(torch.uint8)[:, unmet] = 0x7F  # NaN, and 480 to the interpreter
            assert torch.equal(multiply(load("unpacked.bsr24_fp8"), q, b8), clean)
        elif not fp8:
            clean = multiply(BSR24_, a, b, turned=turned)
            b[unmet] = torch.nan
            assert torch.equal(multiply(BSR24_, a, b, turned=turned), clean)


def test_every_pair_of_columns_lands_where_its_nibble_says():
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    mask = torch.zeros(36, 8, dtype=torch.bool)
    for row, (low, high) in enumerate((p, q) for p in pairs for q in pairs):
        mask[row, list(low)] = True
        mask[row, [4 + at for at in high]] = True
    a = Semi24.from_dense(torch.randn(36, 8).half(), mask)
    assert torch.equal(multiply(SEMI24, a, torch.eye(8).half()), a.to_dense())
    assert torch.equal(multiply(SEMI24, a, torch.eye(36).half(), turned=True), a.to_dense().mT)


@pytest.mark.parametrize("kernel", [SEMI24, BSR24_], ids=["semi24", "bsr24"])
def test_slices_of_wider_tensors_are_read_and_written_in_place(kernel):
    a, b, _, _ = (SEMI24_CASES if kernel is SEMI24 else BSR24_CASES)[0].make()
    k, n = b.shape
    wide, room = torch.full((k, 3 * n), torch.nan).half(), torch.full((a.shape[0], 2 * n), torch.nan).half()
    wide[:, n : 2 * n] = b
    multiply(kernel, a, wide[:, n : 2 * n], out=room[:, ::2])
    assert torch.equal(room[:, ::2], multiply(kernel, a, b))
    assert room[:, 1::2].isnan().all()


@pytest.mark.parametrize(
    "case", [SEMI24_CASES[2], SEMI24_CASES[13], BSR24_CASES[3], BSR24_CASES[10], IN_FP8[5]], ids=str
)
def test_a_second_run_gives_the_same_bits(case: Case):
    a, b, epilogue, out = case.make()
    kernel = kernel_of(case)
    first = multiply(kernel, a, b, epilogue, out.clone(), turned=case.turned)
    assert torch.equal(multiply(kernel, a, b, epilogue, out.clone(), turned=case.turned), first)


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


def test_bf16_is_refused_in_the_interpreter():
    for case in (SEMI24_CASES[0], BSR24_CASES[0]):
        a, b, _, _ = case.make(dtype=torch.bfloat16)
        assert "bf16 is wrong in Triton's interpreter" in kernel_of(case).why_not(problem(a, b))[0]
