"""Attention over a mesh, on shards of q, k and v along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparsek.attn.mask.convert.argument import of_flex
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import MaskRule
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.attn.ops.attention import attention as attend
from sparsek.attn.ops.attention import follow_autocast
from sparsek.attn.ops.attention_varlen import attention_varlen
from sparsek.attn.plan.attention import Attended
from sparsek.attn.reference.scores import Scores
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import agreed, refuse_transforms
from sparsek.core.tracing import untraced
from sparsek.distributed.documents import DocumentKeys, layout_of
from sparsek.distributed.dtensors import PlacedOperands
from sparsek.distributed.gather import gathered
from sparsek.distributed.heads import by_heads
from sparsek.distributed.pieces import at_ends, refuse_ends
from sparsek.distributed.plan import MASKS, MeshPlan, once
from sparsek.distributed.planning import groups_of, plan_here
from sparsek.distributed.selection import (
    checked_documents,
    checked_rule,
    lists_at_ends,
    of_length,
    of_whole_sequence,
    with_whole_mask,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

NAME = "sk.distributed.attention"


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MeshPlan | BlockMask | MaskRule | FlexMask,
    *,
    plan: MeshPlan | None = None,
    mesh: Any = None,
    how: str | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    pieces: int = 1,
    exact: bool = False,
    check: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MeshPlan | BlockMask | MaskRule | FlexMask,
    *,
    plan: MeshPlan | None = None,
    mesh: Any = None,
    how: str | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    pieces: int = 1,
    exact: bool = False,
    check: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@untraced(f"{NAME} communicates", "leave fullgraph=True out")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MeshPlan | BlockMask | MaskRule | FlexMask,
    *,
    plan: MeshPlan | None = None,
    mesh: Any = None,
    how: str | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    pieces: int = 1,
    exact: bool = False,
    check: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return this rank's shard of `sk.attention` of the whole sequence.

    All ranks of the mesh must call it, with shapes that fit together, and run the backward pass if one of them does.

    q, k and v may be DTensors with Shard(2) along the mesh of the plan. These are whole tensors with their tokens in
    order, in torch's split, so out is a DTensor as well, with the placements of q, and gradients have those of their
    operands. Their tokens are sent to the ranks of the plan and back in each call; where both splits are the same,
    as for lengths that ranks times units divide by "heads" and often for windows, nothing is sent. A plan's shard is no
    shard of a DTensor: pass it as it is. Along other dims of their mesh DTensors may be split by batch items and heads
    of a mask for all of them.

    Args:
        q: This rank's queries [B, Hq, S_r, D]: `shard_sequence(q, plan)` of the whole tensor.
        k: Its keys [B, Hkv, T_r, D], `shard_sequence(k, plan, of="keys")`.
        v: Its values [B, Hkv, T_r, Dv].
        mask: Which keys a query sees.

            - A plan of `sk.distributed.plan`: its mask, or what its policy chooses.
            - With `plan` or `mesh` a `BlockMask` of the whole sequence, or one of FlexAttention, as in
              `BlockMask.from_flex`.
            - With `plan` `TokenLists` of this rank's own queries, which the ranks exchange; of DTensors those of their
              local queries.
            - With `plan` a `MaskPolicy`, with top-k by block means, which the ranks exchange.
            - With a `plan` by "heads" a policy of `sk.policies`, which reads whole rows of this rank's heads.
        plan: The plan by which the shards were made, where `mask` is none.
        mesh: In place of `plan`, where `mask` is a BlockMask: as in `sk.distributed.plan`. The plan is made in the
            first call and kept with the mask.
        how: With `mesh`: as in `sk.distributed.plan`; "gather" for None.
        scale: As in `sk.attention`.
        return_lse: Whether to return lse as well.
        pieces: With "gather" and "both": collectives in which keys arrive. With more than one, attention to the first
            keys overlaps with the exchange of the others, and the results are merged by lse.
        exact: With "gather" and "both": visit blocks in the order of one process, in one piece, and compute dK and dV
            of a key where it is owned, from all queries that see it, for more bytes and time. With "heads" always so.
            Plans then follow that of one process, and on a GPU out, lse and gradients have its bits; `plan.explain()`
            reports when not. One process plans by bounds until the host has the sizes of a mask that a GPU made, as
            after `mask.verify(wait=True)`.
        check: Whether ranks first compare their calls, so that if one refuses, all do. One small collective that the
            host waits for, and another one where the mask is chosen in this call. With False an error on one rank
            leaves the others waiting until their process group's timeout.
        softcap: As in `sk.attention`.
        alibi_slopes: As in `sk.attention`; with "heads" only.
        sink_logits: As in `sk.attention`. Each rank gets the gradient of its own queries and heads: sum it over ranks,
            as for any parameter of a data-parallel model.
        cu_seqlens: With a mask that is chosen in each call, of one batch item: int32 or int64 [documents + 1] of the
            whole packed sequence, the same on all ranks. As in `attention_varlen`, TokenLists then count blocks, window
            and sinks in each document. On a GPU it is read with one sync, once for a tensor. A BlockMask keeps
            documents apart itself. Plan with one, `MaskPolicy().packed(cu_seqlens)`.

    Returns:
        out [B, Hq, S_r, Dv]; with return_lse (out, lse [B, Hq, S_r]).

    Raises:
        InvalidInput: For operands that do not fit the plan, on every rank.
        MeshError: If an exchange fails or times out; the timeout is that of the process group.
    """
    options = MeshOptions(scale, pieces, exact, softcap, alibi_slopes, sink_logits, return_lse, cu_seqlens)
    groups = _groups(mask, plan, mesh)
    made: list[Any] = []

    def checks() -> str:
        arguments.flag("check", check)
        found, rule = _planned(mask, plan, mesh, how)
        if any(isinstance(x, DTensor) for x in (q, k, v)):
            query, key, value = follow_autocast(q, k, v)
            made.append(PlacedOperands.of(query, key, value, found, mask))
            return made[0].text
        text, checked = _checked(q, k, v, found, rule, options)
        made.append((found, rule, checked))
        return text

    if check is not False:
        agreed(NAME, groups, checks)
    else:
        checks()
    if isinstance(made[0], PlacedOperands):
        placed, again = made[0].placed, cast(Any, attention)
        given = {**options._asdict(), "plan": plan, "mesh": mesh, "how": how, "check": check}
        result = again(*made[0].shards(), **given)
        return (placed(result[0]), placed(result[1])) if return_lse else placed(result)
    found, rule, options = made[0]
    q, k, v = follow_autocast(q, k, v)
    if rule is not None and of_whole_sequence(rule, q, k, found):
        (found, keys), rule = _with_whole_mask(rule, q, k, found, options, groups if check else []), None
        if keys is not None:
            k, v = keys.spread(k, v)
    out, lse = _attended(q, k, v, found, rule, options, groups if check and rule is not None else [])
    return out if lse is None or not return_lse else (out, lse)


