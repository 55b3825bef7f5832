"""Pictures of the stored blocks: text for a terminal, and PNG.

Both draw the grid of blocks, row 0 on top. A grid that is finer than the picture is binned; a bin with any stored block
is visible.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsek.core import arguments, files
from sparsek.core.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT_COLUMNS, TEXT_LINES = 64, 32
HALVES = np.array([" ", "▄", "▀", "█"])  # index: 2 * upper + lower
SHADES = np.array([" ", "░", "▒", "▓", "█"])

DPI = 160
PIXELS = (64, 4096)  # of the longer side of a picture
FLATTEST = 0.2  # the short side of the picture is at least this part of the long one
GAP_FROM = 6  # pixels of a cell from which on cells are set apart
INK, FAINT, PAPER, EMPTY, BARS, FAULTY = "#1f2430", "#6b7280", "#ffffff", "#edeff3", "#8fa6c4", "#00b8d9"
SHARE_COLOURS = ("#b3cde8", "#5b93c9", "#12355b")
NORM_COLOURS = ("#fdd9a0", "#f78d5c", "#d3436e", "#812581", "#1d1147")
FONT = "DejaVu Sans"  # comes with matplotlib
LOOK: dict[str, Any] = {"dpi": DPI, "facecolor": PAPER, "bbox_inches": None}


@dataclass(frozen=True)
class Blocks:
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

    def drawn(self) -> Blocks:
        """Return the data of its pictures. Internal."""
        raise NotImplementedError

    def spy(self, path: str | os.PathLike[str] | None = None, max_pixels: int = 1024) -> str:
        """Return a text picture of the stored blocks, with a line that describes them. Synchronizes.

        Up to 64 x 64 blocks are drawn one by one. A larger grid is binned to at most 64 columns and 32 lines, shaded by
        the share of stored blocks.

        Args:
            path: Where to write a PNG picture as well; it needs matplotlib.
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
        arguments.integer("max_pixels", max_pixels, *PIXELS)
        if path is not None:
            spy_png(self, path, max_pixels=max_pixels)
        lines, scale = _text(blocks)
        return "\n".join([*framed(lines), blocks.described, *scale])


def spy_png(
    obj: Drawable, path: str | os.PathLike[str], title: str | None = None, max_pixels: int = 1024
) -> None:
    """Write a PNG picture of a pattern, or of a matrix with its blocks coloured by Frobenius norm. Synchronizes.

    Bars show the stored blocks of each block row (right) and of each block column (below). A bin of several blocks is
    coloured by the share that is stored, or by the root mean square of its stored norms. Norms that are not finite are
    cyan. Needs matplotlib, whose global state is not touched.

    Args:
        obj: A BlockPattern or a BSR.
        path: Where to write the file.
        title: The title; the shape by default.
        max_pixels: The pixels of the longer side, 64 to 4096, or slightly fewer so that all blocks have one size.
    """
    blocks, where = _blocks(obj), files.as_path("path", path)
    title = None if title is None else arguments.text("title", title)
    arguments.integer("max_pixels", max_pixels, *PIXELS)
    bins = Bins.of(blocks, max_pixels)
    page = Page(bins.width, bins.height, has_scale=blocks.norms is not None or bins.is_coarse)
    figure = new_figure(page)
    _draw_cells(figure, page, bins)
    draw_sides(figure, page, bins)
    _write_facts(figure, page, blocks, title)
    with files.replacing(where) as file:
        figure.savefig(file, format="png", **LOOK)


