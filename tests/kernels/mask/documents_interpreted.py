"""Kernels of masks of packed documents, in Triton's interpreter."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.mask.mask import BlockMask
from tests.kernels.mask.same import SIDES, assert_same, by_kernels

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FEW = settings(max_examples=12)


@st.composite
def lengths_of_documents(draw: st.DrawFn) -> list[list[int]]:
    """One to three rows of document lengths of one sum."""
    total = draw(st.integers(1, 800))
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
