"""q, k and slow, plain versions of what policies choose."""

import itertools
import math

import torch
from torch import Tensor

import sparsek as sk


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def lengths_of(blocks: int, side: int, batch: int, seed: int) -> Tensor:
    """Lengths of blocks, 0 to `side`, at least one above 0 in each row."""
    found = torch.randint(0, side + 1, (batch, blocks), generator=torch.Generator().manual_seed(seed))
    found[:, -1] = found[:, -1].clamp(min=1)
    return found.int()


def chosen(mask: sk.BlockMask) -> Tensor:
    """bool [batch, heads, Mb, Nb]: the stored blocks."""
    found = torch.zeros(mask.rows, mask.grid[1], dtype=torch.bool)
    for lists in (mask.full, mask.partial):
        for row, (start, count) in enumerate(zip(lists.starts.tolist(), lists.counts.tolist(), strict=True)):
            found[row, lists.indices[start : start + count].long()] = True
    return found.view(mask.batch, mask.heads, *mask.grid)


def keys_of(j: int, side: int, kv_len: int, lengths: Tensor | None, item: int) -> range:
    """The keys of a block that exist."""
    count = side if lengths is None else int(lengths[item % lengths.shape[0], j])
    return range(j * side, min(j * side + count, kv_len))


def visible(i: int, keys: range, block: tuple[int, int], q_len: int, offset: int | None) -> bool:
    """Whether any query of tile i sees the first of these keys; `offset` of the first query if causal."""
    if not keys:
        return False
    return offset is None or keys.start <= min((i + 1) * block[0], q_len) - 1 + offset


def slow_scores(
    q: Tensor, k: Tensor, block: tuple[int, int], parts: tuple[int, int], lengths: Tensor | None
) -> Tensor:
    """float64 [B, Hq, Mb, Nb], by loops over blocks and their parts."""
    (batch, heads, q_len, dim), (k_heads, kv_len) = q.shape, k.shape[1:3]
    tiles, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    found = torch.full((batch, heads, tiles, columns), -math.inf, dtype=torch.float64)
    down, across = block[0] // parts[0], block[1] // parts[1]
    for b, h, i, j in itertools.product(range(batch), range(heads), range(tiles), range(columns)):
        keys = keys_of(j, block[1], kv_len, lengths, b)
        total = 0.0
        for first in range(i * block[0], min((i + 1) * block[0], q_len), down):
            rows = q[b, h, first : min(first + down, q_len)].double()
            for start in range(keys.start, keys.stop, across):
                some = k[b, h * k_heads // heads, start : min(start + across, keys.stop)].double()
                total += math.exp(float(rows.mean(0) @ some.mean(0)) * dim**-0.5)
        if total:
            found[b, h, i, j] = math.log(total)
    return found
