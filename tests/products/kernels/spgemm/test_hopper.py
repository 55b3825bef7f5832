"""hopper.spgemm without a GPU: configs compiled for sm_90a, its schedule walked in numpy, its limits.

CASES are every two choices that some config has together. In each run the pinned Triton compiles fresh ones that hold
every choice, and the newest release, which takes twice as long, a few.
"""

from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops.spgemm import plan_spgemm
from sparsek.products.plan.matches import Matches, match
from sparsek.products.plan.problems import SpgemmProblem

pytest.importorskip("triton")

from sparsek.products.kernels.spgemm.hopper import Work, sweeps
from sparsek.products.kernels.spmm.hopper import Config
from tests.engine.launch.covering import covering, once
from tests.engine.launch.hopper_code import compiled
from tests.products.kernels.common.hopper_code import (
    LARGE,
    Memory,
    boxes_of,
    check_code,
    check_code_of_next,
    check_limits,
    leave,
)
from tests.sampling import sampled

KERNEL = load("hopper.spgemm")
# bm, bk, bn
BLOCKS = (
    (128, 128, 128),
    (64, 64, 64),
    (32, 32, 32),
    (16, 16, 16),
    (48, 96, 48),
    (96, 48, 96),
    (80, 80, 80),
    (512, 112, 128),
    (192, 64, 384),
    (128, 128, 512),
    (16, 64, 16),
    (64, 16, 64),
)
VIEWS = ((False, False), (False, True), (True, False), (True, True))
PAIRS = (300, 20000)  # a dense C is bound by memory, or by arithmetic


def problem(
    blocks: tuple[int, int, int],
    views: tuple[bool, bool] = (False, False),
    dense: bool = True,
    pairs: int = 2600,
    **more: Any,
) -> SpgemmProblem:
    """8192^3, with so many pairs of blocks."""
    given: dict[str, Any] = {
        "a_block": blocks[:2],
        "b_block": blocks[1:],
        "nnzb_a": 512,
        "nnzb_b": 512,
        "dense_out": dense,
    }
    given |= {"nnzb_out": min(pairs, 4096), "pairs": pairs, "pairs_max": 8}
    given |= {"a_transposed": views[0], "b_transposed": views[1]}
    return SpgemmProblem(**LARGE | given | more)


PROBLEMS = [
    problem(blocks, views, dense, pairs)
    for blocks, views, dense, pairs in product(BLOCKS, VIEWS, (True, False), PAIRS)
]
CONFIGS = list(dict.fromkeys(c for p in PROBLEMS for c in KERNEL.configs(p)))


def choices(case: tuple[Config, str]) -> list[Hashable]:
    """What was chosen for a config; how many stages there are follows."""
    c, dtype = case
    tile = ("tile", c.wg_m, c.wg_n, c.cols, c.owned)
    depth = ("depth", c.width, c.pieces)
    return [("block", c.block), tile, depth, ("a", c.a_col), ("b", c.b_col), ("direct", c.direct), dtype]


CASES = covering(product(CONFIGS, ("bf16", "fp16")), choices)
# Of blocks any.
COMPILED = sorted(map(CASES.index, once(CASES, lambda case: choices(case)[1:], most=4)))
NEXT_CASES = sampled(CASES[:16], 1, of="the newest Triton")


@pytest.mark.parametrize("at", COMPILED, ids=lambda at: str(CASES[at][0]))
def test_configs_compile_to_wgmma_and_tma_without_spills(at: int) -> None:
    """The machine code of every fourth is read, which takes as long as compiling it."""
    c, dtype = CASES[at]
    check_code(c, dtype, compiled(c, dtype, reads_sass=at % 4 == 0))


def test_the_newest_triton_compiles_configs_to_the_same() -> None:
    check_code_of_next(NEXT_CASES)


def test_all_the_planners_configs_have_texts_of_their_own() -> None:
    """Triton keeps compiled kernels by the text of their constants."""
    assert len({str(c) for c in CONFIGS}) == len(CONFIGS)


