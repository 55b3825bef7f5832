"""The portable FP8 kernels in Triton's interpreter.

The interpreter multiplies FP8 exactly. Its conversion to FP8 does not round to nearest, so there torch does.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.products.formats import quantized_tensor
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import quantize
from sparsek.products.kernels.pack import to_fp8 as round_fp8
from sparsek.products.kernels.spmm import portable
from sparsek.products.kernels.spmm import portable_fp8 as spmm_fp8
from sparsek.products.kernels.spmm.portable import Config
from sparsek.products.kernels.spmm.portable_fp8 import TABLE
from sparsek.testing.cases import COL, E4M3, E5M2, ROW, Case, ScaleScopes
from sparsek.testing.cases import FP8_CASES as ALL_CASES
from tests.attn.kernels.planned import hold, multiply, problem
from tests.sampling import half

F16, F32 = torch.float16, torch.float32
FP8_CASES = [case for case in ALL_CASES if case.op == "spmm_fp8"]


def seed() -> int:
    return int(torch.randint(2**31, ()))


@pytest.mark.parametrize("case", half(FP8_CASES), ids=str)
def test_every_case_is_within_the_budget_of_float32_sums(case: Case):
    hold(spmm_fp8.KERNEL, case, F32, seed=seed(), core=0.0)


@pytest.mark.parametrize("case", FP8_CASES[1::6], ids=str)
def test_c_in_fp16_is_within_budget(case: Case):
    hold(spmm_fp8.KERNEL, case, F16, seed=seed(), core=0.0)


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
def test_any_bsr_is_within_budget(m, k, n, block, scales, view, layouts, config, drawn):
    view = view and scales.a != "row"
    case = Case(m, k, n, block, "any", 0.6, scales=scales, view=view, bias=True, layouts=layouts)
    hold(spmm_fp8.KERNEL, case, F32, seed=drawn, config=config, core=0.0)


SQUARE = Case(128, 128, 20, (128, 128), "any", 1.0, scales=ROW)


def test_every_config_of_the_table_gives_the_same_product():
    for c in {(c.tile_m, c.tile_n, c.tile_k): c for c in TABLE}.values():
        hold(spmm_fp8.KERNEL, SQUARE, F32, seed=seed(), config=c, core=0.0)


def test_nan_in_rows_of_b_without_a_block_never_reaches_c():
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()
    a, b, _, _ = Case(192, 320, 24, (64, 64), "any", 1.0, scales=ROW).make()
    values = a.dequantize().to_dense().view(3, 64, 5, 64) * mask[:, None, :, None]
    a = quantize(BSR.from_dense(values.view(192, 320), 64, mask=mask))
    clean = multiply(spmm_fp8.KERNEL, a, b)
    unread = ~mask.any(0).repeat_interleave(64)
    b.values.view(torch.uint8)[:, unread] = 0x7F  # NaN, and 480 to the interpreter
    assert torch.equal(multiply(spmm_fp8.KERNEL, a, b), clean)


@pytest.mark.parametrize("case", [FP8_CASES[5], FP8_CASES[11]], ids=str)
def test_offsets_of_64_bits_and_a_second_run_give_the_same_bits(case: Case, monkeypatch):
    a, b, epilogue, out = case.make()
    kernel = spmm_fp8.KERNEL
    narrow = multiply(kernel, a, b, epilogue, out.clone())
    assert torch.equal(multiply(kernel, a, b, epilogue, out.clone()), narrow)
    p = problem(a, b, out, epilogue)
    c = kernel.default(p)
    with monkeypatch.context() as patch:
        patch.setattr(portable, "SIZE_LIMIT", 100)
        kernel.launch(c, kernel.prepare(p, c, a), a, b, out, epilogue)
    assert torch.equal(out, narrow)


def test_slices_of_wider_tensors_are_written_in_place():
    a, b, _, out = FP8_CASES[0].make()
    room = torch.full((out.shape[0], 3 * out.shape[1]), torch.nan)
    multiply(spmm_fp8.KERNEL, a, b, out=room[:, ::3])
    assert torch.equal(room[:, ::3], multiply(spmm_fp8.KERNEL, a, b))
    assert room[:, 1::3].isnan().all()


SHAPES = [(5, 40), (3,), (1, 8), (7, 1), (2, 3, 70), (2, 9000), (0, 16), (16, 0), (2, 50, 20)]


@pytest.mark.parametrize("at", range(len(SHAPES)), ids=lambda at: str(SHAPES[at]))
def test_rows_are_rounded_to_the_bits_that_torch_finds(at: int):
    shape = SHAPES[at]
    for dtype, to in ((F16, (E4M3, E5M2)[at % 2]), (F32, (E5M2, E4M3)[at % 2])):
        x = (torch.randn(shape) * 2.0 ** torch.randint(-8, 8, (*shape[:-1], 1))).to(dtype)
        views = [x, x[..., ::2], x.expand(2, *shape)] + ([x.mT] if x.ndim > 1 and x.shape[-1] < 9000 else [])
        for each in views:
            made = round_fp8.round_rows(each, to)
            right = quantized_tensor._rounded_rows(each, to)
            assert made is not None
            for found, wanted in zip(made, right, strict=True):
                assert found.shape == wanted.shape
                assert found.is_contiguous()
                assert torch.equal(found.float(), wanted.float())


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_of_zeros_tiny_numbers_nan_and_inf_have_the_scales_that_torch_finds():
    x = torch.randn(6, 48)
    x[1], x[2], x[3, 5], x[4, 6] = 0, 1e-42, torch.nan, -torch.inf
    made, right = round_fp8.round_rows(x, E4M3), quantized_tensor._rounded_rows(x, E4M3)
    assert made is not None
    for found, wanted in zip(made, right, strict=True):
        assert torch.equal(found.float().nan_to_num(-7.0), wanted.float().nan_to_num(-7.0))
    assert right[0][3].float().isnan().all()


def test_offsets_of_64_bits_round_the_same(monkeypatch):
    x = torch.randn(3, 40, 50)
    for each in (x, x.mT):
        narrow = round_fp8.round_rows(each, E4M3)
        with monkeypatch.context() as patch:
            patch.setattr(round_fp8, "SIZE_LIMIT", 60)
            wide = round_fp8.round_rows(each, E4M3)
        assert narrow is not None
        assert wide is not None
        assert torch.equal(narrow[0].float(), wide[0].float())


def test_what_the_kernel_does_not_round_is_left_to_torch():
    assert round_fp8.round_rows(torch.randn(3, 16, dtype=torch.float64), E4M3) is None


def test_bf16_is_refused_in_the_interpreter():
    a, b, _, out = FP8_CASES[0].make(dtype=torch.bfloat16)
    assert "bf16 is wrong in Triton's interpreter" in spmm_fp8.KERNEL.why_not(problem(a, b, out))[0]
