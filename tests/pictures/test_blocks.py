"""Pictures: every stored block shows where it is, and nothing else does."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.errors import InvalidInput
from sparsek.pictures.blocks import Bins, spy_svg
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr


def pattern_of(mask: np.ndarray, block: tuple[int, int] = (16, 16)) -> BlockPattern:
    indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(np.int32)
    indices = np.nonzero(mask)[1].astype(np.int32)
    shape = (mask.shape[0] * block[0], mask.shape[1] * block[1])
    return BlockPattern(shape, block, torch.tensor(indptr), torch.tensor(indices))


def drawn(text: str) -> list[str]:
    """The lines between the frame."""
    return [line[1:-1] for line in text.splitlines() if line.startswith("│")]


def unpacked(lines: list[str], rows: int) -> np.ndarray:
    """The mask that half blocks show."""
    cells = np.array([list(line) for line in lines])
    upper, lower = np.isin(cells, ["▀", "█"]), np.isin(cells, ["▄", "█"])
    return np.stack([upper, lower], axis=1).reshape(-1, cells.shape[1])[:rows]


def test_a_small_pattern_is_drawn_block_by_block():
    a = pattern_of(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool), (32, 48))
    assert a.spy() == (
        "┌──────┐\n"
        "│██  ██│\n"
        "│      │\n"
        "│  ████│\n"
        "└──────┘\n"
        "BlockPattern(96x144, block 32x48, 4 of 9 blocks, 44.4 %, rows 0..2, cpu)"
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 64), columns=st.integers(33, 64), seed=st.integers(0, 99))
def test_up_to_64_x_64_blocks_are_drawn_two_to_a_character(rows, columns, seed):
    mask = np.random.default_rng(seed).random((rows, columns)) < 0.3
    assert np.array_equal(unpacked(drawn(pattern_of(mask).spy()), rows), mask)


def test_a_large_pattern_is_binned_and_shaded_by_the_share_stored():
    mask = np.zeros((128, 128), bool)
    mask[:4, :2] = True
    mask[0, 2] = True
    mask[4:8, 0] = True
    text = pattern_of(mask).spy()
    lines = drawn(text)
    assert (len(lines), len(lines[0])) == (32, 64)
    assert lines[0] == "█░" + 62 * " "
    assert lines[1] == "▒" + 63 * " "
    assert not "".join(lines[2:]).strip()
    assert "one character is 4 x 2 blocks" in text


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 99))
def test_a_single_block_of_any_grid_shows_and_the_text_fits_a_terminal(rows, columns, seed):
    rng, mask = np.random.default_rng(seed), np.zeros((rows, columns), bool)
    mask[rng.integers(rows), rng.integers(columns)] = True
    lines = drawn(pattern_of(mask).spy())
    assert len("".join(lines).replace(" ", "")) == (2 if rows <= 32 and columns <= 32 else 1)
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 64


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_a_matrix_without_cells_is_an_empty_frame(shape):
    assert random_bsr(shape[0], shape[1], 16, 0.0).spy().startswith("┌┐\n└┘\nBSR(")


def test_a_transposed_view_is_drawn_transposed():
    a = random_bsr(5 * 16, 9 * 32, (16, 32), 0.3)
    assert drawn(a.T.spy()) == drawn(a.T.pattern.spy())
    assert drawn(a.T.spy()) != drawn(a.spy())


def test_only_patterns_and_matrices_are_drawn(tmp_path):
    with pytest.raises(InvalidInput, match=r"not a torch.Tensor"):
        spy_svg(torch.zeros(3, 3), tmp_path / "a.svg")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInput, match=r"not \[\]"):
        spy_svg([], tmp_path / "a.svg")  # pyright: ignore[reportArgumentType]


@settings(max_examples=60, deadline=None)
@given(
    grid=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
    block=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    longest=st.integers(64, 4096),
)
def test_bins_cover_the_grid_and_fit_the_picture(grid, block, longest):
    bm, bk = 16 * block[0], 16 * block[1]
    indptr = torch.zeros(grid[0] + 1, dtype=torch.int32)
    pattern = BlockPattern((grid[0] * bm, grid[1] * bk), (bm, bk), indptr, torch.zeros(0, dtype=torch.int32))
    bins = Bins.of(pattern.drawn(), longest)
    for axis in (0, 1):
        covered = bins.cells[axis] * bins.blocks[axis]
        assert grid[axis] <= covered < max(grid[axis], 1) + bins.blocks[axis]
        assert bins.pixels[axis] >= 1
        assert bins.capacity(axis).sum() == max(grid[axis], 1)
    assert max(bins.width, bins.height) <= longest


def panel(path: Path) -> np.ndarray:
    """The colours of the cells of an SVG's first panel, [rows, columns, 3]."""
    ground, *shapes = (
        shape.attrib for shape in ElementTree.parse(path).getroot().find(".//*[@shape-rendering]") or ()
    )
    cells = np.full((int(ground["height"]), int(ground["width"])), ground["fill"])
    for shape in shapes:
        for x, y, wide in re.findall(r"M(\d+) (\d+)h(\d+)v1", shape["d"]):
            cells[int(y), int(x) : int(x) + int(wide)] = shape["fill"]
    return np.array([[list(bytes.fromhex(cell[1:])) for cell in line] for line in cells])