def test_it_can_be_planned_for_views_and_for_both_kinds_of_c() -> None:
    a = random_bsr(128, 192, (32, 64), 0.5, dtype=torch.bfloat16, seed=0)
    for left, right in ((a, a.T), (a.T, a)):
        for out in ("dense", "bsr"):
            p = plan_spgemm(left, right, out, kernel="hopper.spgemm", device="h200").problem
            assert (p.a_transposed, p.b_transposed) == (left is not a, right is not a)


SIZES = st.integers(1, 512 // 16).map(lambda i: 16 * i)


@settings(max_examples=40)
@given(
    blocks=st.tuples(SIZES, SIZES, SIZES),
    views=st.sampled_from(VIEWS),
    dense=st.booleans(),
    pairs=st.integers(0, 10**6),
)
def test_every_config_fits_the_card(
    blocks: tuple[int, int, int], views: tuple[bool, bool], dense: bool, pairs: int
) -> None:
    p = problem(blocks, views, dense, pairs)
    (bm, bk, bn), configs = blocks, list(KERNEL.configs(p))
    assert configs
    assert len(set(configs)) == len(configs)
    assert KERNEL.default(p) == KERNEL.default(p)
    assert KERNEL.default(p) in configs
    for c in configs:
        check_limits(c, max(c.a_boxed, c.cols))
        assert (c.block, c.joined_rows, c.b_stack, c.split) == ((bm, bk), 1, True, False), c
        assert (c.a_col, c.b_col, c.c_col) == (*views, False), c
        assert c.per_block * c.width >= bk > (c.per_block - 1) * c.width, c
        assert c.rows % c.a_boxed == 0, c
        assert 16 <= c.owned_cols <= c.block_cols, c
        assert bn % c.owned_cols == 0, "tiles of a block do not overlap in columns"
        assert c.owned_cols == c.block_cols or bn == c.owned_cols, (
            "what a tile has beyond its own is no block's"
        )
        count = sum(len(boxes_of(c, wg)) for wg in range(c.wg_m * c.wg_n))
        assert count * c.c_box * c.panel == c.height * c.owned_cols, "boxes cover what a tile owns"


def walked(c: Config, work: Work, a: BSR, b: BSR, matches: Matches, out: np.ndarray) -> None:
    """The kernel's index arithmetic, tile by tile, in numpy, into `out`: C, or the rows of its stored blocks."""
    tiles, starts = (each.numpy() for each in work.tiles)
    right = work.positions("b", b, matches.right).numpy()
    left = work.positions("a", a, matches.left).numpy()
    bm, bk = c.block
    a_mem, b_mem = Memory(a.values.numpy().reshape(-1, a.values.shape[2])), Memory(b.values.numpy())
    memory = Memory(out)
    for t in (t for first, last in pairwise(starts) for t in range(first, last)):
        begin, end, row, col, b_col, _, a_row, _ = (int(number) for number in tiles[t])
        acc = np.zeros((c.rows, c.block_cols))
        count = (end - begin) * c.per_block
        for q in range(-(-count // c.pieces) * c.pieces):
            inside = q < count
            pair, k = begin + q // c.per_block, q % c.per_block * c.width
            s, j = (int(left[pair]), int(right[pair])) if inside else (a.nnzb, b.nnzb)
            part = np.zeros((c.rows, c.width))
            if c.a_col:
                for w in range(c.wg_m):
                    box = a_mem.read((s * bk + k, a_row + 64 * w), (c.width, 64))
                    part[64 * w : 64 * w + 64] = box.T
            else:
                part[: c.a_box] = a_mem.read((s * bm + a_row, k), (c.a_box, c.width))
                part[c.a_box :] = np.nan  # no one writes it
            for w in range(c.wg_n):
                along = b_col + w * c.cols
                if c.b_col:
                    box = b_mem.read((j, along, k), (1, c.cols, c.width))[0].T
                else:
                    box = b_mem.read((j, k, along), (1, c.width, c.cols))[0]
                acc[:, w * c.cols : (w + 1) * c.cols] += part @ box
        leave(c, acc, row, col, memory)


@settings(max_examples=50)
@given(
    blocks=st.sampled_from([*BLOCKS, (144, 32, 48), (16, 48, 112), (208, 16, 160)]),
    grid=st.tuples(*3 * [st.integers(1, 4)]),
    cut=st.tuples(*3 * [st.integers(0, 15)]),
    density=st.sampled_from((0.2, 0.5, 1.0)),
    views=st.sampled_from(VIEWS),
    kind=st.sampled_from(("dense", "bsr", "wanted")),
    sms=st.sampled_from((1, 3, 132)),
    direct=st.booleans(),
    cache=st.sampled_from((1 << 12, H200.l2_bytes)),
    data=st.data(),
)
def test_walking_the_schedule_as_the_kernel_does_gives_the_product(
    blocks, grid, cut, density, views, kind, sms, direct, cache, data
) -> None:
    bm, bk, bn = blocks
    m, k, n = (side * count - off for side, count, off in zip(blocks, grid, cut, strict=True))

    def made(rows: int, columns: int, block: tuple[int, int], view: bool, seed: int) -> BSR:
        sides, stored = ((columns, rows), (block[1], block[0])) if view else ((rows, columns), block)
        x = random_bsr(*sides, stored, density, pattern="powerlaw", dtype=torch.float64, seed=seed)
        return x.T if view else x

    a, b = made(m, k, (bm, bk), views[0], 1), made(k, n, (bk, bn), views[1], 2)
    wanted = random_bsr(m, n, (bm, bn), 0.5, seed=3).pattern if kind == "wanted" else None
    matches = match(a.pattern, b.pattern, wanted)
    p = problem(
        blocks, views, kind == "dense", matches.pairs, m=m, k=k, n=n, nnzb_b=b.nnzb,
        card=replace(H200, sm_count=sms, l2_bytes=cache),
    )  # fmt: skip
    c = replace(data.draw(st.sampled_from(list(KERNEL.configs(p)))), direct=direct)
    work = KERNEL.prepare(p, c, matches)
    assert len(work.tiles.starts) == work.ctas + 1 == sms * c.ctas_per_sm + 1
    exact = a.to_dense().numpy() @ b.to_dense().numpy()
    if p.dense_out:
        out = np.full((m, n), np.nan)
    else:
        whole = np.zeros((grid[0] * bm, grid[2] * bn))
        whole[:m, :n] = exact
        parts = whole.reshape(grid[0], bm, grid[2], bn).transpose(0, 2, 1, 3)
        exact = parts[matches.pattern.block_rows.numpy(), matches.pattern.indices.numpy()].reshape(-1, bn)
        out = np.full(exact.shape, np.nan)
    walked(c, work, a, b, matches, out)
    np.testing.assert_allclose(out, exact, rtol=1e-9, atol=1e-9)


def test_a_large_b_is_read_in_sweeps_that_stay_in_the_cache() -> None:
    """32768 squared, 3 % of blocks of 64 stored: B has 64 MB."""
    small = problem((64, 64, 64), dense=False)
    large = replace(small, m=32768, k=32768, n=32768, nnzb_b=7680)
    assert (sweeps(small), sweeps(large), sweeps(replace(large, dense_out=True))) == (1, 3, 1)
    assert sweeps(replace(large, nnzb_b=10**6)) <= large.grid[1]


def test_positions_among_the_values_of_a_view_are_looked_up_by_the_plan() -> None:
    a = random_bsr(192, 128, (64, 32), 0.6, dtype=torch.bfloat16, seed=1)
    matches = match(a.T.pattern, a.pattern)
    p = problem((32, 64, 32), (True, False), m=128, k=192, n=128, pairs=matches.pairs)
    work = KERNEL.prepare(p, KERNEL.default(p), matches)
    KERNEL.place(work, a.T, a, matches)
    first = work.positions("a", a.T, matches.left)
    assert work.positions("a", a.T, matches.left) is first
    assert work.positions("b", a, matches.right) is matches.right
    order = a.T.order
    assert order is not None
    assert first.tolist() == order[matches.left.long()].tolist()
    again = BSR.unchecked(a.T.pattern, a.values, order.clone())
    assert torch.equal(work.positions("a", again, matches.left), first)
    assert work.placed.keys() == {"a"}
