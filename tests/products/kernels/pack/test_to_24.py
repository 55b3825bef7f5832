"""products/kernels/pack/to_24.py: in Triton's interpreter, compiled for cards that are not there, and on a GPU."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.products.formats import two_four
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from tests.products.formats.two_four import same_bits

pytest.importorskip("triton")

from sparsek.products.kernels.pack import to_24 as portable
from tests.engine.launch import newest
from tests.engine.launch.covering import once
from tests.products.kernels.pack import to_24_code as offline
from tests.products.kernels.pack.to_24_cases import LAYOUTS, any_bits, flags, same
from tests.sampling import dealt

WIDE = "v4.b32"  # 16 bytes
BYTES = {"b8", "b16"}  # of metadata, those of one thread


@pytest.mark.parametrize(
    ("card", "dtype", "read", "masked"),
    once(
        product(("sm_90", "sm_80"), offline.DTYPES, offline.READ, (False, True)),
        lambda case: (("read", case[0], case[2]), ("dtype", case[1]), ("masked", case[3])),
    ),
)
def test_it_reads_and_writes_16_bytes_at_once(card: str, dtype: str, read: str, masked: bool):
    code = offline.pack_code(card, dtype, read, masked)
    assert code.stack == 0
    assert offline.loads(code.ptx) <= {WIDE} | ({"v2.b32", "b32"} if masked else set())
    assert WIDE in offline.loads(code.ptx)
    assert WIDE in code.stores
    assert code.stores - {WIDE} <= BYTES
    if "columns" not in read:
        assert code.shared == 0, "all of a group is in one lane"
        assert "shfl" not in code.ptx
        # 32 warps on an SM have 64 KB under way.
        assert code.registers <= 64


@pytest.mark.parametrize(
    ("card", "dtype", "ragged", "blocks"),
    once(product(("sm_90", "sm_80"), offline.DTYPES, (False, True), (False, True))),
)
def test_unpacking_writes_16_bytes_at_once(card: str, dtype: str, ragged: bool, blocks: bool):
    code = offline.unpack_code(card, dtype, ragged, blocks)
    assert code.stack == 0
    assert code.registers <= 32
    assert code.stores == {WIDE}
    assert offline.loads(code.ptx) == {"b8", WIDE if dtype == "fp32" else "v2.b32"}
    assert code.shared == 0 or dtype == "fp32"


def test_the_newest_triton_reads_and_writes_16_bytes_at_once_too():
    reads = once(product(offline.DTYPES, offline.READ))
    found = newest.call(offline.facts, reads)
    assert len(found) == len(reads) + 2 * len(offline.DTYPES)
    for name, (loads, stores, stack, shared) in found.items():
        assert WIDE in stores, name
        assert set(stores) - {WIDE} <= BYTES, name
        assert stack == 0, name
        if "unpacked" not in name:
            assert loads == [WIDE], name
            assert shared == 0 or "columns" in name, name


def test_matrices_on_the_cpu_are_left_to_torch():
    w = torch.randn(8, 16)
    assert portable.pack24(w) is None
    assert portable.unpack24(*two_four.pack(w)) is None


SHAPES = ((1, 8), (70, 264), (1000, 520), (128, 4096), (3, 64, 128), (5, 129, 72), (64,), (33, 4104))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", offline.DTYPES.values(), ids=str)
def test_a_gpu_packs_the_bits_of_the_cpu(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor], masked: bool
):
    for shape in dealt(SHAPES, 3, LAYOUTS.index(layout), of=(dtype, masked)):
        w = layout(any_bits(shape, dtype).cuda())
        mask = layout(flags(shape).cuda().view(torch.int8)).view(torch.bool) if masked else None
        same(w, mask)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_a_gpu_packs_what_lies_past_2_to_the_31(columns: bool):
    w = torch.zeros(65544, 32776, dtype=torch.bfloat16, device="cuda")
    w = w.T if columns else w
    part = any_bits((8, w.shape[1]), torch.bfloat16)
    w[-8:] = part.cuda()
    made = portable.pack24(w)
    assert made is not None
    for whole, right in zip(made, two_four.pack(part), strict=True):
        assert same_bits(whole[-8:].cpu(), right)
    assert not made[0][:-8].any()
    dense = portable.unpack24(*made)
    assert dense is not None
    assert same_bits(dense[-8:].cpu(), two_four.unpack(*two_four.pack(part)))


@pytest.mark.gpu
def test_formats_on_a_gpu_are_packed_by_it_without_a_sync(no_sync: Any, monkeypatch: pytest.MonkeyPatch):
    w, stored = torch.randn(256, 512).bfloat16(), random_bsr(500, 700, 64, 0.3)
    right, blocks = Semi24.from_dense(w), BSR24.from_bsr(stored)
    there, stored = w.cuda(), stored.to("cuda")
    Semi24.from_dense(there)
    BSR24.from_bsr(stored)
    monkeypatch.setattr(two_four, "groups", lambda *given: pytest.fail("torch packed"))
    with no_sync():
        a, b = Semi24.from_dense(there), BSR24.from_bsr(stored)
        dense = portable.unpack24(a.values, a.meta)
    assert dense is not None
    monkeypatch.undo()
    for made, expected in ((a, right), (b, blocks)):
        assert same_bits(made.values.cpu(), expected.values)
        assert same_bits(made.meta.cpu(), expected.meta)
    assert same_bits(dense.cpu(), right.to_dense())
