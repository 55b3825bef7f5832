"""Which configs of a kernel to measure, and which of the measured ones wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsek.plan.sources import source_hash
from sparsek.plan.table import Entry, as_json, key_of

# The gain over the kernel's own choice that a config needs to win: less is within the spread of rounds.
MARGIN = 0.02


@dataclass(frozen=True)
class Trial:
    """A config and the median seconds of its calls, or the reason why it has none."""

    config: Any
    seconds: float = math.inf
    why_not: str = ""


def shortlist(kernel: Any, p: Any, most: int) -> list[Any]:
    """The kernel's own choice, then others by rising prediction: at most `most` configs."""
    default = kernel.default(p)
    others = [each for each in kernel.configs(p) if each != default]
    return [default, *sorted(others, key=lambda each: kernel.seconds(p, each))][: max(1, most)]


def winner(trials: Sequence[Trial], margin: float = MARGIN) -> Trial:
    """The fastest trial; the first, which is the kernel's own choice, unless another gains more than `margin`."""
    default = trials[0]
    best = min(trials, key=lambda each: each.seconds)
    return best if best.seconds < default.seconds * (1 - margin) else default


def entry_of(kernel: Any, p: Any, trials: Sequence[Trial], date: str) -> Entry | None:
    """The table entry after these trials, the kernel's own choice first; None if that choice could not be measured."""
    default, best = trials[0], winner(trials)
    if not math.isfinite(default.seconds):
        return None
    return Entry(
        card=p.card.name,
        kernel=kernel.name,
        source=source_hash(kernel.name),
        problem=key_of(p),
        config=as_json(best.config),
        seconds=float(f"{best.seconds:.6g}"),
        default_seconds=float(f"{default.seconds:.6g}"),
        predicted=float(f"{kernel.seconds(p, default.config):.6g}"),
        date=date,
    )
