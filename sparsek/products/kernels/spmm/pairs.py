"""Block rows that share columns: which ones are computed together, and in which order their steps go.

    block rows  -- match, 0 to 2 times -->  units of 1, 2 or 4 rows  -- match -->  pairs of units
    a pair's steps:  where both units have blocks, both take the column in the same step; the rest in order

Pairs are matched greedily, those with the most columns in common first, among WINDOW neighbours. In a band that may
make one pair of its two ends; there neighbours are paired in order. Of uniformly random rows with an eighth of their
blocks stored (128 to 512 rows), pairs need 0.86 to 0.88 of the columns that their rows have; pairs of joined pairs
0.74, of joined fours 0.60.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsek.products.formats.pattern import BlockPattern

WINDOW = 512
NEAR = 0.04  # what neighbours may cost more than rows that are alike


class Pairs(NamedTuple):
    """The steps of all pairs of units; pair i has those from begin[i] to end[i].

    `rows` [pairs, 2, joined]: block rows of both units, -1 for none. `cols` [2, steps]: the block column of each unit's
    step, -1 for none. `shared` [steps]: whether both are the same column. `blocks` [2, steps, joined]: stored blocks,
    nnzb for none.
    """

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    shared: NDArray[np.bool_]
    blocks: NDArray[np.int64]


def matched(has: NDArray[np.bool_], together: bool = False) -> NDArray[np.int64]:
    """Pairs [n / 2, 2] of rows with the most True in common; a last odd row is paired with -1.

    Rows that walk their columns `together` wait for the longer one: what they differ in length counts against them.
    In each round two rows become a pair if each is the other's best. This finds the pairs that a greedy choice, of all
    pairs the best first, would take. Of equally good ones those come first whose indices differ in the lowest bits: so
    each of many equal rows has another partner, and all of them pair in few rounds.
    """
    n = len(has)
    bits = has.astype(np.float32)
    at = np.arange(n)
    order = (at[:, None] ^ at) * n + np.minimum(at[:, None], at)
    common, lengths = (bits @ bits.T).astype(np.int64), has.sum(1)
    if together:
        common -= np.abs(lengths[:, None] - lengths)
    alike = common * (2 * n * n) - order  # no two pairs are equal
    np.fill_diagonal(alike, np.iinfo(np.int64).min)
    pairs, left = [], at
    while len(left) > 1:
        best = alike[np.ix_(left, left)].argmax(1)
        mutual = best[best] == np.arange(len(left))
        pairs.append(np.stack((left, left[best]), 1)[mutual & (np.arange(len(left)) < best)])
        left = left[~mutual]
    if len(left):
        pairs.append(np.array([[left[0], -1]]))
    return np.concatenate(pairs)


def pairs_of(pattern: BlockPattern, joined: int) -> Pairs:
    """Units of `joined` block rows, in pairs, and their steps."""
    found = [_window(pattern, joined, at) for at in range(0, pattern.grid[0], WINDOW)]
    rows = np.concatenate([each[0] for each in found])
    lengths, cols, shared, blocks = zip(*[step for each in found for step in each[1]], strict=True)
    end = np.cumsum(lengths)
    return Pairs(
        end - lengths, end, rows,
        np.concatenate(cols, 1), np.concatenate(shared), np.concatenate(blocks, 1),
    )  # fmt: skip


def _window(pattern: BlockPattern, joined: int, at: int) -> tuple[NDArray[np.int64], list[tuple]]:
    """Pairs and steps of WINDOW block rows from `at` on."""
    count, width = min(WINDOW, pattern.grid[0] - at), max(1, pattern.grid[1])
    (indptr, indices), nnzb = pattern.host, pattern.nnzb
    stored = np.arange(indptr[at], indptr[at + count])
    place = np.full((count + 1, width), nnzb, np.int64)  # the last row has no blocks: -1 selects it
    place[np.repeat(np.arange(count), np.diff(indptr[at : at + count + 1])), indices[stored]] = stored
    rows = _chosen(place < nnzb, joined)
    steps = [_steps(place[pair], nnzb) for pair in rows]
    return np.where(rows < 0, -1, rows + at), steps


def _chosen(has: NDArray[np.bool_], joined: int) -> NDArray[np.int64]:
    """Rows of the pairs of units [pairs, 2, joined] of a window; `has` ends with an empty row, which -1 selects.

    Of a band, a greedy choice leaves the two ends to each other, and no cluster can share the long pair that they
    make. So neighbours are taken where their longest pair is shorter and they cost little more.
    """
    count = len(has) - 1
    rows = np.arange(count)[:, None]
    while rows.shape[1] < 2 * joined:
        pairs = matched(has[rows].any(1), together=rows.shape[1] == joined)
        padded = np.concatenate((rows, np.full_like(rows[:1], -1)))
        rows = padded[pairs].reshape(len(pairs), -1)
    alike = rows.reshape(-1, 2, joined)
    neighbours = np.full(alike.shape, -1)
    neighbours.flat[:count] = np.arange(count)
    longest, *costs = _costs(has, alike)
    shorter, *others = _costs(has, neighbours)
    near = all(other <= (1 + NEAR) * cost for other, cost in zip(others, costs, strict=True))
    return neighbours if shorter < longest and near else alike


def _costs(has: NDArray[np.bool_], rows: NDArray[np.int64]) -> tuple[int, int, int]:
    """Steps of the longest pair, and of all pairs, and the block columns of B that they load."""
    needs = has[rows].any(2)
    steps = needs.sum(2).max(1)
    return int(steps.max()), int(steps.sum()), int(needs.any(1).sum())


def _steps(place: NDArray[np.int64], nnzb: int) -> tuple:
    """The steps of a pair, from the stored blocks `place` [2, joined, columns]: their number, and fields of Pairs."""
    has = (place < nnzb).any(1)
    both, alone = has.all(0), has & ~has.all(0)
    own = [np.flatnonzero(each) for each in alone]
    count = int(both.sum()) + max(map(len, own))
    # Shared columns are spread over the steps, so that the need for bandwidth is even.
    shared = np.zeros(count, np.bool_)
    shared[np.arange(both.sum()) * count // max(1, int(both.sum()))] = True
    cols = np.full((2, count), -1, np.int64)
    cols[:, shared] = np.flatnonzero(both)
    for unit in range(2):
        cols[unit, np.flatnonzero(~shared)[: len(own[unit])]] = own[unit]
    blocks = np.stack([place[unit].T[cols[unit]] for unit in range(2)])
    blocks[cols < 0] = nnzb
    return count, cols, shared, blocks
