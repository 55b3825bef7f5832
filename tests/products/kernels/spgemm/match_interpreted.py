"""spgemm/match.py and spgemm_tiles.py in Triton's interpreter."""

import random

import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.kernels.spgemm import match as portable
from sparsek.products.kernels.spgemm import tiles
from sparsek.products.kernels.spgemm.tiles import spgemm_tiles
from sparsek.products.plan import matches, spgemm_schedule
from tests.products.kernels.spgemm.matched import assert_same, drawn, full

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BLOCKS = (16, 48, 32)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, steps and sums so small that little patterns need several."""
    monkeypatch.setattr(portable, "WIDTH", 16)
    monkeypatch.setattr(portable, "DEEP", 4)
    monkeypatch.setattr(portable, "SUM_STEP", 8)


def pair(
    grid: tuple[int, int, int], densities: tuple[float, float], seed: int
) -> tuple[BlockPattern, BlockPattern]:
    """Patterns of A and B, every side ragged by a different number of rows."""
    m, k, n = (max(0, g * b - r) for g, b, r in zip(grid, BLOCKS, (3, 5, 7), strict=True))
    bm, bk, bn = BLOCKS
    a = drawn((m, k), (bm, bk), densities[0], seed)
    return a, drawn((k, n), (bk, bn), densities[1], seed + 1)


def check(a: BlockPattern, b: BlockPattern, wanted: BlockPattern | None = None) -> matches.Matches:
    assert portable.why_not(a, b) == []
    found = portable.match(a, b, wanted)
    assert_same(found, matches.match(a, b, wanted))
    assert wanted is None or found.pattern is wanted
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("small")
def test_random_patterns_match_as_torch_matches_them(seed):
    draw = random.Random(seed)
    grid = draw.randint(1, 4), draw.randint(1, 30), draw.randint(1, 40)
    densities = draw.choice((0.05, 0.2, 0.6, 1.0)), draw.choice((0.05, 0.2, 0.6, 1.0))
    a, b = pair(grid, densities, seed)
    check(a, b)
    c = drawn((a.shape[0], b.shape[1]), (a.block[0], b.block[1]), draw.choice((0.1, 0.5, 1.0)), seed + 2)
    check(a, b, c)


def test_chunks_of_full_size_and_rows_longer_than_a_step():
    a, b = pair((3, 40, 150), (0.5, 0.2), 0)
    found = check(a, b)
    assert int((a.indptr[1:] - a.indptr[:-1]).max()) > 2 * portable.DEEP
    assert b.grid[1] > portable.WIDTH
    assert found.longest > portable.DEEP
    check(a, b, drawn((a.shape[0], b.shape[1]), (16, 32), 0.9, 3))


def test_pairs_of_a_block_are_in_the_order_of_the_columns_of_a():
    a, b = full((16, 20 * 16), 16), full((20 * 16, 48), 16)
    found = check(a, b)
    assert found.pairs == 60
    assert found.longest == 20
    assert found.left.tolist() == 3 * list(range(20))
    assert found.right.tolist() == [3 * k + j for j in range(3) for k in range(20)]


@pytest.mark.usefixtures("small")
def test_the_longest_is_found_in_whatever_chunk_it_is():
    lengths = [1] * 12
    columns = torch.zeros(12, dtype=torch.int32)
    b = full((7 * 16, 16), 16)
    for row in (0, 7, 11):
        indptr = torch.tensor([0, *lengths[:row], 7, *lengths[row + 1 :]]).cumsum(0).int()
        indices = torch.cat((columns[:row], torch.arange(7, dtype=torch.int32), columns[row + 1 :]))
        found = check(BlockPattern((12 * 16, 7 * 16), (16, 16), indptr, indices), b)
        assert (found.longest, found.pairs) == (7, 18)


@pytest.mark.usefixtures("small")
def test_one_block_meets_one_block_or_none():
    one = full((16, 16), 16)
    assert check(one, one).pairs == 1
    a = BlockPattern((16, 32), (16, 16), torch.tensor([0, 1]).int(), torch.tensor([1]).int())
    b = BlockPattern((32, 16), (16, 16), torch.tensor([0, 1, 1]).int(), torch.tensor([0]).int())
    found = check(a, b)
    assert (found.pairs, found.longest, found.pattern.nnzb) == (0, 0, 0)
    assert check(a, b, one).indptr.tolist() == [0, 0]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("densities", [(0.0, 0.5), (0.5, 0.0), (0.0, 0.0)], ids=str)
def test_a_side_without_blocks_gives_no_pairs(densities):
    a, b = pair((3, 5, 20), densities, 1)
    found = check(a, b)
    assert (found.pairs, found.pattern.indptr.tolist()) == (0, [0, 0, 0, 0])
    c = drawn((a.shape[0], b.shape[1]), (16, 32), 0.5, 3)
    assert not check(a, b, c).indptr.any()


@pytest.mark.usefixtures("small")
def test_a_wanted_pattern_drops_pairs_and_keeps_blocks_without_one():
    a, b = pair((4, 9, 37), (0.3, 0.3), 5)
    every = check(a, b)
    shape, block = (a.shape[0], b.shape[1]), (16, 32)
    some = check(a, b, drawn(shape, block, 0.4, 6))
    lengths = some.indptr[1:] - some.indptr[:-1]
    assert 0 < some.pairs < every.pairs
    assert int(lengths.min()) == 0
    assert check(a, b, full(shape, block)).pairs == every.pairs
    assert check(a, b, drawn(shape, block, 0.0, 0)).pairs == 0
    assert torch.equal(check(a, b, every.pattern).left, every.left)


@pytest.mark.parametrize("grid", [(0, 3, 3), (3, 3, 0), (3, 0, 3), (0, 0, 0)], ids=str)
def test_sides_of_zero_give_the_matches_of_torch(grid):
    a, b = pair(grid, (0.5, 0.5), 0)
    assert_same(portable.match(a, b), matches.match(a, b))
    assert bool(portable.why_not(a, b)) == (grid[0] * grid[2] == 0)


def test_slices_of_longer_index_lists_are_read_in_place():
    a, b = pair((2, 6, 9), (0.5, 0.5), 4)
    room = torch.full((a.nnzb + 9,), 2**31 - 1, dtype=torch.int32)
    room[3 : 3 + a.nnzb] = a.indices
    view = BlockPattern.unchecked(a.shape, a.block, a.indptr, room[3 : 3 + a.nnzb])
    assert_same(portable.match(view, b), matches.match(a, b))


def test_patterns_that_do_not_fit_are_refused_as_by_torch():
    a, b = pair((2, 3, 2), (0.5, 0.5), 0)
    with pytest.raises(InvalidInput, match="B needs 139 rows"):
        portable.match(a, a)
    with pytest.raises(InvalidInput, match="the pattern is"):
        portable.match(a, b, a)


def test_too_many_pairs_are_refused_before_they_are_listed(monkeypatch):
    a, b = full((32, 48), 16), full((48, 32), 16)
    monkeypatch.setattr(portable, "INT32_MAX", 11)
    with pytest.raises(InvalidInput, match="12 pairs of blocks meet; at most 11"):
        portable.match(a, b)
    monkeypatch.setattr(portable, "INT32_MAX", 12)
    assert portable.match(a, b).pairs == 12


def check_tiles(found: matches.Matches, dense: bool, rows: int, cols: int, ctas: int, sweeps: int = 1) -> int:
    """How many tiles there are, which are those of torch, bit for bit."""
    ours = spgemm_tiles(found, dense, rows, cols, ctas, sweeps)
    theirs = spgemm_schedule.spgemm_tiles(found, dense, rows, cols, ctas, sweeps)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    return len(ours.tiles) - 2


@pytest.mark.parametrize("seed", range(5))
def test_tiles_are_those_of_torch(seed, monkeypatch):
    draw = random.Random(seed)
    grid = draw.randint(1, 9), draw.randint(1, 30), draw.randint(1, 40)
    a, b = pair(grid, (draw.choice((0.05, 0.3, 1.0)), draw.choice((0.05, 0.3, 1.0))), seed)
    found = matches.match(a, b)
    for dense in (True, False):
        rows, cols, ctas = draw.choice((16, 64)), draw.choice((16, 32, 64)), draw.choice((7, 16, 33, 132))
        check_tiles(found, dense, rows, cols, ctas)
    monkeypatch.setattr(tiles, "RUNS", draw.choice((8, 64)))
    monkeypatch.setattr(tiles, "LISTED", 4)
    for sweeps in (2, draw.randint(3, 50)):
        check_tiles(found, False, rows, cols, ctas, sweeps)


@pytest.mark.parametrize("block", [(48, 96, 80), (512, 112, 128), (80, 16, 64)], ids=str)
def test_tiles_of_slices_are_those_of_torch(block):
    bm, bk, bn = block
    a, b = drawn((5 * bm - 3, 7 * bk), (bm, bk), 0.4, 1), drawn((7 * bk, 6 * bn - 9), (bk, bn), 0.4, 2)
    found = matches.match(a, b, drawn((5 * bm - 3, 6 * bn - 9), (bm, bn), 0.5, 3))
    for dense in (True, False):
        check_tiles(found, dense, 64, 64, 12)
        check_tiles(found, dense, 128, 32, 20)


def test_windows_without_a_rest_and_with_any():
    """The last window is of every length, in windows that go forth and in those that go back."""
    found = matches.match(full((7 * 16, 16), 16), full((16, 3 * 16), 16))
    assert {check_tiles(found, dense, 16, 16, ctas) for dense in (True, False) for ctas in range(1, 24)} == {
        21
    }


def test_as_many_ctas_as_two_to_an_sm():
    a = drawn((20 * 16, 40 * 16), 16, 0.5, 1)
    found = matches.match(a, a.T)
    assert check_tiles(found, True, 16, 16, 264) == 400


def test_a_c_without_blocks_has_no_tiles():
    none, some = drawn((64, 64), 16, 0.0, 0), drawn((64, 64), 16, 0.5, 0)
    found = matches.match(none, some)
    assert check_tiles(found, False, 64, 16, 132) == 0
    assert check_tiles(found, True, 64, 16, 132) == 16
    for sides in ((0, 64, 64), (64, 64, 0), (0, 0, 0)):
        empty = matches.match(full(sides[:2], 16), full(sides[1:], 16))
        assert check_tiles(empty, True, 64, 16, 5) == check_tiles(empty, False, 64, 16, 5) == 0


def test_on_the_interpreter_the_tiles_are_triton_s(monkeypatch):
    monkeypatch.setattr(spgemm_schedule, "spgemm_tiles", lambda *given: pytest.fail("torch made them"))
    spgemm_tiles(matches.match(full((32, 32), 16), full((32, 32), 16)), True, 16, 16, 3)
