"""Masks of few queries over a cache, made on the device: no position, no padding and no length is read by the host.

Masks of one shape differ in their tensors only, so a compiled decode step is for all positions. Every pair of a query
and a key is evaluated, O(queries * keys), as by transformers, because only that follows padding with gaps without a
look at it; the blocks that no query sees are not in the lists. All partial blocks have bits, and sizes are bounds.

They use torch operators only, so torch.compile traces them as they are; made before a compiled step, as by `generate`,
they enter its graph as seven tensors. `sk.attention_paged` over the static cache would hide no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers.masking_utils as masking_utils
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.build.selection_reference import rows_of
from sparsek.attn.mask.build.tiles import pack_bits
from sparsek.attn.mask.lists import Sizes, mask_block
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.policies.policy import Policy

TILE = 64  # queries of a tile
MOST = TILE // 2  # queries of a step: hopper.attention_fwd packs heads that share keys for up to half a tile


class WindowKeys(NamedTuple):
    """What a `MaskPolicy` without stride and top-k admits: `window` keys on either side (0: all), the first `sinks`
    tokens; and the keys of a block.
    """

    window: int
    sinks: int
    block: int

    def most(self, q_len: int, kv_len: int) -> int:
        """The most blocks that a tile of q_len queries sees."""
        columns, side = -(-kv_len // self.block), self.block
        if not self.window:
            return columns
        blocks = (2 * self.window + q_len - 2) // side + 2
        if self.sinks:
            blocks += (self.sinks - 1) // side + 2
        return min(columns, blocks)


def near_of(policy: MaskPolicy | Policy | None) -> WindowKeys | None:
    """The policy as a `WindowKeys`; None for one whose masks of steps need lengths on the host."""
    if policy is None:
        return WindowKeys(0, 0, 128)
    if isinstance(policy, Policy) or policy.topk is not None or policy.stride is not None:
        return None
    return WindowKeys(policy.window or 0, policy.sinks, mask_block(policy.block)[1])


class PairsRequest(NamedTuple):
    """The pairs of queries and keys that a mask of transformers is for.

    `q_offset`: an int, or a tensor of one. `padding`: [B or 1, tokens], true for a token; None for none.
    """

    batch: int
    q_len: int
    kv_len: int
    q_offset: Any
    kv_offset: int
    function: Callable[..., Any]
    padding: Tensor | None
    use_vmap: bool
    device: Any

    def evaluated(self, batch: int) -> Tensor:
        """The pairs that `function` and the padding admit, bool [batch, 1, q_len, kv_len]."""
        seen = masking_utils.sdpa_mask(
            batch, self.q_len, self.kv_len, self.q_offset, self.kv_offset, self.function, self.padding,
            allow_is_causal_skip=False, use_vmap=self.use_vmap, device=self.device,
        )  # fmt: skip
        assert seen is not None  # only skips give None
        return seen


def seen_pairs(of: PairsRequest, lists: int, near: WindowKeys) -> Tensor:
    """The pairs that a request and `near` admit, bool [lists, 1, q_len, kv_len]."""
    seen = of.evaluated(lists)
    if not near.window:
        return seen
    query = torch.arange(of.q_len, dtype=torch.int64, device=of.device)[:, None] + of.q_offset
    key = torch.arange(of.kv_len, dtype=torch.int64, device=of.device) + of.kv_offset
    admitted = (query - key).abs() < near.window
    if near.sinks:
        if of.padding is not None:  # sinks count from the first token
            key = key - of.padding.to(torch.uint8).argmax(1)[:, None, None, None]
        admitted = admitted | (key < near.sinks)
    return seen & admitted


def step_mask(seen: Tensor, block: int, most: int) -> BlockMask:
    """The mask of bool [batch, 1, q_len, kv_len], where a tile sees at most `most` blocks. Without a sync.

    Its sizes are bounds on a CPU too, so that they are equal for all positions.
    """
    batch, _, q_len, kv_len = seen.shape
    columns, device = -(-kv_len // block), seen.device
    tiles = functional.pad(seen[:, 0], (0, columns * block - kv_len)).view(batch, q_len, columns, block)
    whole, some = tiles.all(3).all(1), tiles.any(3).any(1)
    rows = rows_of(whole[:, None, None], (some & ~whole)[:, None, None], most)
    first = torch.arange(batch, dtype=torch.int32, device=device) * columns
    bits = pack_bits(tiles.transpose(1, 2).flatten(0, 1))
    return BlockMask.unchecked(
        q_len=q_len, kv_len=kv_len, block=(TILE, block), batch=batch, heads=1,
        full=rows.full, partial=rows.partial, rules=(rows.columns.flatten(1) + first[:, None]).flatten(),
        bits=functional.pad(bits, (0, 0, 0, TILE - q_len)), sizes=Sizes(batch * most, batch * most, most, exact=False),
        pure=False, label=f"{q_len} queries of a cache",
    )  # fmt: skip