class MeshOptions(NamedTuple):
    """The options of a call beside its mask."""

    scale: float | None
    pieces: int
    exact: bool
    softcap: float
    alibi_slopes: Tensor | None
    sink_logits: Tensor | None
    return_lse: bool
    cu_seqlens: Tensor | None


def _groups(mask: Any, plan: Any, mesh: Any) -> list[Any]:
    """The process groups of the ranks that call. InvalidInput if there are none; all else is checked on all ranks."""
    for each in (mask, plan):
        if isinstance(each, MeshPlan):
            each._here  # noqa: B018  # InvalidInput without processes
            return each._groups
    groups = [] if mesh is None else groups_of(mesh)
    if not groups:
        raise InvalidInput(
            f"mask is {arguments.shown(mask)}, plan {arguments.shown(plan)} and mesh {arguments.shown(mesh)}; pass a "
            "plan of sk.distributed.plan, or a mask with plan=, or a BlockMask with mesh=, a DeviceMesh or group"
        )
    return groups


def _planned(mask: Any, plan: Any, mesh: Any, how: Any) -> tuple[MeshPlan, MaskRule | None]:
    """The plan, and the rule that chooses the mask in this call. InvalidInput unless one of plan and mesh is given."""
    planned = isinstance(mask, MeshPlan)
    if planned + (plan is not None) + (mesh is not None) != 1 or (how is not None and mesh is None):
        raise InvalidInput(
            "pass one of a plan as mask, plan= and mesh=; how goes with mesh, for plans have their own"
        )
    if planned:
        return mask, mask.rule
    mask = of_flex(mask) or mask
    if isinstance(mask, BlockMask) and plan is None:
        how = "gather" if how is None else how
        key = (
            "mesh plan",
            *groups_of(mesh),
            how,
        )  # of the groups: meshes of groups that are gone are equal to new ones
        return mask.derived(key, lambda: plan_here(mask, mesh, how)), None
    if isinstance(plan, MeshPlan) and isinstance(mask, BlockMask):
        return once(plan._masks, mask, lambda: plan.with_mask(mask), MASKS), None
    if isinstance(plan, MeshPlan) and isinstance(mask, MaskRule):
        return plan, mask
    raise InvalidInput(
        f"mask is {arguments.shown(mask)} and plan {arguments.shown(plan)}; with a plan of sk.distributed.plan mask is "
        "a BlockMask of the whole sequence, TokenLists or a policy, and with mesh= a BlockMask"
    )


