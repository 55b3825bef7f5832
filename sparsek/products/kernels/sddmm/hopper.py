"""S = X @ Y at the stored blocks of a pattern, on Hopper: X and Y dense, S in BSR, float32 accumulation.

    one tile of S                                  operands of one step, in shared memory
    .--------------- groups * piece -------------.
    | block (i, j0)  | block (i, j1) |    ...    |   X [rows, width]  of block row i
    |  warpgroup 0   (wg_n = 2: 0, then 1)       |   Y [width, piece]  of each column of the group
    |  warpgroup 1                               |
    '---------------------------------------------

Stored blocks of one block row share their rows of X, whatever their columns: `groups` of them form a tile as wide as
one of a dense product. All CTAs sweep K in step, so that their reads hit L2. The kernel is persistent: a CTA walks
the tiles that the schedule assigned to it. A producer warp fills a ring by TMA; consumer warpgroups multiply
(spmm/multiply.py) and store each box of a tile to its stored block. X and Y may be row- or column-major: the gradient
of A in C = A @ B is dC @ B.T, sampled.

Bottleneck: L2 to shared memory, as for hopper.spmm. A step of 64 of a 128x256 tile loads 48 KB for 4.2 MFLOP.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparsek.engine.launch.gluon import Described, describe, launch_on, reinterpret, tma_load
from sparsek.engine.launch.kinds import source_of
from sparsek.engine.plan.kernel import unless_aligned, unless_gapless, unless_hopper, unless_near
from sparsek.products.formats.padding import padding_of, zero_padding
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.kernels.sddmm.tiles import tiles_of
from sparsek.products.kernels.spmm import multiply as prims
from sparsek.products.kernels.spmm.multiply import RECORD, Tile, deepened, multiply
from sparsek.products.plan.kernels import SddmmKernel
from sparsek.products.plan.problems import SddmmProblem
from sparsek.products.plan.sddmm_schedule import SddmmTiles


@dataclass(frozen=True)
class Config(Tile):
    """`block` is (bm, bn) of S. A tile has `groups` pieces of `piece` columns, each a block or a part of a wide one.

    The width of a piece is a power of two; columns beyond its block are never stored.
    """

    piece: int = 128

    sampled: ClassVar[bool] = True
    per_block: ClassVar[int] = 1

    @property
    def groups(self) -> int:
        return self.block_cols // self.piece

    @property
    def side(self) -> int:
        """Columns of a block."""
        return self.block[1]

    @property
    def a_box(self) -> int:
        return self.rows

    @property
    def a_rows(self) -> int:
        return self.rows

    @property
    def panel(self) -> int:
        return min(64, self.piece)

    @property
    def y_box(self) -> tuple[int, int]:
        """Shape of one box of Y in memory."""
        return (self.piece, self.width) if self.b_col else (self.width, self.piece)


SOURCE = source_of(__file__, prims.__file__)


@gluon.jit
def load(T: gl.constexpr, x_desc, y_desc, lists, columns, ring):
    """Producer warp: for each tile of the CTA, sweeps K and fills the ring. TMA fills in zeros beyond K."""
    tiles, starts = lists
    x_s, y_s, full, empty = ring
    WIDTH: gl.constexpr = T.width
    GROUPS: gl.constexpr = T.groups
    WG_M: gl.constexpr = T.wg_m
    first = gl.load(starts + gl.program_id(0))
    last = gl.load(starts + gl.program_id(0) + 1)
    slot = 0
    phase = 1  # waiting on the phase before a barrier's first returns at once, so every slot starts empty
    for t in range(first, last):
        steps = gl.load(tiles + RECORD * t + 1)
        group = gl.load(tiles + RECORD * t + 3)
        row = gl.load(tiles + RECORD * t + 4)
        cols = ()
        for g in gl.static_range(GROUPS):
            cols = cols + (gl.load(columns + group * GROUPS + g),)
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)  # until every warpgroup has read the slot
            landed = full.index(slot)
            mbarrier.expect(landed, T.stage_bytes)
            k = step * WIDTH
            if T.a_col:
                for w in gl.static_range(WG_M):
                    tma_load(x_desc, [k, row + w * 64], landed, x_s.index(slot * WG_M + w))
            else:
                tma_load(x_desc, [row, k], landed, x_s.index(slot))
            for g in gl.static_range(GROUPS):
                y_part = y_s.index(slot * GROUPS + g)
                if T.b_col:
                    tma_load(y_desc, [cols[g], k], landed, y_part)
                else:
                    tma_load(y_desc, [k, cols[g]], landed, y_part)
            slot += 1
            if slot == T.stages:
                slot = 0
                phase ^= 1


@gluon.jit
def sddmm_kernel(
    x_desc, y_desc, s_desc, tiles, starts, columns, stored, T: gl.constexpr, SOURCE: gl.constexpr
):  # fmt: skip
    """CTA p computes tiles starts[p] to starts[p+1]; see products/plan/sddmm_schedule.py. SOURCE is for
    Triton's cache key.
    """
    DTYPE: gl.constexpr = x_desc.dtype
    STAGES: gl.constexpr = T.stages
    WARPGROUPS: gl.constexpr = T.wg_m * T.wg_n
    if T.a_col:
        x_s = gl.allocate_shared_memory(DTYPE, [STAGES * T.wg_m, T.width, 64], x_desc.layout)
    else:
        x_s = gl.allocate_shared_memory(DTYPE, [STAGES, T.rows, T.width], x_desc.layout)
    WIDE: gl.constexpr = [T.cols, T.width] if T.b_col else [T.width, T.cols]
    y_s = gl.allocate_shared_memory(DTYPE, [STAGES * T.wg_n] + WIDE, y_desc.layout)
    y_boxes = reinterpret(y_s, DTYPE, [STAGES * T.groups] + y_desc.block_type.shape, y_desc.layout)
    s_s = gl.allocate_shared_memory(DTYPE, [WARPGROUPS, 64, T.cols], s_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    lists = (tiles, starts)
    before = (tiles, 0, 1.0, tiles)  # no epilogue
    joined = (columns, stored)
    ring = (x_s, y_s, full, empty)
    boxes = (x_s, y_boxes, full, empty)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (T, 0, s_desc, lists, before, joined, ring, s_s)),
                (load, (T, x_desc, y_desc, lists, columns, boxes)),
            ],
            [1],
            [56],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (T, 0, s_desc, lists, before, joined, ring, s_s)),
                (multiply, (T, 1, s_desc, lists, before, joined, ring, s_s)),
                (load, (T, x_desc, y_desc, lists, columns, boxes)),
            ],
            [4, 1],
            [216, 56],
        )


class Work(NamedTuple):
    """A schedule on the device, and its number of CTAs. None if nothing is stored."""

    tiles: SddmmTiles | None
    ctas: int


class HopperSddmm(SddmmKernel):
    name = "hopper.sddmm"
    shares = True

    def why_not(self, p: SddmmProblem) -> list[str]:
        reasons = unless_hopper(p)
        reasons += unless_gapless("X", p.x_layout) + unless_gapless("Y", p.y_layout)
        reasons += unless_aligned(p, "leading strides of X and Y")
        reasons += unless_near(
            "M, N, K and the rows of all stored blocks", p.nnzb * p.block[0], p.m, p.n, p.k, bits=30
        )  # the schedule's OUTSIDE
        if p.k == 0:
            reasons.append("K is 0")
        return reasons

    def configs(self, p: SddmmProblem) -> list[Config]:
        bm, bn = p.block
        piece = min(256, 1 << (bn - 1).bit_length())
        shapes = [(2, 1), (1, 2)] if bm > 64 else [(1, 2)]
        found: dict[Config, None] = {}
        for (wg_m, wg_n), cols, width in product(shapes, (64, 128, 256), (64, 32)):
            # A producer keeps the column of every box of a tile in registers; more than 16 would spill.
            if cols < piece or cols * wg_n // piece > 16:
                continue
            c = Config(
                p.block, wg_m, wg_n, cols, width, 1, 3,
                a_col=p.x_layout == "col", b_col=p.y_layout == "col", piece=piece,
            )  # fmt: skip
            found[deepened(c, p.card.smem_bytes)] = None
        return list(found)

    def seconds(self, p: SddmmProblem, c: Config) -> float:
        """Rounds of tiles, each the larger of multiplying and loading (a smooth maximum), as in hopper.spmm.

        Rings of 2 and 3 stages do not cover the latency of L2: 50 % and 3 % more (H200, 2026-11-21).
        """
        if p.nnzb == 0:
            return p.card.launch_seconds
        sms = p.card.sm_count
        mma = c.rows * c.block_cols * p.k / (2048 * 1.6e9 * p.card.pace)
        fetch = 2 * p.k * (c.rows + c.block_cols) * sms / p.card.fabric
        slices = max(1, -(-p.block[0] // c.rows)) * max(1, -(-p.block[1] // c.piece))
        mean = max(1.0, p.nnzb / max(1, p.grid[0]))
        tiles = slices * p.nnzb / mean * max(1, -(-int(mean) // c.groups))
        ring = {2: 1.5, 3: 1.03}.get(c.stages, 1.0)
        tile = (mma**4 + fetch**4) ** 0.25 * ring + 2e-6
        traffic = p.compulsory_bytes / (0.9 * p.card.bandwidth)
        return max(-(-int(tiles) // sms) * tile, traffic) + p.card.launch_seconds

    def prepare(self, p: SddmmProblem, c: Config, pattern: BlockPattern) -> Work:
        ctas = p.card.sm_count * c.ctas_per_sm
        if pattern.nnzb == 0:
            return Work(None, ctas)
        if pattern.is_ragged:
            padding_of(pattern)  # for the zeros that `launch` writes: looked up once, with a sync
        return Work(tiles_of(pattern, -(-p.k // c.width), c.rows, c.piece, c.groups, ctas), ctas)

    def launch(
        self, c: Config, work: Work, x: Tensor, y: Tensor, pattern: BlockPattern, values: Tensor
    ) -> None:
        if work.tiles is None:
            return
        nnzb, bm, bn = values.shape
        x_box = (c.width, 64) if c.a_col else (c.rows, c.width)
        args = (
            describe(x.mT if c.a_col else x, x_box), describe(y.mT if c.b_col else y, c.y_box),
            Described(values, (nnzb * bm, bn), (bn, 1), c.c_shape), *work.tiles, c, SOURCE,
        )  # fmt: skip
        launch_on(values.device, sddmm_kernel, work.ctas, args, c.options)
        # Zeros that TMA filled in become NaN where they were multiplied by NaN or infinity.
        zero_padding(pattern, values)


KERNEL: SddmmKernel = HopperSddmm()
