"""portable.attention_bwd without a GPU: arithmetic in Triton's interpreter, code by compiling for real cards, plans."""

import re
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.backward import portable_bwd as portable
from sparsek.attn.kernels.forward.parts import Walk, longest_part, walk
from sparsek.attn.kernels.forward.portable_tiles import DIMS
from tests.attn.kernels.backward.portable_bwd_code import added, compiled, passes
from tests.attn.kernels.forward.problems import BLOCKS, attention_problem, hold_predictions, hold_refusals
from tests.engine.launch import newest
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import Code
from tests.problems import CARDS
from tests.sampling import sampled

KERNEL: Any = portable.KERNEL
# Addresses that a step of partial blocks reloads once or twice, at head dims of 128 and 256.
STACK = 96


def problem(card: str, *dims: int, length: int = 8192, **more: Any) -> AttentionGradProblem:
    """On a card of CARDS, with as many keys as queries."""
    return attention_problem(
        AttentionGradProblem, *dims, card=CARDS[card], q_len=length, kv_len=length, **more
    )


def check_code(
    card: str, p: AttentionGradProblem, c: portable.Config, code: Code, stack: int = STACK
) -> None:
    what = f"{card} {p.dim}:{p.v_dim} {p.block} {c}: {code._replace(ptx='', ttgir='')}"
    assert code.stack <= stack, f"spills: {what}"
    assert code.shared <= portable._shared(p, c) <= p.card.smem_bytes, what
    assert code.copies, f"16-byte asynchronous copies are missing: {what}"
    assert code.wgmma == (card == "sm_90"), what
    assert not re.search(r"\b(atom|red)\.", code.ptx), what


@pytest.mark.parametrize(
    ("card", "dim", "rules"), once(product(("sm_90", "sm_80"), (64, 128, 256), ("interval", "both")), most=1)
)
def test_every_tile_compiles_without_spilled_sums(card: str, dim: int, rules: str) -> None:
    every = {}
    for block in BLOCKS:
        p = problem(card, dim, block=block)
        for c in KERNEL.configs(p):
            for which, tile in passes(c).items():
                every.setdefault((which, tile), (p, c))
    assert len(every) >= 4
    for which, tile in once(every, lambda case: case[:1]):
        p, c = every[which, tile]
        check_code(card, p, c, compiled(card, (dim, dim), p.block, rules, which, tile))


OTHERS = (
    ((96, 96), (128, 128), "interval", "bf16"),
    ((192, 128), (128, 128), "none", "fp16"),
    ((32, 32), (128, 64), "bits", "fp16"),
    ((128, 128), (64, 128), "bits", "fp16"),
    ((128, 128), (128, 128), "members", "bf16"),
)


@pytest.mark.parametrize(("card", "other"), once(product(CARDS, OTHERS), most=1), ids=str)
def test_defaults_for_other_dims_blocks_and_rules_compile_without_spilled_sums(
    card: str, other: tuple[tuple[int, int], tuple[int, int], str, str]
) -> None:
    dims, block, rules, dtype = other
    p = problem(card, *dims, block=block, dtype=dtype)
    c = KERNEL.default(p)
    for which, tile in passes(c).items():
        check_code(card, p, c, compiled(card, dims, block, rules, which, tile, dtype))


def test_the_newest_triton_compiles_the_defaults() -> None:
    chosen = []
    for card, dim in sampled(list(product(("sm_90", "sm_80"), (64, 128, 256))), 1):
        p = problem(card, dim)
        c = KERNEL.default(p)
        chosen += [(card, p, c, which, tile) for which, tile in passes(c).items()]
    wanted = [(card, (p.dim, p.v_dim), p.block, "both", which, tile) for card, p, _, which, tile in chosen]
    found = newest.calls(compiled, wanted)
    for (card, p, c, _, _), code in zip(chosen, found, strict=True):
        check_code(card, p, c, code, stack=160)


