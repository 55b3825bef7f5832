"""Vertical and slash lines of a prompt's softmax, estimated from its last queries, in plain torch: the specification of
FlexPrefill and of MInference's vertical-slash pattern.

The last queries attend to all keys, causally. A vertical line is a key; a slash line is a distance: query position less
key position. The mass of a line is its share of the softmax of these queries, summed. FlexPrefill takes lines of whole
blocks: a key block, or a distance in key blocks, position // bk of the query less that of the key.

Lines are kept by a cut (`cut`): those with at least a certain mass. Masses are compared by their leading bits, a step
of 2^-11 relative, and lines with a mass below 2^-30 are never kept by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes

# A mass counts by its 20 leading bits, from those of 2^-30 on. CODES is more than those of all float32 from 2^-30 on.
DROPPED, LEAST, CODES = 12, 0x30800000 >> 12, 1 << 18


class Lines(NamedTuple):
    """Mass of every key [B, Hq, T] and of every distance from 0 to the last query's position [B, Hq, distances]."""

    vertical: Tensor
    slash: Tensor


def last_softmax(
    q: Tensor, k: Tensor, last: int, q_offset: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Causal softmax of the `last` queries over all keys, float32 [B, Hq, n, T], and their positions, int64 [n]. A
    query that sees no key has zeros. scale: the factor of q @ k; D**-0.5 for None.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    n = min(last, q_len)
    with dtypes.as_given(q.device):
        rows, k = q[:, :, q_len - n :].float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        s = rows @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    position = torch.arange(q_len - n, q_len, dtype=torch.int64, device=q.device) + q_offset
    hidden = torch.arange(kv_len, dtype=torch.int64, device=q.device) > position[:, None]
    return s.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0), position


def token_lines(q: Tensor, k: Tensor, last: int, q_offset: int, scale: float | None = None) -> Lines:
    """Lines of tokens, of the `last` queries."""
    p, position = last_softmax(q, k, last, q_offset, scale)
    key = torch.arange(k.shape[2], dtype=torch.int64, device=q.device)
    return Lines(p.sum(2), _by_distance(p, position[:, None] - key))


def block_lines(
    q: Tensor, k: Tensor, last: int, q_offset: int, side: int, scale: float | None = None
) -> Lines:
    """Lines of key blocks of `side`: [B, Hq, Nb], and block distances up to that of the last query to block 0."""
    p, position = last_softmax(q, k, last, q_offset, scale)
    key = torch.arange(k.shape[2], dtype=torch.int64, device=q.device) // side
    vertical = p.new_zeros(*p.shape[:2], -(-k.shape[2] // side)).index_add_(2, key, p.sum(2))
    return Lines(vertical, _by_distance(p, position[:, None] // side - key))


def _by_distance(p: Tensor, distance: Tensor) -> Tensor:
    """Sums of p [B, H, n, T] over pairs of one distance, int64 [n, T]; those below 0 have no mass."""
    if not distance.numel() or int(distance.max()) < 0:
        return p.new_zeros(*p.shape[:2], 0)
    sums = p.new_zeros(*p.shape[:2], int(distance.max()) + 1)
    return sums.index_add_(2, distance.clamp(min=0).flatten(), p.masked_fill(distance < 0, 0.0).flatten(2))


def codes(mass: Tensor) -> Tensor:
    """int32: how masses compare. 0 for those below 2^-30 and NaN."""
    bits = mass.float().contiguous().view(torch.int32) >> DROPPED
    return torch.where(mass >= 0, (bits - LEAST + 1).clamp(0, CODES - 1), 0).int()


def cut(mass: Tensor, share: float, least: int = 0) -> Tensor:
    """Which of the masses [.., n] are kept, bool: those from the highest step on at which the kept ones have `share` of
    the sum, and are at least `least`; if there is none, all with a mass. Sums are exact: a mass counts in steps of
    2^-30, rounded down.
    """
    code = codes(mass)
    ranked, order = code.sort(dim=-1, descending=True, stable=True)
    counted = torch.where(code > 0, mass.float() * 2.0**30, 0.0).long()
    held = counted.gather(-1, order).cumsum(-1)
    need = (
        counted.sum(-1, keepdim=True).double()
        * torch.tensor(share, dtype=torch.float32, device=mass.device).double()
    )
    count = torch.arange(1, mass.shape[-1] + 1, dtype=torch.int64, device=mass.device)
    enough = (held >= need) & (count >= least)
    if not mass.shape[-1]:
        return code > 0
    first = torch.where(enough.any(-1), enough.int().argmax(-1), mass.shape[-1] - 1)
    return (code > 0) & (code >= ranked.gather(-1, first[..., None]))
