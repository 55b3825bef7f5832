"""What `sparsify_` did with each layer of a model: a table, and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Attributes:
        name: Its name in the model.
        shape: (out_features, in_features), or that of the largest parameter of another kind of layer.
        format: The format of its weight now, for example "BSR 64 50 %"; "" if it was skipped.
        why_not: Why it was skipped; "" if it was not.
        kept: Stored values over out_features * in_features; None if it was skipped.
        kept_norm: ||stored values|| / ||weight||, Frobenius; None if it was skipped, and on the meta device.
        seconds: The predicted time of its product; None without a card, and where no kernel runs.
        dense_seconds: The predicted time of the dense product; None without a card.
    """

    name: str
    shape: tuple[int, ...]
    format: str = ""
    why_not: str = ""
    kept: float | None = None
    kept_norm: float | None = None
    seconds: float | None = None
    dense_seconds: float | None = None

    @property
    def speed(self) -> float | None:
        """The predicted speed over that of the dense layer."""
        if self.seconds is None or self.dense_seconds is None:
            return None
        return self.dense_seconds / self.seconds


@dataclass(frozen=True)
class SparsifyReport:
    """What `sparsek.sparsify_` did; `str` of it is a table.

    Attributes:
        rows: A row for each layer with a weight matrix, in the order of the model.
        card: The name of the card of the predictions; "" without.
        tokens: The number of tokens of the predictions.
    """

    rows: tuple[LayerRow, ...]
    card: str = ""
    tokens: int = 0

    @property
    def replaced(self) -> tuple[LayerRow, ...]:
        """The rows of layers that became sparse."""
        return tuple(row for row in self.rows if row.format)

    @property
    def skipped(self) -> tuple[LayerRow, ...]:
        """The rows of layers that were skipped."""
        return tuple(row for row in self.rows if not row.format)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON: "rows", "card", "tokens"."""
        rows = [{**asdict(row), "shape": list(row.shape), "speed": row.speed} for row in self.rows]
        return {"rows": rows, "card": self.card, "tokens": self.tokens}

    def __str__(self) -> str:
        heads = ["layer", "shape", "format", "kept", "norm", *(["speed"] if self.card else []), "why skipped"]
        groups: dict[tuple[Any, ...], list[LayerRow]] = {}
        for row in self.rows:
            key = re.sub(r"\d+", "*", row.name), row.shape, row.format, re.sub(r"\d+", "*", row.why_not)
            groups.setdefault(key, []).append(row)
        lines = [heads]
        for (name, shape, form, _), rows in groups.items():
            label = rows[0].name if len(rows) == 1 else f"{name} ({len(rows)})"
            cells = [label, "x".join(map(str, shape)), form or "dense"]
            cells += [_span((row.kept for row in rows), 100, " %"), _span(row.kept_norm for row in rows)]
            cells += [_span((row.speed for row in rows), 1, "x")] if self.card else []
            lines.append([*cells, rows[0].why_not])
        whole = f"{len(self.replaced)} of {len(self.rows)} layers are sparse"
        timed = [row for row in self.replaced if row.speed is not None]
        if timed:
            dense = sum(row.dense_seconds or 0.0 for row in timed)
            speed = dense / sum(row.seconds or 0.0 for row in timed)
            whole += f"; their products take {1 / speed:.3g}x the time of dense ones"
            whole += f" with {self.tokens} tokens, predicted for {self.card}"
        return "\n".join([whole, *_aligned(lines)])


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
