"""A block mask beside the softmax mass of the blocks, one head at a time: text for a terminal, and PNG."""

from __future__ import annotations

import os

import numpy as np

from sparsek.core import arguments, files
from sparsek.core.errors import InvalidInput
from sparsek.pictures import blocks as spy
from sparsek.pictures.masks import FULL, PARTIAL, Drawable, Head, MaskBins

LEVELS = (0.5, 0.75, 0.9, 0.95)  # of the mass of a row: the cells that hold it, darkest first
LEGEND = "left: the mask, █ full, ▒ partial; right: the cells that hold 50 █, 75 ▓, 90 ▒, 95 ░ % of each row's mass"
PANELS = "left: the mask, blue full, red partial; right: blocks with 50, 75, 90, 95 % of a row, the largest darkest"
TEXT_CELLS, GAP = 32, 24  # lines, and cells of each picture in a line; pixels between the panels of a PNG


def beside(
    mask: Drawable,
    mass: np.ndarray,
    facts: list[str],
    path: str | os.PathLike[str] | None = None,
    head: int = 0,
    batch: int = 0,
    *,
    max_pixels: int = 1024,
) -> str:
    """A text picture of one head of a mask and of the mass of its blocks, and `facts`, a line each.

    Args:
        mask: What is drawn on the left.
        mass: float64 [Mb, Nb], not negative: the mass of each block, drawn on the right.
        facts: Lines below the picture, and the titles of the PNG.
        path: Where to write a PNG as well; it needs matplotlib.
        head: The head of the mask.
        batch: The batch item of the mask.
        max_pixels: The pixels of the longer side of each panel, 64 to 4096.
    """
    drawn = mask.drawn(head, batch)
    arguments.integer("max_pixels", max_pixels, *spy.PIXELS)
    if path is not None:
        _png(drawn, mass, facts, path, max_pixels)
    if 0 in mass.shape:
        return "\n".join(facts)
    blocks = (*(-(-side // TEXT_CELLS) for side in mass.shape),)
    cells = (*(-(-side // step) for side, step in zip(mass.shape, blocks, strict=True)),)
    bins = MaskBins.counted(
        drawn, spy.Bins(drawn.blank, (blocks[0], blocks[1]), (cells[0], cells[1]), (1, 1))
    )
    shares = (bins.full + bins.partial / 2) / np.outer(bins.capacity(0), bins.capacity(1))
    left, right = (spy.framed(spy.shaded(each)) for each in (shares, levels(binned(mass, bins)) / 4))
    lines = [f"{a}  {b}" for a, b in zip(left, right, strict=True)]
    scale = [f"one character is {blocks[0]} x {blocks[1]} blocks"] if bins.is_coarse else []
    return "\n".join([*lines, *facts, LEGEND, *scale])


def binned(mass: np.ndarray, bins: spy.Bins) -> np.ndarray:
    """float64 [cells]: the sum of the blocks of each cell."""
    starts = (np.arange(count) * step for count, step in zip(bins.cells, bins.blocks, strict=True))
    down, across = starts
    return np.add.reduceat(np.add.reduceat(mass, down, axis=0), across, axis=1)


def levels(mass: np.ndarray) -> np.ndarray:
    """int [rows, columns]: 4 for the largest cells of a row, which hold half of its mass, to 0 for the smallest."""
    order = np.argsort(-mass, axis=1, kind="stable")
    ranked = np.take_along_axis(mass, order, axis=1)
    before = ranked.cumsum(1) - ranked
    total = mass.sum(1, keepdims=True)
    found = sum((before < level * total) & (ranked > 0) for level in LEVELS)
    made = np.zeros(mass.shape, np.int64)
    np.put_along_axis(made, order, np.asarray(found, np.int64), axis=1)
    return made


def _png(head: Head, mass: np.ndarray, facts: list[str], path: str | os.PathLike[str], most: int) -> None:
    where = files.as_path("path", path)
    if where.suffix.lower() != ".png":
        raise InvalidInput(f"{arguments.shown(where.name)}: the picture is a .png file")
    bins = MaskBins.counted(head, spy.Bins.of(head.blank, most))
    page = spy.Page(2 * bins.width + GAP, bins.height, has_scale=False)
    figure = spy.new_figure(page)
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    full, partial, dark = (
        LinearSegmentedColormap.from_list("sparsek", names) for names in (FULL, PARTIAL, spy.NORM_COLOURS)
    )
    stored, shares = bins.sums(), bins.shares()
    of_partial = (bins.partial / np.maximum(stored, 1))[..., None]
    colours = (1 - of_partial) * full(shares)[..., :3] + of_partial * partial(shares)[..., :3]
    found = levels(binned(mass, bins)) if mass.size else np.zeros(bins.cells, np.int64)
    panels = (
        np.where(stored[..., None] > 0, colours, to_rgb(spy.EMPTY)),
        np.where(found[..., None] > 0, dark(found / 4)[..., :3], to_rgb(spy.EMPTY)),
    )
    bottom = page.height - page.top - page.panel_height
    for at, cells in enumerate(panels):
        left = page.left + at * (bins.width + GAP)
        figure.figimage(spy.as_image(bins, cells), left, bottom, origin="upper")
    spy.write_titles(figure, page, [*facts, PANELS])
    with files.replacing(where) as file:
        figure.savefig(file, format="png", **spy.LOOK)
