"""What attention over 2 to 512 ranks would send and how even it would be, without processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.distributed.planning import MOST, plan

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


class Simulated(NamedTuple):
    """One number of ranks: figures of a forward pass.

    Attributes:
        ranks: Ranks of the mesh.
        imbalance: Visited pairs of the fullest rank over the mean.
        tokens: Tokens of the longest shard over the mean.
        received: Bytes that the rank with most receives.
        share: These bytes over those of gathering all keys and values.
        seconds: The longest rank, where `pair_seconds` and `bandwidth` are given: its attention, and then what it
            receives. Otherwise 0.
    """

    ranks: int
    imbalance: float
    tokens: float
    received: int
    share: float
    seconds: float

    def __str__(self) -> str:
        time = f", {self.seconds * 1e3:.3g} ms" if self.seconds else ""
        return (
            f"{self.ranks:4d} ranks: imbalance {self.imbalance:.3f} of pairs, {self.tokens:.3f} of tokens, "
            f"{self.received / 1e6:9.1f} MB received ({100 * self.share:.3g} % of all K and V){time}"
        )


def simulate(
    mask: Any,
    ranks: Sequence[int] = RANKS,
    how: str = "gather",
    *,
    batch: int = 1,
    q_heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    pair_seconds: float = 0.0,
    bandwidth: float = 0.0,
) -> list[Simulated]:
    """Return what attention with a mask over each number of ranks would send.

    Args:
        mask: As in `sk.distributed.plan`.
        ranks: Numbers of ranks.
        how: As in `sk.distributed.plan`.
        batch: Batch items.
        q_heads: Heads of q.
        kv_heads: Heads of k and v.
        dim: Their head dim.
        dtype: Their dtype.
        pair_seconds: Seconds of one card for a visited pair of one head of q, measured on it.
        bandwidth: Bytes a second that a rank receives.

    Example:
        >>> import sparsek as sk
        >>> print(*sk.distributed.simulate(sk.BlockMask.causal(65536), (2, 8)), sep="\\n")
           2 ranks: imbalance 1.000 of pairs, 1.000 of tokens,     134.2 MB received (50 % of all K and V)
           8 ranks: imbalance 1.000 of pairs, 1.000 of tokens,    234.9 MB received (87.5 % of all K and V)
    """
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence):
        raise InvalidInput(f"ranks is {arguments.shown(ranks)}; it must be a list of numbers of ranks")
    pair_seconds = arguments.number("pair_seconds", pair_seconds, 0.0)
    bandwidth = arguments.number("bandwidth", bandwidth, 0.0)
    sizes = [arguments.integer(*each) for each in (("batch", batch), ("kv_heads", kv_heads), ("dim", dim))]
    made = []
    for count in ranks:
        each = plan(mask, arguments.integer("ranks", count, 1, MOST), how)
        received = int(each.received(batch, q_heads, kv_heads, dim, dtype=dtype).max())
        queries, whole = each._parts.queries, each.mask
        every = 2 * math.prod(sizes) * dtype.itemsize * whole.kv_len
        seconds = 0.0
        if pair_seconds and bandwidth:
            heads = sizes[0] * int(q_heads) / (whole.batch * whole.heads)
            seconds = float(each._pairs.max()) * heads * pair_seconds + received / bandwidth
        tokens = float(queries.tokens.max() * each.ranks / max(whole.q_len, 1))
        made.append(
            Simulated(each.ranks, each.imbalance, tokens, received, received / max(every, 1), seconds)
        )
    return made
