"""Pictures: every stored block shows where it is, nothing else does, and matplotlib is left as it was."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.errors import InvalidInput
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.random import random_bsr
from sparsek.pictures.blocks import Bins, spy_png, two_lines


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
        spy_png(torch.zeros(3, 3), tmp_path / "a.png")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInput, match=r"not \[\]"):
        spy_png([], tmp_path / "a.png")  # pyright: ignore[reportArgumentType]


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


def panel(path: Path, obj: BlockPattern | BSR, max_pixels: int) -> np.ndarray:
    """The pixels at the centres of the cells, [cells, 3], as they stand in the PNG."""
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    bins = Bins.of(obj.drawn(), max_pixels)
    pixels = np.round(255 * image.imread(path)[..., :3]).astype(int)
    left, top = 124, 168  # Page.left, Page.top
    whole = pixels[top : top + bins.height, left : left + bins.width]
    return whole[bins.pixels[0] // 2 :: bins.pixels[0], bins.pixels[1] // 2 :: bins.pixels[1]]


EMPTY, CYAN = [0xED, 0xEF, 0xF3], [0x00, 0xB8, 0xD9]


@pytest.mark.parametrize("block", [(16, 16), (128, 64), (16, 512)], ids=str)
@pytest.mark.parametrize("max_pixels", [64, 333, 1024])
def test_the_png_shows_exactly_the_stored_blocks(tmp_path, block, max_pixels):
    mask = np.random.default_rng(0).random((11, 23)) < 0.3
    spy_png(pattern_of(mask, block), tmp_path / "a.png", max_pixels=max_pixels)
    bins = Bins.of(pattern_of(mask, block).drawn(), max_pixels)
    cells = panel(tmp_path / "a.png", pattern_of(mask, block), max_pixels)
    assert np.array_equal((cells != EMPTY).any(axis=2), bins.sums() > 0)
    assert bins.is_coarse or np.array_equal(bins.sums() > 0, mask)


def test_a_matrix_is_coloured_by_block_norm_and_norms_that_are_not_finite_are_cyan(tmp_path):
    a = random_bsr(4 * 16, 4 * 16, 16, 1.0, dtype=torch.bfloat16)
    a.values[:] = torch.arange(1, 17).reshape(16, 1, 1)
    a.values[5, 3, 3] = float("nan")
    a.values[6, 0, 0] = float("inf")
    spy_png(a, tmp_path / "a.png")
    cells = panel(tmp_path / "a.png", a, 1024).reshape(16, 3)
    assert cells[5].tolist() == cells[6].tolist() == CYAN
    brightness = np.delete(cells, [5, 6], axis=0).sum(axis=1)
    assert (np.diff(brightness) < 0).all()


def test_the_png_of_a_transposed_view_is_the_picture_transposed(tmp_path):
    a = random_bsr(5 * 16, 7 * 16, 16, 0.4)
    spy_png(a, tmp_path / "a.png")
    spy_png(a.T, tmp_path / "t.png")
    cells, flipped = panel(tmp_path / "a.png", a, 1024), panel(tmp_path / "t.png", a.T, 1024)
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
def test_a_matrix_of_any_shape_gives_a_png(tmp_path, a):
    text = a.spy(tmp_path / "a.png", max_pixels=256)
    assert text == a.spy()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_any_title_is_drawn_as_it_is(tmp_path):
    for title in ("$x_{", "a " * 500, "", "größe\n§ 1"):
        spy_png(random_bsr(64, 64, 16, 0.5), tmp_path / "a.png", title, max_pixels=64)


@pytest.mark.parametrize("max_pixels", [0, 63, 4097, 100.0, "big"])
def test_a_picture_of_another_size_is_refused(tmp_path, max_pixels):
    with pytest.raises(InvalidInput, match=r"max_pixels is .*; it must be an int from 64 to 4096"):
        spy_png(random_bsr(64, 64, 16, 0.5), tmp_path / "a.png", max_pixels=max_pixels)


def test_without_matplotlib_the_text_stands_and_the_png_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert random_bsr(64, 64, 16, 0.5).spy().startswith("┌")
    with pytest.raises(InvalidInput, match=r"pip install 'sparsek\[plot\]'"):
        random_bsr(64, 64, 16, 0.5).spy(tmp_path / "a.png")


def test_a_picture_leaves_matplotlib_as_it_was(tmp_path):
    script = """if True:
        import sys
        import matplotlib
        before = matplotlib.rcParams.copy(), list(matplotlib.colormaps)  # dict() would load a backend
        from sparsek.matrix.random import random_bsr
        from sparsek.pictures.blocks import spy_png
        spy_png(random_bsr(64, 64, 16, 0.5), sys.argv[1])
        assert (matplotlib.rcParams.copy(), list(matplotlib.colormaps)) == before
        assert "matplotlib.pyplot" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.png")], check=True)


def test_facts_that_do_not_fit_in_one_line_go_on_in_a_second():
    facts = ["30522 × 384 bf16", "blocks of 64 × 64", "358 of 2862 blocks, 12.5 %", "0 to 6 in a row"]
    assert two_lines(facts, 200) == (" · ".join(facts), "")
    assert two_lines(facts, 70) == (" · ".join(facts[:3]), facts[3])
