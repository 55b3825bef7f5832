"""How much softmax mass a block of attention may have, estimated from means: in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def block_means(x: Tensor, side: int, lengths: Tensor | None = None) -> Tensor:
    """The mean of each `side` rows of x [B, H, L, D], [B, H, ceil(L / side), D], float32 or float64. Differentiable.

    The last mean is of the remaining rows. With `lengths` int32 [1 or B, blocks] a mean is of the first lengths[j] rows
    of its block, and 0 if there are none; other rows are not read.
    """
    batch, heads, rows, dim = x.shape
    blocks = -(-rows // side)
    whole = x.new_zeros((batch, heads, blocks * side, dim), dtype=torch.promote_types(x.dtype, torch.float32))
    whole[:, :, :rows] = x
    counts = rows_of_blocks(rows, side, lengths, x.device)
    there = torch.arange(side, device=x.device) < counts[..., None]
    kept = torch.where(there[:, None, :, :, None], whole.unflatten(2, (blocks, side)), 0)
    return kept.sum(3) / counts.clamp(min=1)[:, None, :, None]


def rows_of_blocks(rows: int, side: int, lengths: Tensor | None, device: torch.device | str | None) -> Tensor:
    """int64 [1 or B, blocks]: how many rows each block of `side` rows has."""
    start = torch.arange(0, rows, side, dtype=torch.int64, device=device)
    counts = (rows - start).clamp(max=side)[None]
    return counts if lengths is None else torch.minimum(counts, lengths.long().clamp(min=0))


def block_scores(
    q: Tensor,
    k: Tensor,
    block: tuple[int, int],
    parts: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    kv_lengths: Tensor | None = None,
    q_lengths: Tensor | None = None,
) -> Tensor:
    """float32 [B, Hq, Mb, Nb]: log sum over parts a, b of exp(scale * mean(q of part a) . mean(k of part b)).

    A tile of queries has parts[0] parts of as many rows, a block of keys parts[1]; with one part of each the score is
    scale times the product of the means. Parts without a row do not count; a block without a key has score -inf.

    Args:
        q: [B, Hq, S, D].
        k: [B, Hkv, T, D]; each head serves Hq / Hkv heads of q.
        block: Queries of a tile and keys of a block.
        parts: Divisors of both.
        scale: The factor of q @ k in attention.
        kv_lengths: int32 [1 or B, Nb]: the keys that exist of each block, its first ones.
        q_lengths: int32 [1 or B, Mb]: the queries of each tile, for tiles of one part.
    """
    (tile, keys), (down, across) = block, parts
    sub_q, sub_k = tile // down, keys // across
    lengths = None
    if kv_lengths is not None:
        before = torch.arange(across, dtype=torch.int32, device=k.device) * sub_k
        lengths = (kv_lengths[..., None] - before).clamp(0, sub_k).flatten(1)[:, : -(-k.shape[2] // sub_k)]
    q_means, k_means = block_means(q, sub_q, q_lengths), block_means(k, sub_k, lengths)
    k_means = k_means.repeat_interleave(q.shape[1] // k.shape[1], 1)
    products = scale * (q_means @ k_means.mT)
    empty = rows_of_blocks(k.shape[2], sub_k, lengths, k.device) == 0
    products = products.masked_fill(empty[:, None, None, :], -torch.inf)
    rows, columns = -(-q.shape[2] // tile), -(-k.shape[2] // keys)
    room = products.new_full((*products.shape[:2], rows * down, columns * across), -torch.inf)
    room[..., : products.shape[2], : products.shape[3]] = products
    cells = room.unflatten(3, (columns, across)).unflatten(2, (rows, down)).transpose(3, 4)
    return cells.flatten(4).logsumexp(-1)


def block_mass(scores: Tensor, block: tuple[int, int], q_len: int, causal_from: int | None = None) -> Tensor:
    """The softmax of each row of scores [B, H, Mb, Nb], float32. A row of -inf has mass 0.

    With `causal_from`, where the first query stands at that key, blocks after the last query of a tile have mass 0.
    """
    if causal_from is not None:
        tile = torch.arange(1, scores.shape[2] + 1, device=scores.device) * block[0]
        first = torch.arange(scores.shape[3], device=scores.device) * block[1]
        scores = scores.masked_fill(first >= tile.clamp(max=q_len)[:, None] + causal_from, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.where(nothing, 0, scores.softmax(-1))
