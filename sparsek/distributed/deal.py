"""The deal: which rank owns which tokens of a sequence, balanced by the query-key pairs that a mask shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsek.attn.mask.data import MaskData

TOLERANCE = 1.03  # visited pairs of the fullest rank over the mean
LOOSE, SAVING = 1.05, 0.75  # a less even deal is taken where it costs this share of the best that is even
MOST_UNEVEN = 1.05  # tokens of the longest shard over the mean, where cuts follow the pairs
SWAPS = 256  # of chunks between the fullest and another rank, at most
# 512 bytes at 300 GB/s over 4 * 512 flop at 500 TFLOP/s: a head of k, 4 heads of q, D = 128.
PAIRS_PER_KEY = 425


@dataclass(frozen=True, eq=False)
class Deal:
    """The owner of each unit of a sequence. A rank's tokens are those of its units, in ascending order.

    Attributes:
        length: Tokens of the sequence.
        unit: Tokens of one unit; the last unit may be shorter.
        owner: int64 [ceil(length / unit)], a rank for each unit.
        ranks: Ranks of the mesh; some may have no unit.
    """

    length: int
    unit: int
    owner: np.ndarray
    ranks: int

    @cached_property
    def unit_tokens(self) -> np.ndarray:
        """The tokens of each unit."""
        first = np.arange(self.owner.size) * self.unit
        return np.minimum(first + self.unit, self.length) - first

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens of each rank, int64 [ranks]."""
        return np.bincount(self.owner, self.unit_tokens, self.ranks).astype(np.int64)

    def units(self, rank: int) -> np.ndarray:
        """The units of a rank, ascending."""
        return np.flatnonzero(self.owner == rank)

    def positions(self, rank: int) -> np.ndarray:
        """The places of a rank's tokens in the sequence, ascending."""
        units = self.units(rank)
        return ranges(units * self.unit, self.unit_tokens[units])

    def owners(self, side: int) -> np.ndarray:
        """The owner of each block of `side` tokens, which divide the unit."""
        return np.repeat(self.owner, self.unit // side)[: -(-self.length // side)]

    def by(self, side: int) -> Deal:
        """The deal of the blocks of `side` tokens, which divide the unit, in place of tokens."""
        return Deal(-(-self.length // side), self.unit // side, self.owner, self.ranks)

    def parts(self, rank: int, side: int) -> np.ndarray:
        """The blocks of `side` tokens, which divide the unit, that a rank owns, ascending."""
        units, whole = self.units(rank), self.unit // side
        blocks = (units[:, None] * whole + np.arange(whole)).ravel()
        return blocks[blocks * side < self.length]


def ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """first[i], first[i] + 1, ... of `count[i]` numbers, one after the other."""
    before = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(first - before, count)


def in_pairs(mask: MaskData) -> bool:
    """Whether kernels take two neighbouring key blocks together: blocks of 64 of lists of tokens."""
    return mask.members is not None and mask.block[1] == 64


def even_deal(length: int, unit: int, ranks: int) -> Deal:
    """Contiguous shares of as many units for each rank."""
    units = -(-length // unit)
    return Deal(length, unit, np.arange(units) * ranks // max(units, 1), ranks)


def balanced_deal(
    mask: MaskData, unit: int, ranks: int, pairs: np.ndarray, tolerance: float = TOLERANCE
) -> Deal:
    """The deal of a mask's queries, and of its keys if there are as many, that is predicted to take least time among
    those whose fullest rank has at most `tolerance` times the mean of `pairs` [units]; else the most even one.

    The sequence is cut into `ranks * m` contiguous chunks for m = 1, 2, 4 and so on. Chunks are assigned in m rounds,
    the one with most pairs to the rank with fewest, so all ranks have as many chunks. Then chunks are swapped between
    the fullest and other ranks. Coarse chunks keep the keys of a window on few ranks.
    """
    units = pairs.size
    if ranks == 1 or units == 0:
        return even_deal(mask.q_len, unit, ranks)
    met, fixed = _met(mask, unit), None
    if mask.q_len != mask.kv_len:
        fixed = even_deal(mask.kv_len, unit, ranks).owner
    found = []
    for owner in _candidates(units, ranks, pairs):
        of_ranks = np.bincount(owner, pairs, ranks)
        received = _received(met, owner, owner if fixed is None else fixed, ranks) * unit
        cost = of_ranks.max() + PAIRS_PER_KEY * received * mask.batch * mask.heads
        found.append((cost, imbalance(of_ranks), owner))
    even = [each for each in found if each[1] <= tolerance]
    best = min(even, key=lambda each: each[0]) if even else min(found, key=lambda each: each[1])
    loose = min((each for each in found if each[1] <= max(LOOSE, best[1])), key=lambda each: each[0])
    return Deal(mask.q_len, unit, (loose if loose[0] < SAVING * best[0] else best)[2], ranks)


def _met(mask: MaskData, unit: int) -> np.ndarray:
    """Which units of keys some head's queries of each unit visit, bool [units, units of keys]."""
    (bq, bk), tiles = mask.block, mask.grid[0]
    met = np.zeros((-(-mask.q_len // unit), -(-mask.kv_len // unit)), bool)
    for row, column in entries_of(mask):
        met[row % max(tiles, 1) // (unit // bq), column // (unit // bk)] = True
    return met


def _received(met: np.ndarray, owner: np.ndarray, key_owner: np.ndarray, ranks: int) -> int:
    """The units of keys that the rank with most of them gets from others."""
    return max(int((met[owner == rank].any(0) & (key_owner != rank)).sum()) for rank in range(ranks))


def entries_of(mask: MaskData) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row and column of every visited block: those of the full lists, then those of the partial ones."""
    for lists in (mask.host.full, mask.host.partial):
        counts = lists.counts.astype(np.int64)
        row = np.repeat(np.arange(mask.rows), counts)
        yield row, lists.indices[ranges(lists.starts.astype(np.int64), counts)]


def imbalance(pairs: np.ndarray) -> float:
    """The most over the mean; 1.0 of nothing."""
    mean = pairs.mean() if pairs.size else 0.0
    return float(pairs.max() / mean) if mean else 1.0


def unit_pairs(mask: MaskData, unit: int) -> np.ndarray:
    """The visited query-key pairs of each unit of queries, int64, summed over batch items and heads of the mask."""
    (bq, bk), tiles = mask.block, mask.grid[0]
    if not tiles:
        return np.zeros(0, np.int64)
    visited = mask.host.full.counts.astype(np.int64) + mask.host.partial.counts
    queries = np.minimum(np.arange(1, tiles + 1) * bq, mask.q_len) - np.arange(tiles) * bq
    pairs = visited.reshape(-1, tiles).sum(0) * bk * queries
    return np.add.reduceat(pairs, np.arange(0, tiles, unit // bq))


def _candidates(units: int, ranks: int, pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Owners of the units, from coarse to fine."""
    # Contiguous, cut where the pairs are even, if the tokens are nearly so.
    ends = np.cumsum(pairs)
    cut = np.minimum(((ends - pairs / 2) * ranks / max(ends[-1], 1)).astype(np.int64), ranks - 1)
    if np.bincount(cut, minlength=ranks).max() * ranks <= MOST_UNEVEN * units:
        yield cut
    rounds = 1
    while True:
        chunks = min(ranks * rounds, units)
        chunk = np.arange(units) * chunks // units  # of each unit
        yield _dealt(np.bincount(chunk, pairs, chunks), ranks)[chunk]
        if chunks == units:
            return
        rounds *= 2


def _dealt(pairs: np.ndarray, ranks: int) -> np.ndarray:
    """The rank of each chunk: rounds of `ranks` chunks, the fullest to the rank with fewest pairs; then swaps."""
    order, owner, load = np.argsort(-pairs, kind="stable"), np.zeros(pairs.size, np.int64), np.zeros(ranks)
    for first in range(0, pairs.size, ranks):
        some = order[first : first + ranks]
        to = np.argsort(load, kind="stable")[: some.size]
        owner[some] = to
        load[to] += pairs[some]
    for _ in range(SWAPS):
        if not _swap(pairs, owner, load):
            break
    return owner


def _swap(pairs: np.ndarray, owner: np.ndarray, load: np.ndarray) -> bool:
    """Swap two chunks of the fullest and another rank so that the fuller of both gets least; False if none is."""
    top = int(load.argmax())
    mine, others = np.flatnonzero(owner == top), np.flatnonzero(owner != top)
    if load[top] <= load.mean() * 1.001 or not others.size:
        return False
    less = pairs[mine][:, None] - pairs[others]
    fuller = np.maximum(load[top] - less, load[owner[others]] + less)
    at = int(fuller.argmin())
    a, b = mine[at // others.size], others[at % others.size]
    if fuller.flat[at] >= load[top]:
        return False
    other, less = int(owner[b]), pairs[a] - pairs[b]
    load[top], load[other] = load[top] - less, load[other] + less
    owner[a], owner[b] = other, top
    return True
