"""Draws the pictures of `figures` as SVG, one for light and one for dark pages.

The same records give the same file: no date, no random ids. The text stays text, in the reader's own sans-serif font.
`stamp` of a file is the digest of what it shows and of the code here, so that a check needs no drawing.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from sparsek.pictures.svg import text
from sparsek_bench.engine.bench import Record
from sparsek_bench.engine.sources import files_hash
from sparsek_bench.figures import CUDNN, FLASH4, FLEX, OURS, PICTURES, Axis, Panel, Picture, Point

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
STAMP = re.compile(r"sparsek:([0-9a-f]{16})")
TITLE, NAME, TICK = 16, 14, 13  # pixels of letters
APART = 18  # pixels of names behind lines
RIGHT, BEHIND, TOP, BOTTOM = 54, 142, 64, 84


@dataclass(frozen=True)
class Theme:
    """Colours of a page: text, lesser text, the grid, and what lines are drawn in."""

    ink: str
    faint: str
    grid: str
    ours: str
    torch: str
    flash: str
    cudnn: str

    def of(self, label: str) -> tuple[str, str, str]:
        """Colour, marker and line style of a name."""
        known = {
            OURS: (self.ours, "o", "-"),
            "torch.sparse": (self.torch, "s", "-"),
            "torch": (self.torch, "s", "-"),
            FLEX: (self.torch, "s", "-"),
            FLASH4: (self.flash, "^", "-"),
            CUDNN: (self.cudnn, "D", "-"),
            "1/density": (self.faint, "", ":"),
            "bool mask": (self.cudnn, "", "--"),
        }
        return known.get(label, (self.faint, "", "--"))


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d8dee4", "#0072B2", "#C75000", "#00805D", "#A6508A"),
    "dark": Theme("#e6edf3", "#9aa4af", "#3a414a", "#56B4E9", "#F2994A", "#2FC79A", "#DB93BF"),
}


def code_hash() -> str:
    """The digest of the code that draws; comments and layout do not count."""
    return files_hash([Path(__file__)], Path(__file__).parent)


def _filled(found: Sequence[Record]) -> dict[str, Picture]:
    """The pictures that the records can fill, by name."""
    made = ((name, make(found)) for name, make in PICTURES.items())
    return {name: picture for name, picture in made if picture is not None}


def stamps(found: Sequence[Record]) -> dict[str, str]:
    """The stamp of every file that `draw` makes of these records, by its name."""
    filled = _filled(found).items()
    return {f"{name}-{theme}.svg": each.digest(code_hash()) for name, each in filled for theme in THEMES}


def stamp_in(svg: str) -> str:
    """The stamp of a drawn file; "" if it has none."""
    found = STAMP.search(svg)
    return found[1] if found else ""


def draw(found: Sequence[Record], folder: Path) -> list[Path]:
    """Writes every picture that the records can fill into `folder`, light and dark, and returns the paths."""
    drawn = []
    for name, picture in _filled(found).items():
        for theme in THEMES:
            folder.mkdir(parents=True, exist_ok=True)
            drawn.append(folder / f"{name}-{theme}.svg")
            drawn[-1].write_text(svg(picture, theme), encoding="utf-8")
    return drawn


def pictures(found: Sequence[Record]) -> list[tuple[str, str]]:
    """The question and the SVG text, for light pages, of each picture that the records can fill but the front one."""
    return [(each.question, svg(each, "light")) for name, each in _filled(found).items() if name != "front"]


def svg(picture: Picture, theme: str) -> str:
    """The text of a picture for "light" or "dark" pages."""
    (width, height), look = picture.size, THEMES[theme]
    parts, before = [], None
    for number, (panel, left, right) in enumerate(_places(picture)):
        frame = Frame(left, right, TOP, height - BOTTOM, panel.x, panel.y)
        parts += _panel(frame, panel, look, panel.y != before, f"panel{number}")
        before = panel.y
    parts.append(text(6, height - 10, picture.note, size=12, colour=look.faint))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    stamp = (
        f"<title>{escape(picture.question)}</title><metadata>sparsek:{picture.digest(code_hash())}</metadata>"
    )
    return "\n".join([f'{head} font-family="{FONTS}">', stamp, *parts, "</svg>", ""])


def _places(picture: Picture) -> list[tuple[Panel, float, float]]:
    """Each panel with the pixels of its left and right edge: equal widths, and room for texts beside them."""
    beside, before = [], None
    for panel in picture.panels:
        names = max((len(text) for _, text in _shown(panel.y)), default=0)
        left = 12 if panel.y == before else 16 + (7.2 if panel.pairs else 8.2) * names
        ends = RIGHT if any(line.end for line in panel.lines) else 24
        beside.append((left, BEHIND if panel.labelled and not panel.pairs else ends))
        before = panel.y
    width = (picture.size[0] - sum(a + b for a, b in beside)) / len(beside)
    places, at = [], 0.0
    for panel, (left, right) in zip(picture.panels, beside, strict=True):
        places.append((panel, at + left, at + left + width))
        at += left + width + right
    return places


class Frame(NamedTuple):
    """The pixels of a panel's edges, and its axes."""

    left: float
    right: float
    top: float
    bottom: float
    x: Axis
    y: Axis

    def at(self, point: Point) -> Point:
        """The pixel of a point."""
        x, y = (_along(axis, value) for axis, value in zip((self.x, self.y), point, strict=True))
        return self.left + x * (self.right - self.left), self.bottom - y * (self.bottom - self.top)


