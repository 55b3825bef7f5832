"""Semi24: which two of four it keeps, that nothing is lost on the way there and back, and what it refuses."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.sparse import SparseSemiStructuredTensor

from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.core.operations import KERNELS
from sparsek.products.formats import two_four
from sparsek.products.formats.semi24 import Semi24
from tests.products.formats.two_four import (
    DTYPES,
    PAIRS,
    kept,
    masks,
    matrices,
    nibble,
    packed,
    pruned,
    random_pairs,
    same_bits,
    spread,
)

MALFORMED = tuple(n for n in range(16) if n & 3 >= n >> 2)


def make(m: int = 6, k: int = 32, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Semi24:
    return Semi24.from_dense(torch.randn(m, k, device=device).to(dtype))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


@given(w=matrices())
def test_the_two_largest_of_four_are_kept_and_of_equal_ones_the_lower_columns(w: torch.Tensor):
    a = pruned(w)
    pairs = [[kept(row[at : at + 4]) for at in range(0, len(row), 4)] for row in w.tolist()]
    assert torch.equal(a.meta, packed(pairs, w.shape[1]))
    expected = torch.zeros_like(w)
    for row, of_row in enumerate(pairs):
        for group, pair in enumerate(of_row):
            for slot, column in enumerate(pair):
                expected[row, 4 * group + column] = w[row, 4 * group + column]
                assert same_bits(a.values[row, 2 * group + slot], w[row, 4 * group + column])
    assert same_bits(a.to_dense(), expected)
    Semi24(a.values, a.meta)


@given(data=st.data())
def test_a_mask_keeps_its_elements_and_fills_up_with_zeros(data: st.DataObject):
    w = data.draw(matrices())
    mask = data.draw(masks(*w.shape))
    a = pruned(w, mask)
    assert same_bits(a.to_dense(), torch.where(mask, w, torch.zeros_like(w)))
    pairs = [
        [kept([float(each) for each in row[at : at + 4]]) for at in range(0, len(row), 4)]
        for row in mask.tolist()
    ]
    assert torch.equal(a.meta, packed(pairs, w.shape[1]))
    Semi24(a.values, a.meta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 40), (1, 8), (0, 16), (3, 0), (0, 0)], ids=str)
def test_any_values_in_any_columns_come_back_to_the_last_bit(shape: tuple[int, int], dtype: torch.dtype):
    rows, columns = shape
    values = torch.randn(rows, columns // 2).to(dtype)
    values.view(-1)[: values.numel() // 3] = torch.nan
    values.view(-1)[::5] = -torch.inf
    pairs = random_pairs(rows, columns, generator())
    a = Semi24(values, packed(pairs, columns))
    assert (a.shape, a.dtype, a.device.type) == (shape, dtype, "cpu")
    assert same_bits(a.to_dense(), spread(values, pairs))
    again = pruned(a.to_dense())
    assert torch.equal(again.meta, a.meta)  # no value is zero, so there is no other way to write this matrix
    assert same_bits(again.values, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_nan_is_equal_and_above_infinity(dtype: torch.dtype):
    bits, infinity = two_four.BITS[dtype]
    rising = torch.tensor(
        [[infinity, infinity + 1, infinity + 3, -1, infinity, 0, infinity + 5, infinity + 2]]
    )
    w = rising.to(bits).view(dtype)
    assert w.isnan().tolist() == [[False, True, True, True, False, False, True, True]]
    a = pruned(w)
    assert a.meta.tolist() == [[nibble((1, 2)) | nibble((2, 3)) << 4]]
    assert same_bits(a.values, w[:, [1, 2, 6, 7]])


def test_a_nibble_is_read_as_the_ptx_isa_has_it():
    values = torch.arange(1.0, 13.0).view(1, 12)
    meta = torch.tensor([[0x84, 0x9C, 0xED]], dtype=torch.uint8)
    expected = [[1, 2, 0, 0, 3, 0, 4, 0, 5, 0, 0, 6, 0, 7, 8, 0, 0, 9, 0, 10, 0, 0, 11, 12]]
    assert Semi24(values, meta).to_dense().tolist() == expected


@pytest.mark.parametrize(
    "stride",
    [
        lambda w: w.T.contiguous().T,
        lambda w: torch.stack((w, -w), dim=-1)[..., 0],
        lambda w: w.flip(0).contiguous().flip(0),
        lambda w: torch.cat((w.new_ones(1), w.reshape(-1)))[1:].view(w.shape),
    ],
    ids=["columns", "every second", "flipped", "odd offset"],
)
def test_strides_do_not_matter(stride: Any, device: str):
    w = torch.randn(12, 24, device=device).bfloat16()
    mask = torch.rand(12, 24, device=device) < 0.1
    a, b = Semi24.from_dense(w), Semi24.from_dense(stride(w))
    Semi24(b.values, b.meta)
    assert same_bits(a.values, b.values)
    assert same_bits(a.meta, b.meta)
    mask &= torch.tensor([True, True, False, False], device=device).repeat(6)
    masked = Semi24.from_dense(stride(w), stride(mask.view(torch.int8)).bool())
    assert same_bits(masked.to_dense(), w.masked_fill(~mask, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_packs_the_same_bits_without_a_sync(dtype: torch.dtype, no_sync: Any):
    w = torch.randint(-3, 4, (70, 264)).to(dtype)
    w[torch.rand(w.shape) < 0.05] = torch.nan
    there = w.cuda()
    Semi24.from_dense(there).to_dense()
    with no_sync():
        a = Semi24.from_dense(there)
        dense = a.to_dense()
    right = pruned(w)
    assert same_bits(a.values.cpu(), right.values)
    assert same_bits(a.meta.cpu(), right.meta)
    assert same_bits(dense.cpu(), right.to_dense())


@pytest.mark.gpu
def test_a_registered_packer_is_asked_on_a_gpu_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setitem(KERNELS, "pack24", lambda w, mask: asked.append(tuple(w.shape)))
    w = torch.randn(8, 16, device="cuda")
    right = Semi24.from_dense(w.cpu())
    assert same_bits(Semi24.from_dense(w).values.cpu(), right.values)  # it answered None, so torch packed
    Semi24.from_dense(w.requires_grad_())
    assert asked == [(8, 16)]
    made = right.to("cuda")
    monkeypatch.setitem(KERNELS, "pack24", lambda w, mask: (made.values, made.meta))
    assert Semi24.from_dense(w.detach()).values is made.values


def test_a_registered_packer_is_not_asked_for_a_matrix_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    def never(w: torch.Tensor, mask: torch.Tensor | None) -> None:
        raise AssertionError

    monkeypatch.setitem(KERNELS, "pack24", never)
    w = torch.randn(2, 8)
    assert Semi24.from_dense(w).kept_norm(w) < 1


@pytest.mark.gpu
def test_a_registered_unpacker_is_asked_on_a_gpu_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setitem(KERNELS, "unpack24", lambda values, meta: asked.append(tuple(values.shape)))
    a = Semi24.from_dense(torch.randn(8, 16)).to("cuda")
    right = a.to("cpu").to_dense()
    assert same_bits(a.to_dense().cpu(), right)  # it answered None, so torch unpacked
    Semi24.unchecked(a.values.clone().requires_grad_(), a.meta).to_dense()
    assert asked == [(8, 8)]
    monkeypatch.setitem(KERNELS, "unpack24", lambda values, meta: right)
    assert a.to_dense() is right


def test_exact_takes_a_2_4_matrix_and_counts_what_it_refuses(device: str):
    w = make(7, 40, device=device).to_dense()
    assert torch.equal(Semi24.from_dense(w, exact=True).to_dense(), w)
    crowded = torch.zeros(7, 10, dtype=torch.bool)
    crowded.view(-1)[torch.randperm(70)[:4]] = True
    for group in crowded.nonzero().tolist():
        w[group[0], 4 * group[1] : 4 * group[1] + 4] = torch.tensor([0, 7, 1e-30, 5])
    row, group = crowded.nonzero()[0].tolist()
    place = f"the first is row {row}, columns {4 * group} to {4 * group + 3}"
    with pytest.raises(
        InvalidInput, match=f"4 of 70 groups .* more than two nonzeros; {place}; without exact=True"
    ):
        Semi24.from_dense(w, exact=True)
    Semi24.from_dense(w)


def test_a_mask_with_three_of_four_is_refused_and_counted(device: str):
    w = torch.randn(7, 40, device=device)
    mask = torch.zeros(7, 40, dtype=torch.bool, device=device)
    mask[:, ::4] = mask[:, 1::4] = True
    mask[5, 8:12] = mask[6, 0:3] = True
    with pytest.raises(
        InvalidInput, match=r"2 of 70 groups .* two elements of the mask; the first is row 5, columns 8 to"
    ):
        Semi24.from_dense(w, mask)


def test_exact_with_a_mask_refuses_nonzeros_outside_the_mask(device: str):
    w = make(7, 40, device=device).to_dense()
    mask = w != 0
    assert torch.equal(Semi24.from_dense(w, mask, exact=True).to_dense(), w)
    row, column = mask.nonzero()[17].tolist()
    mask[row, column] = False
    with pytest.raises(
        InvalidInput, match=f"1 nonzeros lie outside the mask, the first at row {row}, column {column};"
    ):
        Semi24.from_dense(w, mask, exact=True)
    w[row, column] = 0
    assert torch.equal(Semi24.from_dense(w, mask, exact=True).to_dense(), w)


@pytest.mark.parametrize(
    ("w", "more", "message"),
    [
        ([[1.0]], {}, r"w must be a dense torch.Tensor, got list"),
        (torch.ones(8), {}, r"w has shape \[8\]; it must be 2-D"),
        (torch.ones(2, 8).to_sparse_csr(), {}, "layout torch.sparse_csr"),
        (torch.ones(2, 8, dtype=torch.int8), {}, "is torch.int8; use one of"),
        (torch.ones(2, 8, device="meta"), {}, "is on meta, which is not supported"),
        (torch.ones(2, 12), {}, "w has 12 columns; K must be a multiple of 8"),
        (torch.ones(2, 8), {"mask": [True]}, r"mask must be a dense torch.Tensor, got list"),
        (
            torch.ones(2, 8),
            {"mask": torch.ones(2, 8)},
            "dtype of mask is torch.float32; it must be torch.bool",
        ),
        (
            torch.ones(2, 8),
            {"mask": torch.ones(8, 2, dtype=torch.bool)},
            r"mask has shape \[8, 2\]; it must be of",
        ),
        (
            torch.ones(2, 8),
            {"mask": torch.ones(2, 8, dtype=torch.bool, device="meta")},
            "mask is on meta, which is not supported",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_packed_is_refused(w: Any, more: dict[str, Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        Semi24.from_dense(w, **more)


def test_metadata_that_names_a_column_twice_or_in_falling_order_is_counted_and_placed():
    for wrong in MALFORMED:
        rows, columns = 5, 64
        a = make(rows, columns)
        columns_of = torch.stack((a.meta & 15, a.meta >> 4), dim=-1).view(-1)
        count = int(torch.randint(1, 9, ()))
        at = torch.randperm(columns_of.numel())[:count]
        columns_of[at] = wrong
        meta = (columns_of[0::2] | columns_of[1::2] << 4).view(a.meta.shape)
        row, group = divmod(int(at.min()), columns // 4)
        message = (
            rf"{count} of {rows * columns // 4} groups have malformed metadata; the first, at row {row}, columns "
            rf"{4 * group} to {4 * group + 3}, has the nibble {wrong:#06b}: columns {wrong & 3} and {wrong >> 2},"
        )
        with pytest.raises(InvalidInput, match=message):
            Semi24(a.values, meta)
    assert {nibble(pair) for pair in PAIRS}.isdisjoint(MALFORMED)
    assert len(MALFORMED) == 10


def test_gradients_reach_the_values_through_other_dtypes():
    values = make(dtype=torch.float64).values.requires_grad_()
    Semi24.unchecked(values, make().meta).to(dtype=torch.float32).to_dense().square().sum().backward()
    assert values.grad is not None
    assert torch.allclose(values.grad, 2 * values.detach(), rtol=1e-6)


def test_kept_norm_neither_over_nor_underflows():
    w = torch.tensor([[3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0]])
    for scale in (1e-30, 1.0, 1e30):
        assert Semi24.from_dense(w * scale).kept_norm(w * scale) == pytest.approx(
            math.sqrt(75 / 125), rel=1e-6
        )
    assert Semi24.from_dense(w * 0).kept_norm(w * 0) == 1.0


def test_it_goes_through_torch_compile_as_a_pytree_and_is_made_there():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(a: Semi24, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.to_dense() * 2, Semi24.from_dense(w).to_dense()

    a, w = make(), torch.randn(3, 16)
    doubled, pruned = run(a, w)
    assert torch.equal(doubled, a.to_dense() * 2)
    assert torch.equal(pruned, Semi24.from_dense(w).to_dense())


def test_torch_takes_it_on_a_gpu_only_and_says_so():
    with pytest.raises(
        Unsupported, match=r"(?s)Semi24.* to torch\.sparse.*Only CUDA tensors are currently supported"
    ):
        make(64, 64, torch.float16).to_torch()
    with pytest.raises(Unsupported, match="only bf16 and fp16 are 2:4 there"):
        make().to_torch()
    with pytest.raises(
        InvalidInput,
        match=r"expected a torch.sparse.SparseSemiStructuredTensor, got a torch.Tensor, torch.float32",
    ):
        Semi24.from_torch(torch.ones(64, 64))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend", ["SparseSemiStructuredTensorCUTLASS", "SparseSemiStructuredTensorCUSPARSELT"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_and_back_on_a_gpu(backend: str, dtype: torch.dtype):
    a = make(128, 256, dtype, "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the class a prototype
        theirs = getattr(torch.sparse, backend).from_dense(a.to_dense())
        again = Semi24.from_torch(theirs)
        back = a.to_torch()
        with pytest.raises(Unsupported, match="to Semi24"):
            Semi24.from_torch(theirs.t())
        with pytest.raises(Unsupported, match="multiple of"):
            make(24, 24, dtype, "cuda").to_torch()
    assert torch.equal(again.to_dense(), a.to_dense())
    assert isinstance(back, SparseSemiStructuredTensor)
    x = torch.randn(256, 64, device="cuda").to(dtype)
    assert torch.allclose(torch.mm(back, x).float(), a.to_dense().float() @ x.float(), rtol=2e-2, atol=0.2)