@dataclass(frozen=True)
class Bins:
    """The division of a grid of blocks into cells of a picture: blocks per cell, cells, and pixels per cell."""

    drawn: Blocks
    blocks: tuple[int, int]
    cells: tuple[int, int]
    pixels: tuple[int, int]

    @classmethod
    def of(cls, drawn: Blocks, longest: int) -> Bins:
        sides = [max(count * side, 1) for count, side in zip(drawn.grid, drawn.block, strict=True)]
        room = [max(round(longest * side / max(sides)), round(longest * FLATTEST)) for side in sides]
        blocks = [max(-(-side // most), 1) for side, most in zip(drawn.grid, room, strict=True)]
        cells = [max(-(-side // step), 1) for side, step in zip(drawn.grid, blocks, strict=True)]
        pixels = [most // cell for most, cell in zip(room, cells, strict=True)]
        return cls(drawn, (blocks[0], blocks[1]), (cells[0], cells[1]), (pixels[0], pixels[1]))

    @classmethod
    def of_text(cls, drawn: Blocks) -> Bins:
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


@dataclass(frozen=True)
class Page:
    """The layout of a picture, in pixels from its upper left corner."""

    panel_width: int
    panel_height: int
    has_scale: bool
    left: int = 124
    top: int = 168
    gap: int = 16
    bars: int = 92
    margin: int = 36
    narrowest: int = 980

    @property
    def scale_left(self) -> int:
        return self.left + self.panel_width + self.gap + self.bars + 2 * self.margin

    @property
    def width(self) -> int:
        needed = self.scale_left + (22 + 120 if self.has_scale else -self.margin)
        return max(needed, self.narrowest)

    @property
    def height(self) -> int:
        return self.top + self.panel_height + self.gap + self.bars + self.margin

    def box(self, left: int, top: int, width: int, height: int) -> tuple[float, float, float, float]:
        """(left, bottom, width, height) of a box as fractions of the page, for matplotlib."""
        bottom = self.height - top - height
        return left / self.width, bottom / self.height, width / self.width, height / self.height


def framed(lines: list[str]) -> list[str]:
    """The lines of a picture with a frame around them."""
    width = max(map(len, lines), default=0)
    return [f"┌{'─' * width}┐", *(f"│{line}│" for line in lines), f"└{'─' * width}┘"]


def shaded(shares: np.ndarray) -> list[str]:
    """Lines of characters, darker for greater shares, 0 to 1."""
    return ["".join(line) for line in SHADES[np.ceil(4 * shares).astype(np.int64)]]


def new_figure(page: Page) -> Figure:
    """An empty figure of the page's size. InvalidInput without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("pictures need matplotlib: pip install 'sparsek[plot]'") from error
    figure = Figure(figsize=(page.width / DPI, page.height / DPI), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def _blocks(obj: Any) -> Blocks:
    if not isinstance(obj, Drawable):
        raise InvalidInput(f"spy_png draws a BlockPattern or a BSR, not {arguments.shown(obj)}")
    return obj.drawn()


def _text(drawn: Blocks) -> tuple[list[str], list[str]]:
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


def _draw_cells(figure: Figure, page: Page, bins: Bins) -> None:
    """Draw the matrix pixel by pixel, so that no resampling blurs or drops a block, and its colour scale."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb

    stored, levels = bins.sums() > 0, _levels(bins)
    drawn = stored & np.isfinite(levels)
    low, high = 0.0, 1.0
    if bins.drawn.norms is not None:
        label, names = ("RMS of norms" if bins.is_coarse else "block norm"), NORM_COLOURS
        if drawn.any():
            low, high = float(levels[drawn].min()), float(levels[drawn].max())
    else:
        label, names = "share stored", SHARE_COLOURS
    if high - low <= 1e-6 * high:
        low, high = 0.0, high or 1.0
    norm, colours = Normalize(low, high), LinearSegmentedColormap.from_list("sparsek", names)
    cells = np.empty((*bins.cells, 3))
    cells[:] = to_rgb(EMPTY)
    cells[stored] = to_rgb(FAULTY)
    cells[drawn] = colours(norm(levels[drawn]))[..., :3]

    image = as_image(bins, cells)
    if min(bins.pixels) >= GAP_FROM:
        gap = 1 if min(bins.pixels) < 4 * GAP_FROM else 2
        for start in range(gap):
            image[bins.pixels[0] - 1 - start :: bins.pixels[0]] = 255
            image[:, bins.pixels[1] - 1 - start :: bins.pixels[1]] = 255
    figure.figimage(image, page.left, page.height - page.top - page.panel_height, origin="upper")
    if page.has_scale:
        axes = figure.add_axes(page.box(page.scale_left, page.top, 22, min(page.panel_height, 480)))
        figure.colorbar(ScalarMappable(norm, colours), cax=axes)
        axes.set_title(label, loc="left", pad=9, color=FAINT, fontsize=7, fontfamily=FONT)
        style_axes(axes)


def as_image(bins: Bins, cells: np.ndarray) -> np.ndarray:
    """Pixels, uint8 [height, width, 3], of the colours of cells, float [cells, 3] from 0 to 1."""
    image = np.round(255 * cells).astype(np.uint8)
    return image.repeat(bins.pixels[0], axis=0).repeat(bins.pixels[1], axis=1)


def draw_sides(figure: Figure, page: Page, bins: Bins) -> None:
    """Draw ticks in elements on top and left, and bars of stored blocks: of the rows right, of the columns below."""
    panel = figure.add_axes(page.box(page.left, page.top, page.panel_width, page.panel_height))
    panel.patch.set_visible(False)
    drawn = bins.drawn
    rows, columns = (bins.cells[axis] * bins.blocks[axis] * drawn.block[axis] for axis in (0, 1))
    panel.set(xlim=(0, columns), ylim=(rows, 0))  # the last cell is drawn whole, even if it sticks out
    panel.xaxis.tick_top()
    panel.set_xticks(_ticks(drawn.shape[1], drawn.block[1], columns, page.panel_width))
    panel.set_yticks(_ticks(drawn.shape[0], drawn.block[0], rows, page.panel_height))
    style_axes(panel)

    sums = bins.sums()
    per_row, per_column = (sums.sum(axis=1 - axis) / bins.capacity(axis) for axis in (0, 1))
    right = figure.add_axes(
        page.box(page.left + page.panel_width + page.gap, page.top, page.bars, page.panel_height)
    )
    right.stairs(per_row, orientation="horizontal", fill=True, color=BARS)
    most = max(float(per_row.max()), 1.0)
    right.set(xlim=(0, most), ylim=(bins.cells[0], 0), yticks=[])
    right.xaxis.tick_top()
    right.set_xticks([most], [f"{most:.3g}"])
    below = figure.add_axes(
        page.box(page.left, page.top + page.panel_height + page.gap, page.panel_width, page.bars)
    )
    below.stairs(per_column, fill=True, color=BARS)
    most = max(float(per_column.max()), 1.0)
    below.set(xlim=(0, bins.cells[1]), ylim=(most, 0), xticks=[])
    below.set_yticks([most], [f"{most:.3g}"])
    for axes, label in ((right, "blocks in a row"), (below, "blocks in a column")):
        style_axes(axes)
        axes.set_xlabel(label, loc="left", color=FAINT, fontsize=7, fontfamily=FONT, labelpad=6)
        axes.xaxis.set_label_position("bottom")


def _ticks(side: int, block: int, drawn: int, pixels: int) -> list[int]:
    """0, the true side, and multiples of the block between them, far enough apart for their labels."""
    apart = 110 * drawn / pixels
    step = block
    while step < apart:
        step *= 2
    return [*(at for at in range(0, side, step) if at == 0 or side - at >= apart), side]


def style_axes(axes: Any) -> None:
    """Set faint small labels and no box."""
    axes.tick_params(length=3, width=0.6, color=FAINT, labelcolor=FAINT, labelsize=7, labelfontfamily=FONT)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _write_facts(figure: Figure, page: Page, drawn: Blocks, title: str | None) -> None:
    """Write the title, or the shape by default, and how much is stored."""
    lengths = np.diff(drawn.indptr)
    rows = f"{lengths.min()} to {lengths.max()} in a row" if lengths.size else "no rows"
    facts = [drawn.name, f"blocks of {drawn.block[0]} × {drawn.block[1]}", drawn.summary, rows]
    write_titles(figure, page, facts if title is None else [title, *facts])


def write_titles(figure: Figure, page: Page, facts: list[str]) -> None:
    """Write the first fact in bold and the others in one or two lines below."""
    first, second = two_lines(facts[1:], _room(page, 8))
    bold = textwrap.shorten(facts[0], _room(page, 12), placeholder=" …")
    for text, top, size, colour, weight in (
        (bold, 44, 12, INK, "bold"),
        (first, 84, 8, FAINT, "normal"),
        (second, 112, 8, FAINT, "normal"),
    ):
        figure.text(
            page.margin / page.width, 1 - top / page.height, text,
            color=colour, fontsize=size, fontweight=weight, fontfamily=FONT, va="center", parse_math=False,
        )  # fmt: skip


def _room(page: Page, size: int) -> int:
    """The number of letters of a size, in points, that fit on the page."""
    return int((page.width - 2 * page.margin) / (0.62 * size * DPI / 72))


def two_lines(facts: list[str], room: int) -> tuple[str, str]:
    """The facts with dots between them, in one line if they fit, and otherwise in two; only the second may be cut."""
    lines = [""]
    for fact in facts:
        longer = f"{lines[-1]} · {fact}" if lines[-1] else fact
        if len(longer) <= room or len(lines) == 2:
            lines[-1] = longer
        else:
            lines.append(fact)
    first, second = (*lines, "")[:2]
    return first, textwrap.shorten(second, room, placeholder=" …")
