"""Kernels of masks of packed documents, in Triton's interpreter."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsek.attn.mask.build.banded import Band, bounded_band, room_of_documents
from sparsek.attn.mask.layout import MaskLayout
from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from tests.attn.kernels.mask.same import SIDES, assert_same, by_kernels, entries_of
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FEW = settings(max_examples=5)


@st.composite
def lengths_of_documents(draw: st.DrawFn) -> list[list[int]]:
    """One to three rows of document lengths of one sum."""
    total = draw(st.integers(1, 500))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
        edges = [0, *cuts, total]
        rows.append([b - a for a, b in pairwise(edges)])
    return rows


@given(lengths_of_documents(), SIDES, SIDES, st.booleans())
@FEW
def test_documents(rows: list[list[int]], bq: int, bk: int, causal: bool):
    def build() -> BlockMask:
        return BlockMask.block_diagonal(rows, causal=causal, block=(bq, bk), device="cpu")

    assert_same(by_kernels(build), build())


@given(lengths_of_documents(), SIDES, SIDES, st.booleans(), st.integers(1, 300), st.integers(0, 200))
@FEW
def test_documents_of_edges_that_the_host_does_not_read(
    rows: list[list[int]], bq: int, bk: int, causal: bool, window: int, more: int
):
    edges = torch.tensor([0, *accumulate(rows[0])])

    def build() -> BlockMask:
        total = int(edges[-1]) + more
        return BlockMask.documents(edges, total, window=window, causal=causal, block=(bq, bk))

    made, wanted = by_kernels(build), build()
    assert not made.sizes.exact
    assert made.heavy_blocks >= wanted.heavy_blocks
    assert all(true <= said for true, said in zip(wanted.sizes[:3], made.sizes[:3], strict=True))
    assert_same(made, wanted, sizes=False)


@pytest.mark.parametrize(("window", "block"), [(None, 128), (70, 64)])
def test_torch_compile_knows_the_layout_without_the_kernel(window: "int | None", block: int):
    edges = torch.tensor([0, 100, 317, 490])
    made = by_kernels(lambda: BlockMask.documents(edges, 500, window=window, block=block))
    with FakeTensorMode():
        place = Place.of(500, block=block, device="cpu", q_offset=0)
        room = room_of_documents(place, Band.of(place, window, 1), True)
        shapes = MaskLayout.of(place, bounded_band(place, Band.of(place, window, 1)), room, made.label).shapes
    assert made._layout is not None
    assert shapes == made._layout.shapes


EDGE = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-10, 520), st.just(0))


@given(st.lists(EDGE, min_size=2, max_size=5), st.integers(1, 300), st.booleans())
@FEW
def test_wrong_edges_give_a_mask_within_its_bounds(edges: list[int], window: int, causal: bool):
    given_edges = torch.tensor(edges, dtype=torch.int32)
    mask = by_kernels(lambda: BlockMask.documents(given_edges, 500, window=window, causal=causal, block=64))
    right = edges[0] == 0 and edges == sorted(edges) and edges[-1] <= 500
    fault, *_ = mask._memo.pop("readbacks")
    assert (fault.look() == 0) == right
    if not right:
        refused("cu_seqlens is wrong at document", fault.apply, mask, wait=False)
    rows = [full + cut for full, cut in zip(*map(entries_of, (mask.full, mask.partial)), strict=True)]
    assert sum(map(len, rows)) <= mask.sizes.stored
    assert max(map(len, rows)) <= mask.sizes.longest
    assert all(len(set(row)) == len(row) and set(row) <= set(range(8)) for row in rows)
    lo, hi = mask.host.lo, mask.host.hi
    assert lo is not None
    assert hi is not None
    assert lo.min() >= 0
    assert hi.max() <= 500
    assert (lo <= hi).all()
