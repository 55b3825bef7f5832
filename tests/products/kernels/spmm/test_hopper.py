"""hopper.spmm without a GPU: configs compiled for sm_90a, its schedule walked in numpy, its limits.

FLAGGED holds every two choices that some config has together, among them transposed A, C by columns, epilogues and
split rows. The pinned Triton compiles in this process, in each run fresh ones of them that hold every choice. Of A @ B
with B by rows or by columns alone, CASES are every default and every three choices that some config has together; these
hold no pair that FLAGGED lacks, and each run compiles a few of them. The newest release, in its own environment, takes
three times as long, and compiles some of cases that hold every value of a field.
"""

from collections.abc import Hashable
from dataclasses import asdict, replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.storage import merged_steps
from sparsek.products.plan import schedule
from sparsek.products.plan.problems import SpmmProblem
from tests.problems import changed, spmm_problem
from tests.sampling import sampled

pytest.importorskip("triton")

from sparsek.products.kernels.spmm.hopper import Config
from sparsek.products.kernels.spmm.parts import records
from tests.engine.launch.covering import covering, once
from tests.engine.launch.hopper_code import compiled
from tests.products.kernels.common.hopper_code import (
    LARGE,
    check_batches,
    check_code,
    check_code_of_next,
    check_limits,
    check_texts,
    fields_of,
    walked,
)

KERNEL = load("hopper.spmm")
BLOCKS = (
    (128, 128),
    (64, 64),
    (32, 32),
    (16, 16),
    (256, 128),
    (512, 112),
    (48, 96),
    (80, 80),
    (192, 64),
    (16, 64),
    (128, 16),
)
SIDES = (16, 64, 200, 8192)


def problem(block: tuple[int, int], n: int, layout: str = "row", **more: Any) -> SpmmProblem:
    """8192 x 8192, one block of eight stored, and every factor for merging that ops would offer."""
    stored = 8192 * 8192 // 8 // block[0] // block[1]
    factors = [r for r in (2, 4, 8) if block[0] in (16, 32, 64) and r * block[0] <= 128]
    merged = tuple((r, int(stored * 0.94)) for r in factors)
    blocks: dict[str, Any] = {
        "block": block,
        "nnzb": stored,
        "row_max": 8192 // 8 // block[1],
        "merged": merged,
    }
    return spmm_problem(**LARGE | blocks | {"n": n, "b_layout": layout} | more)


PROBLEMS = [problem(block, n, layout) for block, n, layout in product(BLOCKS, SIDES, ("row", "col"))]
CONFIGS = list(dict.fromkeys(c for p in PROBLEMS for c in [KERNEL.default(p), *KERNEL.configs(p)]))
DEFAULTS = list(dict.fromkeys(KERNEL.default(p) for p in PROBLEMS if p.n >= 64))
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
EPILOGUES: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True},
    {"has_alpha": True},
    *({"bias": True, "activation": name} for name in ACTIVATIONS),
    {"has_alpha": True, "activation": "silu"},
    {"combine": "mul", "activation": "gelu_tanh"},
    {"combine": "mul", "activation": "silu"},
    {"combine": "add"},
    {"combine": "add", "bias": True, "has_alpha": True, "activation": "gelu"},
    {"combine": "add", "in_place": True},
    {"combine": "mul"},
    *({"bias": True, "activation": name, "slope": True} for name in ACTIVATIONS if name != "relu"),
)


def flagged_problems(draw: Random, count: int) -> list[SpmmProblem]:
    """`count` problems of every block and number of columns, with forms and epilogues drawn."""
    return [
        problem(
            block,
            n,
            draw.choice(("row", "col")),
            transposed=draw.random() < 0.5,
            out_layout=draw.choice(("row", "col")),
            **draw.choice(EPILOGUES),
        )
        for block, n in product(BLOCKS, SIDES)
        for _ in range(count)
    ]


def choices(case: tuple[Config, str]) -> list[Hashable]:
    """What was chosen for a config. How many stages there are, and how far apart boxes leave, follows from the rest."""
    c, dtype = case
    fields = asdict(c)
    names = (
        "block",
        "cols",
        "a_col",
        "b_col",
        "c_col",
        "bias",
        "has_alpha",
        "activation",
        "combine",
        "slope",
        "preload",
        "held",
        "split",
        "box",
    )
    shape = [("groups", c.wg_m, c.wg_n), ("depth", c.width, c.pieces), ("merged", c.joined_rows > 1)]
    return [*((name, fields[name]) for name in names), *shape, dtype]


CASES = [
    *dict.fromkeys([*product(DEFAULTS, ["bf16"]), *covering(product(CONFIGS, ["bf16"]), choices, 3)]),
    *product(DEFAULTS[::8], ["fp16"]),
]
DRAW = Random(0)
FLAGGED = covering(
    {
        replace(c, split=c.split or (not c.slope and not c.held and DRAW.random() < 0.4)): DRAW.choice(
            ("bf16", "fp16")
        )
        for p in flagged_problems(DRAW, 16)
        for c in KERNEL.configs(p)
    }.items(),
    choices,
)
COMPILED = sorted(FLAGGED.index(case) for case in once(FLAGGED, choices, most=5))
EVERY_VALUE = covering([*CASES, *FLAGGED], lambda case: (*asdict(case[0]).items(), case[1]), 1)
NEXT_CASES = sampled(EVERY_VALUE, 1, of="the newest Triton")


