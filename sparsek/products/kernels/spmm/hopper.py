"""C = epilogue(A @ B) on Hopper: A in BSR, B and C dense, float32 accumulation.

    one tile of C                             operands of one step, in shared memory
    .----------- block_cols ----------.
    |                |                |       A piece [rows, width]  of stored block s
    |  warpgroup 0   |  warpgroup 1   |       B piece [width, block_cols]  of the matching rows of B
    |  64 x cols     |  64 x cols     |
    '----------------------------------       (wg_n = 2; with wg_m = 2 the warpgroups are stacked vertically)

The kernel is persistent: a CTA walks the tiles that the schedule assigned to it. One producer warp loads pieces by
TMA into a ring of `stages` slots (spmm/load.py). Consumer warpgroups multiply them from shared memory with wgmma
(spmm/multiply.py, spmm/multiply_register_tile.py). A block taller than a tile is cut into tiles that share the block
row's list. A block shorter than a tile wastes rows of the tensor core, unless `joined_rows` block rows share a tile
where their columns coincide.

One kernel serves every product of a BSR matrix, because wgmma reads A and B, and TMA writes C, row- or column-major:

    A @ B      as above                    A.T @ B      blocks of A are stored transposed: a_col
    B @ A      = (A.T @ B.T).T: a_col,     B @ A.T      = (A @ B.T).T: b_col, c_col. This is linear, x @ W.T
                 b_col, c_col

Block rows with far more blocks than others are split: the parts write float32 sums to a workspace, and `merge_parts`
adds them in order (spmm/parts.py).

Bottleneck (H200, 8192^3 bf16, 12.5 % stored; docs/notes/products-hopper.md): L2 to shared
memory, 9 TB/s. Blocks of 128 load 96 KB for 8.4 MFLOP and reach 0.95 of cuBLAS; blocks of 64, 32 and 16 are at the L2
bound. Storing C in one burst at the end of a tile delayed the loads queued behind it; spreading the stores gained 5 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparsek.engine.launch.gluon import Described, describe, describe_transposed, launch_on, reinterpret
from sparsek.engine.launch.kinds import source_of
from sparsek.engine.plan.kernel import beside, unless_hopper
from sparsek.engine.plan.plan import arithmetic_seconds
from sparsek.products.formats.bsr import BSR
from sparsek.products.kernels.spmm import activation, hopper_ring
from sparsek.products.kernels.spmm import load as load_prims
from sparsek.products.kernels.spmm import multiply as prims
from sparsek.products.kernels.spmm import multiply_register_tile as held_prims
from sparsek.products.kernels.spmm.load import load
from sparsek.products.kernels.spmm.multiply import (
    Beside,
    Tile,
    deepened,
    most_boxes,
    multiply,
    owned_boxes,
)
from sparsek.products.kernels.spmm.multiply_register_tile import multiply_held
from sparsek.products.kernels.spmm.parts import (
    SplitTiles,
    beside_c,
    busy_seconds,
    dealt,
    limits,
    merge_parts,
    put,
    uneven,
)
from sparsek.products.kernels.spmm.tiles import device_tiles
from sparsek.products.plan.kernels import SpmmKernel, unless_dense_sides
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.plan.schedule import walk
from sparsek.products.reference.epilogue import PLAIN, Epilogue


@dataclass(frozen=True, repr=False)
class Config(Tile):
    """`b_stack`: B is a stack of blocks [nnzb, bk, bn], and a tile owns `owned` of its columns."""

    b_stack: bool = False
    owned: int = 0

    @property
    def texts(self) -> list[str]:
        lies = {"A": self.a_col, "B": self.b_col, "C": self.c_col}
        return [
            f"tile {self.rows}x{self.block_cols} for {self.wg_m}x{self.wg_n} warpgroups",
            f"{self.joined_rows} block rows merged" * (self.joined_rows > 1),
            f"blocks {self.block[0]}x{self.block[1]}, {self.stages} stages of {self.pieces}x{self.width}",
            *(f"{'col' if col else 'row'}-major {name}" for name, col in lies.items()),
            f"every {self.every}, box {self.box}",
            *self.true_values(
                "bias", "has_alpha", "activation", "slope", "held", "combine", "preload", "split"
            ),
            *self.true_values("b_stack", "owned", "direct"),
        ]

    @property
    def per_block(self) -> int:
        return -(-self.block[1] // self.width)

    @property
    def a_boxed(self) -> int:
        """Rows of A in one box of shared memory."""
        return 64 if self.a_col else self.a_box

    @property
    def owned_cols(self) -> int:
        return self.owned or self.block_cols

    @property
    def panel(self) -> int:
        widest = super().panel
        return min(widest, self.owned & -self.owned) if self.owned else widest


HELD = 32  # columns of a piece of a tile that is held in registers

SOURCE = source_of(__file__, load_prims.__file__, prims.__file__, held_prims.__file__, activation.__file__)


@gluon.jit(do_not_specialize=["no_col", "no_block", "m", "alpha", "lead8", "rows", "cols8", "beta"])
def spmm_kernel(
    a_desc, b_desc, c_desc, tiles, starts, cols, blocks, no_col, no_block,
    bias, m, alpha, part_sums, other, lead8, rows, cols8, beta, beside_desc,
    T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """CTA p computes tiles starts[p] to starts[p+1], RECORD (multiply.py) numbers each.

    Step s multiplies stored blocks blocks[s*joined : (s+1)*joined] with block column (or stored block of B) cols[s].
    `no_col` and `no_block` are indices outside B and A. The remaining arguments belong to the epilogue: `m` rows of
    C, `other` with its leading stride / 8, and `rows` and columns / 8 of C as stored. `beside_desc` is the matrix of
    slopes, with `preload` the other matrix, or None. SOURCE only enters Triton's cache key.
    """
    DTYPE: gl.constexpr = a_desc.dtype
    PARTS: gl.constexpr = T.stages * T.pieces
    STAGES: gl.constexpr = T.stages
    GROUPS: gl.constexpr = T.wg_m * T.wg_n
    if T.a_col:
        a_s = gl.allocate_shared_memory(DTYPE, [PARTS * T.wg_m, T.width, 64], a_desc.layout)
        a_boxes = reinterpret(a_s, DTYPE, [PARTS * (T.rows // 64), T.width, 64], a_desc.layout)
    else:
        A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T.rows, T.width], DTYPE)
        a_s = gl.allocate_shared_memory(DTYPE, [PARTS, T.rows, T.width], A_LAYOUT)
        a_boxes = reinterpret(a_s, DTYPE, [PARTS * (T.rows // T.a_box), T.a_box, T.width], a_desc.layout)
    PIECE: gl.constexpr = [T.cols, T.width] if T.b_col else [T.width, T.cols]
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(PIECE, DTYPE)
    b_s = gl.allocate_shared_memory(DTYPE, [PARTS * T.wg_n] + PIECE, B_LAYOUT)
    b_boxes = reinterpret(b_s, DTYPE, [PARTS * T.wg_n] + b_desc.block_type.shape, b_desc.layout)
    if T.held > 0:
        STAGE: gl.constexpr = [T.held_boxes * GROUPS] + c_desc.block_type.shape
    else:
        STAGE: gl.constexpr = [GROUPS] + ([T.cols, 64] if T.c_col else [64, T.cols])
    c_s = gl.allocate_shared_memory(DTYPE, STAGE, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    if T.preload and T.held > 0:
        landed = gl.allocate_shared_memory(gl.int64, [T.held_boxes * GROUPS, 1], mbarrier.MBarrierLayout())
        for box in gl.static_range(T.held_boxes * GROUPS):
            mbarrier.init(landed.index(box), count=1)
    elif T.preload:
        landed = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
        for wg in gl.static_range(GROUPS):
            mbarrier.init(landed.index(wg), count=owned_boxes(T, wg))
    fence_async_shared()
    lists = (tiles, starts)
    before = (bias, m, alpha, part_sums)
    ring = (a_s, b_s, full, empty)
    steps = (cols, blocks, no_col, no_block)
    slots = (a_boxes, b_boxes, full, empty)
    matrix = Beside(other, lead8, rows, cols8, beta, None, None)
    if T.slope:
        slopes = gl.allocate_shared_memory(DTYPE, [GROUPS] + beside_desc.block_type.shape, beside_desc.layout)
        matrix = Beside(other, lead8, rows, cols8, beta, beside_desc, slopes)
    if T.preload:
        matrix = Beside(other, lead8, rows, cols8, beta, beside_desc, landed)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (T, 0, c_desc, lists, before, matrix, ring, c_s)),
                (load, (T, a_desc, b_desc, lists, steps, slots)),
            ],
            [1],
            [56],
        )
    elif T.held > 0:
        gl.warp_specialize(
            [
                (multiply_held, (T, 0, c_desc, lists, before, matrix, ring, c_s)),
                (multiply_held, (T, 1, c_desc, lists, before, matrix, ring, c_s)),
                (load, (T, a_desc, b_desc, lists, steps, slots)),
            ],
            [4, 1],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (T, 0, c_desc, lists, before, matrix, ring, c_s)),
                (multiply, (T, 1, c_desc, lists, before, matrix, ring, c_s)),
                (load, (T, a_desc, b_desc, lists, steps, slots)),
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
    imbalance: float | None
    parts: SplitTiles | None = None


class HopperSpmm(SpmmKernel):
    name = "hopper.spmm"
    shares = True  # recorded calls, with new patterns
    writes_slope = True  # act'(z) beside act(z)

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("bsr"):
            return foreign
        reasons = unless_hopper(p) + unless_dense_sides(p)
        return limits(p, self.configs, reasons)

    def configs(self, p: SpmmProblem) -> list[Config]:
        bm, bk = p.block
        width = min(64, bk & -bk)
        if p.n <= 64:
            shapes = [(2, 1), (1, 1)] if bm > 64 else [(1, 1)]
        else:
            shapes = [(2, 1), (1, 2)] if bm > 64 else [(1, 2)]
        flags = {
            "a_col": p.a.transposed,
            "b_col": p.b.layout == "col",
            "c_col": p.c.layout == "col",
            "bias": p.bias,
            "has_alpha": p.has_alpha,
            "activation": p.activation,
            "combine": p.combine,
            "slope": p.slope,
            "preload": p.combine != "" and p.activation == "",
        }
        merges = [1] if p.a.transposed else [1, *(rows for rows, _ in p.stats.merged if rows * bm <= 128)]
        found: dict[Config, None] = {}
        for joined in merges:
            for wg_m, wg_n in [(2, 1)] if joined * bm == 128 else shapes:
                if p.in_place and bm > 64 * wg_m and bm % (64 * wg_m):
                    continue
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
                    pieces = min(depth // narrow, 8 // joined)
                    c = Config(p.block, wg_m, wg_n, cols, narrow, pieces, 3, joined, **flags)
                    c = replace(c, box=32) if c.finishes else c
                    found[_paced(p, deepened(c, p.card.smem_bytes))] = None
                    simple = not p.slope and (c.preload or not p.combine)
                    if simple and wg_m * wg_n == 2 and c.height == c.rows and cols >= HELD * c.held_boxes:
                        c = replace(c, held=HELD, box=64)
                        found[_paced(p, deepened(c, p.card.smem_bytes))] = None
        # `merge_parts` writes no slopes, and a tile that is held is never a part.
        may_split = uneven(p) and not p.slope
        split = [replace(c, split=True) for c in found if not c.held] if may_split else []
        return [*found, *split]

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        return hopper_ring.seconds(p, c)

    def rank(self, p: SpmmProblem, c: Config) -> float:
        """Seconds by which this kernel's own configs are compared: a model whose choices were measured.

        A tile takes the larger of multiply and load time (a smooth maximum) plus a fixed cost. Constants were
        measured on an H200 (2026-11-20; steps and bytes 2026-11-22; matrices beside C 2026-11-26): 2048 multiply-adds
        per cycle at 1.75 GHz; 35 ns per step; L2 to shared memory at `card.fabric`; 30 ns for every further A box of a
        step. Begin, end and store of a tile of 128x256 or as large take 1.1 us with stages 64 deep and 0.9 us with
        stages 32 deep, which add 2 % to every step. Another matrix that TMA loads takes 1.0 us. A tile that is held
        takes 0.5 us less, or 0.1 us with stages 32 deep; one of 64x512, whose stages are, 0.5 us more (two H100, 3 to
        5 % of blocks of 64). Its activation or other matrix takes 0.5 us. With very uneven rows CTAs drift apart, and
        large tiles lose 18 % (Zipf 1.2, the longest row 8 times the mean; no loss at twice the mean). Split rows write
        their sums to memory and read them again in a second launch. With few columns, only A's bytes count.
        """
        if p.nnzb == 0 or p.n == 0:
            return p.card.launch_seconds
        steps = dict(p.stats.merged).get(c.joined_rows, p.nnzb) if c.joined_rows > 1 else p.nnzb
        slices = max(1, -(-p.block[0] // c.rows)) if c.joined_rows == 1 else 1
        units = -(-p.grid[0] // c.joined_rows) * slices
        depth = p.block[1]
        shallow = c.pieces * c.width <= 32
        mma = c.rows * c.block_cols * depth / (2048 * 1.75e9 * p.card.pace)
        bytes_ = 2 * depth * (c.a_rows + min(c.block_cols, -(-p.n // 8) * 8))
        fetch = bytes_ * p.card.sm_count / p.card.fabric
        # Layers in blocks of 64 take 0.95 of the time with held tiles of 64x256 instead of 64x512, whose stages are 32
        # deep (0.81 to 1.01 in 21 layers, H100, 2026-11-26). 1.35 ranks all of them so.
        alone = not (p.combine or p.slope)
        apart = alone and shallow and c.b_col and c.wg_n == 2 and depth >= 64
        loses = 1.35 if apart else 1.02 if shallow else 1.0
        step = (mma**4 + fetch**4) ** 0.25 * loses + 3.5e-8 + 3e-8 * (c.joined_rows - 1)
        fixed = 0.9e-6 if shallow else 1.1e-6
        if c.held:
            saved = 0.5e-6 if not shallow else 0.1e-6 if c.wg_m == 2 else -0.5e-6
            fixed += 0.5e-6 * bool(c.activation) + 0.5e-6 * c.preload - saved
        elif c.finishes:  # stages 32 deep leave little time for it
            fixed += (2.5e-6 if shallow else 0.7e-6) + 1.0e-6 * c.slope + 2.5e-6 * bool(c.combine)
        elif c.preload:
            fixed += 1.0e-6
        busy, extra = busy_seconds(p, c, steps * slices, units, step, fixed)
        # 2026-11-21: 16384^2, 25 %, N = 16 at 0.80 of copy bandwidth; 2026-11-22: N = 256 at 0.7
        share = 0.80 if p.n <= 64 else 0.7 if p.n <= 256 else 0.92
        traffic = p.compulsory_bytes / (share * p.card.bandwidth)
        both = max(busy, traffic) if p.n <= 64 else beside(busy, traffic)
        both = max(both, arithmetic_seconds(p))  # no product is faster than the card sustains
        return both + extra + p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: Config, a: BSR) -> Work:
        if p.stats.unread:
            found = device_tiles(a.pattern, p.n, c.rows, c.block_cols, p.card.sm_count * c.ctas_per_sm)
            if found is not None:
                tiles, starts, blocks = found
                blocks = blocks if a.order is None else a.order
                return Work(tiles, starts, a.pattern.indices, blocks, len(starts) - 1, None)
        units = a.pattern.derived(
            ("walk", c.rows, c.joined_rows), lambda: walk(a.pattern, c.rows, c.joined_rows)
        )
        found = dealt(units, c, p, a.device)
        blocks = put(units.blocks, a.device)
        if a.order is not None:  # positions among the stored values
            blocks = torch.cat((a.order, a.order.new_tensor([a.nnzb])))[blocks.long()].contiguous()
        return Work(found.tiles, found.starts, found.cols, blocks, found.ctas, found.imbalance, found.parts)

    def launch(
        self, c: Config, work: Work, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        bm, bk = c.block
        values = a.values
        if a.nnzb == 0:  # TMA needs a valid address; the lists are empty, so nothing is read
            values, b = (
                values.new_empty(1, *values.shape[1:]),
                b.new_empty(*b.shape[:-2], bk, -(-b.shape[-1] // 8) * 8),
            )
            b = b.mT.contiguous().mT if c.b_col else b
        nnzb = values.shape[0]
        a_box, b_box, c_box, options = _boxes(c)
        a_shape, a_strides = ((nnzb * bk, bm), (bm, 1)) if c.a_col else ((nnzb * bm, bk), (bk, 1))
        a_desc = Described(values, a_shape, a_strides, a_box)
        lists = (work.tiles, work.starts, work.cols, work.blocks, a.grid[1], nnzb)
        none = work.tiles  # any int32 tensor stands for an absent one
        sums = none if work.parts is None else work.parts.workspace(c.rows, c.block_cols)
        describe_b = describe_transposed if c.b_col else describe
        describe_c = describe_transposed if c.c_col else describe
        bias, alpha = none if epilogue.bias is None else epilogue.bias, float(epilogue.alpha)
        for b_one, c_one, other, slope in _each(b, out, epilogue.other, epilogue.slope):
            beside = other if c.preload else slope
            args = (
                a_desc, describe_b(b_one, b_box), describe_c(c_one, c_box), *lists,
                bias, out.shape[-2], alpha, sums, *beside_c(other, c.c_col, epilogue.beta, none),
                None if beside is None else describe_c(beside, c_box), c, SOURCE,
            )  # fmt: skip
            launch_on(out.device, spmm_kernel, work.ctas, args, options)
            if work.parts is not None:
                merge_parts(work.parts, sums, c.height, c_one, replace(epilogue, other=other))


def _paced(p: SpmmProblem, c: Config) -> Config:
    """The config with stores of C spread over the next tile: one box of 64 rows per 128 of K (2026-11-20, H200).

    With an epilogue, boxes have 32 rows, and as many stages between them as a tile of mean length allows.
    """
    steps = dict(p.stats.merged).get(c.joined_rows, p.nnzb) * c.joined_rows / max(1, p.grid[0])
    stages, boxes, plain = steps * c.per_block / c.pieces, most_boxes(c), 2 * c.c_box // (c.width * c.pieces)
    if c.preload and not c.held:
        every = min(plain, int(stages / (boxes + 2)))
    else:
        every = int(stages / max(1, boxes)) if c.finishes or c.held else plain
    return replace(c, every=max(1, every))


@cache
def _boxes(c: Config) -> tuple[Any, ...]:
    """The boxes of A, B and C, and the launch options: values that a launch would recompute from the config."""
    a_box = (c.width, 64) if c.a_col else (c.a_box, c.width)
    return a_box, (c.cols, c.width) if c.b_col else (c.width, c.cols), c.c_shape, c.options


def _each(*batched: Tensor | None) -> Any:
    """B, C, and the epilogue's other matrix and slopes, for every product of a batch; an absent one is None."""
    first = batched[0]
    assert first is not None
    if first.dim() == 2:
        return (batched,)
    count = first.shape[:-2].numel()
    return zip(*([None] * count if x is None else _matrices(x) for x in batched), strict=True)


def _matrices(x: Tensor) -> list[Tensor]:
    """Every matrix of a batch, as views."""
    if x.dim() == 2:
        return [x]
    return [x[index] for index in product(*(range(size) for size in x.shape[:-2]))]


KERNEL: SpmmKernel = HopperSpmm()
