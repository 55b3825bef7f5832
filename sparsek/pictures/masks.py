"""Pictures of a block mask, one head at a time: text for a terminal, and PNG or SVG.

Query tiles go down, key blocks to the right. A grid that is finer than the picture is binned, some rows at a time, so
that no picture needs memory for all blocks of a large mask. A bin with any stored block is visible.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from sparsek.core import arguments, files
from sparsek.core.errors import InvalidInput
from sparsek.pictures import blocks as spy

if TYPE_CHECKING:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

ENTRIES = 1 << 22  # of the lists, counted in one step
FULL, PARTIAL = (
    ("#b3cde8", "#12355b"),
    ("#fdd9a0", "#d3436e"),
)  # colour of a bin with few blocks stored, and with all


class Rows(NamedTuple):
    """Rows of block columns on the host: row r holds indices[starts[r] : starts[r] + counts[r]]."""

    starts: np.ndarray
    counts: np.ndarray
    indices: np.ndarray


@dataclass(frozen=True)
class Head:
    """The data of a picture: the blocks of one head of a mask. `which` names the head, if there are several."""

    shape: tuple[int, int]
    block: tuple[int, int]
    full: Rows
    partial: Rows
    name: str
    described: str
    which: str

    @property
    def blank(self) -> spy.Blocks:
        """The grid, without blocks."""
        none = np.zeros(0, np.int32)
        return spy.Blocks(
            self.shape, self.block, np.zeros(-(-self.shape[0] // self.block[0]) + 1, np.int32), none
        )


class Drawable(Protocol):
    """A block mask."""

    def drawn(self, head: int, batch: int) -> Head: ...


def plot(
    mask: Drawable,
    path: str | os.PathLike[str] | None = None,
    head: int = 0,
    batch: int = 0,
    *,
    title: str | None = None,
    max_pixels: int = 1024,
) -> str:
    """Return a text picture of the blocks that one head of one batch item visits, and a line about the mask. Syncs.

    █ is a full block, ▒ a partial one, blank is not stored. Up to 32 x 64 blocks are drawn one by one. A larger grid
    is binned to at most 32 lines of 64 characters: ░▒▓█ up to 25, 50, 75 and 100 % of a bin's blocks stored, where a
    partial one counts half.

    Args:
        path: Where to write a picture as well, a .png or .svg file; it needs matplotlib.
        head: The head to draw.
        batch: The batch item to draw.
        title: The title of the picture in the file.
        max_pixels: The pixels of its longer side, 64 to 4096.
    """
    found = _head(mask, head, batch)
    title = None if title is None else arguments.text("title", title)
    arguments.integer("max_pixels", max_pixels, *spy.PIXELS)
    if path is not None:
        picture(mask, path, head, batch, title=title, max_pixels=max_pixels)
    lines, scale = _text(found)
    which = [found.which] if found.which else []
    return "\n".join([*spy.framed(lines), found.described, *which, *scale])


def picture(
    mask: Drawable,
    path: str | os.PathLike[str],
    head: int = 0,
    batch: int = 0,
    *,
    title: str | None = None,
    max_pixels: int = 1024,
) -> None:
    """Write a PNG or SVG picture of the blocks that one head of one batch item visits.

    Full blocks are blue and partial ones red. A bin of several blocks is paler if fewer are stored, and between blue
    and red if it has both. Bars show the stored blocks of each row of tiles (right) and of each column (below). The
    longer side has `max_pixels` (64 to 4096) pixels, or slightly fewer so that all blocks have one size. Needs
    matplotlib, whose global state is not touched. Syncs.
    """
    found, path = _head(mask, head, batch), files.as_path("path", path)
    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise InvalidInput(f"{arguments.shown(path.name)}: a picture is a .png or a .svg file")
    arguments.integer("max_pixels", max_pixels, *spy.PIXELS)
    bins = MaskBins.counted(found, spy.Bins.of(found.blank, max_pixels))
    page = spy.Page(bins.width, bins.height, has_scale=True)
    figure = spy.new_figure(page)
    _draw_cells(figure, page, bins, as_pixels=form == "png")
    spy.draw_sides(figure, page, bins)
    names = [] if title is None else [arguments.text("title", title)]
    spy.write_titles(figure, page, [*names, *_facts(found, bins)])
    with files.replacing(path) as file:
        figure.savefig(file, format=form, metadata={"Date": None}, **spy.LOOK)


def _head(mask: Any, head: int, batch: int) -> Head:
    found = mask.drawn(head, batch) if hasattr(type(mask), "plot") else None
    if not isinstance(found, Head):
        raise InvalidInput(f"mask is {arguments.shown(mask)}; it must be a BlockMask")
    return found


@dataclass(frozen=True)
class MaskBins(spy.Bins):
    """The division of the grid of a head into cells of a picture, and the blocks in each cell, int64 [cells]."""

    full: np.ndarray
    partial: np.ndarray

    @classmethod
    def counted(cls, head: Head, bins: spy.Bins) -> MaskBins:
        """The blocks of a head, counted into the cells of `bins`."""
        full, partial = (_counts(each, bins) for each in (head.full, head.partial))
        return cls(bins.drawn, bins.blocks, bins.cells, bins.pixels, full, partial)

    def sums(self, weights: np.ndarray | None = None) -> np.ndarray:
        """The number of stored blocks in each cell; a mask has no weights."""
        return self.full + self.partial


def _counts(rows: Rows, bins: spy.Bins) -> np.ndarray:
    """The number of blocks in each cell. Processes the entries of some rows at a time."""
    starts, counts, columns = rows.starts.astype(np.int64), rows.counts.astype(np.int64), rows.indices
    ends = counts.cumsum()
    total = int(ends[-1]) if ends.size else 0
    sums = np.zeros(bins.cells[0] * bins.cells[1], np.int64)
    edges = np.searchsorted(ends, np.arange(ENTRIES, total, ENTRIES))
    for some in np.split(np.arange(counts.size), edges):
        row = np.repeat(some, counts[some])
        skipped = np.repeat(starts[some] - (ends[some] - counts[some]), counts[some])
        before = int(ends[some[0]] - counts[some[0]]) if some.size else 0
        column = columns[skipped + np.arange(before, before + row.size)]
        sums += np.bincount(
            row // bins.blocks[0] * bins.cells[1] + column // bins.blocks[1], minlength=sums.size
        )
    return sums.reshape(bins.cells)


def _text(head: Head) -> tuple[list[str], list[str]]:
    """The lines of the picture, and its legend."""
    rows, columns = head.blank.grid
    if not rows or not columns:
        return [], []
    bins = MaskBins.counted(head, spy.Bins.of_text(head.blank))
    shares = (bins.full + bins.partial / 2) / np.outer(bins.capacity(0), bins.capacity(1))
    if bins.is_coarse:
        return spy.shaded(shares), [f"{bins.text_scale}, where a partial one counts half"]
    wide = 2 if 2 * columns <= spy.TEXT_COLUMNS else 1
    return spy.shaded(shares.repeat(wide, axis=1)), ["█ full, ▒ partial"]


def _draw_cells(figure: Figure, page: spy.Page, bins: MaskBins, as_pixels: bool) -> None:
    """Draw the blocks, pixel by pixel in a PNG so that no resampling drops one, and the legend."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    full, partial = (LinearSegmentedColormap.from_list("sparsek", names) for names in (FULL, PARTIAL))
    stored, shares = bins.sums(), bins.shares()
    of_partial = (bins.partial / np.maximum(stored, 1))[..., None]
    colours = (1 - of_partial) * full(shares)[..., :3] + of_partial * partial(shares)[..., :3]
    cells = np.where(stored[..., None] > 0, colours, to_rgb(spy.EMPTY))
    if as_pixels:
        image = spy.as_image(bins, cells)
        figure.figimage(image, page.left, page.height - page.top - page.panel_height, origin="upper")
    else:
        axes = figure.add_axes(page.box(page.left, page.top, page.panel_width, page.panel_height))
        axes.imshow(cells, aspect="auto", interpolation="none")
        axes.set_axis_off()
    for at, (label, colours) in enumerate((("full", full), ("partial", partial))):
        _draw_scale(figure, page, at, label, colours, bins.is_coarse)


