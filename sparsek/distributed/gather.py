"""Attention of a rank's own queries over keys that it gathers from their owners, as one node of autograd.

    forward    pieces of K and V that the queries see arrive; attention to each; parts merged by lse
    backward   the pieces arrive again; dQ is their sum; dK and dV return to the owners, which add them by rank, of
               float32 where many keys have parts on several ranks
    exact      one piece; and in the backward pass Q, dO, O and lse go to the owners of the keys they see instead

Nothing that was gathered is kept between the passes. A pass makes the same collectives in the same order on all ranks,
whatever a rank has to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.attn.ops.attention import attention
from sparsek.attn.ops.attention_autograd import AttentionBackward
from sparsek.attn.plan.attention import NONE, Attended
from sparsek.attn.reference.attention import merge_attention
from sparsek.attn.reference.scores import Scores
from sparsek.distributed.exchange import Arriving, refuse_second_order, rows_of
from sparsek.distributed.pieces import Piece, key_pieces, query_piece
from sparsek.distributed.plan import MeshPlan


class GatheredAttention(torch.autograd.Function):
    """(out, lse) of this rank's queries over the keys that they see."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: MeshPlan,
        scale: float | None,
        softcap: float,
        pieces: int,
        exact: bool,
    ) -> tuple[Tensor, Tensor]:
        settings: Any = {"scale": scale, "softcap": softcap, "return_lse": True}
        parts = key_pieces(plan, k.shape[0], k.shape[1], q.device, pieces, exact)
        wide = torch.promote_types(q.dtype, torch.float32)
        found, sink_logits = None, sinks
        for part, under_way in _all_under_way(parts, k, v):
            keys, values = _placed(under_way, k.shape[:2], part)
            out, lse = attention(q, keys, values, part.mask, sink_logits=sink_logits, **settings)
            if len(parts) > 1:  # a sum of all parts that is rounded once
                out = out.to(wide)
            found = (out, lse) if found is None else merge_attention(*found, out, lse)
            sink_logits = None
        assert found is not None
        out, lse = found[0].to(v.dtype), found[1]
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.plan, ctx.scale, ctx.softcap, ctx.pieces, ctx.exact = plan, scale, softcap, pieces, exact
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        q, k, v, sinks, out, lse = ctx.saved_tensors
        plan: MeshPlan = ctx.plan
        grad = torch.zeros_like(out) if grad is None else grad
        parts = key_pieces(plan, k.shape[0], k.shape[1], q.device, ctx.pieces, ctx.exact)
        queries = query_piece(plan, q.shape[0], q.shape[1], q.device) if ctx.exact else None
        pairs = _all_under_way(parts, k, v)
        seeing: list[Arriving] = []
        if queries is not None:  # under way before the first product
            grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
            of_sums = (rows_of(x.unsqueeze(-1)) for x in (lse, grad_lse))
            seeing = [queries.exchange.start(*map(rows_of, (q, out, grad))), queries.exchange.start(*of_sums)]
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, returning, learned, of_part = None, [], None, sinks
        for part, under_way in pairs:
            keys, values = _placed(under_way, k.shape[:2], part)
            given = q, keys, values, out, lse, grad, grad_lse
            summed = queries is None and part.shared
            more, *of_keys = _differentiated(given, part, ctx, of_part, summed)
            if of_part is not None:
                learned, of_part = of_keys.pop().sum(0).to(of_part.dtype), None
            dq = more if dq is None else dq.to(wide).add_(more)
            if queries is None:
                if summed:  # of one dtype on all ranks, whatever their kernels have
                    of_keys = [x.to(wide) for x in of_keys]
                returning.append(part.exchange.start_back(*map(rows_of, of_keys)))
        assert dq is not None
        if queries is None:
            dk, dv = (x.view_as(of) for x, of in zip(_returned(returning, k.dtype), (k, v), strict=True))
        else:
            all_q, all_out, all_grad = _placed(seeing[0], q.shape[:2], queries)
            all_lse, all_grad_lse = (x.squeeze(-1) for x in _placed(seeing[1], q.shape[:2], queries))
            given = all_q, k, v, all_out, all_lse, all_grad, all_grad_lse
            _, dk, dv = _differentiated(given, queries, ctx, None, False)
        return dq.to(q.dtype), dk, dv, learned, None, None, None, None, None


def gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: MeshPlan,
    *,
    scale: float | None,
    softcap: float,
    sink_logits: Tensor | None,
    pieces: int,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's shards, with gradients."""
    if exact:
        query_piece(plan, q.shape[0], q.shape[1], q.device)  # which the backward pass needs
    return GatheredAttention.apply(q, k, v, sink_logits, plan, scale, softcap, pieces, exact)


def _all_under_way(parts: list[Piece], k: Tensor, v: Tensor) -> list[tuple[Piece, Arriving]]:
    rows = rows_of(k), rows_of(v)
    return [(part, part.exchange.start(*rows)) for part in parts]


def _placed(under_way: Arriving, heads: Any, part: Piece) -> list[Tensor]:
    """The tensors [B, H, length, E] of a piece, once they have arrived."""
    return [x.reshape(*heads, part.length, x.shape[1]) for x in under_way.placed()]


def _differentiated(given: tuple[Any, ...], part: Piece, ctx: Any, sinks: Tensor | None, wide: bool) -> Any:
    """(dq, dk, dv) of a piece, and with sinks their gradient; by a recorded call where there is one.

    `wide`: dk and dv are parts of sums.
    """
    call = Attended(NONE, NONE, NONE, part.mask, ctx.scale, scores=Scores(ctx.softcap), wide=wide)
    q, k, v, *results = given
    run: Any = AttentionBackward.forward
    return run(q, k, v, *results, sinks, call)


def _returned(returning: list[Arriving], dtype: torch.dtype) -> list[Tensor]:
    """The rows of dK and dV, added in the order of pieces and ranks."""
    if len(returning) == 1:
        return returning[0].returned(dtype, own=True)
    total = None
    for each in returning:
        total = each.added(total)
    assert total is not None
    return list(total.to(dtype).split(returning[0].widths, 1))
