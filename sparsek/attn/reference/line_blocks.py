"""The blocks that FlexPrefill and MInference's patterns keep, in plain torch: the specification. Causal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsek.attn.reference.estimates import block_mass, block_scores
from sparsek.attn.reference.lines import block_lines, cut, token_lines

LINES, NEAR, BLOCKS = range(3)
FORCED_KEYS, FORCED_DISTANCES = 30, 100
FORCED = 2.0**20  # a mass above all others


class Head(NamedTuple):
    """The pattern of one head: LINES of `first` keys and `second` distances, NEAR with `first` sinks and a window of
    `second` tokens, or BLOCKS with `first` blocks for each tile.
    """

    pattern: int
    first: int
    second: int


class Grid(NamedTuple):
    """Where tiles of queries and blocks of keys are: lengths, block (bq, bk), position of the first query."""

    q_len: int
    kv_len: int
    block: tuple[int, int]
    q_offset: int

    def spans(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """First and last position of each tile, int64 [Mb, 1], and the first key of each block, int64 [Nb]."""
        bq, bk = self.block
        first = torch.arange(0, self.q_len, bq, dtype=torch.int64, device=device)[:, None] + self.q_offset
        last = (first + bq).clamp(max=self.q_len + self.q_offset) - 1
        return first, last, torch.arange(0, self.kv_len, bk, dtype=torch.int64, device=device)


def vertical_slash_blocks(
    q: Tensor, k: Tensor, grid: Grid, heads: Sequence[Head], last: int, scale: float | None = None
) -> Tensor:
    """MInference's blocks, bool [B, Hq, Mb, Nb], by the pattern of each head of q.

    LINES: blocks that a kept key or distance crosses. Kept are those with the highest mass in the softmax of the `last`
    queries, among them the first FORCED_KEYS keys and FORCED_DISTANCES distances. NEAR: blocks with one of the first
    keys, or with a key less than the window before a query. BLOCKS: of each tile the key blocks with the highest
    softmax of products of means; those below 2^-30 are not kept. scale: the factor of q @ k; D**-0.5 for None.
    """
    first, final, start = grid.spans(q.device)
    end = (start + grid.block[1]).clamp(max=grid.kv_len)
    lines = token_lines(q, k, last, grid.q_offset, scale)
    mass = _mass(q, k, grid, scale)
    found = torch.zeros_like(mass, dtype=torch.bool)
    for h, head in enumerate(heads):
        if head.pattern == NEAR:
            found[:, h] = (start < head.first) | ((first - end + 1).clamp(min=0) < head.second)
        elif head.pattern == BLOCKS:
            found[:, h] = cut(mass[:, h], 0.0, head.first)
        else:
            vertical, slash = (each[:, h].clone() for each in lines)
            vertical[:, :FORCED_KEYS] = FORCED
            slash[:, :FORCED_DISTANCES] = FORCED
            up, across = _before(cut(vertical, 0.0, head.first)), _before(cut(slash, 0.0, head.second))
            low, high = (each.clamp(0, slash.shape[-1]) for each in (first - end + 1, final - start + 1))
            found[:, h] = (up[:, end] > up[:, start])[:, None] | (across[:, high] > across[:, low])
    return found & (start <= final)


def flex_blocks(
    q: Tensor,
    k: Tensor,
    grid: Grid,
    *,
    last: int,
    gamma: float,
    tau: float,
    least: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """FlexPrefill's blocks, bool [B, Hq, Mb, Nb], and which heads are query-aware, bool [B, Hq].

    v: the shares of key blocks in the softmax of the `last` queries. e: the softmax over key blocks that the last query
    sees of the mean of all products of these queries with the block's keys. A head is query-aware if the square root of
    the Jensen-Shannon divergence of v and e, with natural logarithms, is below tau. It keeps the `cut` of the map of
    softmaxes of products of means, all tiles at once, with at least `least` blocks for each tile on average. Other
    heads keep the `cut` of their key blocks and that of their block distances, each with at least `least`. All keep the
    first key block and those of a tile's own positions. scale: the factor of q @ k; D**-0.5 for None.
    """
    bk = grid.block[1]
    first, final, start = grid.spans(q.device)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    lines = block_lines(q, k, last, grid.q_offset, bk, factor)
    probe = q[:, :, grid.q_len - min(last, grid.q_len) :].mean(2, keepdim=True, dtype=torch.float32)
    scores = block_scores(probe, k.float(), (1, bk), scale=factor)
    estimate = block_mass(scores, (1, bk), 1, grid.q_len + grid.q_offset - 1)[:, :, 0]
    shares = lines.vertical / lines.vertical.sum(-1, keepdim=True).clamp(min=1e-30)
    aware = divergence(shares, estimate).sqrt() < tau
    mass = _mass(q, k, grid, scale)
    by_query = cut(mass.flatten(2), gamma, least * mass.shape[2]).view(mass.shape)
    vertical, slash = (cut(each, gamma, least) for each in lines)
    across = _before(slash)
    low, high = (
        (each // bk - start // bk + more).clamp(0, slash.shape[-1]) for each, more in ((first, 0), (final, 1))
    )
    by_line = vertical[..., None, :] | (across[..., high] > across[..., low])
    own = start >= first // bk * bk
    chosen = torch.where(aware[..., None, None], by_query, by_line)
    return (chosen | own | (start == 0)) & (start <= final), aware


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of distributions [.., n], with natural logarithms: 0 to log 2."""
    middle = ((p + q) / 2).clamp(min=1e-38)
    return (torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)).sum(-1).clamp(min=0) / 2


def _mass(q: Tensor, k: Tensor, grid: Grid, scale: float | None) -> Tensor:
    factor = q.shape[3] ** -0.5 if scale is None else scale
    scores = block_scores(q, k, grid.block, scale=factor)
    return block_mass(scores, grid.block, grid.q_len, grid.q_offset)


def _before(kept: Tensor) -> Tensor:
    """How many are kept before each place, one place more."""
    return pad(kept.long().cumsum(-1), (1, 0))
