"""What one eager call with a kept plan costs the host, by card: measured, and written here by `make readme`.

A product with less device time is bound by its host, unless a CUDA graph replays it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from sparsek.core.device import H200, Card

FILE = Path(__file__).with_name("host.json")


def eager_seconds(card: Card) -> float:
    """Seconds of one eager call on the host of a card; the H200's for a card without a measurement, 0 for a CPU."""
    if card.is_cpu:
        return 0.0
    known = table()
    return known.get(card.name, known[H200.name])["seconds"]


@cache
def table() -> dict[str, dict[str, Any]]:
    """By name of the card: `seconds`, and the `case` and `date` of their record."""
    return json.loads(FILE.read_text(encoding="utf-8"))
