"""BSR24: 2:4 inside stored blocks, from a BSR and from a dense matrix, there and back, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.core.errors import InvalidInput
from sparsek.products.formats import two_four
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.convert import Scope
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from tests.products.formats.two_four import DTYPES, packed, random_pairs, same_bits, spread

SHAPES = [(256, 384), (200, 300), (64, 130), (1, 1), (0, 64), (64, 0)]


def make(m: int = 200, k: int = 330, block: Any = (64, 128), **more: Any) -> BSR24:
    return BSR24.from_bsr(random_bsr(m, k, block, 0.6, **more))


def padded(w: torch.Tensor, step: int = 8) -> torch.Tensor:
    """A dense matrix with columns of zeros up to a multiple of `step`."""
    return torch.nn.functional.pad(w, (0, -w.shape[1] % step))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rows_of_the_blocks_keep_what_those_of_the_matrix_would(
    shape: tuple[int, int], dtype: torch.dtype, device: str
):
    a = random_bsr(*shape, (64, 128), 0.5, dtype=dtype, device=device, seed=int(torch.randint(1000, ())))
    b = BSR24.from_bsr(a)
    assert (b.shape, b.block, b.grid, b.nnzb, b.density) == (a.shape, a.block, a.grid, a.nnzb, a.density)
    assert (b.dtype, b.device, b.pattern is a.pattern) == (a.dtype, a.device, True)
    right = Semi24.from_dense(padded(a.to_dense())).to_dense()[:, : shape[1]]
    assert same_bits(b.to_dense(), right.contiguous())
    assert same_bits(b.to_bsr().to_dense(), b.to_dense())
    again = BSR24.from_bsr(b.to_bsr(), exact=True)
    assert same_bits(again.to_dense(), b.to_dense())
    BSR24(b.pattern, b.values, b.meta)


def test_any_values_in_any_columns_come_back_to_the_last_bit():
    pattern = random_bsr(128, 256, (64, 128), 0.5).pattern
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    pairs = [random_pairs(64, 128, generator) for _ in range(pattern.nnzb)]
    values = torch.randn(pattern.nnzb, 64, 64)
    values[0, 5, ::3] = torch.nan
    a = BSR24(pattern, values, torch.stack([packed(of_block, 128) for of_block in pairs]))
    blocks = torch.stack([spread(*each) for each in zip(values, pairs, strict=True)])
    assert same_bits(a.to_bsr().values, blocks)
    again = BSR24.unchecked(pattern, *two_four.pack(a.to_bsr().values))
    assert same_bits(again.values, values)
    assert torch.equal(again.meta, a.meta)


def test_a_transposed_view_is_packed_along_its_own_rows():
    a = random_bsr(192, 320, (64, 64), 0.5).T
    b = BSR24.from_bsr(a)
    assert torch.equal(b.to_dense(), Semi24.from_dense(a.to_dense()).to_dense())
    BSR24(b.pattern, b.values, b.meta)


@given(keep=st.sampled_from([0.1, 0.3, 1.0]), scope=st.sampled_from(["global", "row"]), data=st.data())
def test_a_dense_matrix_keeps_the_blocks_that_a_bsr_keeps(keep: float, scope: Scope, data: st.DataObject):
    m, k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    w = torch.randn(m, k)
    a = BSR.from_dense(w, (64, 128), keep=keep, scope=scope)
    b = BSR24.from_dense(w, (64, 128), keep=keep, scope=scope)
    assert b.pattern.same_as(a.pattern)
    assert torch.equal(b.to_dense(), BSR24.from_bsr(a).to_dense())
    BSR24(b.pattern, b.values, b.meta)


def test_thresholds_and_a_mask_of_blocks_choose_blocks_too():
    w = torch.zeros(192, 256)
    w[:64, 64:128] = torch.rand(64, 64) + 1
    w[130, 3] = 0.5
    cases: tuple[tuple[dict[str, Any], list[list[int]]], ...] = (
        ({"threshold": 0}, [[0, 1, 0, 0], [0] * 4, [1, 0, 0, 0]]),
        ({"threshold": 2.0}, [[0, 1, 0, 0], [0] * 4, [0] * 4]),
        ({"mask": torch.eye(3, 4, dtype=torch.bool)}, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]),
    )
    for more, stored in cases:
        a = BSR24.from_dense(w, 64, **more)
        ones = torch.ones(a.nnzb, 64, 64)
        assert torch.equal(BSR(a.pattern, ones).to_dense()[::64, ::64], torch.tensor(stored).float())
    with pytest.raises(InvalidInput, match=r"keep=0.25 .*, threshold=t .* or mask="):
        BSR24.from_dense(w, 64)
    with pytest.raises(InvalidInput, match="mask and keep are given"):
        BSR24.from_dense(w, 64, keep=0.5, mask=torch.eye(3, 4, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(128, 192), (100, 150)], ids=str)
def test_a_mask_of_elements_keeps_these_and_refuses_three_of_four(shape: tuple[int, int], device: str):
    w = torch.randn(*shape, device=device)
    mask = padded(torch.rand(*shape, device=device), 4)
    mask = (Semi24.from_dense(padded(mask)).to_dense() > 0.7)[:, : shape[1]]
    mask[:64, 64:128] = False
    a = BSR24.from_dense(w, 64, mask=mask)
    assert torch.equal(a.to_dense(), w.masked_fill(~mask, 0))
    mask[70, 12:15] = True
    with pytest.raises(
        InvalidInput,
        match=r"1 of \d+ groups .* two elements of the mask; the first is row 70, columns 12 to 15;",
    ):
        BSR24.from_dense(w, 64, mask=mask)


def test_exact_takes_2_4_blocks_and_counts_what_it_refuses(device: str):
    b = make(device=device)
    assert torch.equal(BSR24.from_bsr(b.to_bsr(), exact=True).to_dense(), b.to_dense())
    dense = b.to_dense()
    assert torch.equal(BSR24.from_dense(dense, b.block, exact=True, threshold=0).to_dense(), dense)
    at, row, group = 1, int(torch.randint(7, ())), int(torch.randint(16, ()))
    a = b.to_bsr()
    a.values[at, row, 4 * group : 4 * group + 3] = 1
    a.values[b.nnzb - 2, row + 1, 4 * group : 4 * group + 4] = 1
    block_row = int(np.searchsorted(a.pattern.host.indptr, at, side="right")) - 1
    row, column = row + 64 * block_row, 4 * group + 128 * int(a.pattern.host.indices[at])
    place = f"the first is row {row}, columns {column} to {column + 3};"
    message = f"2 of {a.nnzb * 64 * 32} groups .* two nonzeros; {place}"
    with pytest.raises(InvalidInput, match=message):
        BSR24.from_bsr(a, exact=True)
    BSR24.from_bsr(a)


@pytest.mark.gpu
def test_packing_on_a_gpu_does_not_sync(no_sync: Any):
    a = random_bsr(256, 512, 64, 0.5, device="cuda")
    BSR24.from_bsr(a).to_dense()
    with no_sync():
        dense = BSR24.from_bsr(a).to_dense()
    assert torch.equal(dense.cpu(), BSR24.from_bsr(a.to("cpu")).to_dense())


@pytest.mark.parametrize("block", [(32, 64), (64, 96), 48, (128, 16)], ids=str)
def test_blocks_whose_sides_64_does_not_divide_are_refused(block: Any):
    a = random_bsr(384, 384, block, 0.5)
    message = r"block \d+x\d+: the sides of 2:4 blocks must be multiples of 64"
    with pytest.raises(InvalidInput, match=message):
        BSR24.from_bsr(a)
    with pytest.raises(InvalidInput, match=message):
        BSR24.from_dense(torch.ones(384, 384), block, keep=0.5)
    with pytest.raises(InvalidInput, match=message):
        BSR24(a.pattern, a.values[..., ::2].contiguous(), torch.zeros(0))


def test_malformed_metadata_is_counted_and_placed():
    a = make(192, 256)
    meta = a.meta.clone()
    meta[1, 3, 7] = 0xE0 | int(meta[1, 3, 7]) & 0x0F  # good: columns 2 and 3
    BSR24(a.pattern, a.values, meta)
    meta[1, 3, 7] &= 0x0F
    meta[2, 0, 0] = 0xFF
    message = (
        rf"3 of {2 * meta.numel()} groups have malformed metadata; the first, at stored block 1, row 3, columns "
        r"60 to 63, has the nibble 0b0000: columns 0 and 0, which must rise"
    )
    with pytest.raises(InvalidInput, match=message):
        BSR24(a.pattern, a.values, meta)


def test_values_in_the_padding_are_refused_and_counted():
    a = BSR24.from_bsr(random_bsr(100, 130, 64, 1.0))
    values, meta = a.values.clone(), a.meta.clone()
    values[-1, 3, 1] = torch.nan  # the last block has columns 128 and 129
    meta[-1, 3, 0] = meta[-1, 3, 0] & 0xF0 | 0b1100
    values[0, 0] = 7
    BSR24(a.pattern, torch.zeros_like(values), meta)
    with pytest.raises(
        InvalidInput, match="1 values outside a 100x130 matrix in blocks of 64x64 are not zero"
    ):
        BSR24(a.pattern, values, meta)
    values[3, 36, 0] = 1
    with pytest.raises(InvalidInput, match="2 values outside a 100x130 matrix"):
        BSR24(a.pattern, values, meta)


@pytest.mark.gpu
def test_values_on_another_device_than_the_pattern_are_refused():
    a = make()
    with pytest.raises(InvalidInput, match="values are on cuda:0 and the pattern on cpu"):
        BSR24(a.pattern, a.values.cuda(), a.meta.cuda())


def test_what_is_no_bsr_is_refused():
    with pytest.raises(
        InvalidInput, match=r"expected a BSR, got a torch.Tensor, torch.float32 \[64, 64\].*BSR24.from_dense"
    ):
        BSR24.from_bsr(torch.ones(64, 64))  # type: ignore[arg-type]
