"""Pictures of the stored blocks: text for a terminal, and SVG.

Both draw the grid of blocks, row 0 on top. A grid that is finer than the picture is binned; a bin with any stored block
is visible.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.pictures import svg

TEXT_COLUMNS, TEXT_LINES = 64, 32
HALVES = np.array([" ", "▄", "▀", "█"])  # index: 2 * upper + lower
SHADES = np.array([" ", "░", "▒", "▓", "█"])

PIXELS = (64, 4096)  # of the longer side of a picture
CELL = 4  # pixels of a cell, at least: a file has a shape for each run of cells
FLATTEST = 0.2  # the short side of the picture is at least this part of the long one
LEGEND = 240  # pixels of a legend's height
FAULTY = "#00b8d9"
SHARE_COLOURS = ("#b3cde8", "#5b93c9", "#12355b")
NORM_COLOURS = ("#fdd9a0", "#f78d5c", "#d3436e", "#812581", "#1d1147")


@dataclass(frozen=True)
class BlockPicture:
    """The data of a picture: the stored blocks of a matrix, in compressed rows on the host.

    `name` is the default title, `described` the line below a text picture, `summary` how much is stored. `norms`
    returns the Frobenius norm of each stored block, float64 [nnzb]; without it colours show the share of stored blocks.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    indptr: np.ndarray
    indices: np.ndarray
    name: str = ""
    described: str = ""
    summary: str = ""
    norms: Callable[[], np.ndarray] | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of block rows and block columns."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])


class Drawable:
    """A pattern, or a matrix of blocks."""

    def drawn(self) -> BlockPicture:
        """Return the data of its pictures. Internal."""
        raise NotImplementedError

    def spy(self, path: str | os.PathLike[str] | None = None, max_pixels: int = 1024) -> str:
        """Return a text picture of the stored blocks, with a line that describes them. Synchronizes.

        Up to 64 x 64 blocks are drawn one by one. A larger grid is binned to at most 64 columns and 32 lines, shaded by
        the share of stored blocks.

        Args:
            path: Where to write an SVG picture as well.
            max_pixels: The pixels of its longer side, 64 to 4096.

        Examples:
            >>> print(sk.random_bsr(64, 64, block=16, density=0.5, pattern="banded").spy())
            ┌────────┐
            │████    │
            │████    │
            │    ████│
            │    ████│
            └────────┘
            BSR(64x64 fp32, block 16x16, 8 of 16 blocks, 50 %, 0.00819 MB, cpu)
        """
        blocks = self.drawn()
        max_pixels = arguments.integer("max_pixels", max_pixels, *PIXELS)
        if path is not None:
            spy_svg(self, path, max_pixels=max_pixels)
        lines, scale = _text(blocks)
        return "\n".join([*framed(lines), blocks.described, *scale])


def spy_svg(
    obj: Drawable, path: str | os.PathLike[str], title: str | None = None, max_pixels: int = 1024
) -> None:
    """Write an SVG picture of a pattern, or of a matrix with its blocks coloured by Frobenius norm. Synchronizes.

    Bars show the stored blocks of each block row (right) and of each block column (below). A cell of several blocks is
    coloured by the share that is stored, or by the root mean square of its stored norms. Norms that are not finite are
    cyan.

    Args:
        obj: A BlockPattern or a BSR.
        path: Where to write the file, whose name ends in .svg.
        title: The title; the shape by default.
        max_pixels: The pixels of the longer side, 64 to 4096, or slightly fewer so that all blocks have one size.
    """
    blocks, where = _blocks(obj), svg.as_path("path", path)
    title = None if title is None else arguments.text("title", title)
    max_pixels = arguments.integer("max_pixels", max_pixels, *PIXELS)
    bins = Bins.of(blocks, max_pixels)
    stored, levels = bins.sums() > 0, _levels(bins)
    drawn = stored & np.isfinite(levels)
    low, high, label, names = 0.0, 1.0, "share stored", SHARE_COLOURS
    if blocks.norms is not None:
        label, names = ("RMS of norms" if bins.is_coarse else "block norm"), NORM_COLOURS
        if drawn.any():
            low, high = float(levels[drawn].min()), float(levels[drawn].max())
    if high - low <= 1e-6 * high:
        low, high = 0.0, high or 1.0
    shown = svg.mixed(names, (np.where(drawn, levels, low) - low) / (high - low))
    shown[stored & ~drawn] = svg.mixed((FAULTY, FAULTY), np.zeros(()))
    parts = [svg.panel(svg.LEFT, shown, stored, bins.pixels), bins.beside]
    width = svg.LEFT + bins.width + svg.GAP + svg.BAR + 3 * svg.MARGIN
    if blocks.norms is not None or bins.is_coarse:
        ends = f"{low:.3g}", f"{high:.3g}"
        parts.append(svg.legend(width, LEGEND, names, label, ends))
        width += 100
    lengths = np.diff(blocks.indptr)
    rows = f"{lengths.min()} to {lengths.max()} in a row" if lengths.size else "no rows"
    facts = [blocks.name, f"blocks of {blocks.block[0]} × {blocks.block[1]}", blocks.summary, rows]
    first, *rest = facts if title is None else [title, *facts]
    svg.write(where, svg.page(first, [" · ".join(rest)], width, bins.page_height, parts))


