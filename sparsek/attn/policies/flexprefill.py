"""FlexPrefill: a pattern for each head, chosen from the prompt's last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies.estimates import blocks_of_lines
from sparsek.attn.policies.policy import Policy, PolicyInputs
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput

LAST = 128


@dataclass(frozen=True)
class FlexPrefill(Policy):
    """Keeps, for each head, the blocks with a share of an estimated softmax map, or those on lines with that share.

    The last 128 queries attend to all keys. If their softmax, summed over key blocks, is near the softmax of the means
    of the blocks, by the Jensen-Shannon distance, the means of all tiles choose the blocks (query-aware). Else key
    blocks and block distances are kept (vertical and slash). The first key block and those of a tile's own positions
    are always kept. Each head decides for itself, on the device. Causal.

    Args:
        gamma: The share of the mass that is kept, over 0 and at most 1.
        tau: Heads with a smaller distance are query-aware; 0 for none.
        min_budget: Keys that are kept at least, in tokens: as key blocks and as block distances, or for each tile on
            average.
        block: The block in tokens: 64 or 128, or a pair (queries, keys) of them.

    Raises:
        InvalidInput: For options that are out of range. By `mask`: for `kv_lengths`.

    Source: FlexPrefill, Lai et al., arXiv:2502.20766.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(1, 4, 2048, 64), torch.randn(1, 2, 2048, 64)
        >>> sk.policies.FlexPrefill(gamma=0.5, min_budget=256).mask(q, k).heads
        4
    """

    gamma: float = 0.9
    tau: float = 0.1
    min_budget: int = 512
    block: int | tuple[int, int] = 128
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "tau"):
            object.__setattr__(self, name, arguments.number(name, getattr(self, name), 0.0, 1.0))
        if not self.gamma:
            raise InvalidInput("gamma is 0; it must be a share over 0, up to 1")
        object.__setattr__(self, "min_budget", arguments.integer("min_budget", self.min_budget))

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        q, k, place, _, scale = given
        least = min(-(-self.min_budget // place.block[1]), place.grid[1])
        options = {"last": LAST, "gamma": self.gamma, "tau": self.tau, "least": least, "scale": scale}
        return blocks_of_lines(self, given, lambda module, grid: module.flex_blocks(q, k, grid, **options)[0])
