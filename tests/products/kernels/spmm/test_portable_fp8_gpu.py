"""The FP8 kernels for any GPU, the rounding of B and vendor.cublas_fp8 on a GPU: long K, the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.engine.table import load
from sparsek.products.formats import quantized_tensor
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import quantize
from sparsek.testing.budget import check_spmm
from tests.attn.kernels.planned import multiply, problem
from tests.engine.launch.drawn import fresh
from tests.products.cases import COL, FP8_CASES, ROW, Case
from tests.sampling import dealt

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def seed() -> int:
    return int(torch.randint(2**31, ()))


def kernel_of(case: Case) -> Any:
    return load(f"{'unpacked' if '24' in case.op else 'portable'}.{case.op}")


LONG = Case(256, 16384, 264, (128, 128), "long", scales=ROW, bias=True, layouts=COL)


@pytest.mark.parametrize("case", [LONG, replace(LONG, block=None), replace(LONG, two_four=True)], ids=str)
def test_every_config_is_within_budget_for_long_k(case: Case):
    kernel = kernel_of(case)
    a, b, epilogue, out = case.make("cuda", torch.float32, seed())
    for c in kernel.configs(problem(a, b, out, epilogue)):
        multiply(kernel, a, b, epilogue, out.fill_(torch.nan), config=c)
        gate = check_spmm(a, b, out, epilogue)
        assert gate.passed, f"{c}: {gate}"


@pytest.mark.parametrize("kernel", ["portable.spmm_fp8", "vendor.cublas_fp8"])
def test_sums_of_one_sign_do_not_drift(kernel: str):
    a = quantize(BSR.from_dense(torch.rand(256, 16384, device="cuda"), 128, threshold=0))
    b = quantize(torch.rand(128, 16384, device="cuda")).mT
    gate = check_spmm(a, b, multiply(load(kernel), a, b))
    assert gate.passed, gate


def test_a_second_run_gives_the_same_bits():
    for case in FP8_CASES[::6]:
        a, b, epilogue, out = case.make("cuda")
        kernel = kernel_of(case)
        first = multiply(kernel, a, b, epilogue, out.clone())
        assert torch.equal(multiply(kernel, a, b, epilogue, out), first)


@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rows_are_rounded_to_the_bits_that_torch_finds(to: torch.dtype):
    round_rows = load_round_rows()
    shapes = ((3,), (1, 8), (300, 1000), (5, 8192), (7, 20000), (2, 65, 130), (4096, 64))
    for hand, dtype in enumerate(DTYPES):
        for shape in dealt(shapes, 3, hand, of=to):
            x = (
                torch.randn(shape, device="cuda") * 2.0 ** torch.randint(-30, 9, (*shape[:-1], 1)).cuda()
            ).to(dtype)
            x.view(-1)[0] = 0
            for each in (x, x[..., ::3], x.mT if x.ndim > 1 else x):
                made, right = round_rows(each, to), quantized_tensor._rounded(each, to, by_row=True)
                assert made is not None
                assert torch.equal(made[1], right[1])
                assert torch.equal(made[0].view(torch.uint8), right[0].view(torch.uint8))


def test_every_fp8_neighbour_and_tie_is_rounded_as_torch_does():
    """All bf16 numbers of one row, so that scales and quotients are many; NaN and Inf make NaN of their row."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).cuda()
    every = bits.view(torch.bfloat16)
    finite = every[every.isfinite()].view(-1, 128)
    round_rows = load_round_rows()
    for x in (finite, finite.flip(0).T.contiguous(), every.view(-1, 128)):
        made, right = (
            round_rows(x, torch.float8_e4m3fn),
            quantized_tensor._rounded(x, torch.float8_e4m3fn, by_row=True),
        )
        assert made is not None
        for found, wanted in zip(made, right, strict=True):
            found, wanted = found.float(), wanted.float()
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quotients_near_ties_are_rounded_as_torch_does_at_every_scale(to: torch.dtype):
    """The first number of a row makes its scale, the others are ties of FP8 times it, or next to them."""
    fresh()
    exponents = torch.arange(-126, 118, device="cuda").repeat_interleave(64).double()
    mantissas = 1 + torch.rand(len(exponents), device="cuda").double()
    mantissas[::3] = 2 - 2.0**-23 * torch.randint(1, 9, (len(mantissas[::3]),), device="cuda")
    top = torch.finfo(to).max
    scales = (mantissas * 2.0**exponents).float()
    numbers = torch.arange(1, 128 if to is torch.float8_e4m3fn else 124, dtype=torch.uint8, device="cuda")
    every = torch.cat((torch.zeros(1, device="cuda"), numbers.view(to).float())).double()
    every = every[every.isfinite()]
    ties = (every[1:] + every[:-1]) / 2
    x = (scales.double()[:, None] * ties.repeat(8)).float()
    x = torch.where(torch.rand_like(x) < 0.5, x, x.nextafter(x * 0 + torch.randn_like(x).sign() * torch.inf))
    x = torch.cat(((scales.double() * top).float()[:, None], x), 1)
    x = x[x.isfinite().all(1)]
    hard = torch.zeros(1, x.shape[1], device="cuda")
    hard[0, :2] = torch.tensor([float.fromhex("0x1.bffffcp-73"), float.fromhex("0x1.7ffffcp-104")])
    x = torch.cat((x, hard))
    made, right = load_round_rows()(x, to), quantized_tensor._rounded(x, to, by_row=True)
    assert torch.equal(made[1], right[1])
    assert torch.equal(made[0].view(torch.uint8), right[0].view(torch.uint8))


def test_a_stride_of_more_than_31_bits_is_taken_after_a_small_one():
    x = torch.zeros(2, 70000, 32768, dtype=torch.bfloat16, device="cuda")
    for each in (x[:, :16, :4096], x[:1, :2, :64]):
        each.normal_()
        for part in (each.contiguous(), each):
            made = load_round_rows()(part, torch.float8_e4m3fn)
            right = quantized_tensor._rounded(part, torch.float8_e4m3fn, by_row=True)
            assert torch.equal(made[0].view(torch.uint8), right[0].view(torch.uint8))


def load_round_rows() -> Any:
    from sparsek.products.kernels.pack.to_fp8 import round_rows

    return round_rows