@pytest.mark.parametrize(("c", "dtype"), sampled(CASES, 1), ids=str)
def test_configs_compile_to_wgmma_and_tma_without_spills(c: Config, dtype: str) -> None:
    check_code(c, dtype, compiled(c, dtype, reads_sass=False))


@pytest.mark.parametrize("at", COMPILED, ids=lambda at: str(FLAGGED[at][0]))
def test_configs_of_every_form_and_epilogue_compile_as_well(at: int) -> None:
    """The machine code of every fourth is read, which takes as long as compiling it."""
    c, dtype = FLAGGED[at]
    check_code(c, dtype, compiled(c, dtype, reads_sass=at % 4 == 0))


def test_two_choices_of_any_case_are_together_in_one_that_runs_draw_from() -> None:
    assert covering(CASES, choices, held=FLAGGED) == []


def test_the_newest_triton_compiles_configs_to_the_same() -> None:
    check_code_of_next(NEXT_CASES)


FIELDS = fields_of(block=st.sampled_from(BLOCKS), b_stack=st.booleans(), owned=st.sampled_from((0, 48, 128)))


@given(st.data())
def test_two_configs_never_share_a_text(data: st.DataObject) -> None:
    check_texts(Config, FIELDS, data)


def test_all_the_planners_configs_have_texts_of_their_own() -> None:
    known = {*CONFIGS, *(c for c, _ in FLAGGED)}
    assert len({str(c) for c in known}) == len(known)


def test_every_form_and_epilogue_is_taken() -> None:
    layouts, blocks = ("row", "col"), ((64, 64), (128, 128), (48, 96), (16, 16))
    for epilogue, view, b, c, block in product(EPILOGUES, (False, True), layouts, layouts, blocks):
        assert KERNEL.why_not(problem(block, 8192, b, transposed=view, out_layout=c, **epilogue)) == []


@pytest.mark.parametrize("block", [(80, 80), (144, 32), (336, 16)])
def test_a_c_that_is_added_to_itself_is_written_by_no_two_tiles(block: tuple[int, int]) -> None:
    """Slices of a tall block overlap, and both write the same bits, unless they read what they write."""
    for p in (problem(block, n, in_place=True, combine="add") for n in (64, 8192)):
        for c in KERNEL.configs(p):
            units = schedule.walk(random_bsr(4 * block[0], 64, block, 1.0).pattern, c.rows, c.joined_rows)
            assert (np.diff(units.row) >= c.height).all(), c


