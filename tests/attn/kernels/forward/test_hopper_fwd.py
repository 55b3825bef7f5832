"""hopper.attention_fwd without a GPU: configs compiled for sm_90a, and their texts, limits, reasons and predictions.

The planner offers thousands of configs, and a compilation takes a second or two. CASES holds one for every two choices
that can be made together, such as all pairs of head dims with all tiles. Each run compiles a fresh one of them that
holds most choices, and one of the fullest. The newest release, in its own environment, takes twice as long: one.
"""

import re
from collections.abc import Hashable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.engine.table import load

pytest.importorskip("triton")

from sparsek.attn.kernels.forward import fwd_load
from sparsek.attn.kernels.forward.hopper_fwd import Config
from tests.attn.kernels.forward.problems import BLOCKS, attention_problem, hold_forward
from tests.engine.launch import newest
from tests.engine.launch.covering import covering, once
from tests.engine.launch.hopper_code import Code, compiled
from tests.sampling import sampled

KERNEL = load("hopper.attention_fwd")
SIDES = (32, 64, 128, 256)


def problem(dim: int = 128, v_dim: int | None = None, **more: Any) -> AttentionProblem:
    return attention_problem(AttentionProblem, dim, v_dim, **more)


def few_queries(heads: tuple[int, int]) -> dict[str, Any]:
    return {"q_len": 1, "q_heads": heads[0], "kv_heads": heads[1], "mask_heads": 1}


# What decides about packing and cutting.
SHAPES: dict[str, dict[str, Any]] = {
    "even": {},
    "one long row": {"longest": 64, "stored": 16 * 64 * 3},
    "2 heads packed": few_queries((128, 64)),
    "8 heads packed": few_queries((16, 2)),
    "64 heads packed": few_queries((64, 1)),
}
PROBLEMS = [
    problem(*dims, block=block, **shape)
    for dims, block, shape in product(product(SIDES, SIDES), BLOCKS, SHAPES.values())
]
CONFIGS = [
    replace(c, interval=interval, bits=bits, lse=lse)
    for c in dict.fromkeys(c for p in PROBLEMS for c in KERNEL.configs(p))
    for interval, bits, lse in product((True, False), repeat=3)
]


def choices(case: tuple[Config, str]) -> list[Hashable]:
    """What was chosen for a config. Stages and slots of Q follow from heads and tile."""
    c, dtype = case
    flags = (("rules", c.interval, c.bits), ("split", c.split), ("lse", c.lse))
    return [("heads", c.dim, c.v_dim), ("tile", c.groups, c.keys), c.block, c.pack, *flags, dtype]


# The largest tiles with every rule and output spill most, and are not all among the pairs.
FULLEST = [
    Config(128, 128, (128, 128), 2, 128, 2, 2, 8, interval=True, bits=True, split=True, lse=True),
    Config(256, 256, (128, 128), 2, 64, 2, 1, 8, interval=True, bits=True, split=True, lse=True),
]
CASES = [*covering(product(CONFIGS, ("bf16", "fp16")), choices), *product(FULLEST, ["bf16"])]


def dims_apart(case: tuple[Config, str]) -> list[Hashable]:
    """The same with the head dims as two choices."""
    return [("dim", case[0].dim), ("v_dim", case[0].v_dim), *choices(case)[1:]]


# Changed scores, in the configs that hold most in registers, and with every way of masking.
CHANGED = [
    *(replace(c, softcap=True, alibi=True, sinks="bf16") for c in FULLEST),
    Config(128, 128, (128, 128), 2, 128, 2, 2, interval=True, softcap=True, sinks="fp32"),
    Config(64, 64, (64, 64), 1, 64, 4, 2, alibi=True),
]
# Blocks of as many tokens as fill a tile with their heads.
MEMBERS = [
    Config(128, 128, (8, 128), 2, 128, 2, 2, 16, interval=True, lse=True, members=1),
    Config(128, 128, (8, 128), 2, 128, 2, 2, 16, interval=True, lse=True, members=1, member_ends=True),
    Config(128, 128, (128, 64), 2, 64, 4, 2, interval=True, split=True, members=1),
    Config(64, 64, (32, 128), 1, 128, 2, 2, 4, members=1),
    Config(128, 128, (8, 64), 1, 64, 2, 2, 16, interval=True, lse=True, members=1),
    Config(128, 128, (128, 64), 1, 64, 2, 2, interval=True, split=True, members=1),
]
COMPILED = list(dict.fromkeys(once(CASES, dims_apart, most=1)))
NEXT_CASES = sampled([(FULLEST[0], "bf16"), *covering(CASES, dims_apart, 1)[:3]], 1, of="the newest Triton")


class Spills(NamedTuple):
    """Bounds: bytes of stack, bytes spilled, and spills in a step without rules."""

    stack: int
    bytes: int
    in_step: int


# ptxas of CUDA 12.8 spills only what a tile needs at its ends. That of 13.4 also spills in steps of heads of 256.
PINNED, NEXT = Spills(72, 128, 0), Spills(160, 448, 4)
# A slope and a position for each row; with every rule, packed heads and ALiBi they are kept on the stack.
CHANGED_SPILLS = Spills(112, 224, 0)


