"""A mask that a kernel made beside the one that numpy makes."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from sparsek.attn.mask.build import banded
from sparsek.attn.mask.lists import BlockLists, Frame, Place
from sparsek.attn.mask.mask import BlockMask

SIDES = st.sampled_from((64, 128))


@st.composite
def places(draw: st.DrawFn, most: int = 900) -> Place:
    """Lengths, blocks and offsets; half of them of as many queries as keys."""
    kv_len = draw(st.integers(0, most))
    q_len = draw(st.one_of(st.just(kv_len), st.integers(0, most)))
    offset = draw(st.one_of(st.none(), st.just(0), st.integers(-most, most)))
    return Place.of(
        q_len=q_len, kv_len=kv_len, block=(draw(SIDES), draw(SIDES)), device="cpu", q_offset=offset
    )


def frame(place: Place, device: str = "cpu") -> Frame:
    """The options of a builder for this place."""
    return Frame(
        q_len=place.q_len, kv_len=place.kv_len, block=place.block, q_offset=place.q_offset, device=device
    )  # fmt: skip


def by_kernels(build: Callable[[], BlockMask]) -> BlockMask:
    """The mask that kernels make on the CPU, in Triton's interpreter: the second of its kind."""
    with mock.patch.object(banded, "has_kernels", return_value=True):
        build()
        made = build()
    assert made._base is not None
    return made


def assert_same(made: BlockMask, wanted: BlockMask, *, sizes: bool = True) -> None:
    """The masks see the same keys, in the same blocks of the same kinds; bits may have other numbers."""
    assert not sizes or made.sizes == wanted.sizes
    assert not sizes or made.heavy_blocks == wanted.heavy_blocks
    assert (made.pure, made.label, made.batch, made.heads) == (
        wanted.pure,
        wanted.label,
        wanted.batch,
        wanted.heads,
    )
    for name in ("full", "partial"):
        mine, theirs = entries_of(getattr(made, name)), entries_of(getattr(wanted, name))
        assert mine == theirs, name
    for name in ("lo", "hi"):
        mine, theirs = getattr(made, name), getattr(wanted, name)
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine.cpu(), theirs.cpu())
    assert (made.rules is None) == (wanted.rules is None)
    if made.rules is not None:
        for first in {0, max(made.q_len // 2 - 400, 0), max(made.q_len - 800, 0)}:
            last = min(first + 800, made.q_len)
            mine, theirs = (each.dense_rows(first, last) for each in (made, wanted))
            assert torch.equal(mine.cpu(), theirs.cpu())
        kinds = [sorted_rules(each) for each in (made, wanted)]
        assert kinds[0] == kinds[1]


def entries_of(lists: BlockLists) -> list[list[int]]:
    """The columns of each row, in order."""
    indices = lists.indices.tolist()
    rows = zip(lists.starts.tolist(), lists.counts.tolist(), strict=True)
    return [indices[start : start + count] for start, count in rows]


def sorted_rules(mask: BlockMask) -> list[list[bool]]:
    """Of each row, which of its partial blocks have bits."""
    rules: Any = mask.rules
    marked = BlockLists(mask.partial.starts, mask.partial.counts, rules)
    return [[each >= 0 for each in row] for row in entries_of(marked)]