@pytest.mark.parametrize(("card", "width"), once(product(("sm_90", "sm_80"), (192, 256, 512)), most=1))
def test_the_sum_of_parts_compiles_without_spills(card: str, width: int) -> None:
    code = added(card, width, width // 2)
    assert code.stack == 0
    assert "ld.global.v4" in code.ptx
    assert code.stores == {"v4.b32"}


def test_every_problem_has_configs_that_divide_its_block_and_fit_its_card() -> None:
    for card, dim, v_dim, block in product(CARDS, DIMS, DIMS, BLOCKS):
        p = problem(card, dim, v_dim, block=block)
        assert KERNEL.why_not(p) == []
        configs = list(KERNEL.configs(p))
        assert KERNEL.default(p) in configs
        for c in configs:
            assert block[0] % c.queries.rows == block[0] % c.keys.step == 0
            assert block[1] % c.keys.rows == block[1] % c.queries.step == 0
            assert portable._shared(p, c) <= p.card.smem_bytes


def test_reasons_name_what_is_wrong() -> None:
    hold_refusals(KERNEL, problem("sm_90"), {"deterministic": False}, "tiles of queries or keys")


def test_the_default_is_the_first_config_unless_tiles_are_fewer_than_sms() -> None:
    p = problem("sm_90")
    assert KERNEL.default(p) == next(iter(KERNEL.configs(p)))
    assert KERNEL.default(problem("sm_90", length=1024)).keys.rows == 64


def test_predictions_grow_with_work_and_never_beat_the_bandwidth() -> None:
    hold_predictions(KERNEL, lambda dim, block: problem("sm_90", dim, block=block))


@pytest.mark.parametrize("length", [8192, 32768])
def test_the_prediction_is_within_reach_of_seven_products_for_five(length: int) -> None:
    p = problem("sm_90", length=length)
    assert 250e12 < p.useful_flops / KERNEL.seconds(p, KERNEL.default(p)) < 420e12


def test_notes_say_what_is_padded_and_when_tiles_may_be_cut() -> None:
    p = problem("sm_90", 192, 96)
    assert KERNEL.notes(p, KERNEL.default(p)) == ["head dim 96 as 128 and 192 as 256, padded with zeros"]
    one = problem("sm_90", kv_heads=1, q_heads=1, mask_heads=1)
    (note,) = KERNEL.notes(one, KERNEL.default(one))
    assert note.startswith("tiles of more than 8 blocks are cut into parts")


def test_tile_sides_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="step of portable"):
        portable.Tile(64, 48, 4, 3)


def test_a_part_is_a_fair_share_of_an_sm_and_worth_its_sum() -> None:
    assert longest_part(132 * 40, (128, 128), 132) == 50
    assert longest_part(132 * 40 + 1, (128, 128), 132) == 51
    assert longest_part(132, (128, 128), 132) == 8
    assert longest_part(132, (64, 128), 132) == 16


def covered(made: Walk, costs: Tensor, part: int) -> None:
    """Every block of every tile is in one part, longest first; parts of a tile lie side by side in slots that are its
    own, and `merges` lists them.
    """
    slots: dict[int, tuple[int, int, int]] = {}
    for group, entries in enumerate(made.order.tolist()):
        there = [x for x in entries if x[0] >= 0]
        assert all(x[0] < 0 for x in entries[len(there) :])
        lengths = [end - begin for _, begin, end, _ in there]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths) <= part
        for tile in range(costs.shape[1]):
            mine = sorted((begin, end, slot) for t, begin, end, slot in there if t == tile)
            assert mine[0][0] == 0
            assert mine[-1][1] == costs[group, tile]
            assert all(a[1] == b[0] for a, b in pairwise(mine))
            if len(mine) == 1:
                assert mine[0][2] == -1
            else:
                first = mine[0][2]
                assert [x[2] for x in mine] == list(range(first, first + len(mine)))
                assert first + len(mine) <= made.slots
                assert not slots.keys() & {x[2] for x in mine}
                slots |= dict.fromkeys((x[2] for x in mine), (group, tile, first))
    merges = [] if made.merges is None else made.merges.tolist()
    listed = {(group, tile, first): count for group, tile, first, count in merges if count}
    assert listed == {x: list(slots.values()).count(x) for x in slots.values()}
    assert len(listed) == sum(count > 0 for *_, count in merges)


@pytest.mark.parametrize("part", [1, 2, 5, 16, 100])
@pytest.mark.parametrize("groups", [1, 3])
def test_walks_cover_every_block_once_within_what_bounds_reserve(groups: int, part: int) -> None:
    draw = torch.Generator().manual_seed(part)
    for tiles in (1, 7, 40):
        for heavy in (0, 90):
            costs = torch.randint(0, 10, (groups, tiles), generator=draw)
            costs[:, tiles // 2] += heavy
            most = int(costs.max())
            for visited, bound in ((int(costs.sum()), most), (2 * int(costs.sum()) + 5, 2 * most)):
                made = walk(costs.int(), bound, 2 * visited, part, 4, 2 * groups)
                covered(made, costs, max(part, bound if bound <= part else part))
                assert made.replicas == 2
                assert (made.slots == 0) == (bound <= part)
                assert 1 <= made.lead <= tiles


def test_sinks_are_cut_where_heads_are_few_and_lists_differ_by_side() -> None:
    """A head whose first key block all query tiles visit: its column is long, its rows are not."""
    mask = BlockMask.sliding_window(16384, 512, sinks=128, device="cpu")
    p = problem("sm_90", length=16384, q_heads=1, kv_heads=1, mask_heads=1)
    p = replace(p, **mask.sizes._asdict())
    work: Any = KERNEL.prepare(p, KERNEL.default(p), mask)
    assert work.queries.slots == 0
    tile, begin, end, slot = work.keys.order[0, 0].tolist()
    assert (tile, slot >= 0) == (0, True)
    assert end - begin <= longest_part(p.visited, p.block, H200.sm_count)
    many = replace(p, batch=64)
    whole: Any = KERNEL.prepare(many, KERNEL.default(many), mask)
    assert whole.keys.slots == 0
    assert whole.keys.order[0, 0, 0] == 0
