"""Policies that choose by position alone: the base class, and Streaming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.cache import kept_mask
from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.readback import DeferredSizes
from sparsek.attn.mask.recorded import is_determined
from sparsek.attn.mask.traced import decoded, encoded
from sparsek.attn.policies.maps import block_map
from sparsek.attn.policies.policy import Policy, PolicyInputs
from sparsek.core import arguments
from sparsek.core.tracing import CONSTANT, constant


class Static(Policy):
    """A policy that reads only the shapes of q and k. Its mask is made once for each pair of lengths and kept."""

    def pairs(self, place: Place) -> np.ndarray:
        """bool [Mb, Nb]: which key blocks each tile of queries visits. What a static policy implements."""
        raise NotImplementedError

    def mask(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | None = None,
        q_offset: int | None = None,
        kv_lengths: Tensor | None = None,
    ) -> BlockMask:
        """Return the mask for q and k: see `Policy.mask`. Inside torch.compile it is a constant of the graph."""
        if not torch.compiler.is_compiling() or CONSTANT or kv_lengths is not None or not q.shape[0]:
            return super().mask(q, k, scale=scale, q_offset=q_offset, kv_lengths=kv_lengths)
        check_tensors(q, k, k)
        frame = encoded((q.shape[2], k.shape[2], q_offset, q.device), [])
        return _constant(encoded(self, []), frame)

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        place = given.place
        key = self, place.q_len, place.kv_len, place.q_offset, place.device
        found = kept_mask(key, lambda: self._made(given)) if is_determined(self) else self._made(given)
        if given.kv_lengths is None:
            return found
        return given.from_map(block_map(found), self.causal)

    def _made(self, given: PolicyInputs) -> BlockMask:
        chosen = self.pairs(given.place)
        counts = chosen.sum(1)
        indices = np.full((chosen.shape[0], max(int(counts.max(initial=0)), 1)), -1, np.int32)
        row, column = chosen.nonzero()
        indices[row, np.arange(row.size) - np.repeat(counts.cumsum() - counts, counts)] = column
        lists = torch.from_numpy(indices).to(given.place.device)
        made = BlockMask.from_indices(lists, causal=self.causal, **given.frame)
        # These lists have no fault; on a GPU their true sizes are read later.
        made._memo["readbacks"] = tuple(
            x for x in made._memo.get("readbacks", ()) if isinstance(x, DeferredSizes)
        )
        return made


@constant
def _constant(policy: tuple[Any, ...], frame: tuple[Any, ...]) -> BlockMask:
    """The mask of a static policy, made while torch.compile traces."""
    found, (q_len, kv_len, q_offset, device) = decoded(policy), decoded(frame)
    place = Place.of(q_len=q_len, kv_len=kv_len, block=found.block, device=device, q_offset=q_offset)
    nothing: Any = None
    return found.choose(PolicyInputs(nothing, nothing, place, None, 1.0))


@dataclass(frozen=True)
class Streaming(Static):
    """Keeps the first blocks of keys and those near each tile of queries.

    Args:
        window: The blocks near a tile, in tokens, rounded up to blocks: so many up to the tile's own, its own included,
            without `causal` also from there on.
        sinks: The first blocks, in tokens, rounded up to blocks.
        block: The block in tokens: 64 or 128, or a pair (queries, keys) of them.
        causal: Whether a query sees no keys after its own.

    Raises:
        InvalidInput: For options that are out of range.

    `MaskPolicy(window=..., sinks=...)` counts single tokens instead.

    Source: StreamingLLM, Xiao et al., arXiv:2309.17453; block_streaming_attn_func of
    mit-han-lab/Block-Sparse-Attention; MInference's stream_llm pattern.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(2, 1, 4, 2048, 64).unbind()
        >>> print(sk.policies.Streaming(window=512, sinks=128).mask(q, k).summary)
        70 of 256 blocks, 27.3 %, 16 partial
    """

    window: int = 1024
    sinks: int = 128
    block: int | tuple[int, int] = 128
    causal: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "window", arguments.integer("window", self.window, 1))
        object.__setattr__(self, "sinks", arguments.integer("sinks", self.sinks))

    def pairs(self, place: Place) -> np.ndarray:
        """bool [Mb, Nb]: which key blocks each tile of queries visits."""
        local, side = place.blocks(self.window), place.block[1]
        left = place.first // side - local + 1
        right = place.last // side + (1 if self.causal else local)
        column = np.arange(place.grid[1])
        near = (left[:, None] <= column) & (column < right[:, None])
        return near | (column < place.blocks(self.sinks))
