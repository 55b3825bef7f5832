"""C = act(alpha * (A @ B) + bias[:, None]) for a BSR24 A on Hopper's sparse tensor cores.

The kernel of hopper.semi24 with lists, other matrices included: A is a stack of stored blocks, and a tile of C walks
those of its block row. The schedule that assigns tiles to CTAs is hopper.spmm's (products/plan/schedule.py). Tiles
divide a block's rows, so a block row may have several.

Block rows are neither joined nor split. CTAs share nothing, because their lists differ: every tile reads B from L2,
which bounds tiles of 128 x 256. Blocks of 128, 12.5 % stored, 8192^3 in bf16 on an H200 (2026-11-22): 1.27 times as
fast as hopper.spmm on the same blocks with all values.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from sparsek.engine.plan.kernel import unless_near
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.kernels.spmm import hopper_24 as semi24
from sparsek.products.kernels.spmm.hopper_24 import Config, Lists, Work
from sparsek.products.kernels.spmm.parts import put, records
from sparsek.products.plan.kernels import SpmmKernel, unless_stored
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.plan.schedule import balance, walk
from sparsek.products.reference.epilogue import PLAIN, Epilogue


def blocks_seconds(p: SpmmProblem, c: Config) -> float:
    """A product of the stored blocks of A."""
    if not (p.m and p.n and p.nnzb):
        return p.card.launch_seconds
    of_block = p.block[1] // c.bk
    mean, longest = p.nnzb / p.grid[0] * of_block, p.row_max * of_block
    units = p.grid[0] * (p.block[0] // c.tm)
    return semi24.seconds_of(p, semi24.ring_of(p, c, units, mean, max(mean, longest)))


def lists_of(p: SpmmProblem, c: Config, a: BSR24) -> Lists:
    """The schedule of tiles, on A's device."""
    units = a.pattern.derived(("walk", c.tm, 1), lambda: walk(a.pattern, c.tm, 1))
    deal = balance(units, p.n, c.tn, p.card.sm_count)
    tiles = records(deal, p.block[0], np.full(len(deal.tiles), -1))
    arrays = (put(each, a.device) for each in (tiles, deal.starts, units.cols, units.blocks))
    return Lists(*arrays, p.block, deal.ctas)


def tiles_of_blocks(p: SpmmProblem) -> Iterator[Config]:
    """Tiles that divide a block's rows."""
    return (c for c in semi24.tiles_of(p, (1,), lists=True) if p.block[0] % c.tm == 0)


def why_not_blocks(p: SpmmProblem) -> list[str]:
    """Reasons from the blocks, independent of dtype."""
    return unless_stored(p) + unless_near("the rows of all stored blocks", p.nnzb * p.block[0])


class HopperBsr24:
    """The kernel of hopper.semi24, over lists of blocks."""

    name = "hopper.bsr24"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("bsr24"):
            return foreign
        return semi24.why_not(p, p.dtype) + why_not_blocks(p)

    def default(self, p: SpmmProblem) -> Config:
        return min(self.configs(p), key=lambda c: self.seconds(p, c))

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        return tiles_of_blocks(p)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        return blocks_seconds(p, c)

    def prepare(self, p: SpmmProblem, c: Config, a: BSR24) -> Work:
        return semi24.prepared(p, c, a, lists_of(p, c, a))

    def launch(
        self, c: Config, work: Work, a: BSR24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        semi24.launch(c, work, a, b, out, epilogue)


KERNEL: SpmmKernel = HopperBsr24()
