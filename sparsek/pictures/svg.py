"""SVG pictures, written as text: panels of coloured cells with ticks, bars and legends below a title."""

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from sparsek.core import arguments, files
from sparsek.core.errors import InvalidInput

INK, FAINT, PAPER, EMPTY, BARS = "#1f2430", "#6b7280", "#ffffff", "#edeff3", "#8fa6c4"
LEFT, MARGIN, GAP, BAR, SCALE = (
    72,
    24,
    12,
    64,
    20,
)  # pixels; BAR of the longest bar, SCALE of a legend's width
SMALL, BOLD, LINE = 11, 16, 16  # sizes of letters, and of a line of facts
LEAST = 480  # of a page's width
GAP_FROM = 6  # pixels of a cell from which on cells are set apart


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    """The path of a picture in the argument `name`. Raises InvalidInput for a name that does not end in .svg."""
    path = files.as_path(name, value)
    if path.suffix.lower() != ".svg":
        raise InvalidInput(
            f"{name} is {arguments.shown(path.name)}; pictures are SVG, so its name must end in .svg"
        )
    return path


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = SMALL,
    colour: str = FAINT,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    """A line of text that begins, ends or has its middle ("start", "end", "middle") at x, on the line y."""
    shown = escape("".join(each if each.isprintable() else "\ufffd" for each in words))
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{shown}</text>'


def page(title: str, facts: Sequence[str], width: float, height: float, parts: Iterable[str]) -> bytes:
    """A picture: a bold title, a line for each fact, and below them `parts`, whose y is 0 below the lines."""
    width, top = max(width, LEAST), 2 * MARGIN + LINE * len(facts) + 12
    lines = [text(MARGIN, 32, _cut(title, BOLD, width), size=BOLD, colour=INK, bold=True)]
    lines += [text(MARGIN, 52 + LINE * at, _cut(fact, SMALL, width)) for at, fact in enumerate(facts)]
    size = f'width="{width:g}" height="{top + height:g}"'
    view = f'viewBox="0 0 {width:g} {top + height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view} {size} font-family="system-ui, sans-serif">'
    below = [f'<g transform="translate(0 {top})">', *parts, "</g></svg>", ""]
    return "\n".join([head, f'<rect {size} fill="{PAPER}"/>', *lines, *below]).encode()


def element(width: float, height: float, parts: Iterable[str]) -> str:
    """A picture inside of a page of HTML."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>"])


def inline(colours: np.ndarray, stored: np.ndarray, pixels: tuple[int, int]) -> str:
    """A panel alone, inside of a page of HTML; arguments as those of `panel`."""
    high, wide = (side * count for side, count in zip(pixels, stored.shape, strict=True))
    return element(wide, high, [panel(0, colours, stored, pixels)])


def write(path: Path, picture: bytes) -> None:
    with files.replacing(path) as file:
        file.write(picture)


def _cut(words: str, size: int, width: float) -> str:
    room = int((width - 2 * MARGIN) / (0.62 * size))
    return words if len(words) <= room else f"{words[: room - 1]}…"


def mixed(colours: Sequence[str], at: np.ndarray) -> np.ndarray:
    """float64 [..., 3], 0 to 255: the colours at 0 to 1 on a scale of some."""
    known = np.array([list(bytes.fromhex(each[1:])) for each in colours])
    places = np.linspace(0, 1, len(known))
    return np.stack([np.interp(at, places, known[:, channel]) for channel in range(3)], -1)


def panel(x: float, colours: np.ndarray, stored: np.ndarray, pixels: tuple[int, int]) -> str:
    """The stored cells, bool [rows, columns], in `colours` [rows, columns, 3]; a cell has pixels (high, wide)."""
    rows, columns = stored.shape
    codes = np.where(stored, np.round(colours).astype(np.int64) @ (1 << 16, 1 << 8, 1), -1)
    found: dict[int, list[str]] = {}
    for row, line in enumerate(codes):
        starts = np.flatnonzero(np.diff(line, prepend=-2))
        for start, end in zip(starts, [*starts[1:], columns], strict=True):
            if line[start] >= 0:
                found.setdefault(int(line[start]), []).append(f"M{start} {row}h{end - start}v1H{start}z")
    parts = [f'<path fill="#{code:06x}" d="{"".join(shapes)}"/>' for code, shapes in found.items()]
    if min(pixels) >= GAP_FROM:
        down = "".join([f"M0 {at}H{columns}" for at in range(1, rows)])
        along = "".join([f"M{at} 0V{rows}" for at in range(1, columns)])
        for lines, one in ((down, 1 / pixels[0]), (along, 1 / pixels[1])):
            parts.append(f'<path stroke="{PAPER}" stroke-width="{one:g}" d="{lines}"/>')
    place = f'transform="translate({x:g} 0) scale({pixels[1]} {pixels[0]})" shape-rendering="crispEdges"'
    ground = f'<rect width="{columns}" height="{rows}" fill="{EMPTY}"/>'
    return "\n".join([f"<g {place}>", ground, *parts, "</g>"])


def sides(
    shape: tuple[int, int], drawn: tuple[int, int], width: int, height: int, bars: Sequence[np.ndarray]
) -> str:
    """Of a panel at LEFT: the sides of the matrix as ticks, and bars for rows (right) and columns (below).

    `drawn` are the elements that the panel shows: the last cell is whole, even if it sticks out of the matrix.
    """
    parts = [text(LEFT, -6, "0"), text(LEFT - 6, SMALL, "0", anchor="end")]
    right, below = (most / all_ for most, all_ in ((shape[1], drawn[1]), (shape[0], drawn[0])))
    parts.append(text(LEFT + right * width, -6, str(shape[1]), anchor="end"))
    parts.append(text(LEFT - 6, max(below * height, 2.0 * SMALL), str(shape[0]), anchor="end"))
    for at, (lengths, name) in enumerate(zip(bars, ("row", "column"), strict=True)):
        most = max(float(lengths.max(initial=0.0)), 1.0)
        along, across = (height, "HV") if at == 0 else (width, "VH")
        steps = "".join(f"{across[0]}{each:.4g}{across[1]}{place + 1}" for place, each in enumerate(lengths))
        scale = (BAR / most, along / max(len(lengths), 1))
        place = (LEFT + width + GAP, 0) if at == 0 else (LEFT, height + GAP)
        turned = scale if at == 0 else scale[::-1]
        parts.append(
            f'<path fill="{BARS}" transform="translate({place[0]} {place[1]}) scale({turned[0]:.6g} {turned[1]:.6g})" '
            f'd="M0 0{steps}{across[0]}0z"/>'
        )
        words = f"up to {most:.3g} blocks in a {name}"
        parts.append(text(place[0], -6 if at == 0 else height + GAP + BAR + LINE, words))
    return "\n".join(parts)


def legend(
    x: float, height: float, colours: Sequence[str], label: str, ends: tuple[str, str] = ("", "")
) -> str:
    """A bar of colours, the first of them below, and what its lower and upper end mean."""
    name = f"scale{x:g}"
    steps = "".join(
        f'<stop offset="{at / max(len(colours) - 1, 1):g}" stop-color="{each}"/>'
        for at, each in enumerate(colours)
    )
    return "\n".join(
        [
            f'<linearGradient id="{name}" x1="0" y1="1" x2="0" y2="0">{steps}</linearGradient>',
            f'<rect x="{x:g}" width="{SCALE}" height="{height:g}" fill="url(#{name})"/>',
            text(x, height + LINE, label),
            text(x + SCALE + 4, height, ends[0]),
            text(x + SCALE + 4, SMALL, ends[1]),
        ]
    )
