"""What `sparsify_` and `prune` did with each layer of a model: a table, JSON, and a page of HTML with pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any

import numpy as np
import torch

from sparsek.core import arguments, files
from sparsek.core.errors import InvalidInput
from sparsek.core.files import StrPath
from sparsek.pictures import blocks, svg
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.two_four import GROUP, unpack

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a layer's name
CELLS, SIDE = 48, 192  # cells and pixels of the longer side of a picture
CORNER, PIXEL = (16, 32), 6  # elements of a detail, and pixels of each
PICTURES = 256  # on a page
CHART = (960, 160)  # pixels of the chart of errors
OPTIONAL = {
    "error": "error",
    "error_after": "after",
    "speed": "speed",
    "measured_speed": "measured",
    "pruning_seconds": "seconds",
}  # columns
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 1100px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid #edeff3; white-space: nowrap }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
td.why { white-space: normal }
figure { display: inline-block; margin: 0 16px 16px 0; vertical-align: top; font-size: 12px; color: #6b7280 }
"""


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Attributes:
        name: Its name in the model.
        shape: (out_features, in_features), or that of the largest parameter of another kind of layer.
        format: The format of its weight now, for example "BSR 64 50 %"; "" if it is dense.
        why_not: Why it was skipped; "" if it was not.
        why: Why "auto" chose this format, and how many packed experts no token of the calibration reaches.
        config: Its config as JSON; None if it was skipped.
        kept: The share of its values that is stored; None if it was skipped.
        kept_norm: ||stored values|| / ||weight||, Frobenius, before any update; None if it was skipped, and on the meta
            device.
        error: ||y - y'|| / ||y||. Of `prune` on the calibration, y of the dense model, y' of the pruned one before
            weights are updated; of "auto" in `sparsify_` on normally distributed inputs. None without either.
        error_after: The same after the update and the reconstruction by layer, and in FP8 after rounding.
        seconds: The predicted time of its product; None without a card, and where no kernel runs.
        dense_seconds: The predicted time of the dense product; None without a card.
        dtype: That of its weight, for which times are predicted, such as "fp32"; "" without a card.
        pruning_seconds: The time that its pruning took; None of `sparsify_`.
        measured_speed: Its measured speed over that of the dense layer, on inputs as `measure` gives it; None without.
        picture: The share of stored blocks in each cell of its pattern, for the page; None without blocks.
        detail: Which elements are stored in the corner of a 2:4 matrix, or of the first stored block; None without 2:4.
    """

    name: str
    shape: tuple[int, ...]
    format: str = ""
    why_not: str = ""
    why: str = ""
    config: dict[str, Any] | None = None
    kept: float | None = None
    kept_norm: float | None = None
    error: float | None = None
    error_after: float | None = None
    seconds: float | None = None
    dense_seconds: float | None = None
    dtype: str = ""
    pruning_seconds: float | None = None
    measured_speed: float | None = None
    picture: np.ndarray | None = field(default=None, compare=False, repr=False)
    detail: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def speed(self) -> float | None:
        """The predicted speed over that of the dense layer."""
        if self.seconds is None or self.dense_seconds is None:
            return None
        return self.dense_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON, without its pictures."""
        plain = replace(self, picture=None, detail=None)
        found = asdict(plain) | {"shape": list(self.shape), "speed": self.speed}
        del found["picture"], found["detail"]
        return found


@dataclass(frozen=True)
class Quality:
    """What a model computes before and after, on texts that were not in the calibration.

    Attributes:
        measure: "perplexity" of a causal model; "cosine" of the mean last hidden states to those of the dense model.
        before: Of the dense model.
        after: Of the sparse model.
        texts: The number of texts, or of pieces of texts.
    """

    measure: str
    before: float
    after: float
    texts: int


@dataclass(frozen=True)
class Measured:
    """Measured times of a model, or of its repeated blocks, all together.

    Attributes:
        dense_seconds: Of the dense blocks, on one batch of the calibration, or of the model on `measure`.
        seconds: Of the sparse ones.
        card: Where.
        what: What was measured, as the report names it.
    """

    dense_seconds: float
    seconds: float
    card: str
    what: str = "the blocks of the model take"