def _along(axis: Axis, value: float) -> float:
    """The place of a value on an axis, 0 to 1 between its limits."""
    low, high, value = (math.log2(each) if axis.log else each for each in (*axis.limits, value))
    place = (value - low) / (high - low)
    return 1 - place if axis.falling else place


def _panel(frame: Frame, panel: Panel, look: Theme, has_ticks: bool, name: str) -> list[str]:
    left, right, top, bottom = frame[:4]
    begin = 6 if panel.pairs else left
    parts = [text(begin, top - 38, panel.title, size=TITLE, colour=look.ink, bold=True)]
    parts.append(text(begin, top - 18, panel.y.title, size=TICK, colour=look.faint))
    for value, words in _shown(panel.y):
        y = frame.at((panel.x.limits[0], value))[1]
        parts += [] if panel.pairs else [_line(((left, y), (right, y)), look.grid, 1)]
        parts += (
            [text(left - 7, y + 4.5, words, size=TICK, colour=look.faint, anchor="end")] if has_ticks else []
        )
    for value, words in _shown(panel.x):
        x = frame.at((value, panel.y.limits[0]))[0]
        parts += [_line(((x, top), (x, bottom)), look.grid, 1)] if panel.pairs else []
        parts.append(text(x, bottom + 18, words, size=TICK, colour=look.faint, anchor="middle"))
    parts.append(_line(((left, bottom), (right, bottom)), look.faint, 1))
    parts.append(
        text((left + right) / 2, bottom + 37, panel.x.title, size=TICK, colour=look.faint, anchor="middle")
    )
    box = f'x="{left:.5g}" y="{top}" width="{right - left:.5g}" height="{bottom - top}"'
    parts.append(f'<clipPath id="{name}"><rect {box}/></clipPath>')
    if panel.pairs:
        for pair in zip(*(line.points for line in panel.lines), strict=True):
            parts.append(_line([frame.at(point) for point in pair], look.grid, 4))
    for line in sorted(panel.lines, key=lambda each: each.label == OURS):
        colour, marker, style = look.of(line.label)
        points = [frame.at(point) for point in line.points]
        width, radius = (3.3, 4.2) if line.label == OURS else (2.2, 3.2)
        if not panel.pairs:
            parts.append(f'<g clip-path="url(#{name})">{_line(points, colour, width, DASHES[style])}</g>')
        if marker:
            shape = MARKERS[marker].format(*(f"{each * radius:.3g}" for each in (1, 2)))
            parts += [f'<path fill="{colour}" d="M{x:.5g} {y:.5g}{shape}"/>' for x, y in points]
    return [*parts, *(_pairs(frame, panel, look) if panel.pairs else _names(frame, panel, look))]


# Of radius {0}, from the middle. Dashes of lines.
MARKERS = {
    "o": "m-{0} 0a{0} {0} 0 1 0 {1} 0a{0} {0} 0 1 0 -{1} 0z",
    "s": "m-{0} -{0}h{1}v{1}h-{1}z",
    "^": "m0 -{0}l{0} {1}h-{1}z",
    "D": "m0 -{0}l{0} {0}l-{0} {0}l-{0} -{0}z",
}
DASHES = {"-": "", "--": "8 3.5", ":": "2.2 3.6"}


def _line(points: Sequence[Point], colour: str, width: float, dashes: str = "") -> str:
    way = "L".join(f"{x:.5g} {y:.5g}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path fill="none" stroke="{colour}" stroke-width="{width}"{dashed} d="M{way}"/>'


def _shown(of: Axis) -> list[tuple[float, str]]:
    return [(place, text) for place, text in of.ticks if of.limits[0] <= place <= of.limits[1]]


def _names(frame: Frame, panel: Panel, look: Theme) -> list[str]:
    """Names and values of the lines behind their last points, moved apart where they would touch."""
    texts = (
        (line, f"{line.label} {line.end}".strip() if panel.labelled else line.end) for line in panel.lines
    )
    ends = sorted((-frame.at(line.points[-1])[1], line.label, words) for line, words in texts if words)
    places = [place for place, _, _ in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + APART)
    for index in reversed(range(len(places))):
        highest = places[index + 1] - APART if index + 1 < len(places) else -frame.top
        places[index] = min(places[index], highest)
    return [
        text(frame.right + 5, 5 - place, words, size=NAME, colour=look.of(label)[0], bold=label == OURS)
        for (_, label, words), place in zip(ends, places, strict=True)
    ]


def _pairs(frame: Frame, panel: Panel, look: Theme) -> list[str]:
    """The names above the first row."""
    smaller = min(panel.lines, key=lambda line: line.points[0])
    return [
        text(x, y - 12, line.label, size=NAME, colour=look.of(line.label)[0], bold=True,
             anchor="end" if line is smaller else "start")
        for line in panel.lines
        for x, y in [frame.at(line.points[0])]
    ]  # fmt: skip
