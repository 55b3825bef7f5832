"""C = A @ B on Hopper for two BSR matrices; C is dense, or BSR with a known pattern.

    block (i, j) of C  =  sum over k of  A[i, k] @ B[k, j]  where both are stored

The symbolic phase (products/plan/matches.py) lists the pairs of every block of C. The numeric phase is hopper.spmm with
other lists: a tile of C is a block or a part of one, a step is a pair, and B is a stack of blocks instead of a dense
matrix. Tiles of a dense C without a step are written as zeros. The work list is made on the device.

Bottleneck: memory, not the tensor cores. C is written once and every pair is read from L2. At 12.5 % of blocks of 128
a block of C has one pair on average, 64 KB read for 32 KB written and 4.2 MFLOP. A B larger than the L2 cache would be
read from memory again and again: a BSR C is then computed in several sweeps over its columns, and stored as streaming
data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from torch import Tensor

from sparsek.engine.launch.gluon import Described, describe, launch_on
from sparsek.engine.plan.kernel import unless_aligned, unless_hopper, unless_near, unless_whole
from sparsek.engine.plan.plan import arithmetic_seconds, memory_seconds
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.padding import padding_of, zero_padding
from sparsek.products.kernels.spgemm.tiles import spgemm_tiles
from sparsek.products.kernels.spmm.hopper import SOURCE, Config, spmm_kernel
from sparsek.products.kernels.spmm.multiply import deepened
from sparsek.products.plan.kernels import SpgemmKernel
from sparsek.products.plan.matches import Matches
from sparsek.products.plan.problems import SpgemmProblem
from sparsek.products.plan.spgemm_schedule import SpgemmTiles


@dataclass(frozen=True, eq=False)
class Work:
    """A schedule on the device. `placed` keeps lists of pairs as positions among the values of transposed views."""

    tiles: SpgemmTiles
    ctas: int
    placed: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def positions(self, side: str, matrix: BSR, listed: Tensor) -> Tensor:
        """Positions of the blocks of a list among the stored values of `matrix`."""
        if matrix.order is None:
            return listed
        found = self.placed.get(side)
        if found is not None and found[0] is matrix.order:
            return found[1]
        return matrix.order[listed.long()]


class HopperSpgemm(SpgemmKernel):
    """The kernel of hopper.spmm with lists of pairs, as a Kernel."""

    name = "hopper.spgemm"

    def why_not(self, p: SpgemmProblem) -> list[str]:
        reasons = unless_hopper(p) + unless_aligned(p, "rows of a dense C")
        if p.dense_out:
            reasons += unless_whole("C", p.n, p.dtype)
        sides = (p.nnzb_a * max(p.a_block), p.nnzb_b * max(p.b_block), p.nnzb_out * p.block[0], p.m, p.n)
        return reasons + unless_near("M, N and the rows of all stored blocks", *sides)

    def configs(self, p: SpgemmProblem) -> list[Config]:
        (bm, bn), bk = p.block, p.a_block[1]
        fits = 1 << (bn - 1).bit_length()
        columns = fits
        if fits > (256 if bm > 64 or fits == bn else 128):
            columns = 256 if bn % 256 == 0 else bn & -bn
        # (warpgroups vertically and horizontally, the columns of each)
        shapes = [(1, 1, columns), (1, 2, columns // 2)] + [(2, 1, columns)] * (bm > 64)
        found: dict[Config, None] = {}
        for (wg_m, wg_n, cols), depth in product(shapes, (64, 32)):
            if cols < 16 or (wg_m * wg_n == 1 and cols > 128) or (wg_n == 2 and min(bn, columns) < columns):
                continue
            # A box of 64 extends past a narrower block, where TMA fills in zeros: cheaper than boxes of 16.
            width = min(64, depth, bk & -bk) if bk < 64 or p.a_transposed else min(64, depth)
            pieces = max(1, min(depth // width, 8))
            c = Config(
                p.a_block, wg_m, wg_n, cols, width, pieces, 3, a_col=p.a_transposed, b_col=p.b_transposed,
                every=0, b_stack=True, owned=min(bn, columns), direct=_memory_bound(p),
            )  # fmt: skip
            c = deepened(c, p.card.smem_bytes)
            if c.ctas_per_sm * c.smem_bytes <= p.card.smem_bytes:
                found[c] = None
        return list(found)

    def seconds(self, p: SpgemmProblem, c: Config) -> float:
        """The time of every SM to multiply, load and store its share, and no less than the compulsory traffic.

        Streaming stores take their bytes at the card's bandwidth, those through TMA 60 ns a tile more. Constants were
        fitted to the seven records of an H200 (2026-11-26; within 6 %).
        """
        sms = p.card.sm_count
        slices = max(1, -(-p.block[0] // c.rows)) * max(1, -(-p.block[1] // c.block_cols))
        blocks = p.grid[0] * p.grid[1] if p.dense_out else p.nnzb_out
        depth = c.per_block * c.width
        mma = c.rows * c.block_cols * depth / (2048 * 1.6e9 * p.card.pace)
        fetch = 2 * p.a_block[1] * (c.a_rows + c.block_cols) * sms / p.card.fabric
        ring = {2: 1.5, 3: 1.25, 4: 1.1}.get(c.stages, 1.0)
        step = 1.04 * (mma**4 + fetch**4) ** 0.25 * ring
        stored = 2 * c.rows * c.owned_cols * sms / p.card.bandwidth
        fixed = 0.0 if c.direct else 0.06e-6
        busy = (p.pairs * slices * step + blocks * slices * (stored + fixed)) / sms
        longest = p.pairs_max * step
        traffic = p.compulsory_bytes / (0.85 * p.card.bandwidth)
        return max(busy, longest, traffic) + p.card.launch_seconds

    def prepare(self, p: SpgemmProblem, c: Config, matches: Matches) -> Work:
        ctas = p.card.sm_count * c.ctas_per_sm
        if not p.dense_out and matches.pattern.is_ragged:
            padding_of(matches.pattern)  # for the zeros that `launch` writes: looked up once, with a sync
        tiles = spgemm_tiles(matches, p.dense_out, c.rows, c.block_cols, ctas, sweeps(p))
        return Work(tiles, ctas)

    def place(self, work: Work, a: BSR, b: BSR, matches: Matches) -> None:
        """Looks up once where the blocks of transposed views are stored. Part of planning, never of a captured call."""
        for side, matrix, listed in (("a", a, matches.left), ("b", b, matches.right)):
            if matrix.order is not None:
                work.placed[side] = (matrix.order, matrix.order[listed.long()])

    def launch(self, c: Config, work: Work, a: BSR, b: BSR, matches: Matches, out: Tensor) -> None:
        if a.nnzb == 0 or b.nnzb == 0:
            out.zero_()
            return
        (bm, bk), bn = a.block, b.block[1]
        # Blocks of A and B are stacks, in which TMA fills in zeros beyond a block's last column or row.
        if c.a_col:
            a_desc = Described(a.values, (a.nnzb * bk, bm), (bm, 1), (c.width, 64))
        else:
            a_desc = Described(a.values, (a.nnzb * bm, bk), (bk, 1), (c.a_box, c.width))
        b_box = (1, c.cols, c.width) if c.b_col else (1, c.width, c.cols)
        b_desc = Described(b.values, tuple(b.values.shape), tuple(b.values.stride()), b_box)
        if out.dim() == 3:
            lies = out.view(-1, bn)
        else:
            lies = out
        none = work.tiles.tiles
        args = (
            a_desc, b_desc, describe(lies, c.c_shape), *work.tiles, work.positions("b", b, matches.right),
            work.positions("a", a, matches.left), b.nnzb, a.nnzb, none, 0, 1.0, none,
            lies, lies.stride(0) // 8, lies.shape[0], lies.shape[1] // 8, 0.0, None, c, SOURCE,
        )  # fmt: skip
        launch_on(out.device, spmm_kernel, work.ctas, args, c.options)
        if out.dim() == 3:
            zero_padding(matches.pattern, out)  # zero padding becomes NaN when multiplied by NaN


def sweeps(p: SpgemmProblem) -> int:
    """In how many sweeps over its columns a BSR C is computed, so that the blocks of B of one stay in the L2 cache.

    32768 squared, 3 % of blocks of 64, B of 64 MB (H200, 2026-11-26): 434 us in one sweep, 370 in three with streaming
    stores. In another kernel with the same loop and these stores 421 in one, 375 in three, 379 in six.
    """
    b_bytes = 2 * p.nnzb_b * p.b_block[0] * p.b_block[1]
    if p.dense_out or b_bytes <= 0.8 * p.card.l2_bytes:
        return 1
    return max(1, min(p.grid[1], -(-b_bytes // int(0.4 * p.card.l2_bytes))))


def _memory_bound(p: SpgemmProblem) -> bool:
    """Whether moving A, B and C takes longer than multiplying."""
    return memory_seconds(p) > arithmetic_seconds(p)


KERNEL: SpgemmKernel = HopperSpgemm()
