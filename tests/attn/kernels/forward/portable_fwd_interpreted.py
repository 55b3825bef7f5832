"""portable.attention_fwd and its merge in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.forward import portable_fwd as portable
from sparsek.attn.kernels.forward.merge import merge_parts
from sparsek.attn.kernels.forward.packed_rows import (
    halved_tiles,
    launched_copy,
    launched_halves,
    of_tokens,
    packed_mask,
    packed_rows,
    packed_shape,
)
from sparsek.attn.kernels.forward.score_args import Sinks
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import SHARED_ROWS, random_bits, shared_rows
from tests.attn.kernels.planned import attend
from tests.attn.kernels.planned import attention_problem as problem
from tests.attn.kernels.portable_interpreted import normal, operands

HALF = torch.float16
KERNEL = portable.KERNEL
SMALL, LARGE = (64, 64), (128, 128)


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, config: Any = None, scale: float | None = None
) -> None:
    gate = check_attention(q, k, v, mask, *attend(KERNEL, q, k, v, mask, config, scale), scale=scale)
    assert gate.passed, f"{mask} {config}: {gate}"


def test_rows_with_nothing_to_see_are_zero_whatever_they_meet_first() -> None:
    """Queries 0 to 9 see nothing, 10 to 19 only the second partial block, 20 to 29 only a full one."""
    lo = torch.zeros(1, 64, dtype=torch.int32)
    hi = torch.zeros(1, 64, dtype=torch.int32)
    lo[0, 10:20], hi[0, 10:20] = 70, 90
    hi[0, 30:] = 40
    for full in ([], [2]):
        mask = BlockMask(64, 192, SMALL, 1, 1, lists(full), lists([0, 1]), lo, hi)
        q, k, v = operands(mask, (2, 2))
        out, lse = attend(KERNEL, q, k, v, mask)
        check(q, k, v, mask)
        seen_by_all = bool(full)
        assert bool((lse[:, :, :10] == -torch.inf).all()) != seen_by_all
        assert bool((out[:, :, :10] == 0).all()) != seen_by_all
        assert out.isfinite().all()


def test_masks_of_bits_alone_need_no_intervals() -> None:
    """The last two queries are beyond q_len: their bits may be anything."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 64, 4), generator=draw).int()
    bits[:, :, 3] = 0  # keys 96 to 127 of each block, beyond kv_len in the second
    rules = torch.tensor([2, 0], dtype=torch.int32)
    for full in ([], [1]):
        parts = lists([0, 2] if full else [0, 1])
        kv_len = 352 if full else 224
        mask = BlockMask(62, kv_len, (64, 128), 1, 1, lists(full), parts, None, None, rules, bits)
        check(*operands(mask, (2, 2)), mask)


def lists(columns: list[int]) -> BlockLists:
    """The BlockLists of a mask with one row."""
    start, count = torch.zeros(1, dtype=torch.int32), torch.tensor([len(columns)], dtype=torch.int32)
    return BlockLists(start, count, torch.tensor(columns, dtype=torch.int32))


def test_every_section_of_heads_gives_the_same_bits() -> None:
    mask = BlockMask.causal(100, block=SMALL, device="cpu")
    q, k, v = normal(2, 2, 100, 32), normal(2, 1, 100, 32, seed=1), normal(2, 1, 100, 32, seed=2)
    expected = attend(KERNEL, q, k, v, mask)
    p = problem(q, k, v, mask)
    c = KERNEL.default(p)
    order = KERNEL.prepare(p, c, mask).order
    for section in (1, 3, 8):
        out, lse = poisoned(q.shape, HALF), poisoned(q.shape[:3], torch.float32)
        KERNEL.launch(c, portable.Work(order, section), AttentionCall(q, k, v, mask, 32**-0.5, out, lse))
        assert torch.equal(out, expected[0]), section
        assert torch.equal(lse, expected[1]), section


