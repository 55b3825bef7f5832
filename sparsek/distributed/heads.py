"""Attention of a rank's heads, between two exchanges of heads (Ulysses).

q, k, v of this rank's tokens, all heads  ->  all tokens, its heads  ->  out and lse of its tokens, all heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.rule import MaskRule
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.core.handshake import agreed
from sparsek.distributed.deal import Deal
from sparsek.distributed.exchange import Exchange, Exchanged, exchanged, rows_of
from sparsek.distributed.plan import MeshPlan, heads_of, once, reads_of
from sparsek.distributed.selection import whole_lists
from sparsek.distributed.submask import heads_part, on


class HeadsExchange(NamedTuple):
    """How the ranks of a row exchange heads.

    Attributes:
        of_q: The heads of q of this rank, int64.
        mine: The same on the device.
        of_k: The heads of k that they read.
        copies: The head of `of_k` for each of `of_q`, where these have other numbers of heads of q; else None.
        queries: From all heads of this rank's tokens to all tokens of its heads.
        keys: The same of keys and values.
    """

    of_q: np.ndarray
    mine: Tensor
    of_k: np.ndarray
    copies: Tensor | None
    queries: Exchange
    keys: Exchange

    @classmethod
    def of(cls, plan: MeshPlan, q: Tensor, k: Tensor) -> HeadsExchange:
        """Made once for the numbers of heads."""
        batch, q_heads, kv_heads, device = q.shape[0], q.shape[1], k.shape[1], q.device

        def make() -> HeadsExchange:
            parts = plan._parts
            each = [heads_of(q_heads, kv_heads, plan.ranks, other) for other in range(plan.ranks)]
            of_q, of_k = each[plan._here]
            reads, even = reads_of(of_q, of_k, q_heads // kv_heads)
            copies = None if even else torch.from_numpy(reads).to(device)
            queries = _heads_exchange(plan, parts.queries, batch, q_heads, [of for of, _ in each], device)
            keys = _heads_exchange(plan, parts.keys, batch, kv_heads, [of for _, of in each], device)
            return cls(of_q, torch.from_numpy(of_q).to(device), of_k, copies, queries, keys)

        return once(plan._parts.kept, ("heads", batch, q_heads, kv_heads, device), make)

    def rows(self, heads: int, q_heads: int) -> np.ndarray:
        """Which of the `heads` of a mask this rank reads: 1, those of k, or those of q."""
        if heads == 1:
            return np.zeros(1, np.int64)
        if heads == q_heads or self.copies is not None:
            return self.of_q * heads // q_heads
        return self.of_k


def by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: MeshPlan,
    rule: MaskRule | None,
    attend_row: Callable[..., Any],
    settings: Any,
    groups: list[Any],
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of this rank's heads by `attend_row`, between the exchanges of heads. lse returns if it is wanted.

    `groups`: if there are some, their ranks all raise if attention does on one of them, as a policy for NaN.
    """
    each, parts, q_heads = HeadsExchange.of(plan, q, k), plan._parts, q.shape[1]
    rows = (rows_of(q),), (rows_of(k), rows_of(v))
    under_way = [of.start(*given) for of, given in zip((each.queries, each.keys), rows, strict=True)]
    (all_q,), (all_k, all_v) = (
        Exchanged.apply(arriving, *given) for arriving, given in zip(under_way, rows, strict=True)
    )
    all_q = all_q.view(q.shape[0], each.of_q.size, parts.queries.length, q.shape[3])
    all_k, all_v = (x.view(q.shape[0], each.of_k.size, parts.keys.length, x.shape[1]) for x in (all_k, all_v))
    if isinstance(rule, TokenLists):  # before heads run out: all ranks exchange them
        rule = whole_lists(rule, plan)
    for name in ("sink_logits", "alibi_slopes"):
        if settings.get(name) is not None:
            settings = settings | {name: settings[name].index_select(-1, each.mine)}
    found: list[Tensor] = []

    def attend_heads() -> str:
        if (
            each.of_q.size == 0
        ):  # more ranks than heads: nothing to compute, and all exchanges to take part in
            out = _nothing(v.shape[3], all_q, all_k, all_v, settings["sink_logits"])
            found.extend((out, out[:, :1].to(torch.promote_types(q.dtype, torch.float32))))
            return ""
        given = [all_k, all_v]
        if each.copies is not None:
            given = [x.index_select(1, each.copies) for x in given]
        out, lse = attend_row(all_q, *given, _of_heads(plan, rule, each, q, k.shape[1]), **settings)
        found.extend((rows_of(out), rows_of(lse.unsqueeze(-1))))
        return ""

    if groups:
        agreed("sk.distributed.attention of the heads of a rank", groups, attend_heads)
    else:
        attend_heads()
    back = each.queries.reversed
    shape = q.shape[0], q_heads, q.shape[2]
    (out,) = exchanged(back, found[0])
    out = out.view(*shape, v.shape[3])
    return out, exchanged(back, found[1])[0].view(shape) if return_lse else None


def _of_heads(plan: MeshPlan, rule: MaskRule | None, each: HeadsExchange, q: Tensor, kv_heads: int) -> Any:
    """The mask or rule of this rank's heads."""
    if isinstance(rule, TokenLists):
        rows = each.rows(rule.indices.shape[1], q.shape[1])
        heads = once(
            plan._parts.kept, ("rows", rows.tobytes(), q.device), lambda: torch.from_numpy(rows).to(q.device)
        )
        counts = None if rule.counts is None else rule.counts.index_select(1, heads)
        return replace(rule, indices=rule.indices.index_select(1, heads), counts=counts)
    if rule is not None:
        return rule
    mask, device, within = plan.mask, q.device, None
    if each.of_q.size < q.shape[1] and kv_heads >= plan.ranks:  # otherwise ranks share heads of k
        within = kv_heads, int(each.of_k[0])
    elif mask.heads == 1:
        return on(mask, device)
    rows = each.rows(mask.heads, q.shape[1])
    key = "heads", rows.tobytes(), within, device
    return once(plan._kept, key, lambda: heads_part(mask, rows, device, within))


def _nothing(width: int, *operands: Tensor | None) -> Tensor:
    """An empty result [0, width] that depends on all operands, so that their backward passes run here too."""
    first, *others = (x for x in operands if x is not None)
    total = first.sum()
    for each in others:
        total = total + each.sum().to(total.dtype)
    return total.expand(0, width)


def _heads_exchange(
    plan: MeshPlan, deal: Deal, batch: int, heads: int, of_ranks: list[np.ndarray], device: torch.device
) -> Exchange:
    """From all heads of this rank's tokens [B, H, own, E] to all tokens of its heads [B, own heads, L, E]."""
    rank, items = plan._here, np.arange(batch)
    own, length, mine = int(deal.tokens[rank]), deal.length, of_ranks[rank].size
    send = [
        ((items[:, None, None] * heads + theirs[:, None]) * own + np.arange(own)).ravel()
        for theirs in of_ranks
    ]
    place = [
        ((items[:, None, None] * mine + np.arange(mine)[:, None]) * length + deal.positions(other)).ravel()
        for other in range(deal.ranks)
    ]
    sizes = batch * heads * own, batch * mine * length
    return Exchange.of(rank, send, place, sizes, plan._parts.group, device, "heads")
