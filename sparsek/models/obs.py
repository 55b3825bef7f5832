"""Optimal brain surgeon by blocks, and for 2:4: what is dropped, while the remaining weights compensate for it.

For rows w with the damped second moment H of their inputs, dropping the columns D costs w_D C^-1 w_D with
C = inv(H)_DD, and the best change of the others is -w_D C^-1 inv(H)_D: (arXiv:2208.11580). Then D leaves the inverse:
inv(H) -= inv(H)_:D C^-1 inv(H)_D:. Blocks leave a block row one by one, the cheapest first, exactly, and so do columns.
2:4 goes once over the columns, as SparseGPT (arXiv:2301.00774): all rows share one inverse, and columns behind stay as
they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.models.scores import (
    DROPPED,
    choose_blocks,
    diagonal_blocks,
    inverse,
    padded,
    pair_blocks,
    pair_costs,
    quadratics,
)
from sparsek.products.formats.convert import Rule
from sparsek.products.formats.padding import tiles_of
from sparsek.products.formats.pattern import grid_of
from sparsek.products.formats.two_four import GROUP

ELEMENTS = 2**25  # of the inverses that are held at a time
COLUMN_STEPS = 128  # by which all columns of a matrix would leave


def choose_by_obs(w: Tensor, h: Tensor, block: tuple[int, int], keep: float, scope: str) -> Tensor:
    """The blocks to store, bool [Mb, Kb], of w [M, K] under the damped H [K, K] of the same dtype."""
    if scope == "row":
        grid = grid_of((len(w), w.shape[1]), block)
        _, each, more = Rule(None, None, keep, scope).split(grid)
        costs = removal_costs(w, h, block, grid[1] - each)
        stored = costs.isinf()
        if more:  # of the last ones to be dropped, those that cost most stay
            totals, order = (x[:, : grid[1] - each] for x in costs.sort(dim=1))
            last = torch.diff(totals, prepend=torch.zeros_like(totals[:, :1]))[:, -1]
            rows = last.sort(descending=True, stable=True).indices[:more]
            stored[rows, order[rows, -1]] = True
        return stored
    # Blocks leave their row in order, so a cheap block behind a costly one waits for it. The last one comes first,
    # because of equal scores choose_blocks stores the first.
    totals, order = removal_costs(w, h, block).sort(dim=1)
    steps = torch.diff(totals, prepend=torch.zeros_like(totals[:, :1])).cummax(dim=1).values
    stored = choose_blocks(steps.flip(1), keep, scope)
    return torch.zeros_like(stored).scatter_(1, order.flip(1), stored)


def removal_costs(w: Tensor, h: Tensor, block: tuple[int, int], count: int | None = None) -> Tensor:
    """The output error [Mb, Kb] of each block row once a block and all before it are dropped, cheapest first.

    `count`: how many are dropped in each row, all by default; Inf for the others.
    """
    inv = inverse(padded(h, block[1]))
    tiles = tiles_of(w, block).flatten(2)
    at_once = max(1, ELEMENTS // inv.numel())
    return torch.cat([_costs(part, inv, block[1], count) for part in tiles.split(at_once)])


def _costs(w: Tensor, inv: Tensor, side: int, drops: int | None) -> Tensor:
    """`removal_costs` of block rows w [n, bm, K]."""
    count, columns = w.shape[0], inv.shape[0] // side
    w, inv = w.clone(), inv.expand(count, -1, -1).clone()
    costs, total = w.new_full((count, columns), torch.inf), w.new_zeros(count)
    gone = torch.zeros((count, columns), dtype=torch.bool, device=w.device)
    eye = torch.eye(side, dtype=w.dtype, device=w.device)
    rows = torch.arange(count, device=w.device)
    within = torch.arange(side, device=w.device)
    for _ in range(columns if drops is None else drops):
        own = torch.where(gone[..., None, None], eye, diagonal_blocks(inv, side))
        cores = inverse(own)
        tiles = w.unflatten(2, (columns, side))
        price, first = quadratics(tiles, cores).masked_fill(gone, torch.inf).min(1)
        total = total + price
        costs[rows, first] = total
        gone[rows, first] = True
        at = first[:, None] * side + within
        across = inv.gather(1, at[:, :, None].expand(-1, -1, inv.shape[2]))
        change = cores[rows, first] @ across
        w.baddbmm_(tiles[rows, :, first], change, alpha=-1)
        inv.baddbmm_(across.mT, change, alpha=-1)
        # Exactly 0: what rounding leaves of dropped rows and columns would come back later.
        for each in (w.mT, inv, inv.mT):
            each[rows[:, None], at] = 0
    return costs


def choose_columns(w: Tensor, h: Tensor, count: int, side: int = 1) -> Tensor:
    """The columns that stay, `count` of bool [K], of w [M, K] under the damped H [K, K] of the same dtype.

    The others leave one by one, the cheapest first, in a large matrix a few at a time; with a `side`, in groups of so
    many neighbours.
    """
    if side > 1:
        return choose_by_obs(w, h, (len(w), side), count / len(h), "row")[0].repeat_interleave(side)
    inv, w = inverse(h), w.clone()
    stored = torch.ones(len(h), dtype=torch.bool, device=w.device)
    left = len(h) - count
    while left > 0:
        each = min(left, max(1, len(h) // COLUMN_STEPS))
        costs = w.square().sum(0) / inv.diagonal().clamp(min=torch.finfo(inv.dtype).tiny)
        costs = costs.masked_fill_(~stored, torch.inf)
        gone = costs.topk(each, largest=False, sorted=False).indices
        change = torch.linalg.solve(inv[gone][:, gone], inv[gone])
        w.addmm_(w[:, gone], change, alpha=-1)
        inv.addmm_(inv[:, gone], change, alpha=-1)
        # Exactly 0, as in `_costs`; the 1 keeps the price of a dropped column finite.
        w[:, gone], inv[gone], inv[:, gone] = 0, 0, 0
        inv[gone, gone] = 1
        stored[gone] = False
        left -= each
    return stored


def sweep_pairs(w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Prune w [M, K] to 2:4 under the damped H [K, K] of the same dtype: the weights, and the mask bool [M, K]."""
    inv, w = inverse(h), w.clone()
    mask = torch.ones_like(w, dtype=torch.bool)
    pairs = torch.tensor(DROPPED, device=w.device)
    for left in range(0, w.shape[1], GROUP):
        right = left + GROUP
        own = inv[:GROUP, :GROUP]
        cores = inverse(pair_blocks(own[None]))
        drop = pair_costs(w[:, left:right], cores)[:, 0].argmin(1)
        at = pairs[drop]
        values = w[:, left:right].gather(1, at)
        change = torch.zeros_like(w[:, left:right])
        change.scatter_(1, at, torch.einsum("mi,mij->mj", values, cores[0, drop]))
        w[:, left:] -= change @ inv[:GROUP]
        mask[:, left:right].scatter_(1, at, False)
        beside = inv[:GROUP, GROUP:]
        inv = inv[GROUP:, GROUP:] - beside.mT @ (inverse(own) @ beside)
    return w.masked_fill_(~mask, 0), mask
