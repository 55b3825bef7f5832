"""What changes the scores of attention before the softmax: a cap, a bias by distance, learned sinks."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Scores(NamedTuple):
    """The scores of head h of item b, from s = scale <q, k>, before the mask and the softmax:

        s = softcap * tanh(s / softcap)                      softcap > 0 (Gemma 2, arXiv:2408.00118)
        s = s - slope[h] * |i + T - S - j|                   alibi_slopes float32 [Hq] or [B, Hq] (arXiv:2108.12409)
        lse = log(exp(sink[h]) + sum_j exp(s_j))             sink_logits [Hq], float32 or the dtype of q

    for query i of S and key j of T. A sink is a key with a score of its own and a value of 0, which every query sees:
    a query that sees no other key has out = 0 and lse = sink.
    """

    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink_logits: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing changes."""
        return not self.softcap and self.alibi_slopes is None and self.sink_logits is None

    def with_sinks(self, sink_logits: Tensor | None) -> Scores:
        """The softcap and slopes with these sinks."""
        softcap, alibi_slopes, known = self
        if sink_logits is known:
            return self
        plain = not softcap and alibi_slopes is None and sink_logits is None
        return PLAIN if plain else Scores(softcap, alibi_slopes, sink_logits)

    def slopes(self, batch: int, heads: int) -> Tensor:
        """[batch, heads], a view."""
        assert self.alibi_slopes is not None
        return self.alibi_slopes.expand(batch, heads)


PLAIN = Scores()
Places: TypeAlias = tuple[Tensor, Tensor]
"""The positions of some queries, i + T - S for query i, and of some keys."""


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """int64 [..., n, t]: |query - key| of positions [..., n] and [..., t]."""
    return (queries[..., :, None] - keys[..., None, :]).abs()


def capped(s: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """softcap * tanh(s / softcap) and its derivative; `s` and None for a softcap of 0."""
    if not softcap:
        return s, None
    t = torch.tanh(s / softcap)
    return softcap * t, 1 - t * t


def changed(s: Tensor, scores: Scores, places: Places | None) -> tuple[Tensor, Tensor | None]:
    """Scores s [B, Hq, n, t] of the queries and keys `places`, capped and biased; the derivative by `s`, None for 1."""
    s, slope = capped(s, scores.softcap)
    if scores.alibi_slopes is None:
        return s, slope
    assert places is not None, "ALiBi needs the positions of queries and keys"
    slopes = scores.slopes(s.shape[0], s.shape[1]).to(s.dtype)
    return s - slopes[..., None, None] * distances(*places).to(s.dtype), slope


def sink_gradients(
    out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None, sink_logits: Tensor
) -> Tensor:
    """The gradient of `sink_logits` [Hq] for each batch item: [B, Hq], in the dtype of lse.

    - sum_i exp(sink - lse_i) (<grad_i, out_i> - grad_lse_i), for out [B, Hq, S, Dv], which shrinks as the sink grows.
    """
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    weights = (sink_logits.to(lse.dtype)[None, :, None] - lse).exp()
    return -torch.where(lse == -torch.inf, 0, weights * delta).sum(-1)