def check_code(c: Config, dtype: str, code: Code, spills: Spills) -> None:
    """Each warpgroup has a loop of steps with rules, which loads, and one without; with ALiBi that reads columns."""
    where = hold_forward(c, dtype, code, (2 if c.softcap else 1) * c.keys // 2 + 2)
    copies = [re.sub(r"\.shared::c\w+", ".shared", copy) for copy in code.copies]
    for start in ("4d.shared.global.mbarrier", "5d.shared.global.mbarrier", "5d.global.shared.bulk_group"):
        assert any(copy.startswith(f"cp.async.bulk.tensor.{start}") for copy in copies), f"{start}: {where}"
    plain = [loop for loop in code.loops if loop.loads <= (2 if c.alibi else 0)]
    assert len(plain) == c.groups or c.alibi, where
    ruled = [loop for loop in code.loops if loop not in plain and not c.member_ends]
    assert all(loop.predicates >= c.keys // 8 for loop in ruled), f"scores are masked by a test each: {where}"
    assert code.stack <= spills.stack, where
    assert code.spills <= spills.bytes, where
    assert all(loop.local <= spills.in_step for loop in plain), f"a step without rules spills: {where}"


@pytest.mark.parametrize(("c", "dtype"), COMPILED, ids=str)
def test_configs_compile_to_wgmma_and_tma_and_hide_the_softmax(c: Config, dtype: str) -> None:
    check_code(c, dtype, compiled(c, dtype), PINNED)


def test_the_newest_triton_compiles_configs_to_the_same() -> None:
    for (c, dtype), code in zip(NEXT_CASES, newest.calls(compiled, NEXT_CASES), strict=True):
        check_code(c, dtype, code, NEXT)


@pytest.mark.parametrize("c", sampled([FULLEST[0], *CHANGED, *MEMBERS], 1), ids=str)
def test_the_fullest_changed_scores_and_members_spill_in_steps_with_rules_only(c: Config) -> None:
    check_code(c, "bf16", compiled(c, "bf16"), CHANGED_SPILLS if c in CHANGED else PINNED)


def test_a_tile_without_blocks_looks_behind_the_last_key_that_there_can_be() -> None:
    for block in BLOCKS:
        nowhere = fwd_load.NOWHERE.value * block[1]
        assert KERNEL.why_not(problem(block=block, kv_len=nowhere + 1, longest=1))
        assert nowhere < 2**31 - block[1]


def test_heads_are_packed_where_queries_are_few_and_heads_share_a_list() -> None:
    few = problem(batch=16, q_len=64, q_heads=64, kv_heads=8, mask_heads=8, longest=64)
    assert KERNEL.default(few).pack == 8
    assert KERNEL.default(replace(few, mask_heads=1, stored=few.longest)).pack == 8
    assert {c.pack for c in KERNEL.configs(replace(few, q_heads=48, mask_heads=1))} == {1, 2}, (
        "6 heads to one"
    )
    for change in ({"q_len": 65}, {"mask_heads": 64}, {"kv_heads": 64, "mask_heads": 1}):
        assert {c.pack for c in KERNEL.configs(replace(few, **change))} == {1}


def test_tiles_have_64_rows_where_lists_are_sparse_in_the_keys() -> None:
    def tile(keys: int, block: int, dim: int = 128, **more: Any) -> tuple[int, int]:
        sizes = {"q_heads": 64, "kv_heads": 4, "mask_heads": 4, "kv_len": keys, "block": (8, block)}
        c = KERNEL.default(problem(dim, **sizes, longest=128, members=1, by_interval=True, **more))
        return c.groups, c.keys

    for exact in (True, False):
        assert tile(32768, 64, exact=exact) == (1, 64)
        assert tile(8192, 64, exact=exact) == (2, 64)
        assert tile(32768, 128, exact=exact) == (2, 128)
    assert tile(32768, 64, member_ends=True) == tile(32768, 64, dim=256) == (2, 64)


def test_notes_tell_of_packing_cutting_and_padding() -> None:
    assert KERNEL.notes(problem(), KERNEL.default(problem())) == []
    p = problem(96, 96, q_len=16, q_heads=16, kv_heads=2, mask_heads=1, longest=64)
    c = next(c for c in KERNEL.configs(p) if c.pack == 8)
    packed, cut, padded = KERNEL.notes(p, c)
    assert packed == "8 query heads share a tile, because they share a list and queries are few"
    assert cut.startswith(
        "tiles of more than 8 blocks are cut and merged in a fixed order; workspace of at most "
    )
    assert padded == "heads of 96/96 are computed as 128/128"


@pytest.mark.parametrize("v_dim", [128, 96])
def test_the_note_about_parts_says_what_is_allocated(v_dim: int) -> None:
    mask = BlockMask.causal(q_len=16, kv_len=8192, device="cpu")
    p = problem(128, v_dim, q_len=16, mask_heads=1, **mask.sizes._asdict())
    c = KERNEL.default(p)
    (said,) = re.findall(r"workspace of at most ([\d.]+) MB", " ".join(KERNEL.notes(p, c)))
    slots = KERNEL.prepare(p, c, mask).schedule.slots
    assert float(said) == pytest.approx(slots * 128 * (c.v_dim + 1) * 4 / 1e6, rel=1e-3)