def test_tiles_are_walked_longest_first_with_ties_in_order() -> None:
    mask = random_bits("cpu", (900, 500), SMALL, heads=3, batch=2, density=0.8)
    p = problem(*operands(mask, (3, 3)), mask)
    order = KERNEL.prepare(p, KERNEL.default(p), mask).order
    counts = (mask.full.counts + mask.partial.counts).view(6, -1)
    assert order.dtype == torch.int32
    for found, lengths in zip(order.tolist(), counts.tolist(), strict=True):
        assert found == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def test_rows_of_one_length_are_not_sorted() -> None:
    scores = torch.rand(1, 2, 5, 9, generator=torch.Generator().manual_seed(0))
    mask = BlockMask.topk(scores, 4, q_len=320, kv_len=576, block=SMALL)
    p = problem(*operands(mask, (2, 2)), mask)
    assert KERNEL.prepare(p, KERNEL.default(p), mask).order.tolist() == [[0, 1, 2, 3, 4]]


class Split:
    """Tiles of random parts: what merge_parts reads, and the result in float64, [tiles, rows, Dv] and [tiles, rows]."""

    def __init__(self, slots: list[int], rows: int, v_dim: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.first = torch.tensor([0, *slots]).cumsum(0)[:-1] + 1  # slot 0 is nobody's
        total = sum(slots) + 2
        self.o = torch.randn(total, 128, v_dim, generator=draw)
        self.lse = torch.randn(total, 128, generator=draw) * 20
        self.lse[torch.rand(total, 128, generator=draw) < 0.3] = -torch.inf
        self.lse[:, 5] = -torch.inf  # a row that no part saw
        self.lse[0], self.lse[-1], self.o[0], self.o[-1] = torch.nan, torch.nan, torch.nan, torch.nan
        self.o[self.lse == -torch.inf] = torch.nan
        self.lse[:, rows:] = torch.nan
        out, lse = [], []
        for first, count in zip(self.first.tolist(), slots, strict=True):
            part = self.lse[first : first + count, :rows].double() * torch.tensor(2.0).double().log()
            weight = part.softmax(0).nan_to_num(0)[..., None]
            out.append((weight * self.o[first : first + count, :rows].double().nan_to_num(0)).sum(0))
            lse.append(part.logsumexp(0))
        self.out64, self.lse64 = torch.stack(out), torch.stack(lse)


@pytest.mark.parametrize("v_dim", [32, 96, 256])
def test_parts_are_merged_into_the_tiles_of_the_table_and_nowhere_else(v_dim: int) -> None:
    slots = [3, 1, 7]
    split = Split(slots, 128, v_dim)
    where = [(0, 1, 0), (1, 0, 128), (1, 2, 128)]  # batch item, head, first query; 128 + 128 is over the edge
    table = [[f, n, *at] for f, n, at in zip(split.first.tolist(), slots, where, strict=True)] + [
        [0, 0, 0, 0, 0]
    ]
    out, lse = poisoned((2, 200, 3, v_dim), HALF).transpose(1, 2), poisoned((2, 3, 200), torch.float32)
    merge_parts(split.o, split.lse, torch.tensor(table, dtype=torch.int32), out, lse, 1, 128)
    for at, (b, h, first) in enumerate(where):
        rows = min(128, 200 - first)
        span = slice(first, first + rows)
        torch.testing.assert_close(out[b, h, span].double(), split.out64[at, :rows], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse[b, h, span].double(), split.lse64[at, :rows], rtol=1e-5, atol=1e-5)
        assert out[b, h, first + 5].eq(0).all()
        assert lse[b, h, first + 5] == -torch.inf
        out[b, h, span], lse[b, h, span] = torch.nan, torch.nan
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize(("group", "rows"), [(4, 128), (3, 126), (8, 64)])
def test_rows_of_a_tile_may_be_heads_that_share_a_list(group: int, rows: int) -> None:
    split = Split([2, 4], rows, 32)
    table = torch.tensor([[1, 2, 0, group, 0], [3, 4, 0, group, rows // group]], dtype=torch.int32)
    length = 2 * rows // group - 3
    out, lse = poisoned((1, 2 * group, length, 32), HALF), poisoned((1, 2 * group, length), torch.float32)
    merge_parts(split.o, split.lse, table, out, lse, group, rows)
    expected = split.out64.view(-1, group, 32).transpose(0, 1)[:, :length]
    torch.testing.assert_close(out[0, group:].double(), expected, rtol=1e-3, atol=1e-3)
    expected_lse = split.lse64.view(-1, group).T[:, :length]
    torch.testing.assert_close(lse[0, group:].double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert out[0, :group].isnan().all()


def test_a_merge_without_lse_or_without_tiles_is_fine() -> None:
    split = Split([2], 128, 64)
    out = poisoned((1, 1, 128, 64), HALF)
    merge_parts(split.o, split.lse, torch.empty(0, 5, dtype=torch.int32), out, None, 1, 128)
    assert out.isnan().all()
    merge_parts(split.o, split.lse, torch.tensor([[1, 2, 0, 0, 0]], dtype=torch.int32), out, None, 1, 128)
    torch.testing.assert_close(out[0, 0].double(), split.out64[0], rtol=1e-3, atol=1e-3)


def test_the_merge_adds_sinks_once() -> None:
    """Two parts of one tile of four rows, two heads at each of two positions; one sink is -inf."""
    draw = torch.Generator().manual_seed(0)
    o_part, lse_part = torch.randn(2, 128, 32, generator=draw), torch.randn(2, 128, generator=draw)
    lse_part[:, 3] = -torch.inf
    sinks = torch.tensor([0.7, -torch.inf, 1.5])[::2]
    table = torch.tensor([[0, 2, 0, 0, 0]], dtype=torch.int32)
    out, lse = poisoned((1, 2, 2, 32), HALF), poisoned((1, 2, 2), torch.float32)
    merge_parts(o_part, lse_part, table, out, lse, 2, 4, Sinks(sinks, sinks.stride(0)))
    weights = torch.exp2(lse_part[:, :4].double())
    total = weights.sum(0) + sinks.double().exp().repeat(2)
    right = (weights[..., None] * o_part[:, :4]).sum(0) / total[:, None]
    torch.testing.assert_close(out[0].transpose(0, 1).flatten(0, 1).double(), right, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse[0].T.flatten().double(), total.log(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "pack", "dtype"),
    [((2, 6, 37, 40), 2, HALF), ((1, 8, 70, 128), 8, HALF), ((3, 4, 50), 4, torch.float32)],
)
def test_rows_of_heads_are_packed_and_unpacked_by_a_launch(
    shape: tuple[int, ...], pack: int, dtype: torch.dtype
) -> None:
    wide = normal(*(2 * side for side in shape)).to(dtype)
    for x in (wide[tuple(slice(0, side) for side in shape)], wide[tuple(slice(1, 2 * n, 2) for n in shape)]):
        tokens, made = of_tokens(x, pack), poisoned(packed_shape(x, pack), dtype)
        launched_copy(tokens, made.view(tokens.shape))
        assert torch.equal(made, packed_rows(x, pack))
        back = poisoned(wide.shape, dtype)
        there = back[tuple(slice(1, 2 * side, 2) for side in shape)]
        launched_copy(made.view(tokens.shape), of_tokens(there, pack))
        assert torch.equal(there, x)
        there.fill_(torch.nan)
        assert back.isnan().all()


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize(
    ("tokens", "pack", "agree"), [(260, 16, 0), (133, 4, 0), (260, 16, 8), (133, 4, 30), (330, 4, -1)]
)
def test_tiles_of_half_as_many_tokens_see_the_same_keys(
    tokens: int, pack: int, agree: int, side: int
) -> None:
    """And have fewer blocks, or as many, by torch and by a launch. Where as many tokens agree, blocks are full; with -1
    each has the first block, which is full, and its own.
    """
    draw = torch.Generator().manual_seed(tokens + side + agree)
    blocks = -(-tokens // side)
    chosen = torch.randint(0, blocks, (1, 2, tokens, 2), generator=draw, dtype=torch.int32)
    if agree < 0:
        chosen[0, :] = torch.stack((torch.zeros(tokens), torch.arange(tokens) // side), 1).int()
    elif agree:
        chosen = chosen[:, :, torch.arange(tokens) // agree * agree]
    q, k = torch.empty(1, 2 * pack, tokens, 128, dtype=HALF), torch.empty(1, 2, tokens, 128, dtype=HALF)
    check_halves(packed_mask(TokenLists(chosen, side).mask_for(q, k), pack))


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("case", SHARED_ROWS, ids=str)
def test_rows_that_share_entries_have_halves_of_their_own(case: str, side: int) -> None:
    check_halves(packed_mask(shared_rows(case, side=side), 4))


def check_halves(mask: BlockMask) -> None:
    """Half tiles by torch and by a launch see what the tiles see."""
    found = halved_tiles(mask)
    assert torch.equal(of_pairs(found, mask).to_dense(), mask.to_dense())
    assert found.block == (64, 128)
    full, members, given = found.full, found.members, (*found.partial, found.rules, *found.full[:2])
    assert members is not None
    made: Any = tuple(torch.full_like(x, -9) for x in given if x is not None)
    launched_halves(mask, 64 // members.rows, found.grid[0], made)
    again = found.unchecked(
        q_len=mask.q_len, kv_len=mask.kv_len, block=found.block, batch=mask.batch, heads=mask.heads,
        full=BlockLists(made[4], made[5], full.indices), partial=BlockLists(*made[:3]), lo=mask.lo, hi=mask.hi,
        rules=made[3], label="", members=members, sizes=found.sizes,
    )  # fmt: skip
    assert torch.equal(made[1], found.partial.counts)
    for first, own, n in zip(made[0].tolist(), found.partial.starts.tolist(), made[1].tolist(), strict=True):
        assert torch.equal(made[2][first : first + n], found.partial.indices[own : own + n])  # ascending
        assert torch.equal(made[3][first : first + n], found.rules[own : own + n])  # type: ignore[index]
    assert torch.equal(of_pairs(again, mask).to_dense(), mask.to_dense())


def of_pairs(found: BlockMask, mask: BlockMask) -> BlockMask:
    """The half tiles of a mask in its own key blocks."""
    if mask.block[1] == found.block[1]:
        return found
    assert found.rules is not None
    assert found.members is not None
    assert int(found.full.counts.sum()) == 0
    bits, parts = 64 // found.members.rows, found.partial
    columns, words, counts = [], [], []
    for start, count in zip(parts.starts.tolist(), parts.counts.tolist(), strict=True):
        pairs, own = (x[start : start + count].tolist() for x in (parts.indices, found.rules))
        assert len({*pairs}) == count
        entries = [
            (2 * pair + side, word >> side * bits & (1 << bits) - 1)
            for pair, word in sorted(zip(pairs, own, strict=True))
            for side in (0, 1)
        ]
        entries = [each for each in entries if each[1]]
        columns += [column for column, _ in entries]
        words += [word for _, word in entries]
        counts.append(len(entries))
    lists, none = torch.tensor(counts, dtype=torch.int32), torch.zeros(len(counts), dtype=torch.int32)
    return found.unchecked(
        q_len=found.q_len, kv_len=found.kv_len, block=(64, mask.block[1]), batch=found.batch, heads=found.heads,
        full=BlockLists(none, none, none[:0]),
        partial=BlockLists((lists.cumsum(0) - lists).int(), lists, torch.tensor(columns, dtype=torch.int32)),
        lo=found.lo, hi=found.hi, rules=torch.tensor(words, dtype=torch.int32), label="", members=found.members,
        sizes=found.sizes,
    )  # fmt: skip
