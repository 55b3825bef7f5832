"""Which CTA takes which key tile, whom it visits, and whose dQ is added when."""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.attention_grad_schedule import (
    FULL,
    GOLDEN,
    GOLDEN_BITS,
    NO_TICKET,
    ROOM,
    GradSchedule,
    TileParts,
    band_sections,
    schedule,
    sections,
    span_of_rows,
    tile_parts,
    walk_of,
)
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core.device import H200, Card
from tests import odd_cpu
from tests.attn.attention_cases import ATTENTION_CASES, random_bits
from tests.plan.test_attention_schedule import bounded


def same(found: GradSchedule, wanted: GradSchedule) -> None:
    """The visits that exist, and everything else, of two schedules are equal."""
    assert torch.equal(found.starts, wanted.starts)
    assert torch.equal(found.tiles[: len(wanted.tiles)], wanted.tiles)
    assert torch.equal(found.lengths, wanted.lengths)
    assert len(found.tiles) == len(wanted.tiles) or wanted.parts > 1
    assert found.visits.shape == wanted.visits.shape
    there = int(wanted.tiles[:, 6].sum())
    assert torch.equal(found.visits[:there], wanted.visits[:there])
    assert (found.ctas, found.rows, found.parts) == (wanted.ctas, wanted.rows, wanted.parts)
    assert all(x.dtype == torch.int32 for x in (*found[:3], found.lengths))


def problem(mask: BlockMask, batch: int, q_heads: int, kv_heads: int) -> AttentionProblem:
    sizes = mask.sizes
    return AttentionProblem(
        batch, q_heads, kv_heads, mask.q_len, mask.kv_len, 128, 128, "bf16", H200, mask.block, mask.batch, mask.heads,
        sizes.stored, sizes.partial, sizes.longest, sizes.exact,
    )  # fmt: skip


def visits_of(made: GradSchedule, bq: int) -> list[list[tuple[int, ...]]]:
    """(batch item, head, first query, first key, entry, ticket) of every CTA, in its order, without those not there."""
    visits, found = made.visits.tolist(), [[] for _ in range(made.ctas)]
    takers = torch.repeat_interleave(torch.arange(made.ctas), made.starts.diff().long()).tolist()
    assert int(made.starts[-1]) == len(made.tiles) == len(takers)
    for cta, (b, _, key, first, masked, pairs, *_) in zip(takers, made.tiles.tolist(), strict=True):
        for n in range(pairs if bq == 128 else 2 * pairs):
            pos, head, entry, ticket = visits[first + n]
            assert entry == FULL or n < (masked if bq == 128 else 2 * masked), (
                "a partial block among full ones"
            )
            if pos == made.rows - 64 and bq == 64:
                assert (entry, ticket) == (FULL, NO_TICKET)
            else:
                found[cta].append((b, head, pos, key, entry, ticket))
    return found


def wanted(mask: BlockMask, batch: int, q_heads: int) -> set[tuple[int, ...]]:
    (tiles, _), (bq, bk), host, found = mask.grid, mask.block, mask.host, set()
    for b in range(batch):
        for head in range(q_heads):
            item, list_head = b if mask.batch > 1 else 0, head // (q_heads // mask.heads)
            for i in range(tiles):
                row = (item * mask.heads + list_head) * tiles + i
                for lists, partial in ((host.full, False), (host.partial, True)):
                    for e in range(lists.starts[row], lists.starts[row] + lists.counts[row]):
                        found.add((b, head, i * bq, int(lists.indices[e]) * bk, e if partial else FULL))
    return found


