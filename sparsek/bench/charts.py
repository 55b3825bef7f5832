"""Draws the pictures of `figures` as SVG, one for light and one for dark pages. Needs the plot extra.

The same records give the same file: no date, no random ids. The text stays text, in the reader's own sans-serif font.
`stamp` of a file is the digest of what it shows and of the code here, so that a check needs no drawing.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsek.bench.engine.bench import Record
from sparsek.bench.figures import CUDNN, FLASH4, FLEX, OURS, PICTURES, Axis, Panel, Picture
from sparsek.core.errors import SparseKError
from sparsek.plan.sources import ROOT, files_hash

# Okabe and Ito's colours, told apart by readers who do not see red and green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
STAMP = re.compile(r"sparsek:([0-9a-f]{16})")
# Points of a pixel: matplotlib draws 72 to the inch, and a picture has 100 pixels to the inch.
PIXEL = 0.72
TITLE, NAME, TICK = 16 * PIXEL, 14 * PIXEL, 13 * PIXEL
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


class MissingMatplotlibError(SparseKError):
    """Charts need the plot extra."""


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingMatplotlibError("charts need matplotlib: pip install 'sparsek[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def code_hash() -> str:
    """The digest of the code that draws; comments and layout do not count."""
    return files_hash([Path(__file__)], ROOT)


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
    plt = pyplot()
    width, height = picture.size
    look, written = THEMES[theme], io.StringIO()
    settings = {
        "svg.hashsalt": "sparsek",
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "text.color": look.ink,
        "axes.edgecolor": look.faint,
        "axes.facecolor": "none",
    }
    with plt.rc_context(settings):
        figure = plt.figure(figsize=(width / 100, height / 100), facecolor="none")
        before = None
        for panel, left, right in _places(picture):
            shape = (left / width, BOTTOM / height, (right - left) / width, 1 - (BOTTOM + TOP) / height)
            axes = figure.add_axes(shape)
            _panel(axes, panel, look, right - left, height - BOTTOM - TOP)
            axes.tick_params(labelleft=panel.y != before)
            before = panel.y
        figure.text(6 / width, 10 / height, picture.note, fontsize=12 * PIXEL, color=look.faint)
        stamp = f"sparsek:{picture.digest(code_hash())}"
        metadata = {"Date": None, "Creator": "sparsek", "Identifier": stamp, "Title": picture.question}
        figure.savefig(written, format="svg", metadata=metadata)
        plt.close(figure)
    text = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", FONTS, written.getvalue())
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'width="{width}" height="{height}"', text, count=1)


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


def _panel(axes: Any, panel: Panel, look: Theme, width: float, height: float) -> None:
    _scale(axes.xaxis, axes.set_xscale, axes.set_xlim, panel.x, look)
    _scale(axes.yaxis, axes.set_yscale, axes.set_ylim, panel.y, look)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x" if panel.pairs else "y", color=look.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(panel.x.title, fontsize=TICK, color=look.faint, labelpad=4)
    for line in panel.lines:
        colour, marker, style = look.of(line.label)
        weight, size, order = (2.4, 6, 3) if line.label == OURS else (1.6, 4.5, 2)
        given = {"color": colour, "marker": marker or None, "markersize": size, "zorder": order}
        given |= {"linewidth": weight, "linestyle": "none" if panel.pairs else style}
        axes.plot(*zip(*line.points, strict=True), **given)
    if panel.pairs:
        _pairs(axes, panel, look)
    else:
        _names(axes, panel, look, height)
    heads = [(panel.title, TITLE, look.ink, "bold", 38), (panel.y.title, TICK, look.faint, "normal", 18)]
    left = -axes.get_position().x0 * axes.figure.get_figwidth() * 100 / width if panel.pairs else 0.0
    for text, size, colour, weight, above in heads:
        place = (left + (6 / width if panel.pairs else 0), 1 + above / height)
        axes.text(*place, text, transform=axes.transAxes, fontsize=size, color=colour, weight=weight)


def _scale(ticks: Any, set_scale: Any, set_limits: Any, of: Axis, look: Theme) -> None:
    if of.log:
        set_scale("log", base=2)
    set_limits(*(reversed(of.limits) if of.falling else of.limits))
    shown = _shown(of)
    ticks.set_ticks([place for place, _ in shown], [text for _, text in shown])
    ticks.set_tick_params(which="major", labelsize=TICK, labelcolor=look.faint, length=0, pad=5)
    ticks.set_tick_params(which="minor", length=0)
    ticks.set_minor_locator(ticks.get_major_locator())


def _shown(of: Axis) -> list[tuple[float, str]]:
    return [(place, text) for place, text in of.ticks if of.limits[0] <= place <= of.limits[1]]


def _names(axes: Any, panel: Panel, look: Theme, height: float) -> None:
    """Names and values of the lines behind their last points, moved apart where they would touch."""
    apart = 18 / height
    to_axes = axes.transData + axes.transAxes.inverted()
    texts = (
        (line, f"{line.label} {line.end}".strip() if panel.labelled else line.end) for line in panel.lines
    )
    ends = sorted((to_axes.transform(line.points[-1])[1], line.label, text) for line, text in texts if text)
    places = [place for place, _, _ in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + apart)
    for index in reversed(range(len(places))):
        highest = places[index + 1] - apart if index + 1 < len(places) else 1.0
        places[index] = min(places[index], highest)
    for (_, label, text), place in zip(ends, places, strict=True):
        weight = "bold" if label == OURS else "normal"
        where = {"transform": axes.transAxes, "va": "center", "fontsize": NAME, "weight": weight}
        axes.text(1.02, place, text, color=look.of(label)[0], **where)


def _pairs(axes: Any, panel: Panel, look: Theme) -> None:
    """A line between the two points of a row, and the names above the first row's."""
    for points in zip(*(line.points for line in panel.lines), strict=True):
        given = {"color": look.grid, "linewidth": 3, "zorder": 1, "solid_capstyle": "round"}
        axes.plot(*zip(*points, strict=True), **given)
    smaller = min(panel.lines, key=lambda line: line.points[0])
    for line in panel.lines:
        offset = {
            "xytext": (0, 9),
            "textcoords": "offset points",
            "ha": "right" if line is smaller else "left",
        }
        style = {"fontsize": NAME, "weight": "bold", "color": look.of(line.label)[0]}
        axes.annotate(line.label, line.points[0], **offset, **style)
