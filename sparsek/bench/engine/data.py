"""The data of cases: random matrices, and as many sets of them as exceed the cache."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sparsek.core.device import Card, card_of
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24

# The sets together exceed the last-level cache this many times, so that nothing sits in it by accident.
CACHE_MULTIPLE = 4
MAX_SETS = 64

Made = TypeVar("Made")
Stored = TypeVar("Stored", BSR, BSR24)


def set_count(card: Card, footprint: int) -> int:
    """How many operand sets of `footprint` bytes exceed the cache of the card several times, 2 to 64."""
    return max(2, min(MAX_SETS, math.ceil(CACHE_MULTIPLE * card.l2_bytes / max(1, footprint))))


def sets_of(device: torch.device, footprint: int, one: Callable[[int], Made]) -> list[Made]:
    """Operand sets `one(index)` of so many bytes each: 2 to 64, together several times the cache of the card."""
    return [one(index) for index in range(set_count(card_of(device), footprint))]


def random_dense(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """N(0, 1) values, drawn there. Never zeros: on an H200 their product runs 13 % faster."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device=device, generator=generator)


def random_weight(rows: int, columns: int, **given: Any) -> torch.Tensor:
    """A random dense W whose products x @ W.T have the scale of x; keywords as of `random_dense`."""
    return random_dense(rows, columns, **given).mul_(columns**-0.5)


def revalued(a: Stored, seed: int) -> Stored:
    """A matrix of the same pattern with memory of its own: its blocks have changed places.

    In ragged matrices they stay where they are, since those at the edge hold padding.
    """
    order = torch.arange(a.nnzb, device=a.device)
    if not a.pattern.is_ragged:
        generator = torch.Generator(device=a.device).manual_seed(seed)
        order = torch.randperm(a.nnzb, generator=generator, device=a.device)
    if isinstance(a, BSR24):
        return BSR24.unchecked(a.pattern, a.values[order], a.meta[order])
    return BSR.unchecked(a.pattern, a.values[order])
