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
from sparsek.reference.estimates import block_means

# A mass counts by its 20 leading bits, from those of 2^-30 on. CODES is more than those of all float32 from 2^-30 on.
DROPPED, LEAST, CODES = 12, 0x30800000 >> 12, 1 << 18


class Lines(NamedTuple):
    """Mass of every key [B, Hq, T] and of every distance from 0 to the last query's position [B, Hq, distances]."""

    vertical: Tensor
    slash: Tensor


def last_softmax(q: Tensor, k: Tensor, last: int, q_offset: int) -> tuple[Tensor, Tensor]:
    """Causal softmax of the `last` queries over all keys, float32 [B, Hq, n, T], and their positions, int64 [n]. A
    query that sees no key has zeros.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    n = min(last, q_len)
    with dtypes.as_given(q.device):
        rows, k = q[:, :, q_len - n :].float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        s = rows @ k.mT * q.shape[3] ** -0.5
    position = torch.arange(q_len - n, q_len, dtype=torch.int64, device=q.device) + q_offset
    hidden = torch.arange(kv_len, dtype=torch.int64, device=q.device) > position[:, None]
    return s.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0), position


def token_lines(q: Tensor, k: Tensor, last: int, q_offset: int) -> Lines:
    """Lines of tokens, of the `last` queries."""
    p, position = last_softmax(q, k, last, q_offset)
    key = torch.arange(k.shape[2], dtype=torch.int64, device=q.device)
    return Lines(p.sum(2), _by_distance(p, position[:, None] - key))


def block_lines(q: Tensor, k: Tensor, last: int, q_offset: int, side: int) -> Lines:
    """Lines of key blocks of `side`: [B, Hq, Nb], and block distances up to that of the last query to block 0."""
    p, position = last_softmax(q, k, last, q_offset)
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
    need = counted.sum(-1, keepdim=True).double() * torch.tensor(share, dtype=torch.float32, device=mass.device).double()
    count = torch.arange(1, mass.shape[-1] + 1, dtype=torch.int64, device=mass.device)
    enough = (held >= need) & (count >= least)
    if not mass.shape[-1]:
        return code > 0
    first = torch.where(enough.any(-1), enough.int().argmax(-1), mass.shape[-1] - 1)
    return (code > 0) & (code >= ranked.gather(-1, first[..., None]))


class Grid(NamedTuple):
    """Where tiles of queries and blocks of keys stand: lengths, block (bq, bk), position of the first query."""

    q_len: int
    kv_len: int
    block: tuple[int, int]
    q_offset: int

    def spans(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """First and last position of each tile, int64 [Mb, 1], and the first key of each block, int64 [Nb]."""
        (bq, bk) = self.block
        first = torch.arange(0, self.q_len, bq, dtype=torch.int64, device=device)[:, None] + self.q_offset
        last = (first + bq).clamp(max=self.q_len + self.q_offset) - 1
        return first, last, torch.arange(0, self.kv_len, bk, dtype=torch.int64, device=device)


def blocks_on_lines(grid: Grid, vertical: Tensor, slash: Tensor) -> Tensor:
    """bool [.., Mb, Nb]: blocks that a kept key or a kept distance crosses. vertical bool [.., T], slash [.., n]."""
    first, last, start = grid.spans(vertical.device)
    end = (start + grid.block[1]).clamp(max=grid.kv_len)
    up = torch.nn.functional.pad(vertical.long().cumsum(-1), (1, 0))
    across = torch.nn.functional.pad(slash.long().cumsum(-1), (1, 0))
    on_vertical = (up[..., end] > up[..., start])[..., None, :]
    low = (first - end + 1).clamp(0, slash.shape[-1])
    high = (last - start + 1).clamp(0, slash.shape[-1])
    return (on_vertical | (across[..., high] > across[..., low])) & (start <= last)


def near_blocks(grid: Grid, sinks: int, window: int, device: torch.device) -> Tensor:
    """bool [Mb, Nb]: visible blocks with one of the first `sinks` keys, or a key less than `window` before a query."""
    first, last, start = grid.spans(device)
    end = (start + grid.block[1]).clamp(max=grid.kv_len)
    nearest = (first - end + 1).clamp(min=0)
    return ((start < sinks) | (nearest < window)) & (start <= last)


def flex_blocks(
    q: Tensor, k: Tensor, grid: Grid, *, last: int, gamma: float, tau: float, least: int
) -> tuple[Tensor, Tensor]:
    """FlexPrefill's blocks, bool [B, Hq, Mb, Nb], and which heads are query-aware, bool [B, Hq].

    v: the mass of key blocks in the softmax of the `last` queries, as shares. e: the softmax of the products of their
    mean with the means of visible key blocks. A head is query-aware if the square root of the Jensen-Shannon divergence
    of v and e, with natural logarithms, is below tau. Its blocks are those of `cut` over the whole map of softmaxes of
    products of means, a row for each tile, with `least` blocks for each tile on average. Other heads keep the `cut` of
    their key blocks and that of their block distances, each with at least `least`. All keep the first key block and
    those of a tile's own positions.
    """
    (bq, bk), scale = grid.block, q.shape[3] ** -0.5
    first, final, start = grid.spans(q.device)
    visible = start <= final
    lines = block_lines(q, k, last, grid.q_offset, bk)
    n = min(last, grid.q_len)
    means = block_means(k, bk).repeat_interleave(q.shape[1] // k.shape[1], 1)
    probe = q[:, :, grid.q_len - n :].float().mean(2, keepdim=True) @ means.mT * scale
    seen = start < grid.q_len + grid.q_offset
    estimate = probe.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)[:, :, 0]
    aware = divergence(lines.vertical / lines.vertical.sum(-1, keepdim=True), estimate).sqrt() < tau
    scores = (block_means(q, bq) @ means.mT * scale).masked_fill(~visible, -torch.inf)
    mass = scores.softmax(-1).masked_fill(~visible, 0.0)
    by_query = cut(mass.flatten(2), gamma, least * grid.spans(q.device)[0].shape[0]).view(mass.shape)
    vertical, slash = (cut(each, gamma, least) for each in lines)
    own = (start >= first // bk * bk) & visible
    distance = (final // bk - start // bk), (first // bk - start // bk)
    across = torch.nn.functional.pad(slash.long().cumsum(-1), (1, 0))
    high, low = ((each + more).clamp(0, slash.shape[-1]) for each, more in zip(distance, (1, 0), strict=True))
    by_line = vertical[..., None, :] | (across[..., high] > across[..., low])
    chosen = torch.where(aware[..., None, None], by_query, by_line)
    return (chosen | own | (start == 0)) & visible, aware


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of distributions [.., n], with natural logarithms: 0 to log 2."""
    middle = (p + q) / 2
    return (torch.xlogy(p, p / middle).nan_to_num(0.0) + torch.xlogy(q, q / middle).nan_to_num(0.0)).sum(
        -1
    ) / 2
