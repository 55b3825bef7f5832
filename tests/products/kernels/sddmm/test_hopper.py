"""hopper.sddmm without a GPU: configs compiled for sm_90a, its schedule walked in numpy, its limits.

CASES are every two choices that some config has together. In each run the pinned Triton compiles fresh ones that hold
every choice, and the newest release, which takes twice as long, a few.
"""

from collections.abc import Hashable
from dataclasses import asdict, fields, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops.sddmm import plan_sddmm
from sparsek.products.plan.problems import SddmmProblem

pytest.importorskip("triton")

from sparsek.products.kernels.sddmm.hopper import Config, Work
from tests.engine.launch.covering import covering, once
from tests.engine.launch.hopper_code import compiled
from tests.products.kernels.common.hopper_code import (
    LARGE,
    Memory,
    boxes_of,
    check_code,
    check_code_of_next,
    check_limits,
)
from tests.sampling import sampled

KERNEL = load("hopper.sddmm")
BLOCKS = (
    (128, 128),
    (64, 64),
    (32, 32),
    (16, 16),
    (48, 96),
    (80, 80),
    (512, 112),
    (192, 64),
    (128, 512),
    (16, 64),
)
LAYOUTS = (("row", "row"), ("row", "col"), ("col", "row"), ("col", "col"))


