"""pack/to_24.py in Triton's interpreter."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsek.core import operations
from sparsek.products.formats import two_four
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.kernels.pack import to_24 as portable
from tests.products.formats.two_four import PAIRS, VALUES, masks, matrices, packed, random_pairs, same_bits
from tests.products.kernels.pack.to_24_cases import LAYOUTS, any_bits, flags, same
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# The kernels move and compare integers, so bf16 is right in the interpreter too.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALL = {"LANES": 64, "ACROSS": 8, "TALL": 16, "BYTES": 8}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that little matrices need several."""
    for name, size in SMALL.items():
        monkeypatch.setattr(portable, name, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [False, True], ids=["by rows", "by columns"])
def test_every_group_of_special_values_is_packed_as_by_torch(columns: bool, dtype: torch.dtype):
    w = torch.tensor(list(itertools.product(VALUES, repeat=4)), dtype=dtype).view(98, 1568)
    same(w.T.contiguous().T if columns else w)


@pytest.mark.parametrize("columns", [False, True], ids=["by rows", "by columns"])
def test_every_mask_of_a_group_is_packed_as_by_torch(columns: bool):
    chosen = torch.tensor([[at in some for at in range(4)] for some in ((), (0,), (1,), (2,), (3,), *PAIRS)])
    mask = torch.cartesian_prod(torch.arange(11), torch.arange(11)).view(-1)
    mask = chosen[mask].view(11, 88)
    for dtype in DTYPES:
        w = any_bits((11, 88), dtype)
        same(w.T.contiguous().T if columns else w, mask)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("dtype", "layout", "masked"),
    sampled(list(itertools.product((torch.float16, torch.float32), LAYOUTS, (False, True))), 8),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_any_bits_in_any_strides_are_packed_as_by_torch(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor], masked: bool
):
    for shape in (
        (1, 8),
        (7, 24),
        (33, 40),
        (16, 64),
        (32, 64),
        (19, 136),
        (3, 5, 72),
        (2, 16, 32),
        (8,),
        (40,),
    ):
        w = layout(any_bits(shape, dtype))
        assert w.shape == shape
        same(w, layout(flags(shape).view(torch.int8)).view(torch.bool) if masked else None)


@pytest.mark.parametrize("dtype", sampled(DTYPES, 1), ids=str)
def test_tiles_of_full_size_that_are_full_and_that_are_not(dtype: torch.dtype):
    for rows, columns in (
        (64, 128),
        (128, 256),
        (16, 512),
        (1, 4096),
        (2, 4096),
        (1, 4104),
        (63, 120),
        (65, 520),
    ):
        wide = any_bits((rows, columns + 64), dtype)
        for w in (wide[:, :columns].contiguous(), wide[:, :columns], wide[:, :columns].T.contiguous().T):
            same(w)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 8), (5, 24), (9, 40)], ids=str)