def _draw_scale(
    figure: Figure, page: spy.Page, at: int, label: str, colours: LinearSegmentedColormap, is_coarse: bool
) -> None:
    """Draw one of two bars of the legend, by share stored if cells hold several blocks."""
    height = min(page.panel_height, 480 if is_coarse else 22)
    axes = figure.add_axes(page.box(page.scale_left + 72 * at, page.top, 22, height))
    levels = np.linspace(1, 0, 256) if is_coarse else np.ones(1)
    axes.imshow(colours(levels)[:, None], aspect="auto", extent=(0, 1, 0, 1))
    axes.set_title(label, loc="left", pad=9, color=spy.FAINT, fontsize=7, fontfamily=spy.FONT)
    axes.yaxis.tick_right()
    axes.set(xticks=[], yticks=[])
    if is_coarse and at:
        axes.set_yticks([0, 1], ["few", "all"])
    spy.style_axes(axes)


def _facts(head: Head, bins: MaskBins) -> list[str]:
    """The name of the mask, the head that is drawn, and how much is stored."""
    grid = head.blank.grid
    full, partial, cells = int(bins.full.sum()), int(bins.partial.sum()), grid[0] * grid[1]
    share = 100 * (full + partial) / cells if cells else 0.0
    return [
        f"{head.name}, {head.shape[0]} × {head.shape[1]}",
        *([head.which] if head.which else []),
        f"blocks of {head.block[0]} × {head.block[1]}",
        f"{full} full and {partial} partial of {cells}, {share:.3g} %",
    ]