def check(
    mask: BlockMask,
    batch: int,
    q_heads: int,
    kv_heads: int,
    ctas: int,
    cut: TileParts | None = None,
    card: Card = H200,
) -> GradSchedule:
    p = replace(problem(mask, batch, q_heads, kv_heads), card=card)
    made = schedule(p, mask, ctas, cut=cut)
    found = visits_of(made, mask.block[0])
    listed = [visit[:5] for own in found for visit in own]
    assert len(listed) == len(set(listed))
    assert set(listed) == wanted(mask, batch, q_heads)
    tickets = defaultdict(list)
    for own in found:
        for b, head, pos, _, _, ticket in own:
            tickets[b, head, pos].append(ticket)
    assert all(sorted(each) == list(range(len(each))) for each in tickets.values())
    assert ends(found), "CTAs wait for each other in a circle"
    if cut is not None:
        holds_parts(made, p, cut)
    return made


def holds_parts(made: GradSchedule, p: AttentionProblem, cut: TileParts) -> None:
    """Every part with visits is there once, and has those of its heads and range only."""
    parts, columns, visits = cut.count(p), p.grid[1], made.visits.tolist()
    assert (made.parts, len(made.lengths)) == (parts, p.batch * p.kv_heads * parts * columns)
    numbers = sorted(made.tiles[:, 7].tolist())
    assert parts == 1 or numbers == made.lengths.nonzero().flatten().tolist()
    for b, g, key, first, _, _, steps, number in made.tiles.tolist():
        part = number // columns % parts
        assert number == ((b * p.kv_heads + g) * parts + part) * columns + key // p.block[1]
        of_part = visits[first : first + int(made.lengths[number])]
        assert steps - len(of_part) in (0, 1)
        for pos, head, *_ in of_part:
            assert head // cut.heads == (g * parts + part) // cut.ranges
            assert cut.ranges == 1 or pos // p.block[0] // cut.tiles(p) == part % cut.ranges


def ends(found: list[list[tuple[int, ...]]]) -> bool:
    """Whether all CTAs come to their end when each waits for its ticket, all of them running."""
    turns: dict[Any, int] = defaultdict(int)
    at = [0] * len(found)
    moved = True
    while moved:
        moved = False
        for cta, own in enumerate(found):
            while at[cta] < len(own) and turns[own[at[cta]][:3]] == own[at[cta]][5]:
                turns[own[at[cta]][:3]] += 1
                at[cta] += 1
                moved = True
    return all(at[cta] == len(own) for cta, own in enumerate(found))


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_every_block_is_visited_once_and_every_ticket_comes_up(case: Any) -> None:
    q, k, _, mask = case.make("cpu", None)
    if 0 in (*q.shape, *k.shape):
        return
    check(mask, q.shape[0], q.shape[1], k.shape[1], 7)


@st.composite
def drawn(draw: st.DrawFn, lists_of_kv: bool = False) -> tuple[BlockMask, int, int, int]:
    """A random mask, and (batch, q_heads, kv_heads). Its lists are those of queries, or maybe of keys."""
    lengths = draw(st.integers(1, 600)), draw(st.integers(1, 600))
    block = draw(st.sampled_from([(64, 64), (128, 128), (64, 128), (128, 64)]))
    heads = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 6)]))
    batch, density, seed = draw(st.integers(1, 2)), draw(st.floats(0, 1)), draw(st.integers(0, 2**31))
    lists = heads[int(lists_of_kv and draw(st.booleans()))]
    mask = random_bits("cpu", lengths, block, heads=lists, batch=batch, density=density, seed=seed)
    return mask, batch, *heads


@settings(max_examples=25, deadline=None)
@given(drawn(), st.integers(1, 140), st.sampled_from(((0, 1), (1, 1), (1, 2), (1, 3), (2, 1))))
def test_drawn_masks(of: tuple[BlockMask, int, int, int], ctas: int, cut: tuple[int, int]) -> None:
    """Of whole tiles, or cut into parts; whatever memory holds before it is written."""
    with odd_cpu.asked_for("memory"):
        check(*of, ctas, cut_for(of, cut))


