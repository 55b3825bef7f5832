"""attn/kernels/backward/schedule_bwd.py in Triton's interpreter: number for number the plan's schedule."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.attn.kernels.backward import schedule_bwd
from sparsek.attn.kernels.backward.schedule_bwd import launched
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_grad_schedule as plan
from sparsek.attn.plan.attention_grad_schedule import NO_TICKET
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core.device import H200
from tests.engine.launch.covering import once
from tests.plan.test_attention_grad_schedule import cut_for, drawn, problem, same
from tests.plan.test_attention_schedule import bounded
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("one_thread")


def check(
    mask: BlockMask,
    p: AttentionProblem,
    ctas: int,
    *,
    ordered: bool = True,
    cut: plan.TileParts | None = None,
) -> None:
    found = launched(p, mask, ctas, ordered=ordered, cut=cut)
    same(found, plan.schedule(p, mask, ctas, ordered=ordered, cut=cut))


@settings(max_examples=6)
@given(drawn(lists_of_kv=True), st.sampled_from((1, 2, 7, 33)), st.booleans())
def test_drawn_masks(of: tuple[BlockMask, int, int, int], ctas: int, ordered: bool) -> None:
    check(of[0], problem(*of), ctas, ordered=ordered)


def topk(batch: int, heads: int, rows: int, columns: int, k: int, block: int = 64, **more: Any) -> BlockMask:
    scores = torch.rand(batch, heads, rows, columns, generator=torch.Generator().manual_seed(k))
    return BlockMask.topk(scores, k, q_len=rows * block - 7, kv_len=columns * block, block=block, **more)


MASKS: dict[str, tuple[BlockMask, tuple[int, int, int]]] = {
    "causal": (BlockMask.causal(700, block=64), (2, 2, 1)),
    "causal, blocks of 128": (BlockMask.causal(600), (2, 2, 2)),
    "sinks": (BlockMask.sliding_window(64 * 20, 70, sinks=64, block=64), (1, 3, 1)),
    "top-k": (topk(2, 2, 4, 7, 3), (2, 4, 2)),
    "top-k, a list for each head": (topk(1, 4, 4, 5, 3, causal=True), (2, 4, 2)),
    "nothing": (BlockMask.causal(q_len=150, kv_len=200, block=64, q_offset=-300), (1, 2, 2)),
    "empty rows": (BlockMask.causal(q_len=700, kv_len=500, block=64, q_offset=-300), (1, 2, 1)),
    "bounds": (bounded(BlockMask.sliding_window(400, 200, block=64), 3), (2, 2, 1)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask, sizes = MASKS[name]
    check(mask, problem(mask, *sizes), 7)


@pytest.mark.parametrize(
    ("name", "cut"),
    sampled(
        [
            ("causal", (1, 3)),
            ("top-k, a list for each head", (1, 2)),
            ("top-k", (1, 1)),
            ("sinks", (1, 4)),
            ("empty rows", (2, 1)),
            ("nothing", (1, 2)),
            ("bounds", (1, 2)),
        ],
        2,
    ),
)
def test_parts(name: str, cut: tuple[int, int]) -> None:
    mask, sizes = MASKS[name]
    p = replace(problem(mask, *sizes), card=replace(H200, l2_bytes=1 << 21))
    check(mask, p, 7, cut=cut_for((mask, *sizes), cut))
    check(mask, p, 3, cut=cut_for((mask, *sizes), cut), ordered=False)


def test_sections_of_heads() -> None:
    mask = topk(1, 6, 3, 4, 3)
    p = replace(problem(mask, 1, 6, 6), card=replace(H200, l2_bytes=1 << 20))
    assert plan.sections(p, 3) > 2
    check(mask, p, 3)
    tiny = replace(p, card=replace(H200, l2_bytes=1000))
    assert plan.heads_in_section(tiny) == 0
    check(mask, tiny, 2, ordered=False)


@pytest.mark.parametrize(("causal", "lists", "kv_heads"), once(product((True, False), (1, 6), (6, 3))))
def test_ctas_that_follow_each_other(causal: bool, lists: int, kv_heads: int) -> None:
    seen = torch.ones(9, 9, dtype=torch.bool)
    seen = (seen.tril() if causal else seen).expand(1, lists, -1, -1)
    mask = BlockMask.from_block_map(seen, 9 * 128 - 30, causal=causal, block=128)
    p = replace(problem(mask, 1, 6, kv_heads), card=replace(H200, l2_bytes=1 << 21))
    assert plan.sections(p, 4) > 1
    narrow = replace(p, dim=64, v_dim=64)
    assert not torch.equal(plan.schedule(p, mask, 4).visits, plan.schedule(narrow, mask, 4).visits)
    for each in (p, narrow):
        check(mask, each, 4)
    check(mask, p, 4, ordered=False)


@pytest.mark.parametrize(("block", "lists"), once(product((64, 128), (1, 6))))
def test_heads_that_take_each_column_in_turn(block: int, lists: int) -> None:
    near = torch.ones(24, 24, dtype=torch.bool).tril().triu(-2)
    mask = BlockMask.from_block_map(near.expand(1, lists, -1, -1), 24 * block, causal=True, block=block)
    p = replace(problem(mask, 1, 6, 6), card=replace(H200, l2_bytes=block * 60_000))
    heads = plan.schedule(p, mask, 7).tiles[:, 1]
    assert heads[0] == 0
    assert heads[1] != plan.schedule(p, mask, 7, ordered=False).tiles[1, 1]
    check(mask, p, 7)
    check(mask, p, 7, ordered=False)


@pytest.mark.parametrize(
    ("name", "heads", "l2_bytes"),
    sampled(
        [
            ("sinks", (38, 19), 26_000_000),
            ("causal", (19, 19), 2_000_000),
            ("empty rows", (18, 18), H200.l2_bytes),
        ],
        1,
    ),
)
def test_heads_with_the_same_lists(
    name: str, heads: tuple[int, int], l2_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More heads than are written together, in uneven sections; key tiles far longer than the mean."""
    monkeypatch.setattr(schedule_bwd, "ALIKE_STREAM", 4)
    mask = MASKS[name][0]
    assert mask.grid[1] > 4
    p = replace(problem(mask, 1, *heads), card=replace(H200, l2_bytes=l2_bytes))
    assert (p.kv_heads % plan.sections(p, 7) > 0) == (l2_bytes < H200.l2_bytes)
    check(mask, p, 7)


