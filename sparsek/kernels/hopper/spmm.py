"""C = A @ B on Hopper: A in BSR, B and C dense, float32 accumulation.

    one tile of C                             what one step brings into shared memory
    .----------- block_cols ----------.
    |                |                |       A piece [rows, width]  of stored block s
    |  warpgroup 0   |  warpgroup 1   |       B piece [width, block_cols]  of the rows of B under its column
    |  64 x cols     |  64 x cols     |
    '----------------------------------       (wg_n = 2; with wg_m = 2 the warpgroups lie below each other)

A CTA stays on its SM and walks the tiles that the schedule gave it. One producer warp brings pieces by TMA into a
ring of `stages` slots; the consumer warpgroups multiply them with wgmma out of shared memory. Blocks taller than a
tile are cut into tiles that share the block row's list; blocks lower than a tile leave rows of the tensor core
unused, or `merge` block rows share a tile where their columns coincide. A warpgroup stores its part of C one box at
a time while it already multiplies the next tile.

What limits it (H200, 8192^3 bf16, 12.5 % stored; docs/spmm.md, docs/lab-notes.md): L2 to shared memory, 9 TB/s.
Blocks of 128 bring 96 KB for 8.4 MFLOP and reach 0.92 of cuBLAS; blocks of 64, 32 and 16 are at that bound.
Storing C in one burst at the end of a tile held up the loads behind it; spreading it gained 5 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek.formats.bsr import BSR
from sparsek.kernels.prims.gluon import (
    Described,
    describe,
    launch_on,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
)
from sparsek.plan.kernel import SpmmKernel
from sparsek.plan.problem import SpmmProblem
from sparsek.plan.schedule import Schedule, balance, walk


@dataclass(frozen=True, repr=False)
class Config:
    """A tile of C and the ring that feeds it. Everything here is known when the kernel is compiled.

    `wg_m` x `wg_n` consumer warpgroups own 64 x `cols` of C each. A piece is `width` deep in K; a stage holds
    `pieces` of them; `merge` block rows share a tile. `b_col` says that B is the transpose view of a row-major [N, K].
    """

    block: tuple[int, int]
    wg_m: int
    wg_n: int
    cols: int
    width: int
    pieces: int
    stages: int
    merge: int = 1
    b_col: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.wg_m

    @property
    def block_cols(self) -> int:
        return self.cols * self.wg_n

    @property
    def height(self) -> int:
        """Rows of the tile that belong to C."""
        return min(self.block[0] * self.merge, self.rows)

    @property
    def per_block(self) -> int:
        return self.block[1] // self.width

    @property
    def a_box(self) -> int:
        """Rows of one A box. A box higher than its block reads the next block's rows; they are never stored."""
        bm = self.block[0]
        return bm if bm < self.rows and bm & (bm - 1) == 0 else self.rows

    @property
    def c_box(self) -> int:
        """Rows of one C box: the largest power of two that divides what each warpgroup owns."""
        return min(64, self.height & -self.height)

    @property
    def panel(self) -> int:
        return min(64, self.cols)

    @property
    def stage_bytes(self) -> int:
        return 2 * self.pieces * self.width * (self.a_box * self.merge + self.block_cols)

    @property
    def smem_bytes(self) -> int:
        ring = 2 * self.stages * self.pieces * self.width * (self.rows + self.block_cols)
        return ring + 2 * self.rows * self.block_cols + 16 * self.stages + 1024

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.wg_m * self.wg_n == 1 else 1

    @property
    def store_every(self) -> int:
        """Stages between two C boxes of a warpgroup: one box of 64 rows for every 128 of K (2026-11-20, H200)."""
        return max(1, 2 * self.c_box // (self.width * self.pieces))

    def __str__(self) -> str:
        """Names every field: Triton keeps compiled kernels by the text of their constants."""
        bm, bk = self.block
        merged = f"{self.merge} block rows merged, " if self.merge > 1 else ""
        return (
            f"tile {self.rows}x{self.block_cols} for {self.wg_m}x{self.wg_n} warpgroups, {merged}blocks {bm}x{bk}, "
            f"{self.stages} stages of {self.pieces}x{self.width}, {'col' if self.b_col else 'row'}-major B"
        )

    __repr__ = __str__


# Triton keeps compiled kernels by the text of device functions and constants. What Config computes from its fields is
# in neither, so this file's own text is a constant too.
SOURCE = sha256(Path(__file__).read_bytes()).hexdigest()[:16]


@gluon.jit
def load(
    T: gl.constexpr, a_desc, b_desc, tiles, starts, cols, blocks, no_col, no_block, a_s, b_s, full, empty
):
    """Producer warp: walks the CTA's tiles, and in each the pieces of its blocks, and fills the ring."""
    PIECES: gl.constexpr = T.pieces
    PER: gl.constexpr = T.per_block
    MERGE: gl.constexpr = T.merge
    BM: gl.constexpr = T.block[0]
    BK: gl.constexpr = T.block[1]
    WIDTH: gl.constexpr = T.width
    ROWS: gl.constexpr = T.rows
    COLS: gl.constexpr = T.cols
    A_BOXES: gl.constexpr = T.rows // T.a_box
    B_BOXES: gl.constexpr = T.wg_n
    first = gl.load(starts + gl.program_id(0))
    last = gl.load(starts + gl.program_id(0) + 1)
    slot = 0
    phase = 1  # a new barrier passes for the phase before its first, so that every slot begins empty
    for t in range(first, last):
        begin = gl.load(tiles + 4 * t)
        pieces = (gl.load(tiles + 4 * t + 1) - begin) * PER
        a_row = gl.load(tiles + 4 * t + 2) % BM if BM > ROWS else 0
        col = gl.load(tiles + 4 * t + 3)
        for q in range(0, pieces, PIECES):
            # Indices come before the wait, whose time hides their latency. Pieces behind the last one read outside
            # A and B, where TMA fills in zeros.
            js = ()
            bs = ()
            for i in gl.static_range(PIECES):
                step = begin + (q + i) // PER
                inside = q + i < pieces
                js = js + (gl.load(cols + step, mask=inside, other=no_col),)
                for r in gl.static_range(MERGE):
                    bs = bs + (gl.load(blocks + step * MERGE + r, mask=inside, other=no_block),)
            mbarrier.wait(empty.index(slot), phase)  # until every warpgroup has multiplied what the slot held
            landed = full.index(slot)
            mbarrier.expect(landed, T.stage_bytes)
            for i in gl.static_range(PIECES):
                part = slot * PIECES + i
                k = (q + i) % PER * WIDTH
                for r in gl.static_range(MERGE):
                    row = bs[i * MERGE + r] * BM + a_row
                    tma_load(a_desc, [row, k], landed, a_s.index(part * A_BOXES + r))
                for w in gl.static_range(B_BOXES):
                    b_part = b_s.index(part * B_BOXES + w)
                    if T.b_col:
                        tma_load(b_desc, [col + w * COLS, js[i] * BK + k], landed, b_part)
                    else:
                        tma_load(b_desc, [js[i] * BK + k, col + w * COLS], landed, b_part)
            slot += 1
            if slot == T.stages:
                slot = 0
                phase ^= 1


@gluon.jit
def store_box(T: gl.constexpr, WG: gl.constexpr, c_desc, box, row, col, staged):
    """Sends box number `box` of this warpgroup's part of C, whose corner is (row, col), to global memory."""
    C_BOX: gl.constexpr = T.c_box
    PANEL: gl.constexpr = T.panel
    OWNED: gl.constexpr = min(64, T.height - 64 * (WG % T.wg_m)) // T.c_box
    panel = box // OWNED
    r = box % OWNED
    tma_store(c_desc, [row + r * C_BOX, col + panel * PANEL], staged.index(panel * (64 // C_BOX) + r))


@gluon.jit
def multiply(T: gl.constexpr, WG: gl.constexpr, c_desc, tiles, starts, a_s, b_s, c_s, full, empty):
    """Consumer warpgroup WG: accumulates its 64 x cols of every tile, and stores them while it does the next."""
    PIECES: gl.constexpr = T.pieces
    PER: gl.constexpr = T.per_block
    STAGES: gl.constexpr = T.stages
    COLS: gl.constexpr = T.cols
    EVERY: gl.constexpr = T.store_every
    ROW0: gl.constexpr = 64 * (WG % T.wg_m)
    COL0: gl.constexpr = T.cols * (WG // T.wg_m)
    B_BOXES: gl.constexpr = T.wg_n
    BOXES: gl.constexpr = min(64, T.height - 64 * (WG % T.wg_m)) // T.c_box * (T.cols // T.panel)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.cols, 16])
    stage = c_s.index(WG)
    boxes: gl.constexpr = [64 // T.c_box * (T.cols // T.panel), T.c_box, T.panel]
    staged = reinterpret(stage, c_desc.dtype, boxes, c_desc.layout)
    first = gl.load(starts + gl.program_id(0))
    last = gl.load(starts + gl.program_id(0) + 1)
    slot = 0
    phase = 0
    unsent = 0  # boxes of the previous tile that still wait in shared memory, and where they go
    old_row = 0
    old_col = 0
    begin = gl.load(tiles + 4 * first)
    end = gl.load(tiles + 4 * first + 1)
    row = gl.load(tiles + 4 * first + 2)
    col = gl.load(tiles + 4 * first + 3)
    for t in range(first, last):
        # The next tile's record is read a whole tile early; the schedule ends with one record to spare.
        next_begin = gl.load(tiles + 4 * t + 4)
        next_end = gl.load(tiles + 4 * t + 5)
        next_row = gl.load(tiles + 4 * t + 6)
        next_col = gl.load(tiles + 4 * t + 7)
        pieces = (end - begin) * PER
        acc = warpgroup_mma_init(gl.zeros((64, COLS), gl.float32, LAYOUT))
        for q in range(0, pieces, PIECES):
            mbarrier.wait(full.index(slot), phase)  # until TMA has written the whole slot
            for i in gl.static_range(PIECES):
                a = a_s.index(slot * PIECES + i).slice(ROW0, 64)
                b = b_s.index((slot * PIECES + i) * B_BOXES + WG // T.wg_m)
                if T.b_col:
                    b = b.permute((1, 0))
                acc = warpgroup_mma(a, b, acc, is_async=True)
            if unsent > 0:
                if q // PIECES % EVERY == EVERY // 2 * WG:
                    store_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, staged)
                    unsent -= 1
            acc = warpgroup_mma_wait(PIECES, deps=(acc,))  # the stage before this one has been read
            acc = warpgroup_mma_init(acc)
            if q > 0:
                mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        out = warpgroup_mma_wait(0, deps=(acc,))
        if pieces > 0:
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
        while unsent > 0:  # the tile was too short to send everything on the way
            store_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, staged)
            unsent -= 1
        tma_store_wait(0)  # until TMA has read the staged tile, which is about to be overwritten
        stage.store(out.to(c_desc.dtype))
        fence_async_shared()
        unsent = BOXES + 0
        old_row = row + ROW0
        old_col = col + COL0
        begin = next_begin
        end = next_end
        row = next_row
        col = next_col
    while unsent > 0:
        store_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, staged)
        unsent -= 1
    tma_store_wait(0)  # shared memory must outlive the copies that read it


@gluon.jit(do_not_specialize=["no_col", "no_block"])
def spmm_kernel(
    a_desc,
    b_desc,
    c_desc,
    tiles,
    starts,
    cols,
    blocks,
    no_col,
    no_block,
    T: gl.constexpr,
    SOURCE: gl.constexpr,
):
    """Tile t of the schedule is tiles[4t : 4t+4] = first step, end step, row of C, column of C.

    CTA p does tiles starts[p] to starts[p+1]. Step s multiplies stored blocks blocks[s*merge : (s+1)*merge] with
    block column cols[s]. `no_col` and `no_block` lie outside B and A. SOURCE is there for Triton's cache alone.
    """
    DTYPE: gl.constexpr = a_desc.dtype
    PARTS: gl.constexpr = T.stages * T.pieces
    STAGES: gl.constexpr = T.stages
    GROUPS: gl.constexpr = T.wg_m * T.wg_n
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T.rows, T.width], DTYPE)
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, T.cols], DTYPE)
    a_s = gl.allocate_shared_memory(DTYPE, [PARTS, T.rows, T.width], A_LAYOUT)
    a_boxes = reinterpret(a_s, DTYPE, [PARTS * (T.rows // T.a_box), T.a_box, T.width], a_desc.layout)
    b_s = gl.allocate_shared_memory(DTYPE, [PARTS * T.wg_n] + b_desc.block_type.shape, b_desc.layout)
    c_s = gl.allocate_shared_memory(DTYPE, [GROUPS, 64, T.cols], C_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (T, 0, c_desc, tiles, starts, a_s, b_s, c_s, full, empty)),
                (
                    load,
                    (
                        T,
                        a_desc,
                        b_desc,
                        tiles,
                        starts,
                        cols,
                        blocks,
                        no_col,
                        no_block,
                        a_boxes,
                        b_s,
                        full,
                        empty,
                    ),
                ),
            ],
            [1],
            [56],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (T, 0, c_desc, tiles, starts, a_s, b_s, c_s, full, empty)),
                (multiply, (T, 1, c_desc, tiles, starts, a_s, b_s, c_s, full, empty)),
                (
                    load,
                    (
                        T,
                        a_desc,
                        b_desc,
                        tiles,
                        starts,
                        cols,
                        blocks,
                        no_col,
                        no_block,
                        a_boxes,
                        b_s,
                        full,
                        empty,
                    ),
                ),
            ],
            [4, 1],
            [216, 56],
        )


