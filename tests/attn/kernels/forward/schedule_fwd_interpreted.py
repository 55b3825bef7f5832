"""attn/kernels/forward/schedule_fwd.py in Triton's interpreter: record for record the plan's schedule."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from sparsek.attn.kernels.forward import schedule_fwd
from sparsek.attn.kernels.forward.schedule_fwd import launched
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_schedule as plan
from sparsek.attn.plan.attention_schedule import TileShape
from sparsek.core.device import H200
from tests.plan.test_attention_schedule import Case, bounded, cases, problem, same

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = replace(H200, l2_bytes=4 * 2 * (64 + 64) * 700)


@settings(max_examples=20)
@given(cases())
def test_drawn_masks(case: Case) -> None:
    same(launched(case.p, case.mask, case.shape), plan.schedule(case.p, case.mask, case.shape))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lists", [(1, 1), (1, 4), (2, 4), (3, 1)], ids=str)
def test_sections(lists: tuple[int, int], kv_heads: int) -> None:
    batch, heads = lists
    scores = torch.randn(batch, heads, 6, 11, generator=torch.Generator().manual_seed(3))
    mask = BlockMask.topk(scores, 7, causal=True, q_len=700, kv_len=1400)
    for at in (1, batch * 6):
        mask.full.counts[at - 1] = 0
    p = replace(problem(mask, batch if batch > 1 else 3, (4, kv_heads)), card=SMALL)
    assert plan.sections(p) > 1
    shape = TileShape(128, 1, 5)
    assert not plan.is_cut(p, shape)
    same(launched(p, mask, shape), plan.schedule(p, mask, shape))


def test_rows_longer_than_a_chunk_and_many_groups() -> None:
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 70, (2 * 10 * 9,), generator=generator)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    indices = torch.cat([torch.arange(n) for n in counts.tolist()]).int()
    mask = BlockMask.from_blocks(indptr, indices, 9 * 64, 70 * 64, 64, batch=2, heads=10)
    p, shape = problem(mask, 2, (10, 10)), TileShape(64, 1, 7)
    same(launched(p, mask, shape), plan.schedule(p, mask, shape))


@pytest.mark.parametrize("heavy", [(), (3, 31, 37, 74)], ids=["whole", "cut"])
@pytest.mark.parametrize("heads", [1, 2])
def test_rows_are_ranked_among_more_than_are_read_together(
    heads: int, heavy: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tiles a row, and half a row at the end."""
    monkeypatch.setattr(schedule_fwd, "ROWS", 32)
    rows, columns = 75, 90
    counts = torch.randint(20, 30, (heads * rows,), generator=torch.Generator().manual_seed(heads))
    for row in heavy:
        counts[row::rows] = columns - row % 2
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    indices = torch.cat([torch.arange(n) for n in counts.tolist()]).int()
    mask = BlockMask.from_blocks(indptr, indices, rows * 128 - 70, columns * 128, 128, heads=heads)
    p, shape = problem(mask, 2, (2, 2)), TileShape(64, 1, 33)
    assert plan.is_cut(p, shape) == bool(heavy)
    same(launched(p, mask, shape), plan.schedule(p, mask, shape))


def test_a_mask_of_many_rows() -> None:
    mask = BlockMask.causal(64 * 150, block=64)
    p = problem(mask, 1, (2, 1))
    same(launched(p, mask, TileShape(64, 1, 33)), plan.schedule(p, mask, TileShape(64, 1, 33)))


@pytest.mark.parametrize("split", [False, True])
def test_counts_that_are_out_of_range_write_nothing_out_of_bounds(split: bool) -> None:
    """Every live record is written once, and its blocks and slots are within what the host knows."""
    mask = bounded(BlockMask.causal(q_len=400 if split else 4000, kv_len=4000), 2)
    big = 2**31 - 1
    bad = torch.tensor([-5, big, -big, 3, big - 1, 7, 0, 99] * 9)[: mask.rows].int()
    lists = [BlockLists(each.starts, bad, each.indices) for each in (mask.full, mask.partial)]
    parts: dict[str, Any] = {name: getattr(mask, name) for name in BlockMask._fields}
    hostile = BlockMask.unchecked(**parts | {"full": lists[0], "partial": lists[1]})
    p, shape = problem(mask, 2, (4, 4)), TileShape(64, 1, 132)
    assert plan.is_cut(p, shape) == split
    made = launched(p, hostile, shape)
    count = int(made.count)
    assert plan.tiles_of(p, shape) <= count <= len(made.tiles)
    found = made.tiles[:count]
    assert len(found[:, :3].unique(dim=0)) == plan.tiles_of(p, shape) or split
    assert 0 <= int(found[:, 4:7:2].min()) <= int(found[:, 4:7:2].max()) <= mask.sizes.longest
    assert int(found[:, 7].max()) < max(made.slots, 1)
    if made.merges is not None:
        assert int((made.merges[:, 0] + made.merges[:, 1])[made.merges[:, 1] > 0].max()) <= made.slots
