"""sddmm_tiles: every element of every stored block is in a tile, CTAs take tiles in turns, and a record is to spare."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.products.formats.random import random_bsr
from sparsek.products.plan.sddmm_schedule import FIELDS, OUTSIDE, SddmmTiles, sddmm_tiles
from tests.products.pattern_cases import pattern_of

# (block, rows of a tile, columns of a piece): as hopper.sddmm chooses them
SHAPES = [
    ((128, 128), 128, 128),
    ((64, 64), 64, 64),
    ((32, 32), 64, 32),
    ((16, 16), 64, 16),
    ((48, 96), 64, 128),
    ((80, 80), 128, 128),
    ((80, 80), 64, 128),
    ((512, 112), 128, 128),
    ((192, 64), 128, 64),
    ((128, 512), 128, 256),
    ((128, 320), 128, 256),
    ((16, 64), 64, 64),
]


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray:
    """With one cell at least: nothing is planned for a pattern without blocks."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    density = draw(st.sampled_from([0.0, 0.1, 0.4, 1.0]))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    mask = random.random((rows, columns)) < density
    mask[random.integers(rows), random.integers(columns)] = True
    return mask


def check_dealt(made: SddmmTiles, ctas: int) -> list[list[int]]:
    """The records that CTAs have. Behind them there is one more at least, which consumers read ahead, of zeros."""
    tiles, starts = made.tiles, made.starts.tolist()
    assert tiles.shape[1] == FIELDS
    assert all(each.dtype == torch.int32 for each in made)
    assert len(starts) == ctas + 1
    assert starts[0] == 0
    held = np.diff(starts)
    assert held.min() >= 0
    assert held.max() - held.min() <= 1, "CTAs take tiles in turns"
    assert len(tiles) > starts[-1]
    assert not tiles[starts[-1] :].any()
    return tiles[: starts[-1]].tolist()


@given(masks(), st.sampled_from(SHAPES), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 3, 132]))
def test_tiles_cover_every_element_of_every_stored_block(
    mask: np.ndarray, shape: tuple[tuple[int, int], int, int], groups: int, ctas: int
) -> None:
    (bm, bn), rows, piece = shape
    pattern = pattern_of(mask, (bm, bn))
    made = sddmm_tiles(pattern, 5, rows, piece, groups, ctas)
    records = check_dealt(made, ctas)
    columns, stored = made.columns.tolist(), made.stored.tolist()
    block_rows, indices = pattern.block_rows.tolist(), pattern.indices.tolist()
    covered = np.zeros((pattern.nnzb, bm, bn), int)
    for begin, steps, offset, group, row, slot, *rest in records:
        assert (begin, steps, slot, rest) == (0, 5, -1, [0, 0])
        there = [s < pattern.nnzb for s in stored[group]]
        assert there[0], "a tile has at least one piece"
        assert there == sorted(there, reverse=True), "pieces fill a group from its start"
        for s, column in zip(stored[group], columns[group], strict=True):
            if s == pattern.nnzb:
                assert column == OUTSIDE
                continue
            assert row == block_rows[s] * bm + offset, "every block of a tile lies in its block row"
            shift = column - indices[s] * bn
            assert shift >= 0
            assert shift + min(piece, bn) <= bn
            assert shift % 16 == 0, "boxes of what is stored begin at multiples of 16 columns"
            covered[s, offset : offset + rows, shift : shift + piece] += 1
    assert (covered >= 1).all()
    if bm % rows == 0 or bm < rows:
        whole = bn % piece == 0 or bn < piece
        assert not whole or (covered == 1).all(), "tiles overlap in blocks that they do not divide"
    assert len(records) == len({(group, offset) for _, _, offset, group, *_ in records})


@given(masks(), st.sampled_from([1, 2, 4, 8]))
def test_a_block_row_has_as_few_tiles_as_hold_its_blocks(mask: np.ndarray, groups: int) -> None:
    made = sddmm_tiles(pattern_of(mask, (64, 64)), 3, 64, 64, groups, 7)
    assert made.starts[-1] == sum(-(-int(count) // groups) for count in mask.sum(1))


def test_ctas_that_run_together_have_neighbours() -> None:
    """Tile t is the next of CTA t % ctas: those which run together share rows of X."""
    pattern = random_bsr(2048, 2048, 64, 0.3, seed=0).pattern
    made = sddmm_tiles(pattern, 4, 64, 64, 4, 10)
    starts = made.starts.tolist()
    for p, (first, last) in enumerate(pairwise(starts)):
        groups = made.tiles[first:last, 3].tolist()
        assert groups == list(range(p, starts[-1], 10))