@pytest.mark.parametrize("seen", [(0, 0, 0), (1, 0, 0), (0, 1, 0)], ids=str)
def test_absent_visits_of_parts_that_nobody_takes_change_nothing(seen: tuple[int, ...]) -> None:
    """The last part has no visit, so that no CTA has it, and single steps have absent visits behind it."""
    mask = BlockMask.from_dense(torch.tensor(seen).bool().view(1, 3, 1, 1).expand(1, 3, 64, 64), 64)
    with odd_cpu.asked_for("memory"):
        check(mask, 1, 3, 1, 2, TileParts(1, 1))


def cut_for(of: tuple[BlockMask, int, int, int], cut: tuple[int, int]) -> TileParts | None:
    """Parts of heads that divide the group, and of no more ranges than there are query tiles."""
    mask, _, q_heads, kv_heads = of
    heads, tiles = math.gcd(cut[0], q_heads // kv_heads), mask.grid[0]
    return TileParts(heads, -(-tiles // -(-tiles // min(cut[1], tiles)))) if cut[0] else None


def test_bounds_that_are_too_large_change_nothing() -> None:
    exact = BlockMask.sliding_window(900, 300)
    tight, wide = check(exact, 1, 2, 1, 5), check(bounded(exact, 2), 1, 2, 1, 5)
    assert torch.equal(tight.tiles, wide.tiles)
    assert torch.equal(tight.visits, wide.visits[: len(tight.visits)])


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: BlockMask.full(8192), 1.04),
        (lambda: BlockMask.causal(16384), 1.06),
        (lambda: BlockMask.sliding_window(32768, 2048), 1.02),
        (lambda: BlockMask.sliding_window(32768, 2048, sinks=128), 1.05),
        (lambda: BlockMask.topk(torch.rand(1, 1, 128, 128), 16, seq_len=16384), 1.03),
    ],
    ids=["full", "causal", "window", "sinks", "topk"],
)
def test_ctas_have_about_as_much_to_do(make: Any, most: float) -> None:
    mask = make()
    assert schedule(problem(mask, 1, 16, 16), mask, 132).imbalance() <= most


