"""spgemm_tiles: every element of C is in a tile with its block's pairs, CTAs share tiles, two records are to spare."""

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparsek.products.formats.random import Spread, random_bsr
from sparsek.products.plan.matches import Matches, match
from sparsek.products.plan.spgemm_schedule import FIELDS, SpgemmTiles, spgemm_tiles

# (blocks of A and B, rows and columns of a tile): as hopper.spgemm chooses them
SHAPES = [
    ((128, 128), (128, 128), 128, 128),
    ((64, 64), (64, 64), 64, 64),
    ((32, 32), (32, 48), 64, 64),
    ((16, 16), (16, 16), 64, 16),
    ((48, 96), (96, 80), 64, 128),
    ((512, 112), (112, 128), 128, 128),
    ((80, 16), (16, 64), 64, 64),
    ((192, 64), (64, 384), 128, 128),
    ((128, 128), (128, 512), 128, 256),
]

shapes = st.sampled_from(SHAPES)
densities = st.sampled_from([0.0, 0.2, 0.5, 1.0])


def matches_of(shape: tuple, grid: tuple[int, int, int], density: float, seed: int, wanted: bool) -> Matches:
    (bm, bk), (_, bn), _, _ = shape
    m, k, n = grid[0] * bm, grid[1] * bk, grid[2] * bn
    a = random_bsr(m, k, (bm, bk), density, pattern="powerlaw", seed=seed).pattern
    b = random_bsr(k, n, (bk, bn), 0.4, seed=seed + 1).pattern
    at = random_bsr(m, n, (bm, bn), 0.5, seed=seed + 2).pattern if wanted else None
    return match(a, b, at)


def runs(made: SpgemmTiles, ctas: int) -> list[list[list[int]]]:
    """The records of every CTA; behind them two are to spare."""
    starts = made.starts.tolist()
    assert made.tiles.dtype == made.starts.dtype == torch.int32
    assert made.tiles.shape == (starts[-1] + 2, FIELDS)
    assert not made.tiles[-2:, :5].any()
    assert not made.tiles[-2:, 6].any()
    assert starts[0] == 0
    assert len(starts) == ctas + 1
    assert starts == sorted(starts)
    return [made.tiles[first:last].tolist() for first, last in pairwise(starts)]


@given(
    shapes,
    st.tuples(*3 * [st.integers(0, 5)]),
    densities,
    st.integers(0, 999),
    st.sampled_from(["dense", "bsr", "wanted"]),
    st.sampled_from([1, 3, 132]),
)
@example(SHAPES[-1], (2, 2, 2), 0.5, 0, "dense", 3)  # tiles beside one another in a block
@example(SHAPES[6], (2, 2, 2), 0.5, 0, "bsr", 3)  # below one another, with an overlap
def test_tiles_cover_c_with_the_pairs_of_its_blocks(
    shape: tuple, grid: tuple[int, int, int], density: float, seed: int, kind: str, ctas: int
) -> None:
    (bm, _), (_, bn), rows, cols = shape
    dense = kind == "dense"
    matches = matches_of(shape, grid, density, seed, kind == "wanted")
    pattern, indptr = matches.pattern, matches.indptr.tolist()
    made = spgemm_tiles(matches, dense, rows, cols, ctas)
    high = grid[0] * bm if dense else pattern.nnzb * bm
    covered = np.zeros((high, grid[2] * bn if dense else bn), int)
    place = pattern.block_rows.tolist(), pattern.indices.tolist()
    stored = {cell: at for at, cell in enumerate(zip(*place, strict=True))}
    for begin, end, row, col, inside_col, slot, inside_row, last in chain(*runs(made, ctas)):
        assert (slot, last) == (-1, 0)
        assert (row % bm, col % bn) == (inside_row, inside_col)
        assert inside_row + min(rows, bm) <= bm, "a tile reaches into the next block"
        at = stored.get((row // bm, col // bn)) if dense else row // bm
        pairs = (0, 0) if at is None else (indptr[at], indptr[at + 1])
        assert (begin, end) == pairs
        width = min(cols, bn - inside_col)
        covered[row : row + min(rows, bm), col : col + width] += 1
    assert (covered >= 1).all()
    if bm % rows == 0 or bm < rows:
        assert (covered == 1).all(), "tiles overlap in blocks that they do not divide"


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "bsr"])
@pytest.mark.parametrize("pattern", ["uniform", "powerlaw"])
def test_ctas_share_the_work(pattern: Spread, dense: bool) -> None:
    """In turns the first and the last CTA have the longest and the shortest tile of every round."""
    a = random_bsr(8192, 8192, 128, 0.125, pattern=pattern, seed=1).pattern
    b = random_bsr(8192, 8192, 128, 0.125, pattern=pattern, seed=2).pattern
    work = [
        sum(end - begin + 1 for begin, end, *_ in own)
        for own in runs(spgemm_tiles(match(a, b), dense, 128, 128, 132), 132)
    ]
    assert max(work) <= 2.0 * np.mean(work)


def test_a_round_is_of_neighbours_the_longest_first() -> None:
    """CTAs that run together read the same blocks: their tiles follow each other in C, dealt by their pairs."""
    a = random_bsr(2048, 2048, 128, 0.3, seed=1).pattern
    dealt = runs(spgemm_tiles(match(a, a), True, 128, 128, 10), 10)
    further = round(0.62 * 10)
    for window in range(-(-256 // 10)):
        of_window = [own[window] for own in dealt if len(own) > window]
        cells = sorted((row // 128) * 16 + col // 128 for _, _, row, col, *_ in of_window)
        assert cells == list(range(10 * window, min(10 * window + 10, 256)))
        if len(of_window) == 10:
            turned = [of_window[(p + window // 2 * further) % 10] for p in range(10)]
            in_order = turned if window % 2 == 0 else turned[::-1]
            ranks = [(begin - end, row, col) for begin, end, row, col, *_ in in_order]
            assert ranks == sorted(ranks)


def test_a_round_gives_every_cta_a_tile_and_all_ctas_about_as_much_to_do() -> None:
    a = random_bsr(8192, 8192, 128, 0.125, seed=1).pattern
    matches = match(a, a)
    made = spgemm_tiles(matches, True, 128, 128, 132)
    held = made.starts.diff()
    assert held.max() - held.min() <= 1
    steps = (made.tiles[:-2, 1] - made.tiles[:-2, 0]).double()
    reached = torch.cat((torch.zeros(1), steps.cumsum(0)))
    load = reached[made.starts[1:].long()] - reached[made.starts[:-1].long()]
    assert load.max() <= 1.25 * load.mean()


@pytest.mark.parametrize("sweeps", [2, 3, 100])
def test_sweeps_take_columns_of_c_one_after_another(sweeps: int) -> None:
    a = random_bsr(640, 1024, 64, 0.2, pattern="powerlaw", seed=1).pattern
    matches = match(a, random_bsr(1024, 1344, 64, 0.2, seed=2).pattern)
    once, made = (spgemm_tiles(matches, False, 64, 64, 3, each) for each in (1, sweeps))
    assert sorted(made.tiles[:-2].tolist()) == sorted(once.tiles[:-2].tolist())
    width = -(-21 // sweeps)
    places = []  # sweep and row of each tile, in the order in which windows of CTAs take them
    dealt = runs(made, 3)
    for window in range(max(map(len, dealt))):
        blocks = [own[window][2] // 64 for own in dealt if len(own) > window]
        places.append(
            [
                (int(matches.pattern.indices[at]) // width, int(matches.pattern.block_rows[at]))
                for at in blocks
            ]
        )
    for one, then in pairwise(places):
        assert max(one) <= min(then)