@dataclass(frozen=True)
class Bins:
    """The division of a grid of blocks into cells of a picture: blocks per cell, cells, and pixels per cell."""

    drawn: BlockPicture
    blocks: tuple[int, int]
    cells: tuple[int, int]
    pixels: tuple[int, int]

    @classmethod
    def of(cls, drawn: BlockPicture, longest: int) -> Bins:
        sides = [max(count * side, 1) for count, side in zip(drawn.grid, drawn.block, strict=True)]
        room = [max(round(longest * side / max(sides)), round(longest * FLATTEST)) for side in sides]
        blocks = [max(-(-side // (most // CELL)), 1) for side, most in zip(drawn.grid, room, strict=True)]
        cells = [max(-(-side // step), 1) for side, step in zip(drawn.grid, blocks, strict=True)]
        pixels = [most // cell for most, cell in zip(room, cells, strict=True)]
        return cls(drawn, (blocks[0], blocks[1]), (cells[0], cells[1]), (pixels[0], pixels[1]))

    @classmethod
    def of_text(cls, drawn: BlockPicture) -> Bins:
        """Cells of one character, at most as many as a text picture has."""
        rows, columns = drawn.grid
        blocks = -(-rows // TEXT_LINES), -(-columns // TEXT_COLUMNS)
        return cls(drawn, blocks, (-(-rows // blocks[0]), -(-columns // blocks[1])), (1, 1))

    @property
    def text_scale(self) -> str:
        """The legend of the shaded characters."""
        rows, columns = self.blocks
        return f"one character is {rows} x {columns} blocks; ░▒▓█ up to 25, 50, 75, 100 % of them stored"

    @property
    def height(self) -> int:
        return self.cells[0] * self.pixels[0]

    @property
    def width(self) -> int:
        return self.cells[1] * self.pixels[1]

    @property
    def page_height(self) -> int:
        """The pixels of a page below its title, with the bars of the columns."""
        return max(self.height + svg.GAP + svg.BAR, LEGEND) + svg.LINE + svg.MARGIN

    @property
    def beside(self) -> str:
        """The ticks and the bars of a picture: the stored blocks of each block row and column."""
        drawn = (
            *(c * b * side for c, b, side in zip(self.cells, self.blocks, self.drawn.block, strict=True)),
        )
        sums = self.sums()
        bars = [sums.sum(axis=1 - axis) / self.capacity(axis) for axis in (0, 1)]
        return svg.sides(self.drawn.shape, (drawn[0], drawn[1]), self.width, self.height, bars)

    @property
    def is_coarse(self) -> bool:
        """True if a cell holds more than one block."""
        return self.blocks != (1, 1)

    def sums(self, weights: np.ndarray | None = None) -> np.ndarray:
        """The number of stored blocks in each cell, or the sum of their `weights` [nnzb]; float64 [cells]."""
        rows = np.repeat(np.arange(self.drawn.grid[0]), np.diff(self.drawn.indptr))
        at = rows // self.blocks[0] * self.cells[1] + self.drawn.indices // self.blocks[1]
        flat = np.bincount(at, weights, minlength=self.cells[0] * self.cells[1])
        return flat.astype(np.float64).reshape(self.cells)

    def capacity(self, axis: int) -> np.ndarray:
        """The number of block rows (axis 0) or block columns (axis 1) in each row or column of cells."""
        starts = np.arange(self.cells[axis]) * self.blocks[axis]
        return np.clip(self.drawn.grid[axis] - starts, 1, self.blocks[axis])

    def shares(self) -> np.ndarray:
        """The share of the blocks of each cell that is stored, 0 to 1."""
        return self.sums() / np.outer(self.capacity(0), self.capacity(1))


def cells(drawn: BlockPicture, most: int) -> np.ndarray:
    """The share of stored blocks, 0 to 1, in each cell of a picture of at most so many cells a side."""
    rows, columns = (max(-(-side // most), 1) for side in drawn.grid)
    count = -(-drawn.grid[0] // rows), -(-drawn.grid[1] // columns)
    return Bins(drawn, (rows, columns), count, (1, 1)).shares()


def framed(lines: list[str]) -> list[str]:
    """The lines of a picture with a frame around them."""
    width = max(map(len, lines), default=0)
    return [f"┌{'─' * width}┐", *(f"│{line}│" for line in lines), f"└{'─' * width}┘"]


def shaded(shares: np.ndarray) -> list[str]:
    """Lines of characters, darker for greater shares, 0 to 1."""
    return ["".join(line) for line in SHADES[np.ceil(4 * shares).astype(np.int64)]]


def _blocks(obj: Any) -> BlockPicture:
    if not isinstance(obj, Drawable):
        raise InvalidInput(f"spy_svg draws a BlockPattern or a BSR, not {arguments.shown(obj)}")
    return obj.drawn()


def _text(drawn: BlockPicture) -> tuple[list[str], list[str]]:
    """The lines of the picture, and a line about its scale if it is binned."""
    rows, columns = drawn.grid
    if not rows or not columns:
        return [], []
    if rows <= TEXT_LINES and 2 * columns <= TEXT_COLUMNS:
        stored = Bins(drawn, (1, 1), (rows, columns), (1, 1)).sums() > 0
        return ["".join(line) for line in np.repeat(SHADES[4 * stored], 2, axis=1)], []
    if rows <= 2 * TEXT_LINES and columns <= TEXT_COLUMNS:
        stored = Bins(drawn, (1, 1), (rows + rows % 2, columns), (1, 1)).sums() > 0
        return ["".join(line) for line in HALVES[2 * stored[::2] + stored[1::2]]], []
    bins = Bins.of_text(drawn)
    return shaded(bins.shares()), [bins.text_scale]


def _levels(bins: Bins) -> np.ndarray:
    """The number that each cell shows: the share of stored blocks, or the RMS of their norms."""
    if bins.drawn.norms is None:
        return bins.shares()
    return np.sqrt(bins.sums(bins.drawn.norms() ** 2) / np.maximum(bins.sums(), 1))