def test_nothing_behind_a_matrix_is_read(shape: tuple[int, int], dtype: torch.dtype, last_page: Tensor):
    rows, columns = shape
    size = rows * columns * dtype.itemsize
    for part in (last_page[-size:].view(dtype), last_page.view(dtype)[-2 * rows * columns :]):
        part.copy_(any_bits(tuple(part.shape), dtype))
        w = part.view(rows, -1)
        same(w[:, w.shape[1] - columns :])
        same(part.view(-1, rows).T[:, -columns:])
    mask = last_page[-rows * columns :].copy_(flags((rows * columns,))).view(torch.bool)
    same(any_bits(shape, dtype), mask.view(shape))
    same(any_bits(shape, dtype), mask.view(columns, rows).T)
    values = last_page[-size // 2 :].view(dtype).view(rows, -1)
    meta = torch.full((rows, columns // 8), 0x44, dtype=torch.uint8)
    for _ in range(2):
        dense = portable.unpack24(values, meta)
        assert dense is not None
        assert same_bits(dense, two_four.unpack(values, meta))
        values, meta = values.clone(), last_page[-meta.numel() :].copy_(meta.view(-1)).view(meta.shape)


@pytest.mark.usefixtures("small")
@settings(max_examples=50)
@given(data=st.data())
def test_any_matrix_and_mask(data: st.DataObject):
    w = data.draw(matrices().filter(lambda w: w.dtype != torch.float64))
    layout = data.draw(st.sampled_from(LAYOUTS))
    same(layout(w))
    same(layout(w), data.draw(masks(*w.shape)))


def read_by(monkeypatch: pytest.MonkeyPatch, w: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """Which kernel packs w, and the constants that say how."""
    found: list[portable.PackLaunch] = []
    real = portable._launch
    monkeypatch.setattr(portable, "_launch", lambda *given: found.append(real(*given)) or found[-1])
    same(w, mask)
    monkeypatch.undo()
    (launch,) = found
    return {"by": launch.kernel, "flat": launch.constants.get("ACROSS") == portable.LANES} | launch.constants


def test_what_can_be_read_16_bytes_at_once_is(monkeypatch: pytest.MonkeyPatch):
    rows, columns = {"by": portable._by_rows}, {"by": portable._by_columns}
    half, wide = any_bits((64, 128), torch.float16), any_bits((64, 256), torch.float16)
    cases = (
        (half, rows | {"flat": True, "RAGGED": False, "EVEN": True}),
        (any_bits((2, 4, 64), torch.float16), rows | {"flat": True, "RAGGED": True}),
        (any_bits((6, 64), torch.float32), rows | {"flat": True, "RAGGED": True}),
        (wide[:, :128], rows | {"flat": False}),
        (wide[:, 2:122], rows | {"flat": False, "EVEN": False}),
        (wide[:, 1:129], columns),
        (any_bits((64, 129), torch.float16)[:, :128], columns),
        (any_bits((64, 129), torch.float32)[:, 1:], rows | {"flat": False}),
        (wide[:, ::2], columns),
        (wide.T.contiguous().T, columns | {"UNIT": 8, "RAGGED": False}),
        (any_bits((64, 60), torch.float16).T, columns | {"UNIT": 1, "RAGGED": True}),
        (any_bits((3, 64, 60), torch.float32).mT, columns | {"UNIT": 4, "RAGGED": True}),
    )
    for w, expected in cases:
        found = read_by(monkeypatch, w)
        assert {name: found[name] for name in expected} == expected
    # A mask of other strides makes one row impossible.
    mask = flags((64, 128))
    assert read_by(monkeypatch, half, mask)["flat"]
    assert not read_by(monkeypatch, half, mask.T.contiguous().T)["flat"]


def test_what_the_kernels_do_not_take_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    w = torch.randn(4, 2, 3, 16).half()
    assert portable.pack24(w.double()) is None
    assert portable.pack24(w[:0]) is None
    assert portable.pack24(torch._neg_view(w)) is None
    assert portable.pack24(w.transpose(0, 1)) is None
    assert portable.pack24(w, flags(w.shape).transpose(0, 1).contiguous().transpose(0, 1)) is None
    same(w)
    values, meta = two_four.pack(w)
    assert portable.unpack24(values[:0], meta[:0]) is None
    assert portable.unpack24(torch._neg_view(values), meta) is None
    assert portable.unpack24(values.mT.contiguous().mT, meta) is None
    assert portable.unpack24(values, meta.mT.contiguous().mT) is None
    many = any_bits((3, 8, 16), torch.float16).mT.contiguous().mT
    monkeypatch.setattr(portable, "GRID", 3)
    same(many)
    monkeypatch.setattr(portable, "GRID", 2)
    assert portable.pack24(many) is None


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (5, 40), (3, 64, 128), (16,), (256, 8), (512, 64)], ids=str)
def test_any_values_in_any_columns_are_unpacked_as_by_torch(shape: tuple[int, ...], dtype: torch.dtype):
    half = (*shape[:-1], shape[-1] // 2)
    values = any_bits(half, dtype)
    pairs = random_pairs(values.numel() // half[-1], shape[-1], torch.Generator().manual_seed(values.numel()))
    meta = packed(pairs, shape[-1]).view(*shape[:-1], shape[-1] // 8)
    dense = portable.unpack24(values, meta)
    assert dense is not None
    assert same_bits(dense, two_four.unpack(values, meta))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (130, 136), (128, 256), (300, 72), (0, 16), (16, 0)], ids=str)
def test_a_matrix_is_unpacked_to_the_bits_of_its_blocks_with_zeros_around(
    shape: tuple[int, int], dtype: torch.dtype
):
    wide = torch.float64 if dtype.itemsize == 1 else dtype
    a = Semi24.from_dense(torch.randn(shape, dtype=wide))
    made = portable.unpacked_blocks(a.values.to(dtype), a.meta, (128, 128))
    rows, columns = -(-shape[0] // 128), -(-shape[1] // 128)
    padded = torch.zeros(rows * 128, columns * 128, dtype=wide)
    padded[: shape[0], : shape[1]] = a.to_dense()
    right = padded.view(rows, 128, columns, 128).transpose(1, 2).reshape(-1, 128, 128).to(dtype)
    assert torch.equal(
        made.view(portable.INTEGERS[dtype.itemsize]), right.view(portable.INTEGERS[dtype.itemsize])
    )


def test_stored_blocks_keep_their_order():
    a = BSR24.from_bsr(BSR.from_dense(torch.randn(192, 320).half(), 64, keep=0.4))
    made = portable.unpacked_blocks(a.values, a.meta, a.block)
    assert same_bits(made, two_four.unpack(a.values, a.meta))


def test_the_operations_have_registered_it_and_leave_alone_what_is_looked_at_op_by_op():
    operations.load()
    registered, unpacks = (operations.KERNELS[name] for name in ("pack24", "unpack24"))
    w = any_bits((6, 40), torch.float16)
    made = registered(w, None)
    assert made is not None
    assert all(same_bits(*parts) for parts in zip(made, two_four.pack(w), strict=True))
    dense = unpacks(*made)
    assert dense is not None
    assert same_bits(dense, two_four.unpack(*made))

    class Other(Tensor):
        pass

    assert registered(w.as_subclass(Other), None) is None
    seen = []
    torch.func.vmap(lambda x: (seen.append(registered(x, None)), x)[1])(w)
    assert seen == [None]
