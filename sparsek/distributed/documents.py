"""Packed documents whose lists count blocks of their own: the keys of each from a key block of its own on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.aligned import AlignedKeys, aligned_keys
from sparsek.attn.mask.build.documents import PackedLayout
from sparsek.attn.mask.build.unions import FEWEST
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import packed_layout
from sparsek.attn.mask.token_lists import TokenLists, mask_of
from sparsek.core.errors import InvalidInput
from sparsek.distributed.deal import Deal
from sparsek.distributed.exchange import Exchange
from sparsek.distributed.plan import MeshParts, MeshPlan, once
from sparsek.distributed.planning import row_of
from sparsek.distributed.resplit import coordinates, exchanges, resplit


def layout_of(plan: MeshPlan, cu_seqlens: Tensor) -> PackedLayout:
    """The documents. cu_seqlens on a GPU are read with one sync, once for a tensor."""
    return packed_layout(cu_seqlens, None, (plan.mask.q_len, plan.mask.kv_len))


class DocumentKeys(NamedTuple):
    """The keys of documents at places with gaps, over the ranks of a plan.

    Attributes:
        documents: The places, on the device of the keys.
        plan: The plan whose keys are these places. The rank of the first key of a block has all of them.
        ways: How keys come there; none where documents have whole blocks.
    """

    documents: AlignedKeys
    plan: MeshPlan
    ways: list[Exchange]

    @classmethod
    def of(
        cls, plan: MeshPlan, layout: PackedLayout, lists: TokenLists, device: torch.device
    ) -> DocumentKeys:
        """Made once for a layout."""
        side, causal = max(lists.block, FEWEST), lists.causal
        documents = aligned_keys(layout, side, causal, device)
        here = aligned_keys(layout, side, causal, torch.device("cpu"))

        def make() -> tuple[MeshPlan, list[Exchange]]:
            keys, length = plan._parts.keys, here.length
            owner = np.repeat(keys.owner, keys.unit_tokens)
            places = np.arange(length) if here.places is None else here.places.numpy()
            first = np.unique(places // side, return_index=True)[1]  # of each block
            deal = Deal(length, side, owner[first], keys.ranks)
            if here.places is None and keys.unit % side == 0:
                return _with_keys(plan, deal), []
            row = np.zeros(deal.owner.size, np.int64)
            for rank in range(deal.ranks):
                units = deal.units(rank)
                row[units] = np.arange(units.size)
            block = places // side
            placed = row[block] * side + places % side, int(deal.tokens[plan._here])
            source, target = coordinates(plan, owner), coordinates(plan, deal.owner[block])
            ways = exchanges(plan, source, target, device, "keys of documents", placed)
            return _with_keys(plan, deal), ways

        return cls(documents, *once(plan._parts.kept, ("documents", layout.key, side, device), make))

    def plan_of(self, lists: TokenLists, q: Tensor, k: Tensor) -> MeshPlan:
        """The plan with the mask of the lists of all queries, for q and k of the whole sequence."""
        mask: BlockMask = mask_of(lists, q, k, self.documents)
        unit = self.plan._parts.queries.unit
        if unit % mask.block[0]:
            raise InvalidInput(
                f"the lists make tiles of {mask.block[0]} queries, and the plan has units of {unit}; plan with a mask "
                f"in blocks of {mask.block[0]}"
            )
        return self.plan._of(mask)

    def spread(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """This rank's shards of keys and values, at the places that it has."""
        return resplit([k, v], self.ways, 2)


def _with_keys(plan: MeshPlan, deal: Deal) -> MeshPlan:
    """The plan with another deal of keys."""
    parts = plan._parts
    if parts.sequence is None or parts.heads is None:
        return replace(plan, _parts=replace(parts, keys=deal, kept={}), _kept={}, _masks={})
    columns = parts.heads.ranks
    sequence = _with_keys(
        parts.sequence, Deal(deal.length, deal.unit, deal.owner // columns, deal.ranks // columns)
    )
    heads = _with_keys(parts.heads, row_of(deal, columns, plan._here // columns))
    return replace(
        plan, _parts=MeshParts(parts.queries, deal, parts.group, sequence, heads), _kept={}, _masks={}
    )
