"""Makes the plan of attention over a mesh, the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparsek.attn.mask.convert.argument import of_flex
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskPolicy, MaskRule
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import agreed
from sparsek.distributed.deal import TOLERANCE, Deal, balanced_deal, even_deal, in_pairs, unit_pairs
from sparsek.distributed.plan import MeshParts, MeshPlan

WAYS = ("gather", "heads", "both")
MOST, MOST_OF_PAIR = 1 << 16, 1 << 8  # ranks of a plan without processes, and along each dim of a mesh


def plan(
    mask: Any,
    mesh: Any,
    how: str = "gather",
    *,
    length: int | None = None,
    tolerance: float = TOLERANCE,
    owner: Any = None,
) -> MeshPlan:
    """Return the plan of attention over the ranks of a mesh: which rank owns which tokens, and what is sent.

    With processes every rank must call it, with the same mask: they compare checksums of its lists, and if one rank
    refuses, all do.

    Args:
        mask: A `BlockMask` of the whole sequence, on any device, whose lists are read on the host once, or one of
            FlexAttention, as in `BlockMask.from_flex`. Or, with
            `length`, a `MaskPolicy`, or a policy of `sk.policies`. A policy that reads q and k chooses in each call,
            and the tokens are distributed by all blocks from which it may choose. By "gather" and "both" only
            `MaskPolicy(topk=...)` may read q and k.
        mesh: A DeviceMesh of one dim, or of two for "both"; a process group; or a number of ranks, for "both" a pair,
            for a plan that is only looked at.
        how: "gather": queries stay, and each rank gets the blocks of keys that its queries see. "heads": every rank
            gets all queries and keys of some heads (Ulysses), and the outputs return. "both": the ranks along the
            second dim of the mesh exchange heads, and those along the first gather keys of these heads.
        length: Tokens of the sequence, for a policy.
        tolerance: Visited pairs of the fullest rank over the mean, within which the deal with the least predicted time
            is taken. One up to 1.05 is taken where that saves a quarter of the predicted time.
        owner: The rank of each token, an int tensor [length], for tokens that are distributed already; a rank has them
            in order. By "gather" whole units of 64 or 128 tokens, the larger side of the mask's blocks, are on one
            rank, of 128 for `TokenLists`. Not with "both".

    Raises:
        InvalidInput: For other masks and meshes, and on every rank if masks differ between ranks.
        MeshError: If a rank ended, or did not call it within the timeout of its process group.

    Example:
        >>> import sparsek as sk
        >>> sk.distributed.plan(sk.BlockMask.causal(4096), 4).imbalance
        1.0
    """
    groups, made = groups_of(mesh), []

    def check() -> str:
        made.append(plan_here(mask, mesh, how, length=length, tolerance=tolerance, owner=owner))
        return made[0]._text

    if groups:
        agreed("sk.distributed.plan", groups, check)
    else:
        check()
    return made[0]


def plan_here(
    mask: Any, mesh: Any, how: Any, *, length: Any = None, tolerance: Any = TOLERANCE, owner: Any = None
) -> MeshPlan:
    """The plan, without communication."""
    arguments.one_of("how", how, WAYS)
    tolerance = arguments.number("tolerance", tolerance, 1.0)
    mask, rule = _resolved(mask, length)
    mask.verify(wait=True)
    if how != "both":
        return _of_one(mask, rule, *_one(mesh), how, tolerance, owner)
    if owner is not None:
        raise InvalidInput('owner does not go with how="both", which distributes tokens over both dims')
    return _of_both(mask, rule, *_two(mesh), tolerance)


def _resolved(mask: Any, length: Any) -> tuple[BlockMask, MaskRule | None]:
    """The mask of a whole sequence, and the rule that chooses within it."""
    mask = of_flex(mask) or mask
    if isinstance(mask, TokenLists) or not isinstance(mask, (BlockMask, MaskRule)):
        also = (
            "; lists go to attention(q, k, v, lists, plan=plan), those of the rank's own queries"
            if isinstance(mask, TokenLists)
            else "; BlockMask.from_dense and BlockMask.from_flex make one"
        )
        raise InvalidInput(
            f"mask is {arguments.shown(mask)}; it must be a BlockMask of the whole sequence, or a policy{also}"
        )
    if isinstance(mask, BlockMask):
        if length is not None:
            raise InvalidInput("length goes with a policy; a BlockMask has its lengths")
        return mask, None
    if length is None:
        raise InvalidInput(
            f"mask is {mask.label}, a policy; plan it with length=, the tokens of the sequence"
        )
    length, chooses = arguments.integer("length", length), True
    if isinstance(mask, MaskPolicy):
        policy, chooses = mask._parts[0], mask.topk is not None
    else:
        block = 128 if mask.by_token else getattr(mask, "block", 128)
        policy = MaskPolicy(causal=getattr(mask, "causal", False), block=block)
    return policy.mask(length, length, "cpu"), mask if chooses else None


def _of_one(
    mask: BlockMask,
    rule: Any,
    rank: int | None,
    ranks: int,
    group: Any,
    how: str,
    tolerance: float,
    owner: Any = None,
) -> MeshPlan:
    unit = 128 if in_pairs(mask) else max(mask.block)
    if owner is not None:
        queries = _given_deal(owner, mask.q_len, unit, ranks, how)
    elif how == "gather":
        queries = balanced_deal(mask, unit, ranks, unit_pairs(mask, unit), tolerance)
    else:
        queries = even_deal(mask.q_len, unit, ranks)
    keys = queries if mask.kv_len == mask.q_len else even_deal(mask.kv_len, unit, ranks)
    return MeshPlan(mask, how, rank, rule, MeshParts(queries, keys, group))


def _given_deal(owner: Any, length: int, unit: int, ranks: int, how: str) -> Deal:
    """The deal of tokens that are distributed already, in units if these are whole, or else token by token."""
    of = arguments.tensor("owner", owner, (torch.int32, torch.int64), 1).cpu().numpy().astype(np.int64)
    if of.size != length or (of.size and not 0 <= of.min() <= of.max() < ranks):
        raise InvalidInput(
            f"owner has {of.size} ranks from {of.min(initial=0)} to {of.max(initial=0)}; it must have one of {ranks} "
            f"for each of {length} tokens"
        )
    first = of[::unit]
    if np.array_equal(np.repeat(first, unit)[:length], of):
        return Deal(length, unit, first, ranks)
    if how == "gather":
        raise InvalidInput(
            f'owner cuts units of {unit} tokens, which "gather" leaves whole; plan with how="heads", or leave it out'
        )
    return Deal(length, 1, of, ranks)


def _of_both(
    mask: BlockMask,
    rule: Any,
    places: tuple[Any, Any],
    sizes: tuple[int, int],
    groups: tuple[Any, Any],
    tolerance: float,
) -> MeshPlan:
    (down, across), (rows, columns) = places, sizes
    sequence = _of_one(mask, rule, down, rows, groups[0], "gather", tolerance)
    queries, keys = (_divided(sequence._parts.deal(of), columns) for of in ("queries", "keys"))
    of_row, keys_of_row = (row_of(each, columns, down or 0) for each in (queries, keys))
    heads = MeshPlan(mask, "heads", across, rule, MeshParts(of_row, keys_of_row, groups[1]))
    rank = None if down is None or across is None else down * columns + across
    return MeshPlan(mask, "both", rank, rule, MeshParts(queries, keys, None, sequence, heads))


def _divided(deal: Deal, columns: int) -> Deal:
    """The units of each rank divided evenly among the ranks of its row, in order."""
    owner = deal.owner * columns
    for rank in range(deal.ranks):
        units = deal.units(rank)
        owner[units] += np.arange(units.size) * columns // max(units.size, 1)
    return Deal(deal.length, deal.unit, owner, deal.ranks * columns)


def row_of(deal: Deal, columns: int, row: int) -> Deal:
    """The deal of a row's tokens, one after the other, among its ranks."""
    mine = deal.owner // columns == row
    return Deal(int(deal.unit_tokens[mine].sum()), deal.unit, deal.owner[mine] % columns, columns)


