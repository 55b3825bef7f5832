"""Masks selected in each call: by lists of each token, or by means of blocks, which the ranks exchange."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.build.documents import PackedLayout
from sparsek.attn.mask.lists import BLOCK_SIZES, Place
from sparsek.attn.mask.rule import MaskPolicy, best_of, block_means, tile_means
from sparsek.attn.mask.token_lists import TokenLists, mask_of
from sparsek.core.errors import InvalidInput
from sparsek.distributed.documents import DocumentKeys, layout_of
from sparsek.distributed.plan import MeshPlan
from sparsek.distributed.sequence import PARTS, unsharded


def checked_rule(rule: Any, q: Tensor, k: Tensor, plan: MeshPlan) -> str:
    """The rule in words, alike on all ranks. InvalidInput for one that the plan does not take."""
    if not isinstance(rule, TokenLists):
        if plan.how != "heads" and not isinstance(rule, MaskPolicy):
            raise InvalidInput(
                f'mask is {rule.label}, which chooses from whole rows of q and k; plan with how="heads", or take '
                "MaskPolicy(topk=...)"
            )
        if plan.how == "heads" and rule.by_token and splits_groups(q, k, plan):
            raise InvalidInput(
                f"mask is {rule.label}, which chooses for all heads of q that share a head of k, and there are "
                f"{k.shape[1]} of k for {plan.ranks} ranks; take at most {k.shape[1]} ranks for heads"
            )
        return f"{rule.label}, blocks of {getattr(rule, 'block', None)}"
    batch, heads, queries, n = rule.indices.shape
    if batch not in (1, q.shape[0]) or heads not in (1, k.shape[1], q.shape[1]) or queries != q.shape[2]:
        raise InvalidInput(
            f"indices is {list(rule.indices.shape)}; this rank's q {list(q.shape)} and k {list(k.shape)} need lists of "
            f"1 or {q.shape[0]} batch items, 1, {k.shape[1]} or {q.shape[1]} heads, and {q.shape[2]} queries: those of "
            "sk.distributed.shard_sequence(indices, plan)"
        )
    if rule.device != q.device:
        raise InvalidInput(f"q is on {q.device} and the lists are on {rule.device}; call lists.to(q.device)")
    counts = "without" if rule.counts is None else "with"
    return f"{rule.label} in {rule.indices.dtype}, batch {batch}, heads {heads}, {n} entries, {counts} counts"


def checked_documents(rule: Any, q: Tensor, plan: MeshPlan, cu_seqlens: Any, slopes: bool) -> int:
    """A checksum of cu_seqlens. InvalidInput for those that do not fit, or with what they do not go with."""
    if rule is None:
        raise InvalidInput(
            "cu_seqlens goes with TokenLists or a policy as mask, or with the plan of a policy that chooses in each "
            "call; a BlockMask keeps documents apart itself: MaskPolicy(...).packed(cu_seqlens)"
        )
    if q.shape[0] != 1:
        raise InvalidInput(f"cu_seqlens is for one packed sequence, and q has {q.shape[0]} batch items")
    if slopes and isinstance(rule, TokenLists):
        raise InvalidInput(
            "alibi_slopes count distances in the packed sequence, which TokenLists with cu_seqlens space out; leave "
            "one of them out"
        )
    if not (isinstance(rule, (TokenLists, MaskPolicy)) or rule.by_token):
        raise InvalidInput(
            f"mask is {rule.label}, which chooses blocks of one sequence and keeps no documents apart; pass a "
            "MaskPolicy, TokenLists, or a policy for each token"
        )
    return zlib.crc32(b"".join(each.tobytes() for each in layout_of(plan, cu_seqlens).docs))


def splits_groups(q: Tensor, k: Tensor, plan: MeshPlan) -> bool:
    """Whether heads of q that share a head of k are on several ranks by "heads"."""
    return q.shape[1] > k.shape[1] < plan.ranks


def of_whole_sequence(rule: Any, q: Tensor, k: Tensor, plan: MeshPlan) -> bool:
    """Whether a rule's mask must be made from all ranks' rows: top-k policies use the mean of the heads of a group."""
    return plan.how != "heads" or (isinstance(rule, MaskPolicy) and splits_groups(q, k, plan))


@torch.no_grad()
def with_whole_mask(
    rule: Any, q: Tensor, k: Tensor, plan: MeshPlan, layout: PackedLayout | None
) -> tuple[MeshPlan, DocumentKeys | None]:
    """The plan with the mask of the whole sequence, on every rank, of TokenLists or a MaskPolicy; and, of lists of
    packed documents, where their keys must be.

    Ranks exchange lists, or means of tiles of queries and of blocks of keys.
    """
    lengths = plan.mask.q_len, plan.mask.kv_len
    if isinstance(rule, TokenLists):
        lists, q, k = whole_lists(rule, plan), of_length(q, lengths[0]), of_length(k, lengths[1])
        if layout is None:
            return plan.with_mask(mask_of(lists, q, k)), None
        keys = DocumentKeys.of(plan, layout, lists, q.device)
        return keys.plan_of(lists, q, k), keys
    visible = None if layout is None else rule.visible_in(layout, q.device)
    if rule.topk is None or not q.shape[0]:
        return plan.with_mask(
            rule._parts[0].mask(*lengths, q.device) if visible is None else visible.within
        ), None
    place = Place.of(q_len=lengths[0], kv_len=lengths[1], block=rule.block, device=q.device)
    if any(plan._parts.deal(of).unit % side for of, side in zip(PARTS, place.block, strict=True)):
        raise InvalidInput(
            f"mask is {rule.label}, whose blocks of {place.block} tokens the owners of the plan cut; take at most as "
            "many ranks for heads as there are of k"
        )
    tiles = unsharded(tile_means(q, k.shape[1], place.block[0]), plan, 2, "queries", place.block[0])
    blocks = unsharded(block_means(k, place.block[1]), plan, 2, "keys", place.block[1])
    scores = tiles @ blocks.mT
    return plan.with_mask(best_of(rule, scores, place) if visible is None else visible.chosen(scores)), None


def of_length(x: Tensor, length: int) -> Tensor:
    """Something of the shape and dtype of x [B, H, L, E] with another length, in no memory, for checks."""
    return x.new_empty(()).expand(*x.shape[:2], length, x.shape[3])


def lists_at_ends(lists: TokenLists) -> bool:
    """Whether the mask of these lists is by members with a window or sinks; smaller blocks have bits instead."""
    return lists.block >= min(BLOCK_SIZES) and bool(lists.window or lists.sinks)


def whole_lists(lists: TokenLists, plan: MeshPlan) -> TokenLists:
    """The lists of all queries, from those of the ranks' own."""
    indices, counts = lists.indices, lists.counts
    if counts is None:
        return replace(lists, indices=unsharded(indices, plan, 2, "queries"))
    wide = torch.promote_types(indices.dtype, counts.dtype)
    both = torch.cat((indices.to(wide), counts[..., None].to(wide)), -1)
    both = unsharded(both, plan, 2, "queries")
    return replace(lists, indices=both[..., :-1], counts=both[..., -1])
