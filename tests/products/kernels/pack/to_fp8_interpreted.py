"""products/kernels/pack/to_fp8.py in Triton's interpreter, whose own conversion to FP8 does not round to nearest."""

import pytest
import torch

from sparsek.products.formats import quantized_tensor
from sparsek.products.kernels.pack import to_fp8 as round_fp8
from tests.products.cases import E4M3, E5M2

F16, F32 = torch.float16, torch.float32
SHAPES = [(5, 40), (3,), (1, 8), (7, 1), (2, 3, 70), (2, 9000), (0, 16), (16, 0), (2, 50, 20)]


@pytest.mark.parametrize("at", range(len(SHAPES)), ids=lambda at: str(SHAPES[at]))
def test_rows_are_rounded_to_the_bits_that_torch_finds(at: int):
    shape = SHAPES[at]
    for dtype, to in ((F16, (E4M3, E5M2)[at % 2]), (F32, (E5M2, E4M3)[at % 2])):
        x = (torch.randn(shape) * 2.0 ** torch.randint(-8, 8, (*shape[:-1], 1))).to(dtype)
        views = [x, x[..., ::2], x.expand(2, *shape)] + ([x.mT] if x.ndim > 1 and x.shape[-1] < 9000 else [])
        for each in views:
            made = round_fp8.round_rows(each, to, together=each is x)
            right = quantized_tensor._rounded(each, to, by_row=True)
            assert made is not None
            for found, wanted in zip(made, right, strict=True):
                assert found.shape == wanted.shape
                assert found.is_contiguous()
                assert torch.equal(found.float(), wanted.float())


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_of_zeros_tiny_numbers_nan_and_inf_have_the_scales_that_torch_finds():
    x = torch.randn(6, 48)
    x[1], x[2], x[3, 5], x[4, 6] = 0, 1e-42, torch.nan, -torch.inf
    made, right = round_fp8.round_rows(x, E4M3), quantized_tensor._rounded(x, E4M3, by_row=True)
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