class Work(NamedTuple):
    """A schedule on the device."""

    tiles: Tensor
    starts: Tensor
    cols: Tensor
    blocks: Tensor
    ctas: int
    imbalance: float


class HopperSpmm:
    """The kernel above, behind the planner's protocol."""

    name = "hopper.spmm"

    def why_not(self, p: SpmmProblem) -> list[str]:
        reasons = []
        if p.card.capability != (9, 0):
            reasons.append(f"needs a Hopper card (sm_90) for wgmma and TMA, this is {p.card.name}")
        if p.dtype not in ("bf16", "fp16"):
            reasons.append(f"multiplies bf16 and fp16, not {p.dtype}")
        if p.transposed:
            reasons.append("A is a transposed view; its blocks would be read the wrong way round")
        if not p.aligned:
            reasons.append("TMA needs pointers and leading strides of B and C that are multiples of 16 bytes")
        if p.n % 8:
            reasons.append(f"TMA writes whole 16 bytes, so N must be a multiple of 8, not {p.n}")
        if p.b_layout == "strided":
            reasons.append(
                "TMA reads a row-major B or its transpose view; this B has gaps between its elements"
            )
        if max(p.nnzb * p.block[0], p.m, p.k, p.n) > 2**31 - 1024:
            reasons.append(
                "TMA coordinates are 32 bits: M, K and N must stay 1024 below 2^31, and so must all stored blocks' rows"
            )
        return reasons

    def default(self, p: SpmmProblem) -> Config:
        return min(self.configs(p), key=lambda c: self.seconds(p, c))

    def configs(self, p: SpmmProblem) -> Iterable[Config]:
        bm, bk = p.block
        width = min(64, bk & -bk)
        b_col = p.b_layout == "col"
        if p.n <= 64:
            shapes = [(2, 1), (1, 1)] if bm > 64 else [(1, 1)]
        else:
            shapes = [(2, 1), (1, 2)] if bm > 64 else [(1, 2)]
        merges = [1, *(merge for merge, _ in p.merged if merge * bm <= 128)]
        found: dict[Config, None] = {}
        for merge in merges:
            for wg_m, wg_n in [(2, 1)] if merge * bm == 128 else shapes:
                for cols, depth in product((16, 32, 64, 128, 256), (64, 32)):
                    too_wide = cols > 16 and cols * wg_n >= 2 * p.n
                    too_narrow = p.n > 64 and cols < 64
                    too_deep = cols * wg_n * depth > 16384
                    too_shallow = p.n <= 64 and depth < 64
                    two_ctas = wg_m * wg_n == 1 and cols > 64
                    if too_wide or too_narrow or too_deep or too_shallow or two_ctas:
                        continue
                    narrow = min(width, depth)
                    # The producer keeps an index of every A box of a stage in registers; more than 8 would spill.
                    pieces = min(depth // narrow, 8 // merge)
                    c = Config(p.block, wg_m, wg_n, cols, narrow, pieces, 3, merge, b_col)
                    found[_deepen(c, p.card.smem_bytes)] = None
        return list(found)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Tiles of the fullest SM, each the larger of multiplying and loading (a smooth maximum), plus its fixed part.

        Constants are measured on an H200 (2026-11-20): 2048 multiply-adds per cycle at 1.6 GHz, L2 to shared memory
        at `card.fabric`, 30 ns for every further A box of a step; 1.1 us for a tile of 128x256 or as
        large to begin, end and store with stages 64 deep, 0.9 us with stages 32 deep, which add 2 % to every step. With
        uneven rows CTAs leave step, and large tiles lose 25 % (Zipf 1.2 rows).
        """
        if p.nnzb == 0 or p.n == 0:
            return p.card.launch_seconds
        steps = dict(p.merged).get(c.merge, p.nnzb) if c.merge > 1 else p.nnzb
        slices = max(1, -(-p.block[0] // c.rows)) if c.merge == 1 else 1
        units = -(-p.grid[0] // c.merge) * slices
        columns = -(-p.n // c.block_cols)
        sms = p.card.sm_count
        tiles = units * columns * p.batch
        depth = p.block[1]
        shallow = c.pieces * c.width <= 32
        mma = c.rows * c.block_cols * depth / (2048 * 1.6e9)
        bytes_ = 2 * depth * (c.a_box * c.merge + min(c.block_cols, -(-p.n // 8) * 8))
        fetch = bytes_ * sms / p.card.fabric
        step = (mma**4 + fetch**4) ** 0.25 * (1.02 if shallow else 1.0) + 3e-8 * (c.merge - 1)
        mean = steps * slices / units
        longest = max(mean, min(p.row_max, p.grid[1]))
        area = c.rows * c.block_cols / 32768
        tile = mean * step + (0.9e-6 if shallow else 1.1e-6) * max(0.25, area)
        if longest <= 1.25 * mean:
            busy = -(-tiles // sms) * tile
        else:
            busy = max(tiles / sms, longest / mean) * tile * (1 + 0.25 * area**2)
        traffic = p.compulsory_bytes / (0.92 * p.card.bandwidth)
        return max(busy, traffic) + p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: Config, a: BSR) -> Work:
        units = a.pattern.derived(("walk", c.rows, c.merge), lambda: walk(a.pattern, c.rows, c.merge))
        deal: Schedule = balance(units, p.n, c.block_cols, p.card.sm_count * c.ctas_per_sm)

        def put(array: Any) -> Tensor:
            return torch.from_numpy(array.copy()).to(a.device)

        return Work(
            put(deal.tiles), put(deal.starts), put(units.cols), put(units.blocks), deal.ctas, deal.imbalance
        )

    def launch(self, c: Config, work: Work, a: BSR, b: Tensor, out: Tensor) -> None:
        if a.nnzb == 0:
            out.zero_()
            return
        bm, bk = c.block
        a_desc = Described(a.values, (a.nnzb * bm, bk), (bk, 1), (c.a_box, c.width))
        b_box = (c.cols, c.width) if c.b_col else (c.width, c.cols)
        lists = (work.tiles, work.starts, work.cols, work.blocks, a.grid[1], a.nnzb, c, SOURCE)
        options = {"maxnreg": 128} if c.ctas_per_sm == 2 else {}
        for b_one, c_one in zip(_matrices(b.mT if c.b_col else b), _matrices(out), strict=True):
            args = (a_desc, describe(b_one, b_box), describe(c_one, (c.c_box, c.panel)), *lists)
            launch_on(out.device, spmm_kernel, work.ctas, args, options)


def _deepen(c: Config, smem: int) -> Config:
    """The same tile with as many stages, up to 12, as shared memory holds beside the staged tile."""
    room = smem // c.ctas_per_sm - 1024
    spare = room - replace(c, stages=0).smem_bytes
    one = replace(c, stages=1).smem_bytes - replace(c, stages=0).smem_bytes
    return replace(c, stages=max(2, min(12, spare // one)))


def _matrices(x: Tensor) -> list[Tensor]:
    """Every matrix of a batch, as views."""
    if x.dim() == 2:
        return [x]
    return [x[index] for index in product(*(range(size) for size in x.shape[:-2]))]


KERNEL: SpmmKernel = HopperSpmm()
