"""The data of cases: random matrices, and as many sets of them as exceed the cache."""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.core.device import Card
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.random import Spread, random_bsr, random_dense
from sparsek.testing.poison import poisoned

# The sets together exceed the last-level cache this many times, so that nothing sits in it by accident.
CACHE_MULTIPLE = 4
MAX_SETS = 64

Stored = TypeVar("Stored", BSR, BSR24)


def set_count(card: Card, footprint: int) -> int:
    """How many operand sets of `footprint` bytes exceed the cache of the card several times, 2 to 64."""
    return max(2, min(MAX_SETS, math.ceil(CACHE_MULTIPLE * card.l2_bytes / max(1, footprint))))


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a value, those inside matrices too."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def spoil(results: Any) -> None:
    """Fills every float tensor with NaN."""
    for each in tensors(results):
        if each.is_floating_point():
            each.detach().fill_(torch.nan)


class Draw:
    """Random data in one dtype on one device. Every call moves the seed on."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype, self.seed = device, dtype, seed

    def normal(self, *shape: int) -> torch.Tensor:
        """N(0, 1) values."""
        return random_dense(*shape, dtype=self.dtype, device=self.device, seed=self._next())

    def weight(self, rows: int, columns: int) -> torch.Tensor:
        """A dense W whose products x @ W.T have the scale of x."""
        return self.normal(rows, columns).mul_(columns**-0.5)

    def blocks(
        self, m: int, k: int, block: tuple[int, int], density: float, pattern: Spread = "uniform"
    ) -> BSR:
        """A BSR whose product with N(0, 1) values has unit scale."""
        given = {"dtype": self.dtype, "device": self.device, "seed": self._next()}
        return random_bsr(m, k, block, density, pattern=pattern, **given)

    def revalued(self, a: Stored) -> Stored:
        """A matrix of the same pattern with memory of its own: its blocks have changed places.

        In ragged matrices they stay where they are, since those at the edge hold padding.
        """
        order = torch.arange(a.nnzb, device=a.device)
        if not a.pattern.is_ragged:
            generator = torch.Generator(device=a.device).manual_seed(self._next())
            order = torch.randperm(a.nnzb, generator=generator, device=a.device)
        if isinstance(a, BSR24):
            return BSR24.unchecked(a.pattern, a.values[order], a.meta[order])
        return BSR.unchecked(a.pattern, a.values[order])

    def poison(self, *shape: int) -> torch.Tensor:
        """NaN, for a result."""
        return poisoned(shape, self.dtype, self.device)

    def _next(self) -> int:
        self.seed += 1
        return self.seed


@dataclass(frozen=True)
class TokenMaker:
    """A call that makes the mask of the blocks `indices` [1, Hkv, S, n] of each query and head of keys."""

    indices: torch.Tensor
    case: Any

    def __call__(self) -> BlockMask:
        of_q, of_k, _ = self.case.shapes
        one = torch.empty((), dtype=torch.bfloat16, device=self.indices.device)
        return TokenLists(self.indices, self.case.block[1]).mask_for(one.expand(of_q), one.expand(of_k))
