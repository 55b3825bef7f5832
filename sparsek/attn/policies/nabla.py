"""Nabla: the fewest blocks that hold a share of the softmax of block means, and a window of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies.estimates import block_mass, block_scores
from sparsek.attn.policies.maps import joined
from sparsek.attn.policies.policy import Policy, PolicyInputs
from sparsek.attn.policies.video import SlidingTile
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput


@dataclass(frozen=True)
class Nabla(Policy):
    """Keeps the fewest key blocks whose share of the softmax over block means reaches `threshold`, and near tiles.

    Args:
        threshold: The share of each row's softmax, over 0, up to 1. Kandinsky 5 calls 1 - threshold P and uses 0.9.
        block: The block in tokens: 64 or 128, or a pair (queries, keys) of them.
        tiles: Blocks that are kept too: a SlidingTile of the same block. Kandinsky 5 uses one of tile (1, 8, 8), window
            (11, 3, 3) and clamped=False, for tokens in patches of 8 x 8.
        causal: Whether a query sees no keys after its own.
        most: Blocks that each tile keeps at most, without those of `tiles`: the room for their list on a GPU. None: no
            bound.

    Raises:
        InvalidInput: For options that are out of range.

    Source: NABLA, Mikhailov et al., arXiv:2507.13546, in Kandinsky 5.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(2, 1, 2, 4 * 16 * 16, 64).unbind()
        >>> tiles = sk.policies.SlidingTile((4, 16, 16), window=(1, 3, 3), tile=(1, 8, 8), clamped=False)
        >>> sk.policies.Nabla(threshold=0.5, tiles=tiles).mask(q, k).heads
        2
    """

    threshold: float = 0.9
    block: int | tuple[int, int] = 64
    tiles: SlidingTile | None = None
    causal: bool = False
    most: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "threshold", checked_threshold(self.threshold))
        if self.most is not None:
            object.__setattr__(self, "most", arguments.integer("most", self.most, 1))
        if self.tiles is None:
            return
        if not isinstance(self.tiles, SlidingTile):
            raise InvalidInput(f"tiles is {arguments.shown(self.tiles)}; it must be a SlidingTile or None")
        if self.tiles.sides != self.sides or self.causal:
            raise InvalidInput(
                f"tiles has blocks of {self.tiles.sides} and is not causal; block is {self.sides} and causal "
                f"{self.causal}"
            )

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        mass = block_mass(given, block_scores(given, causal=self.causal), self.causal)
        found = given.cumulative(mass, self.threshold, self.causal, most=self.most)
        if self.tiles is None:
            return found
        near = self.tiles.choose(given)
        return given.from_map(joined(found, near, union=True), self.causal, of=(found,))


def checked_threshold(threshold: float) -> float:
    """A share over 0, up to 1."""
    found = arguments.number("threshold", threshold, 0.0, 1.0)
    if not found:
        raise InvalidInput("threshold is 0; it must be a share of the mass over 0, up to 1")
    return found
