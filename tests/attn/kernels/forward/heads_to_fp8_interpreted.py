"""pack/heads_to_fp8.py in Triton's interpreter: the bits of torch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.attn.kernels.forward.heads_to_fp8 import round_heads
from sparsek.attn.mask import quantized_heads
from sparsek.products.formats.float8 import scales_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@given(
    sides=st.tuples(
        st.integers(1, 2), st.integers(1, 3), st.integers(1, 140), st.sampled_from((1, 16, 40, 64))
    ),
    rows=st.sampled_from((0, 64, 128)),
    turned=st.booleans(),
    across=st.booleans(),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
)
def test_heads_in_any_strides_are_rounded_as_by_torch(
    sides: tuple[int, ...], rows: int, turned: bool, across: bool, dtype: Any
) -> None:
    b, h, length, dim = sides
    x = (torch.randn(b, length, h, dim) * torch.logspace(-3, 2, dim)).to(dtype).transpose(1, 2)
    x = x.mT.contiguous().mT if across else x
    scale = scales_of(quantized_heads._largest(x, rows), quantized_heads.E4M3)
    found = round_heads(x, scale, rows, -(-length // quantized_heads.GROUP) * quantized_heads.GROUP, turned)
    wanted = quantized_heads._rounded(x, scale, rows, turned)
    assert found is not None
    assert found.shape == wanted.shape
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_what_it_does_not_take_is_left_to_torch() -> None:
    one = torch.ones(1, 1)
    for x in (torch.zeros(1, 1, 16, 16, dtype=torch.float64), torch.zeros(1, 1, 16, 1024)):
        assert round_heads(x, one, 0, 16, False) is None