def problem(block: tuple[int, int], layouts: tuple[str, str] = ("row", "row"), **more: Any) -> SddmmProblem:
    """8192 x 8192 with K = 8192, one block of eight stored."""
    stored = 8192 * 8192 // 8 // block[0] // block[1]
    blocks: dict[str, Any] = {"block": block, "nnzb": stored, "row_max": 8192 // 8 // block[1]}
    return SddmmProblem(**LARGE | blocks | more, x_layout=layouts[0], y_layout=layouts[1])


PROBLEMS = [problem(block, layouts) for block, layouts in product(BLOCKS, LAYOUTS)]
CONFIGS = list(dict.fromkeys(c for p in PROBLEMS for c in KERNEL.configs(p)))


def choices(case: tuple[Config, str]) -> list[Hashable]:
    """What was chosen for a config; how many stages there are follows."""
    c, dtype = case
    tile = ("tile", c.wg_m, c.wg_n, c.cols, c.piece)
    return [("block", c.block), tile, ("x", c.a_col), ("y", c.b_col), ("width", c.width), dtype]


CASES = covering(product(CONFIGS, ("bf16", "fp16")), choices)
# Of blocks any.
COMPILED = sorted(map(CASES.index, once(CASES, lambda case: choices(case)[1:], most=4)))
EVERY_VALUE = covering(CASES, lambda case: (*asdict(case[0]).items(), case[1]), 1)
NEXT_CASES = sampled(EVERY_VALUE, 1, of="the newest Triton")


@pytest.mark.parametrize("at", COMPILED, ids=lambda at: str(CASES[at][0]))
def test_configs_compile_to_wgmma_and_tma_without_spills(at: int) -> None:
    """The machine code of every fourth is read, which takes as long as compiling it."""
    c, dtype = CASES[at]
    check_code(c, dtype, compiled(c, dtype, reads_sass=at % 4 == 0))


def test_the_newest_triton_compiles_configs_to_the_same() -> None:
    check_code_of_next(NEXT_CASES)


def test_every_field_is_in_a_configs_text() -> None:
    """Triton keeps compiled kernels by the text of their constants."""
    assert len({str(c) for c in CONFIGS}) == len({repr(c) for c in CONFIGS}) == len(CONFIGS)
    for c in CONFIGS[::20]:
        assert all(f"{field.name}=" in str(c) for field in fields(c))


def test_it_can_be_planned_for_every_layout_that_tma_reads() -> None:
    pattern = random_bsr(128, 192, 32, 0.5, dtype=torch.bfloat16, seed=0).pattern
    x, y = (torch.ones(sides, dtype=torch.bfloat16) for sides in ((128, 64), (64, 192)))
    for each_x, each_y in product((x, x.mT.contiguous().mT), (y, y.mT.contiguous().mT)):
        plan = plan_sddmm(each_x, each_y, pattern, kernel="hopper.sddmm", device="h200")
        assert plan.problem.x_layout == ("row" if each_x is x else "col")
        assert plan.problem.y_layout == ("row" if each_y is y else "col")


SIZES = st.integers(1, 512 // 16).map(lambda i: 16 * i)


@settings(max_examples=60)
@given(
    block=st.tuples(SIZES, SIZES),
    layouts=st.sampled_from(LAYOUTS),
    sides=st.tuples(*3 * [st.integers(1, 2**16)]),
    nnzb=st.integers(0, 5000),
)
def test_every_config_fits_the_card(
    block: tuple[int, int], layouts: tuple[str, str], sides: tuple[int, int, int], nnzb: int
) -> None:
    m, k, n = sides
    p = problem(block, layouts, m=m, k=k, n=n, nnzb=nnzb)
    configs = list(KERNEL.configs(p))
    assert configs
    assert len(set(configs)) == len(configs)
    assert KERNEL.default(p) == KERNEL.default(p)
    assert KERNEL.default(p) in configs
    for c in configs:
        check_limits(c, c.piece)
        assert c.block == block, c
        assert (c.a_col, c.b_col, c.c_col) == (layouts[0] == "col", layouts[1] == "col", False), c
        assert c.panel <= 64, "a box of S is no wider than a swizzle"
        assert c.groups >= 1, c
        assert c.groups * c.piece == c.block_cols, c
        assert c.groups % c.wg_n == 0, "a piece belongs to one warpgroup"
        assert c.piece >= min(block[1], 256), "a block no wider than a TMA box is one piece"
        assert c.piece % c.panel == 0, c


def test_a_pattern_without_blocks_is_a_launch_of_nothing() -> None:
    pattern = random_bsr(128, 128, 64, 0.0, dtype=torch.bfloat16).pattern
    p = problem((64, 64), m=128, n=128, k=64, nnzb=0)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, pattern)
    assert work.tiles is None
    x = torch.ones(128, 64, dtype=torch.bfloat16)
    KERNEL.launch(c, work, x, x.mT, pattern, x.new_empty(0, 64, 64))


def walked(c: Config, work: Work, x: np.ndarray, y: np.ndarray, pattern: BlockPattern) -> np.ndarray:
    """The kernel's index arithmetic, tile by tile, in numpy. Returns the values of S; what was not written is NaN."""
    assert work.tiles is not None
    tiles, starts, columns, stored = (each.numpy() for each in work.tiles)
    columns, stored, (bm, bn) = columns.ravel(), stored.ravel(), c.block
    x_mem, y_mem = Memory(x.T if c.a_col else x), Memory(y.T if c.b_col else y)
    values = np.full((pattern.nnzb * bm, bn), np.nan)
    memory = Memory(values)
    for t in (t for first, last in pairwise(starts) for t in range(first, last)):
        _, steps, inside, group, row, *_ = (int(number) for number in tiles[t])
        acc = np.zeros((c.rows, c.block_cols))
        for k in range(0, steps * c.width, c.width):
            a = np.zeros((c.rows, c.width))
            if c.a_col:
                for w in range(c.wg_m):
                    a[64 * w : 64 * w + 64] = x_mem.read((k, row + 64 * w), (c.width, 64)).T
            else:
                a[:] = x_mem.read((row, k), (c.rows, c.width))
            for g in range(c.groups):
                col = int(columns[group * c.groups + g])
                at = (col, k) if c.b_col else (k, col)
                b = y_mem.read(at, c.y_box)
                acc[:, g * c.piece : (g + 1) * c.piece] += a @ (b.T if c.b_col else b)
        for wg in range(c.wg_m * c.wg_n):
            row0, col0 = 64 * (wg % c.wg_m), c.cols * (wg // c.wg_m)
            for r, along in boxes_of(c, wg):
                down = row0 + r
                at = group * c.groups + (col0 + along) // c.piece
                to = int(stored[at]) * bm + inside + down, int(columns[at]) % bn + along % c.piece
                memory.write(to, acc[down : down + c.c_box, col0 + along : col0 + along + c.panel])
    return values.reshape(pattern.nnzb, bm, bn)


@settings(max_examples=50)
@given(
    block=st.sampled_from([*BLOCKS, (16, 48), (144, 32), (112, 16), (96, 320)]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 6),
    cut=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    k=st.sampled_from((1, 8, 70, 130)),
    density=st.sampled_from((0.1, 0.4, 1.0)),
    sms=st.sampled_from((1, 3, 132)),
    layouts=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_walking_the_schedule_as_the_kernel_does_gives_the_blocks(
    block, rows, columns, cut, k, density, sms, layouts, data
) -> None:
    m, n = rows * block[0] - cut[0], columns * block[1] - cut[1]
    pattern = random_bsr(m, n, block, density, pattern="powerlaw", seed=k).pattern
    if pattern.nnzb == 0:
        return
    p = problem(block, layouts, m=m, k=k, n=n, nnzb=pattern.nnzb, card=replace(H200, sm_count=sms))
    c = data.draw(st.sampled_from(list(KERNEL.configs(p))))
    work = KERNEL.prepare(p, c, pattern)
    assert work.tiles is not None
    assert len(work.tiles.starts) == work.ctas + 1 == sms * c.ctas_per_sm + 1
    x, y = (torch.randn(*sides, dtype=torch.float64).numpy() for sides in ((m, k), (k, n)))
    (down, across), (bm, bn) = pattern.grid, block
    exact = np.zeros((down * bm, across * bn))
    exact[:m, :n] = x @ y
    wanted = exact.reshape(down, bm, across, bn).transpose(0, 2, 1, 3)
    wanted = wanted[pattern.block_rows.numpy(), pattern.indices.numpy()]
    np.testing.assert_allclose(walked(c, work, x, y, pattern), wanted, rtol=1e-9, atol=1e-9)