def _checked(
    q: Any, k: Any, v: Any, plan: MeshPlan, rule: MaskRule | None, options: MeshOptions
) -> tuple[str, MeshOptions]:
    """The call in words, the same on all ranks, and its checked options."""
    refuse_transforms(NAME)
    q, k, v = follow_autocast(q, k, v)
    check_tensors(q, k, v)
    rank, parts = plan._here, plan._parts
    own = int(parts.queries.tokens[rank]), int(parts.keys.tokens[rank])
    if (q.shape[2], k.shape[2]) != own:
        raise InvalidInput(
            f"rank {rank} has {q.shape[2]} queries and {k.shape[2]} keys; the plan gives it {own[0]} and {own[1]}: "
            "make shards by sk.distributed.shard_sequence(x, plan)"
        )
    scale, pieces, exact, softcap, slopes, sinks, lse, cu_seqlens = options
    pieces, lse = arguments.integer("pieces", pieces, 1), arguments.flag("return_lse", lse)
    if arguments.flag("exact", exact):
        pieces = 1
        if plan.how != "heads":
            refuse_ends(plan.mask, at_ends(plan.mask))
            refuse_ends(rule, isinstance(rule, TokenLists) and lists_at_ends(rule))
    if slopes is not None and plan.how != "heads":
        raise InvalidInput('alibi_slopes need whole rows of keys; plan with how="heads"')
    all_q = of_length(q, plan.mask.q_len)
    all_k, all_v = (of_length(x, plan.mask.kv_len) for x in (k, v))
    call = Attended(all_q, all_k, all_v, plan.mask, scale, scores=Scores(softcap, slopes, sinks))
    call.check(here=False)
    call.check_scores()
    softcap, slopes, sinks = call.scores
    chosen = "" if rule is None else checked_rule(rule, q, k, plan)
    if cu_seqlens is not None:
        chosen = f"{chosen}, documents {checked_documents(rule, q, plan, cu_seqlens, slopes is not None):08x}"
    learns = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q, k, v, sinks)]
    if any(learns) and any(x is not None and x.is_inference() for x in (q, k, v, sinks)):
        raise InvalidInput("an operand is an inference tensor, which no backward pass can save; pass a clone")
    given = [slopes is not None, sinks is not None, lse]
    text = (
        f"{'exact ' if exact else ''}attention in {pieces} pieces of q {_shape(q)}, k {_shape(k)}, v {_shape(v)} in "
        f"{q.dtype}, scale {call.scale}, softcap {softcap}, slopes, sinks and lse {given}, gradients {learns}, "
        f"mask {chosen} in {plan._text}"
    )
    return text, MeshOptions(call.scale, pieces, exact, softcap, slopes, sinks, lse, cu_seqlens)


def _with_whole_mask(
    rule: MaskRule, q: Tensor, k: Tensor, plan: MeshPlan, options: MeshOptions, groups: list[Any]
) -> tuple[MeshPlan, DocumentKeys | None]:
    """The plan of the mask that a rule chooses now, and, of lists of packed documents, where their keys must be.

    `groups`: those whose ranks must have chosen the same.
    """
    found: list[tuple[MeshPlan, DocumentKeys | None]] = []
    layout = None if options.cu_seqlens is None else layout_of(plan, options.cu_seqlens)

    def choose() -> str:
        found.append(with_whole_mask(rule, q, k, plan, layout))
        return found[0][0]._text

    if groups:
        agreed("the mask that sk.distributed.attention chose", groups, choose)
    else:
        choose()
    return found[0]


def _shape(x: Tensor) -> list[Any]:
    return [*x.shape[:2], "S", x.shape[3]]


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: MeshPlan,
    rule: MaskRule | None,
    options: MeshOptions,
    groups: list[Any],
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of this rank's shards, of checked arguments. `groups`: those that agree on what a rule chose."""
    scale, pieces, exact, softcap, slopes, sinks, lse, cu_seqlens = options
    settings: Any = {"scale": scale, "softcap": softcap, "sink_logits": sinks}
    if plan.how == "gather":
        return gathered(q, k, v, plan, pieces=pieces, exact=exact, **settings)
    sequence, heads = plan._parts.sequence, plan._parts.heads
    if sequence is None or heads is None:

        def of_rows(q: Tensor, k: Tensor, v: Tensor, mask: Any, **settings: Any) -> Any:
            if rule is None or cu_seqlens is None:
                return attend(q, k, v, mask, return_lse=True, **settings)
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            out, lse = attention_varlen(q, k, v, cu_seqlens, None, mask, return_lse=True, **settings)
            return out.transpose(0, 1)[None], lse[None]

        return by_heads(q, k, v, plan, rule, of_rows, settings | {"alibi_slopes": slopes}, groups, lse)

    def of_columns(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, **settings: Any) -> Any:
        column = once(plan._kept, ("column", mask), lambda: sequence._of(mask))
        return gathered(q, k, v, column, pieces=pieces, exact=exact, **settings)

    return by_heads(q, k, v, heads, None, of_columns, settings, [], lse)
