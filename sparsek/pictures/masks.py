"""Pictures of a block mask, one head at a time: text for a terminal, and SVG.

Query tiles go down, key blocks to the right. A grid that is finer than the picture is binned, some rows at a time, so
that no picture needs memory for all blocks of a large mask. A bin with any stored block is visible.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.pictures import blocks as spy
from sparsek.pictures import svg

ENTRIES = 1 << 22  # of the lists, counted in one step
FULL, PARTIAL = (
    ("#b3cde8", "#12355b"),
    ("#fdd9a0", "#d3436e"),
)  # colour of a bin with few blocks stored, and with all


class PictureRows(NamedTuple):
    """Rows of block columns on the host: row r holds indices[starts[r] : starts[r] + counts[r]]."""

    starts: np.ndarray
    counts: np.ndarray
    indices: np.ndarray


@dataclass(frozen=True)
class HeadPicture:
    """The data of a picture: the blocks of one head of a mask. `which` names the head, if there are several."""

    shape: tuple[int, int]
    block: tuple[int, int]
    full: PictureRows
    partial: PictureRows
    name: str
    described: str
    which: str

    @property
    def blank(self) -> spy.BlockPicture:
        """The grid, without blocks."""
        none = np.zeros(0, np.int32)
        return spy.BlockPicture(
            self.shape, self.block, np.zeros(-(-self.shape[0] // self.block[0]) + 1, np.int32), none
        )


class DrawableMask(Protocol):
    """A block mask."""

    def drawn(self, head: int, batch: int) -> HeadPicture: ...


def plot(
    mask: DrawableMask,
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
        path: Where to write an SVG picture as well. Full blocks are blue and partial ones red; a cell of several blocks
            is paler if fewer are stored, and between blue and red if it has both. Bars show the stored blocks of each
            row of tiles (right) and of each column (below).
        head: The head to draw.
        batch: The batch item to draw.
        title: The title of the picture in the file.
        max_pixels: The pixels of its longer side, 64 to 4096, or slightly fewer so that all blocks have one size.
    """
    found = _head(mask, head, batch)
    title = None if title is None else arguments.text("title", title)
    max_pixels = arguments.integer("max_pixels", max_pixels, *spy.PIXELS)
    if path is not None:
        _write(found, svg.as_path("path", path), title, max_pixels)
    lines, scale = _text(found)
    which = [found.which] if found.which else []
    return "\n".join([*spy.framed(lines), found.described, *which, *scale])


def _head(mask: Any, head: int, batch: int) -> HeadPicture:
    found = mask.drawn(head, batch) if hasattr(type(mask), "plot") else None
    if not isinstance(found, HeadPicture):
        raise InvalidInput(f"mask is {arguments.shown(mask)}; it must be a BlockMask")
    return found


@dataclass(frozen=True)
class MaskBins(spy.Bins):
    """The division of the grid of a head into cells of a picture, and the blocks in each cell, int64 [cells]."""

    full: np.ndarray
    partial: np.ndarray

    @classmethod
    def counted(cls, head: HeadPicture, bins: spy.Bins) -> MaskBins:
        """The blocks of a head, counted into the cells of `bins`."""
        full, partial = (_counts(each, bins) for each in (head.full, head.partial))
        return cls(bins.drawn, bins.blocks, bins.cells, bins.pixels, full, partial)

    def sums(self, weights: np.ndarray | None = None) -> np.ndarray:
        """The number of stored blocks in each cell; a mask has no weights."""
        return self.full + self.partial

    @property
    def colours(self) -> np.ndarray:
        """The colour of each cell."""
        shares, of_partial = self.shares(), (self.partial / np.maximum(self.sums(), 1))[..., None]
        return (1 - of_partial) * svg.mixed(FULL, shares) + of_partial * svg.mixed(PARTIAL, shares)


def _counts(rows: PictureRows, bins: spy.Bins) -> np.ndarray:
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


def _text(head: HeadPicture) -> tuple[list[str], list[str]]:
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


def _write(head: HeadPicture, path: Path, title: str | None, max_pixels: int) -> None:
    bins = MaskBins.counted(head, spy.Bins.of(head.blank, max_pixels))
    width = svg.LEFT + bins.width + svg.GAP + svg.BAR + 3 * svg.MARGIN
    parts = [svg.panel(svg.LEFT, bins.colours, bins.sums() > 0, bins.pixels), bins.beside]
    for at, (label, colours) in enumerate((("full", FULL), ("partial", PARTIAL))):
        shown, ends = (colours, ("few", "all")) if bins.is_coarse else (colours[1:], ("", ""))
        parts.append(
            svg.legend(width + 64 * at, spy.LEGEND if bins.is_coarse else svg.SCALE, shown, label, ends)
        )
    first, *rest = ([] if title is None else [title]) + _facts(head, bins)
    svg.write(path, svg.page(first, [" · ".join(rest)], width + 140, bins.page_height, parts))


def _facts(head: HeadPicture, bins: MaskBins) -> list[str]:
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