def groups_of(mesh: Any) -> list[Any]:
    """The process groups of a mesh, none for numbers of ranks. InvalidInput for anything else."""
    if isinstance(mesh, DeviceMesh):
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    elif isinstance(mesh, dist.ProcessGroup):
        groups = [mesh]
    elif isinstance(mesh, (int, tuple)) and not isinstance(mesh, bool):
        return []
    else:
        raise InvalidInput(
            f"mesh is {arguments.shown(mesh)}; it must be a DeviceMesh, a process group or a number of ranks"
        )
    for group in groups:
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise InvalidInput("this process is no rank of the mesh; only its ranks plan")
    return groups


def _one(mesh: Any) -> tuple[int | None, int, Any]:
    """Rank, ranks and process group of a mesh of one dim."""
    groups = groups_of(mesh)
    if isinstance(mesh, tuple) or len(groups) > 1:
        raise InvalidInput(
            f"mesh has {len(groups) or len(mesh)} dims; take one of them, such as mesh['cp'], or how=\"both\" with two"
        )
    if not groups:
        return None, arguments.integer("mesh", mesh, 1, MOST), None
    return dist.get_rank(groups[0]), dist.get_world_size(groups[0]), groups[0]


def _two(mesh: Any) -> tuple[tuple[Any, Any], tuple[int, int], tuple[Any, Any]]:
    """Places, sizes and process groups along both dims of a mesh."""
    if isinstance(mesh, tuple) and len(mesh) == 2:
        sizes = arguments.pair("mesh", mesh, 1, MOST_OF_PAIR)
        return (None, None), sizes, (None, None)
    groups = groups_of(mesh)
    if len(groups) != 2:
        raise InvalidInput(
            f'mesh is {arguments.shown(mesh)}; how="both" needs a DeviceMesh of two dims, sequence and heads, or a '
            "pair of numbers of ranks"
        )
    a, b = groups
    return (dist.get_rank(a), dist.get_rank(b)), (dist.get_world_size(a), dist.get_world_size(b)), (a, b)
