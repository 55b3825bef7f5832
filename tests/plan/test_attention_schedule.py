"""The schedule of attention: every tile once, its blocks once and in order, evenly, without a sync."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.attention_schedule import (
    FIELDS,
    NO_SLOT,
    SHORTEST_PART,
    AttentionSchedule,
    TileShape,
    is_cut,
    part_blocks,
    schedule,
    sections,
    tiles_of,
)
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core.device import H200
from tests.attn.kernels.forward.problems import attention_problem
from tests.ops.test_attention_fuzz import simple_masks

pytestmark = pytest.mark.usefixtures("one_thread")


def problem(mask: BlockMask, batch: int = 1, heads: tuple[int, int] = (1, 1)) -> AttentionProblem:
    """Heads of 64 columns."""
    return attention_problem(
        AttentionProblem, 64, batch=batch, q_heads=heads[0], kv_heads=heads[1], q_len=mask.q_len, kv_len=mask.kv_len,
        block=mask.block, mask_batch=mask.batch, mask_heads=mask.heads, **mask.sizes._asdict(),
    )  # fmt: skip


class Record(NamedTuple):
    """A row of `AttentionSchedule.tiles`."""

    pos: int
    item: int
    head: int
    partial_at: int
    partial: int
    full_at: int
    full: int
    slot: int

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.pos, self.item, self.head

    @property
    def empty(self) -> bool:
        return self.partial_at < 0

    @property
    def blocks(self) -> int:
        return 0 if self.empty else self.partial + self.full

    @property
    def entries(self) -> list[tuple[str, int]]:
        """Which entries of which list it visits, in order."""
        if self.empty:
            return []
        partial = range(self.partial_at, self.partial_at + self.partial)
        full = range(self.full_at, self.full_at + self.full)
        return [*(("partial", entry) for entry in partial), *(("full", entry) for entry in full)]


def records(plan: AttentionSchedule) -> list[Record]:
    """Those that are there, in order."""
    assert plan.tiles.dtype == plan.count.dtype == torch.int32
    assert plan.tiles.is_contiguous()
    assert plan.tiles.shape[1] == FIELDS
    count = int(plan.count)
    assert 0 <= count <= len(plan.tiles)
    return [Record(*row) for row in plan.tiles[:count].tolist()]


@dataclass(frozen=True, repr=False)
class Case:
    """A mask in a problem, and tiles for it."""

    mask: BlockMask
    p: AttentionProblem
    shape: TileShape

    def __repr__(self) -> str:
        return f"{self.mask!r}, batch {self.p.batch}, heads {self.p.q_heads}:{self.p.kv_heads}, {self.shape}"

    def expected(self) -> dict[tuple[int, int, int], list[tuple[str, int]]]:
        """For every tile the entries that it visits."""
        mask, p, found = self.mask, self.p, {}
        for item in range(p.batch):
            for head in range(0, p.q_heads, self.shape.pack):
                of_mask = item % mask.batch * mask.heads + head // (p.q_heads // mask.heads)
                for pos in range(0, p.q_len, self.shape.positions):
                    row = of_mask * mask.grid[0] + pos // mask.block[0]
                    entries = found[pos, item, head] = []
                    for name, lists in (("partial", mask.host.partial), ("full", mask.host.full)):
                        first = int(lists.starts[row])
                        entries += [(name, e) for e in range(first, first + int(lists.counts[row]))]
        return found


def same(found: AttentionSchedule, wanted: AttentionSchedule) -> None:
    """The live records, and everything else, of two schedules are equal."""
    count = int(wanted.count)
    assert found.count.tolist() == [count]
    assert torch.equal(found.tiles[:count], wanted.tiles[:count])
    assert (found.ctas, found.slots, found.tiles.shape) == (wanted.ctas, wanted.slots, wanted.tiles.shape)
    if wanted.merges is None:
        assert found.merges is None
    else:
        assert found.merges is not None
        assert torch.equal(found.merges, wanted.merges)
    assert found.tiles.dtype == found.count.dtype == torch.int32


def bounded(mask: BlockMask, slack: int) -> BlockMask:
    """The same mask, of whose sizes the host knows bounds only."""
    stored, partial, longest, _ = mask.sizes
    sizes = type(mask.sizes)(stored + slack * mask.rows, partial, longest + slack, exact=False)
    parts = {name: getattr(mask, name) for name in BlockMask._fields}
    return BlockMask.unchecked(**parts | {"sizes": sizes})


@st.composite
def uneven(
    draw: st.DrawFn, q_len: int, kv_len: int, block: tuple[int, int], batch: int, heads: int, device: str
) -> BlockMask:
    """Some tiles see every block, the others two at most."""
    rows, columns = batch * heads * -(-q_len // block[0]), -(-kv_len // block[1])
    kinds = st.sampled_from((0, 1, 1, 2, columns))
    counts = draw(st.lists(kinds, min_size=rows, max_size=rows))
    indptr = torch.tensor([0, *accumulate(min(count, columns) for count in counts)], dtype=torch.int32)
    indices = torch.cat([torch.arange(min(count, columns)) for count in counts]).int()
    return BlockMask.from_blocks(
        indptr.to(device), indices.to(device), q_len, kv_len, block, batch=batch, heads=heads
    )


@st.composite
def cases(draw: st.DrawFn, longest: int = 5000) -> Case:
    """GQA, heads that share lists or not, packed or not; few tiles for many CTAs and many for few."""
    kv_heads, group, batch = (
        draw(st.integers(1, 2)),
        draw(st.sampled_from((1, 2, 3, 4))),
        draw(st.integers(1, 2)),
    )
    block = draw(st.tuples(st.sampled_from((64, 128)), st.sampled_from((64, 128))))
    q_len, kv_len = draw(st.integers(1, 400)), draw(st.integers(1, longest))
    kv_len = draw(st.sampled_from((q_len, kv_len, longest, longest)))
    items = draw(st.sampled_from((1, batch)))
    mask_heads = draw(st.sampled_from((1, kv_heads, kv_heads * group)))
    make = draw(st.sampled_from((simple_masks, uneven, uneven)))
    mask = draw(make(q_len, kv_len, block, items, mask_heads, "cpu"))
    if draw(st.booleans()):
        mask = bounded(mask, draw(st.integers(0, 9)))
    if draw(st.booleans()):
        mask.host  # noqa: B018  from which the blocks of long rows are counted
    pack = draw(
        st.sampled_from([n for n in (1, 2, 4) if (group % n == 0 and mask.heads <= kv_heads) or n == 1])
    )
    rows = draw(st.sampled_from([n for n in (64, 128) if n <= block[0]]))
    shape = TileShape(rows // pack, pack, draw(st.sampled_from((1, 2, 5, 40, 132, 264))))
    return Case(mask, problem(mask, batch, (kv_heads * group, kv_heads)), shape)


@settings(max_examples=150)
@given(cases())
def test_every_tile_is_there_once_and_visits_its_blocks_once_and_in_order(case: Case):
    plan = schedule(case.p, case.mask, case.shape)
    parts: dict[tuple[int, int, int], list[Record]] = {}
    for record in records(plan):
        parts.setdefault(record.tile, []).append(record)
    expected = case.expected()
    assert parts.keys() == expected.keys()
    assert len(parts) == tiles_of(case.p, case.shape)
    longest = part_blocks(case.p, case.shape)
    for tile, found in parts.items():
        found.sort(key=lambda record: record.slot)
        assert list(chain.from_iterable(record.entries for record in found)) == expected[tile]
        sizes = [record.blocks for record in found]
        assert max(sizes) <= longest
        assert max(sizes) - min(sizes) <= 1
        assert len(found) == max(1, -(-len(expected[tile]) // longest)), "no more parts than it takes"
        if not expected[tile]:
            assert found == [Record(*tile, -1, 1, found[0].full_at, 0, NO_SLOT)]


@settings(max_examples=150)
@given(cases())
def test_the_merges_are_the_tiles_that_were_cut_and_their_slots_fit(case: Case):
    plan = schedule(case.p, case.mask, case.shape)
    cut: dict[tuple[int, int, int], list[int]] = {}
    for record in records(plan):
        if record.slot != NO_SLOT:
            cut.setdefault(record.tile, []).append(record.slot)
    if plan.merges is None:
        assert not cut
        assert not is_cut(case.p, case.shape)
        assert plan.slots == 0
        return
    assert plan.merges.dtype == torch.int32
    assert plan.merges.is_contiguous()
    rows = [row for row in plan.merges.tolist() if row[1]]
    assert {(row[4], row[2], row[3]): list(range(row[0], row[0] + row[1])) for row in rows} == {
        tile: sorted(slots) for tile, slots in cut.items()
    }
    assert len(rows) == len(cut)
    slots = sorted(chain.from_iterable(cut.values()))
    assert slots == list(range(len(slots))), "slots are used without gaps, each once"
    assert len(slots) <= plan.slots


@settings(max_examples=50)
@given(cases())
def test_ctas_take_the_longest_tiles_first_back_and_forth(case: Case):
    plan = schedule(case.p, case.mask, case.shape)
    blocks, ctas = [record.blocks for record in records(plan)], case.shape.ctas
    rounds = [blocks[i : i + ctas] for i in range(0, len(blocks), ctas)]
    last = len(blocks) // ctas - 1
    assert [
        b
        for i, each in enumerate(rounds)
        for b in (each[::-1] if i <= last and (last - i) % 2 == 0 else each)
    ] == sorted(blocks, reverse=True)
    assert plan.ctas == ctas


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_heads_that_do_not_fit_in_l2_together_go_in_sections(kv_heads: int):
    mask = BlockMask.causal(3 * 1024)
    p = problem(mask, 2, (8, kv_heads))
    small = replace(p, card=replace(H200, l2_bytes=4 * 2 * (64 + 64) * 3 * 1024))
    assert sections(p) == 1
    assert sections(small) == p.batch * kv_heads // 2, "two heads of four take half of L2"
    shape = TileShape(128, 1, 5)
    found = records(schedule(small, mask, shape))
    assert sorted(record.tile for record in found) == sorted(
        record.tile for record in records(schedule(p, mask, shape))
    )
    own = len(found) // sections(small)
    filled = own // 5 * 5
    for i in range(sections(small)):
        heads = {
            (r.item * kv_heads + r.head * kv_heads // 8) // 2 for r in found[i * filled : (i + 1) * filled]
        }
        assert heads == {i}
    rest = [record.blocks for record in found[sections(small) * filled :]]
    assert max(rest) <= 1 + min(record.blocks for record in found[: sections(small) * filled])


def even(mask: BlockMask) -> float:
    """Blocks of the fullest CTA over the mean: 16 heads in tiles of 128 queries on an H200."""
    p = problem(mask, 1, (16, 16))
    plan = schedule(p, mask, TileShape(128, 1, 132))
    loads = [0] * 132
    for i, record in enumerate(records(plan)):
        loads[i % 132] += record.blocks + (2 if record.empty else 1)
    ratio = max(loads) / (sum(loads) / 132)
    assert plan.imbalance() == pytest.approx(ratio)
    return ratio


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: BlockMask.causal(32768), 1.002),
        (lambda: BlockMask.causal(8192), 1.002),
        (lambda: BlockMask.causal(2048), 1.04),
        (lambda: BlockMask.bigbird(32768, window=1024, globals=640, random=8, heads=16), 1.03),
        (lambda: BlockMask.bigbird(8192, window=1024, globals=128, random=8), 1.1),
        (lambda: BlockMask.sliding_window(32768, 2048), 1.04),
        (lambda: BlockMask.block_diagonal([30000, 1000, 1000, 768]), 1.02),
        (lambda: BlockMask.full(8192), 1.04),
    ],
    ids=["causal 32K", "causal 8K", "causal 2K", "bigbird 32K", "bigbird 8K", "window", "documents", "all"],
)
def test_ctas_have_about_as_much_to_do(make: Callable[[], BlockMask], most: float):
    assert 1 <= even(make()) <= most


def test_rows_over_twice_the_mean_are_cut_and_those_of_a_causal_mask_are_not():
    shape = TileShape(128, 1, 132)
    causal = problem(BlockMask.causal(32768), 1, (16, 16))
    assert not is_cut(causal, shape)
    rows = problem(BlockMask.bigbird(32768, window=1024, globals=256, random=8), 1, (16, 16))
    assert is_cut(rows, shape)
    mean = rows.stored / 256
    assert 2 * mean <= part_blocks(rows, shape) <= 2 * mean + 2


def test_few_long_tiles_are_cut_until_every_cta_has_a_part():
    mask = BlockMask.causal(q_len=1, kv_len=128 * 1000)
    p = problem(mask, 2, (8, 2))
    for tiles, shape in ((16, TileShape(128, 1, 132)), (4, TileShape(32, 4, 132))):
        assert tiles_of(p, shape) == tiles
        count = int(schedule(p, mask, shape).count)
        assert 0.9 * 132 <= count <= 132
    short = problem(BlockMask.causal(q_len=1, kv_len=128 * 9), 1, (1, 1))
    assert part_blocks(short, TileShape(128, 1, 132)) == SHORTEST_PART


def test_a_problem_without_queries_or_keys_has_no_tiles_or_empty_ones():
    none = BlockMask.full(q_len=0, kv_len=300)
    assert records(schedule(problem(none), none, TileShape(128, 1, 132))) == []
    some = BlockMask.full(q_len=300, kv_len=300)
    assert records(schedule(problem(some, batch=0), some, TileShape(128, 1, 132))) == []
    nothing = BlockMask.full(q_len=300, kv_len=0)
    found = records(schedule(problem(nothing), nothing, TileShape(128, 1, 132)))
    assert [(record.pos, record.empty) for record in found] == [(0, True), (128, True), (256, True)]


MASKS: dict[str, Callable[[str], BlockMask]] = {
    "causal": lambda device: BlockMask.causal(3000, device=device),
    "few queries": lambda device: BlockMask.causal(q_len=3, kv_len=3000, device=device),
    "global rows": lambda device: BlockMask.bigbird(20000, 128, 128, 1, block=64, device=device),
    "bounds": lambda device: bounded(
        BlockMask.sliding_window(q_len=90, kv_len=3000, window=2000, device=device), 3
    ),
}
TILES = [TileShape(64, 1, 132), TileShape(16, 4, 264)]


@pytest.mark.parametrize("shape", TILES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_no_value_of_a_tensor_is_asked_for(name: str, shape: TileShape):
    """Tensors without values refuse to be asked: on a GPU every such question would be a sync."""
    mask = MASKS[name]("cpu")
    p, without = problem(mask, 2, (8, 2)), tree_map_only(Tensor, lambda x: x.to("meta"), mask)
    assert is_cut(p, shape) == (name != "causal")
    real, plan = schedule(p, mask, shape), schedule(p, without, shape)
    assert len(plan.tiles) >= int(real.count)
    with pytest.raises(RuntimeError):
        int(plan.count)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TILES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_gpu_makes_the_same_schedule_and_nobody_waits_for_it(
    name: str, shape: TileShape, no_sync: Callable[[], AbstractContextManager[None]]
):
    mask = MASKS[name]("cuda")
    p = problem(mask, 2, (8, 2))
    schedule(p, mask, shape)
    torch.cuda.synchronize()
    with no_sync():
        plan = schedule(p, mask, shape)
    assert records(plan) == records(schedule(p, mask.to("cpu"), shape))