EMPTY, CYAN = [0xED, 0xEF, 0xF3], [0x00, 0xB8, 0xD9]


@pytest.mark.parametrize("block", [(16, 16), (128, 64), (16, 512)], ids=str)
@pytest.mark.parametrize("max_pixels", [64, 333, 1024])
def test_the_svg_shows_exactly_the_stored_blocks(tmp_path, block, max_pixels):
    mask = np.random.default_rng(0).random((11, 23)) < 0.3
    spy_svg(pattern_of(mask, block), tmp_path / "a.svg", max_pixels=max_pixels)
    bins = Bins.of(pattern_of(mask, block).drawn(), max_pixels)
    cells = panel(tmp_path / "a.svg")
    assert np.array_equal((cells != EMPTY).any(axis=2), bins.sums() > 0)
    assert bins.is_coarse or np.array_equal(bins.sums() > 0, mask)


def test_a_matrix_is_coloured_by_block_norm_and_norms_that_are_not_finite_are_cyan(tmp_path):
    a = random_bsr(4 * 16, 4 * 16, 16, 1.0, dtype=torch.bfloat16)
    a.values[:] = torch.arange(1, 17).reshape(16, 1, 1)
    a.values[5, 3, 3] = float("nan")
    a.values[6, 0, 0] = float("inf")
    spy_svg(a, tmp_path / "a.svg")
    cells = panel(tmp_path / "a.svg").reshape(16, 3)
    assert cells[5].tolist() == cells[6].tolist() == CYAN
    brightness = np.delete(cells, [5, 6], axis=0).sum(axis=1)
    assert (np.diff(brightness) < 0).all()


def test_the_svg_of_a_transposed_view_is_the_picture_transposed(tmp_path):
    a = random_bsr(5 * 16, 7 * 16, 16, 0.4)
    spy_svg(a, tmp_path / "a.svg")
    spy_svg(a.T, tmp_path / "t.svg")
    cells, flipped = panel(tmp_path / "a.svg"), panel(tmp_path / "t.svg")
    assert np.array_equal(cells, flipped.transpose(1, 0, 2))


@pytest.mark.parametrize(
    "a",
    [
        random_bsr(0, 500, 128, 0.0),
        random_bsr(500, 0, 128, 0.0),
        random_bsr(100, 100, 64, 0.0),
        random_bsr(1, 1, 16, 1.0),
        random_bsr(48, 100_000, 16, 0.01),
        random_bsr(100_000, 48, 16, 0.5).T,
        random_bsr(30_000, 30_000, 16, 0.001, pattern="powerlaw", dtype=torch.float16),
    ],
    ids=repr,
)
def test_a_matrix_of_any_shape_gives_an_svg(tmp_path, a):
    text = a.spy(tmp_path / "a.svg", max_pixels=256)
    assert text == a.spy()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_any_title_is_drawn_as_it_is(tmp_path):
    for title in ("$x_{", '<b> & "c"', "a " * 500, "", "größe\n§ \x00 \ud800"):
        spy_svg(random_bsr(64, 64, 16, 0.5), tmp_path / "a.svg", title, max_pixels=64)
        words = ElementTree.parse(tmp_path / "a.svg").getroot().findtext(".//*[@font-weight]", "")
        assert (
            words == title.replace("\n", "\ufffd").replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
            or "…" in words
        )


@pytest.mark.parametrize("max_pixels", [0, 63, 4097, 100.0, "big"])
def test_a_picture_of_another_size_is_refused(tmp_path, max_pixels):
    with pytest.raises(InvalidInput, match=r"max_pixels is .*; it must be an int from 64 to 4096"):
        spy_svg(random_bsr(64, 64, 16, 0.5), tmp_path / "a.svg", max_pixels=max_pixels)


@pytest.mark.parametrize("name", ["a.png", "a", "a.svgz"])
def test_a_picture_that_is_no_svg_is_refused(tmp_path, name):
    with pytest.raises(InvalidInput, match=r"pictures are SVG, so its name must end in \.svg"):
        random_bsr(64, 64, 16, 0.5).spy(tmp_path / name)
