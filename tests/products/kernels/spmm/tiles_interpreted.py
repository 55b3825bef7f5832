"""spmm/tiles.py, sddmm/tiles.py and pack/transpose.py in Triton's interpreter: the lists of `balance` and of torch, bit
for bit.
"""

import numpy as np
import pytest
import torch

from sparsek.products.formats.pattern import BlockPattern, _transposed_lists
from sparsek.products.kernels.pack import transpose
from sparsek.products.kernels.sddmm import tiles as sampled_tiles
from sparsek.products.kernels.spmm import tiles
from sparsek.products.kernels.spmm.parts import records
from sparsek.products.plan.schedule import balance, walk
from sparsek.products.plan.sddmm_schedule import sddmm_tiles
from tests.products.pattern_cases import pattern_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs so small that little patterns need several."""
    for name, size in (("RANKED", 8), ("COMPARED", 4), ("ORDERED", 16), ("LISTED", 16)):
        monkeypatch.setattr(tiles, name, size)
    for module in (transpose, sampled_tiles):
        monkeypatch.setattr(module, "LISTED", 16)


def drawn(kind: str, rows: int, columns: int) -> np.ndarray:
    draw = np.random.default_rng(rows)
    mask = np.zeros((rows, columns), bool)
    if kind == "even":
        mask[:, :3] = True
    elif kind == "uneven":
        mask = draw.random((rows, columns)) < draw.random((rows, 1))
    elif kind == "zipf":
        mask = draw.random((rows, columns)) < 1 / np.arange(1, rows + 1)[:, None]
    elif kind == "one row":
        mask[rows // 2] = True
    else:
        mask[0, -1] = True
    return mask


def check(pattern: BlockPattern, n: int, tile: tuple[int, int], workers: int) -> int:
    made = tiles.device_tiles(pattern, n, *tile, workers)
    deal = balance(walk(pattern, tile[0]), n, tile[1], workers)
    assert made is not None
    assert np.array_equal(made.tiles, records(deal, pattern.block[0], -1))
    starts = made.starts.numpy()
    assert np.array_equal(starts[: deal.ctas + 1], deal.starts)
    assert (starts[deal.ctas :] == len(made.tiles) - 2).all(), "other CTAs have no tile"
    assert np.array_equal(made.blocks, np.arange(pattern.nnzb))
    return deal.ctas


@pytest.mark.parametrize("kind", ["even", "uneven", "zipf", "one row", "one block"])
@pytest.mark.parametrize(("rows", "n", "workers"), [(9, 200, 5), (3, 300, 7), (13, 65, 4)], ids=str)
def test_tiles_are_those_that_the_host_deals(kind: str, rows: int, n: int, workers: int) -> None:
    check(pattern_of(drawn(kind, rows, 11), (64, 32)), n, (64, 64), workers)


def test_fewer_ctas_and_slices_of_tall_blocks_that_lie_below_the_matrix() -> None:
    assert check(pattern_of(drawn("even", 2, 5), (64, 32)), 4 * 64, (64, 64), 5) == 4
    high = pattern_of(drawn("uneven", 3, 6), (192, 32))
    indptr, indices = high.indptr, high.indices
    for m in (2 * 192 + 60, 2 * 192 + 70, 3 * 192):
        check(BlockPattern((m, 6 * 32), (192, 32), indptr, indices), 100, (64, 64), 4)
        check(BlockPattern((m, 6 * 32), (192, 32), indptr, indices), 100, (128, 64), 4)


def test_what_a_program_cannot_count_is_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = pattern_of(drawn("even", 3, 4), (64, 32))
    assert tiles.device_tiles(pattern, 0, 64, 64, 4) is None
    monkeypatch.setattr(tiles, "LOAD_BITS", 4)
    assert tiles.device_tiles(pattern, 64, 64, 64, 1) is None


@pytest.mark.parametrize("kind", ["even", "uneven", "one row", "one block"])
def test_transposed_lists_are_those_of_torch(kind: str) -> None:
    pattern = pattern_of(drawn(kind, 7, 6), (16, 32))
    ours = transpose.transposed_lists(pattern.indptr, pattern.indices, pattern.grid)
    assert ours is not None
    for own, torchs in zip(ours, _transposed_lists(pattern), strict=True):
        assert own.dtype == torch.int32
        assert torch.equal(own, torchs)
    assert transpose.transposed_lists(pattern.indptr, pattern.indices[:0], (7, 0)) is None


@pytest.mark.parametrize("kind", ["even", "uneven", "zipf", "one row", "one block"])
@pytest.mark.parametrize(
    ("block", "rows", "piece", "groups", "ctas"),
    [
        ((64, 64), 128, 64, 4, 5),
        ((128, 128), 64, 128, 1, 7),
        ((192, 112), 128, 64, 2, 40),
        ((16, 16), 64, 16, 8, 3),
    ],
    ids=str,
)
def test_tiles_of_samples_are_those_of_torch(
    kind: str, block: tuple[int, int], rows: int, piece: int, groups: int, ctas: int
) -> None:
    pattern = pattern_of(drawn(kind, 9, 11), block)
    ours = sampled_tiles.tiles_of(pattern, 6, rows, piece, groups, ctas)
    for own, torchs in zip(ours, sddmm_tiles(pattern, 6, rows, piece, groups, ctas), strict=True):
        assert own.dtype == torch.int32
        assert torch.equal(own, torchs)
