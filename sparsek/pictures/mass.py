"""A block mask beside the softmax mass of the blocks, one head at a time: text for a terminal, and SVG."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from sparsek.core import arguments
from sparsek.pictures import blocks as spy
from sparsek.pictures import svg
from sparsek.pictures.masks import DrawableMask, HeadPicture, MaskBins

LEVELS = (0.5, 0.75, 0.9, 0.95)  # of the mass of a row: the cells that hold it, darkest first
LEGEND = "left: the mask, █ full, ▒ partial; right: the cells that hold 50 █, 75 ▓, 90 ▒, 95 ░ % of each row's mass"
PANELS = "left: the mask, blue full, red partial; right: blocks with 50, 75, 90, 95 % of a row, the largest darkest"
TEXT_CELLS, GAP = 32, 24  # lines, and cells of each picture in a line; pixels between the panels of an SVG


def beside(
    mask: DrawableMask,
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
        facts: Lines below the text picture and above the SVG.
        path: Where to write an SVG picture as well.
        head: The head of the mask.
        batch: The batch item of the mask.
        max_pixels: The pixels of the longer side of each panel, 64 to 4096.
    """
    drawn = mask.drawn(head, batch)
    max_pixels = arguments.integer("max_pixels", max_pixels, *spy.PIXELS)
    if path is not None:
        _write(drawn, mass, facts, svg.as_path("path", path), max_pixels)
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


def _write(head: HeadPicture, mass: np.ndarray, facts: list[str], path: Path, most: int) -> None:
    bins = MaskBins.counted(head, spy.Bins.of(head.blank, most))
    found = levels(binned(mass, bins)) if mass.size else np.zeros(bins.cells, np.int64)
    right = svg.MARGIN + bins.width + GAP
    parts = [
        svg.panel(svg.MARGIN, bins.colours, bins.sums() > 0, bins.pixels),
        svg.panel(right, svg.mixed(spy.NORM_COLOURS, found / 4), found > 0, bins.pixels),
    ]
    first, *rest = facts
    size = right + bins.width + svg.MARGIN, bins.height + svg.MARGIN
    svg.write(path, svg.page(first, [*rest, PANELS], *size, parts))
