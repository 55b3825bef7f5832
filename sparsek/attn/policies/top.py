"""Policies that keep a fixed number of blocks with the highest scores of means: MeanTopK, SubBlock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies.estimates import block_scores, check_parts
from sparsek.attn.policies.policy import Policy, PolicyInputs
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput


def budget(policy: Any, place: Place) -> int:
    """The blocks that each tile keeps: `topk`, or a share of all rounded up; as many as `always` needs at least."""
    columns, topk = place.grid[1], policy.topk
    wanted = math.ceil(policy.density * columns - 1e-9) if topk is None else topk
    return max(min(wanted, columns), min(_always_held(place, policy.always, policy.causal), columns), 1)


@lru_cache(maxsize=64)
def _always_held(place: Place, always: tuple[int, int], causal: bool) -> int:
    """Blocks that `always` may keep in a tile: the sinks, and those near the tile, which may straddle blocks."""
    sinks, local = always
    if not local or not place.grid[0]:
        return sinks
    own = int((place.last // place.block[1] - place.first // place.block[1]).max()) + 1
    return sinks + own + (local - 1) * (1 if causal else 2)


def chosen(policy: Any, given: PolicyInputs, scores: Tensor) -> BlockMask:
    """The mask of the highest scores."""
    always = policy.always if any(policy.always) else None
    return given.topk(scores, budget(policy, given.place), policy.causal, always)


def check_share(policy: Any) -> None:
    """InvalidInput unless a policy has a valid `topk`, or a valid `density`, and `always`."""
    if policy.topk is not None:
        object.__setattr__(policy, "topk", arguments.integer("topk", policy.topk, 1))
    density = arguments.number("density", policy.density, 0.0, 1.0)
    if not density:
        raise InvalidInput("density is 0; it must be a share of the key blocks over 0, up to 1")
    object.__setattr__(policy, "density", density)
    object.__setattr__(policy, "always", arguments.pair("always", policy.always))


@dataclass(frozen=True)
class MeanTopK(Policy):
    """Keeps the key blocks whose mean key has the largest product with the mean query of a tile.

    Two means are a poor estimate where keys of a block differ; `SubBlock` costs twice as much and finds more.

    Args:
        topk: Blocks that each tile keeps; by default `density` of all.
        density: The share of the key blocks of the sequence that each tile keeps, over 0, up to 1, rounded up. With
            `causal` early tiles have fewer blocks to choose from and keep all.
        block: The block in tokens: 64 or 128, or a pair (queries, keys) of them.
        causal: Whether a query sees no keys after its own.
        always: (sinks, local) in blocks, kept whatever their scores and counted in the budget, which grows to hold
            them: the first `sinks` blocks, and `local` up to the tile's own, without `causal` also from there on.

    Raises:
        InvalidInput: For options that are out of range.

    Source: MInference's block_sparse pattern, Jiang et al., arXiv:2407.02490 (block=64, topk=100); MoBA, Lu et al.,
    arXiv:2502.13189.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = (torch.randn(1, heads, 2048, 64) for heads in (4, 2, 2))
        >>> policy = sk.policies.MeanTopK(density=0.25)
        >>> policy.mask(q, k).heads, sk.attention(q, k, v, policy).shape
        (4, torch.Size([1, 4, 2048, 64]))
    """

    topk: int | None = None
    density: float = 0.125
    block: int | tuple[int, int] = 128
    causal: bool = True
    always: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self)

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        return chosen(self, given, block_scores(given, causal=self.causal))


@dataclass(frozen=True)
class SubBlock(Policy):
    """Keeps the key blocks with the largest estimate of softmax mass, from means of parts of blocks.

    The score of a block is log(sum of exp(scale * mean query . mean key)) over pairs of a part of the tile and a part
    of the block, in float32. In the source's measurements on 567 samples of video models it keeps more mass than
    means of whole blocks at equal density.

    Args:
        density: The share of the key blocks of the sequence that each tile keeps, over 0, up to 1, rounded up.
        parts: Parts of a tile of queries and of a block of keys: powers of two, with 8 tokens or more in each.
        block: The block in tokens: 64 or 128, or a pair (queries, keys) of them.
        causal: Whether a query sees no keys after its own.
        topk: Blocks that each tile keeps, in place of `density`.
        always: (sinks, local) in blocks, as in `MeanTopK`. The source has none.

    Raises:
        InvalidInput: For options that are out of range.

    Source: SGLang's SUBBLOCK_SPARSE_ATTN (sgl-project/sglang#34148): sparsity 0.75, 4 x 4 parts, blocks of 64.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(2, 1, 4, 1024, 64).unbind()
        >>> sk.policies.SubBlock().mask(q, k).density
        0.25
    """

    density: float = 0.25
    parts: tuple[int, int] = (4, 4)
    block: int | tuple[int, int] = 64
    causal: bool = False
    topk: int | None = None
    always: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self)
        object.__setattr__(self, "parts", arguments.pair("parts", self.parts, 1))
        check_parts(self.parts, self.sides)

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        return chosen(self, given, block_scores(given, self.parts, self.causal))