@dataclass(frozen=True)
class ModelReport:
    """What `sparsek.sparsify_` or `sparsek.prune` did; `str` of it is a table.

    Attributes:
        rows: A row for each layer with a weight matrix; of `prune` for each linear layer, the pruned ones first, in the
            order of the work.
        card: The name of the card of the predictions; "" without.
        tokens: The number of tokens of the predictions.
        measured: Measured times; None unless `prune` ran on a GPU, or `sparsify_` was given `measure`.
        quality: What `sparsek prune` measured on texts; None from Python.
        settings: The options of `sparsek prune`, by name.
    """

    rows: tuple[LayerRow, ...]
    card: str = ""
    tokens: int = 0
    measured: Measured | None = None
    quality: Quality | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def replaced(self) -> tuple[LayerRow, ...]:
        """The rows of layers that became sparse."""
        return tuple(row for row in self.rows if row.format and not row.why_not)

    @property
    def skipped(self) -> tuple[LayerRow, ...]:
        """The rows of layers that were skipped, those that were sparse before among them."""
        return tuple(row for row in self.rows if not row.format or row.why_not)

    @property
    def speed(self) -> float | None:
        """The predicted speed of the products of all sparse layers together over those of the dense ones."""
        timed = [row for row in self.replaced if row.speed is not None]
        dense = sum(row.dense_seconds or 0.0 for row in timed)
        return dense / sum(row.seconds or 0.0 for row in timed) if timed else None

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON: "rows", "card", "tokens", "speed", "measured", "quality", "settings"."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "card": self.card,
            "tokens": self.tokens,
            "speed": self.speed,
            "measured": None if self.measured is None else asdict(self.measured),
            "quality": None if self.quality is None else asdict(self.quality),
            "settings": dict(self.settings),
        }

    def __str__(self) -> str:
        return "\n".join(["; ".join(self.facts), *_aligned(self.cells())])

    def cells(self) -> list[list[str]]:
        """Return the table in texts, its heads first: a line for each layer, for layers of one kind together."""
        has = {name: any(getattr(row, name) is not None for row in self.rows) for name in OPTIONAL}
        heads = [
            "layer",
            "shape",
            "format",
            "kept",
            "norm",
            *(head for name, head in OPTIONAL.items() if has[name]),
        ]
        groups: dict[tuple[Any, ...], list[LayerRow]] = {}
        for row in self.rows:
            key = NUMBER.sub("*", row.name), row.shape, row.format, re.sub(r"\d+", "*", row.why_not)
            groups.setdefault(key, []).append(row)
        lines = [[*heads, "why"]]
        for (name, shape, form, _), rows in groups.items():
            label = rows[0].name if len(rows) == 1 else f"{name} ({len(rows)})"
            line = [label, "x".join(map(str, shape)), form or "dense"]
            line += [_span((row.kept for row in rows), 100, " %"), _span(row.kept_norm for row in rows)]
            line += [_span(row.error for row in rows)] * has["error"]
            line += [_span(row.error_after for row in rows)] * has["error_after"]
            line += [_span((row.speed for row in rows), 1, "x")] * has["speed"]
            line += [_span((row.measured_speed for row in rows), 1, "x")] * has["measured_speed"]
            line += [_total(row.pruning_seconds for row in rows)] * has["pruning_seconds"]
            lines.append([*line, rows[0].why_not or rows[0].why])
        return lines

    def html(self) -> str:
        """Return a page for a browser, in one file: a chart of errors, a table of layers, and pictures of patterns."""
        return "".join(self._page())

    def to_html(self, path: StrPath) -> None:
        """Write `html()` to a file.

        Args:
            path: The file, whose name ends in .html.

        Raises:
            InvalidInput: For another name, and for a path that cannot be written.
        """
        where = files.as_path("path", path)
        if where.suffix.lower() not in (".html", ".htm"):
            raise InvalidInput(f"path is {arguments.shown(where.name)}; the name of a page must end in .html")
        with files.replacing(where) as file:
            file.write(self.html().encode())

    @property
    def facts(self) -> list[str]:
        """What is true of the whole model, in sentences."""
        return list(self._facts())

    def _facts(self) -> Iterator[str]:
        forms = [row.format for row in self.rows if row.format]
        rounded, of_all = sum(form.startswith("dense") for form in forms), f"of {len(self.rows)} layers are"
        if len(forms) > rounded or not forms:
            yield f"{len(forms) - rounded} {of_all} sparse" + f", {rounded} dense in FP8" * (rounded > 0)
        else:
            yield f"{rounded} {of_all} dense in FP8"
        if self.speed:
            timed = [row for row in self.replaced if row.speed is not None]
            whose = "their products"
            if len(timed) < len(self.replaced):
                whose = f"the products of the {len(timed)} whose time is predicted"
            yield (
                f"{whose} take {1 / self.speed:.3g}x the time of dense ones with {self.tokens} tokens in "
                f"{' and '.join(sorted({row.dtype for row in timed}))}, predicted for {self.card}"
            )
        if self.measured is not None:
            share = self.measured.seconds / self.measured.dense_seconds
            yield f"{self.measured.what} {share:.3g}x the time, measured on {self.measured.card}"
        if self.quality is not None:
            found = self.quality
            on = f"{found.texts} text{'s' * (found.texts != 1)}"
            yield f"{found.measure} {found.before:.4g} before, {found.after:.4g} after, on {on}"

    def _page(self) -> Iterator[str]:
        title = "Sparse model"
        yield f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        yield f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<ul>"
        yield from (f"<li>{_shown(fact[0].upper() + fact[1:])}</li>\n" for fact in self.facts)
        yield "</ul>\n"
        if self.settings:
            yield "<table>"
            for name, value in self.settings.items():
                yield f"<tr><th>{_shown(name)}</th><td>{_shown(value)}</td></tr>\n"
            yield "</table>\n"
        if any(row.error is not None for row in self.replaced):
            yield f"<h2>Error of each layer</h2>\n{_chart(self.replaced)}\n"
        yield f"<h2>Layers</h2>\n{self._table()}\n"
        drawn = [row for row in self.replaced if row.picture is not None or row.detail is not None]
        if drawn:
            more = len(drawn) - PICTURES
            left = f" The first {PICTURES} of {len(drawn)}." if more > 0 else ""
            yield (
                "<h2>Patterns</h2>\n<p>Stored blocks; a cell of several is coloured by their share. Of 2:4 the "
                f"elements in the corner of the weight, or of its first stored block.{left}</p>\n"
            )
            for row in drawn[:PICTURES]:
                yield f"<figure>{_pattern(row)}{_detail(row)}<br>{_shown(row.name)}<br>{_shown(row.format)}</figure>\n"
        yield "</body></html>\n"

    def _table(self) -> str:
        columns: list[tuple[str, Any]] = [
            ("kept", lambda row: _number(row.kept, 100, " %")),
            ("norm", lambda row: _number(row.kept_norm)),
            ("error", lambda row: _number(row.error)),
            ("after", lambda row: _number(row.error_after)),
            ("predicted speed", lambda row: _number(row.speed, 1, "x")),
            ("measured speed", lambda row: _number(row.measured_speed, 1, "x")),
            ("seconds", lambda row: _number(row.pruning_seconds)),
        ]
        columns = [(name, show) for name, show in columns if any(map(show, self.rows))]
        numbers = "".join(f'<th class="n">{name}</th>' for name, _ in columns)
        lines = [f"<tr><th>layer</th><th>shape</th><th>format</th>{numbers}<th>why</th></tr>"]
        for row in self.rows:
            cells = "".join(f'<td class="n">{show(row)}</td>' for _, show in columns)
            shape = " × ".join(map(str, row.shape))
            why = f'<td class="why">{_shown(row.why_not or row.why)}</td>'
            name, form = _shown(row.name), _shown(row.format or "dense")
            lines.append(f"<tr><td>{name}</td><td>{shape}</td><td>{form}</td>{cells}{why}</tr>")
        return "<table>" + "\n".join(lines) + "</table>"