SIZES = st.integers(1, 512 // 16).map(lambda i: 16 * i)


@settings(max_examples=50)
@given(
    block=st.tuples(SIZES, SIZES),
    n=st.one_of(st.integers(0, 300), st.integers(0, 2**20)),
    layout=st.sampled_from(("row", "col")),
    merge=st.booleans(),
    transposed=st.booleans(),
    out_layout=st.sampled_from(("row", "col")),
    epilogue=st.sampled_from(EPILOGUES),
    longest=st.sampled_from((0, 500)),
)
def test_every_config_fits_the_card(
    block, n, layout, merge, transposed, out_layout, epilogue, longest
) -> None:
    form = {"transposed": transposed, "out_layout": out_layout, "row_max": longest}
    p = problem(block, n, layout, nnzb=500, **form, **epilogue)
    p = p if merge else changed(p, merged=())
    configs = list(KERNEL.configs(p))
    if not configs:
        assert p.in_place
        assert KERNEL.why_not(p)
        return
    assert KERNEL.default(p) in configs
    for c in configs:
        check_limits(c, max(c.a_boxed, c.panel, c.cols))
        assert c.block == block, c
        assert c.width * c.per_block == block[1], "a block is whole pieces"
        assert (c.a_col, c.b_col, c.c_col) == (transposed, layout == "col", out_layout == "col"), c
        assert (c.bias, c.has_alpha, c.activation, c.combine) == (
            p.bias,
            p.has_alpha,
            p.activation,
            p.combine,
        ), c
        assert 2 * c.c_shape[1] <= 128, "a box of C is no wider than a swizzle"
        assert c.every >= 1, "boxes leave while the next tile is multiplied"
        assert c.rows % c.a_boxed == 0, c
        assert c.cols % c.panel == 0, c
        assert c.joined_rows == 1 or not c.a_col, "boxes of a transposed A hold one block"
        held_right = c.c_box == 64 and c.height == c.rows and c.cols % (c.held_boxes * c.held or 1) == 0
        assert not c.held or (held_right and not (c.slope or c.split) and c.preload == bool(c.combine)), c
        assert c.joined_rows == 1 or c.a_box * c.joined_rows <= c.rows, c


def test_every_item_of_a_batch_is_predicted_as_a_launch() -> None:
    """64 tiles on 132 CTAs."""
    check_batches(KERNEL, changed(problem((64, 64), 512), m=1024, k=2048, nnzb=256))


def test_layers_in_blocks_of_64_take_tiles_of_64x256() -> None:
    chosen = {n: KERNEL.default(problem((64, 64), n, "col")) for n in (512, 2048, 8192)}
    assert [(c.rows, c.block_cols, c.held) for c in chosen.values()] == [(64, 256, 32)] * 3


def test_wide_tiles_of_low_blocks_are_held_for_an_activation_only() -> None:
    """H100 (2026-11-26): blocks of 64 at 12.5 %, 8192^3, took 305 us staged and 315 held."""
    p = spmm_problem(8192, 8192, 8192, (64, 64), 2048, "bf16", H200, row_max=16)
    plain, gelu = KERNEL.default(p), KERNEL.default(changed(p, activation="gelu"))
    assert (plain.rows, plain.block_cols, plain.held) == (64, 512, 0)
    assert gelu.held == 32


@settings(max_examples=40)
@given(
    block=st.sampled_from([*BLOCKS, (16, 48), (144, 32), (112, 16), (208, 16), (96, 64)]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    cut=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    n=st.sampled_from((1, 8, 16, 61, 130, 300)),
    density=st.sampled_from((0.1, 0.4, 1.0)),
    sms=st.sampled_from((1, 3, 8, 132)),
    form=st.tuples(st.booleans(), st.sampled_from(("row", "col")), st.sampled_from(("row", "col"))),
    kind=st.sampled_from(("whole", "split")),
    data=st.data(),
)
def test_walking_the_schedule_as_the_kernel_does_gives_the_product(
    block, rows, columns, cut, n, density, sms, form, kind, data
) -> None:
    """`a` is stored as it is or as its transpose. `kind`: rows are whole or in parts."""
    view, b_layout, out_layout = form
    columns = columns * 5 if kind == "split" else columns  # parts have 4 blocks or more
    m, k = rows * block[0] - cut[0], columns * block[1] - cut[1]
    sides, stored = ((k, m), (block[1], block[0])) if view else ((m, k), block)
    a = random_bsr(*sides, stored, density, pattern="powerlaw", dtype=torch.float64, device="cpu", seed=n)
    a = a.T if view else a
    factors = [r for r in (2, 4, 8) if block[0] in (16, 32, 64) and r * block[0] <= 128 and not view]
    p = problem(
        block,
        n,
        b_layout,
        m=m,
        k=k,
        nnzb=a.nnzb,
        merged=tuple((r, merged_steps(a.pattern, r)) for r in factors),
        card=replace(H200, sm_count=sms),
        transposed=view,
        out_layout=out_layout,
    )
    c = replace(data.draw(st.sampled_from(list(KERNEL.configs(p)))), split=kind == "split")
    work = KERNEL.prepare(p, c, a)
    b = torch.randn(k, n, dtype=torch.float64).numpy()
    found = walked(c, a, b, m, n, work)
    np.testing.assert_allclose(found, a.to_dense().numpy() @ b, rtol=1e-9, atol=1e-9)
    assert work.ctas == len(work.starts) - 1 <= sms * c.ctas_per_sm
    assert not work.tiles[-2:, :5].any()
    assert (work.tiles[:-2, 5] == -1).all() or work.parts is not None


@pytest.mark.parametrize("pattern", ["uniform", "powerlaw"])
def test_records_say_which_tiles_are_walked_backwards(pattern: Any) -> None:
    a = random_bsr(2048, 2048, 128, 0.25, pattern=pattern)
    deal = schedule.balance(schedule.walk(a.pattern, 128), 4096, 256, 7)
    backwards = records(deal, 128, -1)[:, 7]
    turning = [nth % 2 * deal.turns for count in np.diff(deal.starts) for nth in range(count)]
    assert backwards.tolist() == [*turning, 0, 0]
    assert backwards.any() == (pattern == "uniform")


def test_lopsided_rows_take_wide_tiles_where_these_have_enough_steps() -> None:
    """H200 (2026-11-26): Zipf rows at 12.5 % took 220 us in 128x256 and 235 in 128x128, at 6.25 % 156 and 146."""
    rows = problem((128, 128), 8192, row_max=64)
    few = changed(rows, nnzb=256)
    assert [KERNEL.default(p).block_cols for p in (rows, few)] == [256, 128]


def test_rows_of_one_length_are_not_split_and_one_long_row_is() -> None:
    even = problem((128, 128), 128)
    assert not any(c.split for c in KERNEL.configs(even))
    long = changed(even, nnzb=64 + 60, row_max=64)
    assert any(c.split for c in KERNEL.configs(long))
    assert KERNEL.default(long).split, "a row of 64 blocks takes one CTA as long as 64 steps"
    assert any(not c.split for c in KERNEL.configs(long)), "the tuner may try both"
