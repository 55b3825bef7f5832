"""Decode context parallelism of vLLM: the tokens of a request are distributed over ranks with the same heads of k.

Token t is on rank t // interleave % ranks. Every rank attends to its tokens with the queries of all ranks, gathered by
heads; outputs are added up with weights by lse, each rank's heads return to it. Imports no vLLM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.ops.attention_varlen import attention_varlen
from sparsek.attn.reference.attention import merge_attention


class ContextShard(NamedTuple):
    """The tokens of each request that one of `ranks` ranks keeps."""

    ranks: int
    rank: int
    interleave: int = 1

    def lengths(self, lengths: Tensor) -> Tensor:
        """How many of the first tokens are here, int32, without a wait."""
        turn = self.ranks * self.interleave
        rest = (lengths % turn - self.rank * self.interleave).clamp(0, self.interleave)
        return (lengths // turn * self.interleave + rest).to(torch.int32)

    def bound(self, longest: int) -> int:
        """The most tokens here of a request of at most so many."""
        return -(-longest // (self.ranks * self.interleave)) * self.interleave


def gathered_heads(query: Tensor, kv_heads: int, group: Any) -> Tensor:
    """The queries [tokens, Hq, D] of all ranks, [tokens, ranks * Hq, D], those of each head of k together."""
    every = group.all_gather(query.contiguous(), dim=1)
    return _turned(every, group.world_size, kv_heads, query.shape[1] // kv_heads)


def _turned(x: Tensor, outer: int, inner: int, rest: int) -> Tensor:
    """x [tokens, outer * inner * rest, ...] with its heads in the order [inner, outer, rest]."""
    if inner == 1 or outer == 1:
        return x
    split = x.unflatten(1, (outer, inner, rest)).transpose(1, 2)
    return split.reshape(x.shape)


def combined(out: Tensor, lse: Tensor, kv_heads: int, group: Any, rank: int) -> tuple[Tensor, Tensor]:
    """(out [tokens, Hq, D], lse [tokens, Hq]) of this rank's heads over the tokens of all ranks.

    Of out [tokens, ranks * Hq, D] and lse [ranks * Hq, tokens] over those of this rank, in the order of
    `gathered_heads`.
    """
    ranks = group.world_size
    heads = out.shape[1] // ranks
    out, lse = (_turned(x, kv_heads, ranks, heads // kv_heads) for x in (out, lse.T))
    every = group.all_gather(lse.contiguous(), dim=0).unflatten(0, (ranks, -1))
    total = every.logsumexp(0)
    weight = (lse - total).exp().masked_fill(total == -torch.inf, 0)  # where no rank has a token
    out = group.reduce_scatter((out * weight[..., None]).to(out.dtype).contiguous(), dim=1)
    return out, total[:, rank * heads : (rank + 1) * heads]


def with_new_tokens(
    out: Tensor, lse: Tensor, new: tuple[Tensor, Tensor, Tensor], edges: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """(out [tokens, Hq, D], lse [tokens, Hq]) with the new tokens of each request too, each up to its own.

    new: q, k and v of all requests. edges: where each request begins, on the CPU.
    """
    own, sums = attention_varlen(
        *new, edges, mask=MaskPolicy(), scale=scale, softcap=softcap, return_lse=True
    )
    return merge_attention(out, lse.to(sums.dtype), own, sums.T)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out [tokens, Hq, D] where a learned score [Hq] takes part in the softmax."""
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)
