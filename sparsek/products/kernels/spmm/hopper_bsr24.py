"""C = act(alpha * (A @ B) + bias[:, None]) for a BSR24 A on Hopper's sparse tensor cores.

The kernel of hopper.semi24 with lists, other matrices included: A is a stack of stored blocks, and a tile of C walks
those of its block row. The schedule that assigns tiles to CTAs is hopper.spmm's (products/plan/schedule.py). Tiles
divide a block's rows, so a block row may have several.

Block rows are neither joined nor split. CTAs share nothing, because their lists differ: every tile reads B from L2,
which bounds tiles of 128 x 256. Blocks of 128, 12.5 % stored, 8192^3 in bf16 on an H200 (2026-11-22): 1.27 times as
fast as hopper.spmm on the same blocks with all values.
"""

import numpy as np

from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.kernels.spmm.hopper_24 import Config, Hopper24, Lists
from sparsek.products.kernels.spmm.parts import put, records
from sparsek.products.plan.kernels import SpmmKernel
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.plan.schedule import balance, walk


def lists_of(p: SpmmProblem, c: Config, a: BSR24) -> Lists:
    """The schedule of tiles, on A's device."""
    units = a.pattern.derived(("walk", c.tm, 1), lambda: walk(a.pattern, c.tm, 1))
    deal = balance(units, p.n, c.tn, p.card.sm_count)
    tiles = records(deal, p.block[0], np.full(len(deal.tiles), -1))
    arrays = (put(each, a.device) for each in (tiles, deal.starts, units.cols, units.blocks))
    return Lists(*arrays, p.block, deal.ctas)


KERNELS: dict[str, SpmmKernel] = {
    each.name: each for each in (Hopper24("bsr24", lists_of), Hopper24("bsr24_fp8", lists_of))
}