def picture_of(weight: Any) -> np.ndarray | None:
    """The share of stored blocks in each cell of a weight's pattern, for a page. One sync. None without blocks."""
    inner = weight.matrix if isinstance(weight, Quantized) else weight
    pattern = getattr(inner, "pattern", None)
    if pattern is None or inner.device.type == "meta":
        return None
    return blocks.cells(pattern.drawn(), CELLS).astype(np.float32)


def detail_of(weight: Any) -> np.ndarray | None:
    """Which elements are stored in the corner of a 2:4 matrix, or of its first stored block. One sync. None without."""
    inner = weight.matrix if isinstance(weight, Quantized) else weight
    meta = getattr(inner, "meta", None)
    if meta is None or not len(meta) or inner.device.type == "meta":
        return None
    meta = (meta[0] if meta.ndim == 3 else meta)[: CORNER[0], : CORNER[1] // (2 * GROUP)].cpu()
    return (
        unpack(torch.ones(len(meta), GROUP * meta.shape[1], dtype=torch.uint8, device="cpu"), meta).numpy()
        > 0
    )


def _detail(row: LayerRow) -> str:
    if row.detail is None:
        return ""
    return svg.inline(svg.mixed(blocks.SHARE_COLOURS, row.detail.astype(float)), row.detail, (PIXEL, PIXEL))


def _pattern(row: LayerRow) -> str:
    """The pattern of a layer as a picture, its sides in the ratio of those of the weight."""
    if row.picture is None:
        return ""
    shape = math.prod(row.shape[:-1]), row.shape[-1]  # expert below expert
    sides = [
        max(1, round(SIDE * side / max(shape) / count))
        for side, count in zip(shape, row.picture.shape, strict=True)
    ]
    return svg.inline(svg.mixed(blocks.SHARE_COLOURS, row.picture), row.picture > 0, (sides[0], sides[1]))


def _chart(rows: Sequence[LayerRow]) -> str:
    """Bars of the errors of layers, in order: faint before the update, dark after it."""
    width, height = CHART
    step = (width - svg.LEFT) / max(1, len(rows))
    most = max(1e-9, *(each for row in rows for each in (row.error, row.error_after) if each is not None))
    ends = (svg.SMALL, f"{most:.3g}"), (height, "0")
    parts = [svg.text(svg.LEFT - 6, at, each, anchor="end") for at, each in ends]
    for at, row in enumerate(rows):
        for value, colour in ((row.error, svg.BARS), (row.error_after, svg.INK)):
            if value is not None:
                high = height * value / most
                name = f"<title>{_shown(row.name)}: {value:.3g}</title>"
                place = f'x="{svg.LEFT + at * step:.6g}" y="{height - high:.6g}"'
                size = f'width="{max(1.0, 0.8 * step):.6g}" height="{high:.6g}"'
                parts.append(f'<rect {place} {size} fill="{colour}">{name}</rect>')
    words = "light: before weights were updated; dark: after it"
    parts.append(svg.text(svg.LEFT, height + svg.LINE, f"{len(rows)} layers in order; {words}"))
    return svg.element(width, height + 2 * svg.LINE, parts)


def _shown(words: str) -> str:
    return escape("".join(each if each.isprintable() else "\ufffd" for each in words))


def _number(value: float | None, scale: float = 1.0, unit: str = "") -> str:
    return "" if value is None else f"{value * scale:.3g}{unit}"


def _total(values: Iterable[float | None]) -> str:
    known = [each for each in values if each is not None]
    return f"{sum(known):.1f}" if known else ""


def _span(values: Iterable[float | None], scale: float = 1.0, unit: str = "") -> str:
    """The least and the greatest value in three digits, once if they are alike; "" without values."""
    shown = [f"{value * scale:.3g}" for value in sorted(x for x in values if x is not None)]
    if not shown:
        return ""
    return (shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}") + unit


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