def rows_by_tile(
    made: GradSchedule, p: AttentionProblem
) -> dict[tuple[int, int], tuple[int, int, list[int]]]:
    """(head, key block): the CTA, the number of visits of partial blocks, and the query tiles in order."""
    takers = torch.repeat_interleave(torch.arange(made.ctas), made.starts.diff().long()).tolist()
    query = (made.visits[:, 0] // p.block[0]).tolist()
    return {
        (head, key // p.block[1]): (cta, masked, query[first : first + visits])
        for cta, (_, head, key, first, masked, _, visits, _) in zip(takers, made.tiles.tolist(), strict=True)
    }


@pytest.mark.parametrize(("causal", "heads"), [(True, 1), (False, 2)])
def test_ctas_of_full_and_causal_masks_follow_each_other(causal: bool, heads: int) -> None:
    """A visit apart; in every second wave of a causal mask backwards."""
    mask = BlockMask.causal(40 * 128, block=128) if causal else BlockMask.full(40 * 128, block=(128, 128))
    p = problem(mask, 1, heads, heads)
    for (head, j), (_, masked, found) in rows_by_tile(schedule(p, mask, 16), p).items():
        rows = list(range(j + 1, 40)) if causal else list(range(40))
        wave, i = divmod(head * 40 + j, 16)
        turned = i % max(1, len(rows))
        assert masked == causal
        assert found[masked:] == (rows[::-1] if causal and wave % 2 == 1 else rows[turned:] + rows[:turned])


def test_waves_begin_anew_in_every_section() -> None:
    mask = BlockMask.causal(20 * 128, block=128)
    p = replace(problem(mask, 1, 6, 6), card=replace(H200, l2_bytes=1 << 20))
    assert sections(p, 4) == 6
    found = rows_by_tile(schedule(p, mask, 4), p)
    assert all(found[head, j][2] == found[0, j][2] for head in range(6) for j in range(20))


@pytest.mark.parametrize(
    ("make", "dim"),
    [
        (lambda: BlockMask.full(40 * 128, block=(128, 128)), 64),
        (lambda: BlockMask.causal(40 * 128, block=128), 64),
        (lambda: BlockMask.full(40 * 128, block=(128, 64)), 128),
        (lambda: BlockMask.sliding_window(40 * 128, 3000, block=128), 128),
        (lambda: BlockMask.block_diagonal([2560] * 2, causal=False, block=128), 128),
        (lambda: BlockMask.block_diagonal([3000, 2120], causal=True, block=128), 128),
        (lambda: BlockMask.causal(q_len=20 * 128, kv_len=40 * 128, block=128), 128),
    ],
    ids=["narrow", "narrow causal", "short", "window", "alike", "documents", "more keys"],
)
def test_other_lists_begin_golden_sections_apart(make: Any, dim: int) -> None:
    mask = make()
    p = replace(problem(mask, 1, 2, 2), dim=dim, v_dim=dim)
    for cta, masked, found in rows_by_tile(schedule(p, mask, 16), p).values():
        rows = found[masked:]
        turned = cta * GOLDEN % (1 << GOLDEN_BITS) * len(rows) >> GOLDEN_BITS
        assert rows == sorted(rows)[turned:] + sorted(rows)[:turned]


@st.composite
def nearly_regular(draw: st.DrawFn) -> tuple[BlockMask, bool]:
    """A full or causal mask, or one cut into documents or a window, and whether CTAs follow each other in it."""
    tiles, columns = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    end = draw(st.integers(0, 127))
    kind = draw(st.sampled_from(("full", "causal", "documents", "window")))
    length = tiles * 128 - end
    if kind == "full":
        return BlockMask.full(q_len=length, kv_len=columns * 128, block=(128, 128)), True
    if kind == "causal":
        return BlockMask.causal(length, block=128), True
    if kind == "window":
        window = draw(st.integers(1, 3000))
        mask = BlockMask.sliding_window(length, window, block=128)
    else:
        cut = draw(st.integers(0, length - 1))
        mask = BlockMask.block_diagonal([cut, length - cut] if cut else [length], causal=True, block=128)
    return mask, mask.sizes.stored == tiles * (tiles + 1) // 2


@settings(max_examples=30, deadline=None)
@given(
    nearly_regular(),
    st.sampled_from(((1, 1, 1), (1, 4, 2), (2, 6, 6), (1, 8, 1), (2, 3, 3))),
    st.sampled_from((1, 2, 5, 16, 132)),
    st.sampled_from((1 << 20, 1 << 22, H200.l2_bytes)),
)
def test_ctas_that_follow_each_other_come_to_an_end(
    of: tuple[BlockMask, bool], sizes: tuple[int, int, int], ctas: int, l2_bytes: int
) -> None:
    mask, follow = of
    card = replace(H200, l2_bytes=l2_bytes)
    made = check(mask, *sizes, ctas, card=card)
    p = replace(problem(mask, *sizes), card=card)
    assert walk_of(p, made.lengths)[0] == follow
    if follow:
        assert band_sections(p, made.lengths, span_of_rows(mask), ctas) == 0


def test_without_order_there_are_no_tickets() -> None:
    mask = BlockMask.causal(1024)
    made = schedule(problem(mask, 1, 2, 2), mask, 5, ordered=False)
    assert (made.visits[:, 3] == NO_TICKET).all()


@pytest.mark.parametrize(
    ("length", "window", "heads"), [(32768, 512, 16), (32768, 2048, 8), (32768, 4096, 4), (8192, 2048, 8)]
)
def test_a_windows_columns_are_taken_by_many_heads_in_turn(length: int, window: int, heads: int) -> None:
    """CTAs begin with no more neighbouring tiles of a head than visit one query tile, or with all heads."""
    mask = BlockMask.sliding_window(length, window)
    made = schedule(problem(mask, 1, 16, 16), mask, 132)
    begun = made.tiles[made.starts[:-1].long()]
    assert set(begun[:, 1].tolist()) == set(range(heads))
    for head in range(heads):
        columns = (begun[begun[:, 1] == head, 2] // 128).sort().values
        assert columns.diff().eq(1).all()
        assert len(columns) <= mask.sizes.longest or heads == 16
    assert ends(visits_of(made, 128)), "CTAs wait for each other in a circle"


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockMask.full(8192),
        lambda: BlockMask.causal(16384),
        lambda: BlockMask.sliding_window(8192, 4096),
        lambda: BlockMask.sliding_window(8192, 128),
        lambda: BlockMask.sliding_window(16384, 2048, sinks=128),
        lambda: BlockMask.block_diagonal([700, 2000, 4000, 1500] * 2),
        lambda: BlockMask.topk(torch.rand(1, 1, 64, 64), 8, seq_len=8192),
    ],
    ids=["full", "causal", "half", "narrow", "sinks", "documents", "topk"],
)
def test_other_masks_are_taken_head_by_head(make: Any) -> None:
    mask = make()
    p = problem(mask, 1, 16, 16)
    assert torch.equal(schedule(p, mask, 132).tiles, schedule(p, mask, 132, ordered=False).tiles)


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "wanted"),
    [(8192, 64, 4, 8), (32768, 64, 4, 8), (32768, 16, 4, 2), (8192, 64, 64, 1), (300, 16, 1, 4)],
)
def test_members_whose_rows_do_not_fit_in_l2_have_parts(
    tokens: int, heads: int, groups: int, wanted: int
) -> None:
    """The parts of H200; and a tile that every query sees is no longer than the share of a CTA."""
    pack = heads // groups
    mask, (tiles, columns) = (
        BlockMask.causal(tokens, block=128),
        (-(-tokens * pack // 128), -(-tokens // 128)),
    )
    p = replace(
        problem(mask, 1, groups, groups),
        q_len=tokens * pack, members=pack, exact=False, stored=groups * tiles * min(columns, 128), mask_heads=groups,
        longest=min(columns, 16 * 128 // pack),
    )  # fmt: skip
    cut = tile_parts(p, 132)
    assert cut.count(p) == wanted
    assert cut.ranges * cut.tiles(p) >= tiles > (cut.ranges - 1) * cut.tiles(p)
    assert tile_parts(replace(p, members=0), 132) == (p.group, 1)
    # Sums keep their order, so bits are the same, when true sizes replace the bounds.
    assert tile_parts(replace(p, exact=True, stored=8 * groups * tiles, longest=9), 132) == cut


def test_sums_of_parts_are_counted_with_padded_heads() -> None:
    tokens = 16384
    p = problem(BlockMask.causal(tokens, block=128), 1, 1, 1)
    p = replace(p, q_len=tokens * 8, members=8, dim=72, v_dim=72)
    assert 4 * tokens * 2 * 128 * tile_parts(p, 132).count(p) <= ROOM


@pytest.mark.parametrize("without", ["batch", "q_len", "kv_len"])
def test_without_rows_or_keys_nothing_is_cut(without: str) -> None:
    p = replace(problem(BlockMask.causal(300, block=128), 1, 4, 2), members=16, **{without: 0})
    assert tile_parts(p, 132).ranges == 1


def test_a_tile_that_every_token_sees_is_spread_over_ctas() -> None:
    """Sinks of one head are in every query tile's list; as one tile they take twice the time of all others."""
    rows = torch.zeros(1, 1, 256, 64, dtype=torch.bool)
    rows[..., 0] = True
    rows |= torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) < 0.05
    mask = BlockMask.from_block_map(rows, q_len=256 * 128, kv_len=64 * 128)
    p = problem(mask, 1, 1, 1)
    assert schedule(p, mask, 16).imbalance() > 1.5
    assert schedule(p, mask, 16, cut=TileParts(1, 8)).imbalance() < 1.1