def test_query_tiles_of_more_visits_than_registers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_bwd, "VISITS", 8)
    mask = MASKS["causal"][0]
    assert mask.sizes.longest > 8
    check(mask, problem(mask, 2, 2, 1), 5)
    check(topk(1, 2, 3, 12, 9), problem(topk(1, 2, 3, 12, 9), 2, 2, 1), 5)


def test_rows_of_more_than_a_chunk() -> None:
    mask = BlockMask.full(q_len=64 * 70, kv_len=64 * 9, block=64)
    check(mask, problem(mask, 1, 1, 1), 9)


@settings(max_examples=15)
@given(st.lists(st.integers(2, 60), max_size=90), st.integers(1, 40), st.booleans())
def test_it_deals_as_the_plan_does(ticks: list[int], ctas: int, ordered: bool) -> None:
    """The longest first, or not."""
    given_ticks = torch.tensor(sorted(ticks, reverse=True) if ordered else ticks, dtype=torch.int32)
    made = [torch.full((max(1, len(ticks)),), -9, dtype=torch.int32) for _ in range(3)]
    has, starts = torch.empty(64, dtype=torch.int32), torch.empty(ctas + 1, dtype=torch.int32)
    args = [*[has] * 6, given_ticks, *made, has, starts, 0, len(ticks), 1, ctas]
    deal: Any = schedule_bwd._deal
    deal[(1,)](*args, LANES=1 << (ctas - 1).bit_length(), LISTED=4)
    wanted = plan.deal(given_ticks, ctas)
    assert made[0].tolist()[: len(ticks)] == wanted[0].tolist()
    assert made[1].tolist()[: len(ticks)] == wanted[1].tolist()
    nth, before = [], [0] * ctas
    for cta in wanted[0].tolist():
        nth.append(before[cta])
        before[cta] += 1
    assert made[2].tolist()[: len(ticks)] == nth
    assert starts.tolist() == [0, *torch.tensor(before).cumsum(0).tolist()]


def test_lists_with_faults_write_nothing_out_of_bounds() -> None:
    """Every visit is written once, and a query tile's tickets count up from 0: no CTA waits for ever."""
    mask = BlockMask.causal(400, block=64)
    big = 2**31 - 1
    for seed in range(2):
        noise = torch.Generator().manual_seed(seed)
        lists = []
        for each in (mask.full, mask.partial):
            parts = [x.clone() for x in each]
            for x in parts:
                bad = torch.randint(0, len(x), (3,), generator=noise)
                x[bad] = torch.tensor([-big, big, 5], dtype=torch.int32)
            lists.append(BlockLists(*parts))
        fields: dict[str, Any] = {name: getattr(mask, name) for name in BlockMask._fields}
        hostile = BlockMask.unchecked(**fields | {"full": lists[0], "partial": lists[1]})
        p = problem(mask, 1, 4, 2)
        made = launched(p, hostile, 5)
        there = int(made.tiles[:, 6].sum())
        assert 0 < there <= len(made.visits)
        visits = made.visits[:there].clone()
        assert bool((visits[:, 3] >= NO_TICKET).all())
        items = torch.zeros(there, dtype=torch.int64)
        for item, _, _, first, _, _, count, _ in made.tiles.tolist():
            items[first : first + count] = item
        tickets: dict[Any, list[int]] = {}
        for item, (pos, head, entry, ticket) in zip(items.tolist(), visits.tolist(), strict=True):
            if pos != made.rows - 64:
                tickets.setdefault((item, head, pos), []).append(ticket)
                assert 0 <= head < 4
                assert -1 <= entry < len(mask.partial.indices)
        assert all(sorted(each) == list(range(len(each))) for each in tickets.values())


def test_bounds_are_padded_with_zeros() -> None:
    lo, hi = torch.arange(2 * 700, dtype=torch.int32).view(2, 2, 350)
    found = schedule_bwd.padded_bounds(lo, hi, 384).view(torch.int32)
    assert torch.equal(found[..., :350], torch.stack((lo, hi)))
    assert not found[..., 350:].any()
