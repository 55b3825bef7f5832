"""C = epilogue(scale_A * scale_B * (A @ B)) on Hopper in FP8: A in BSR, B dense and contiguous along K, C dense.

    one tile of C                             operands of one step, in shared memory
    .------------- cols --------------.
    |  warpgroup 0: 64 x cols         |       A piece [rows, width]  of stored block s
    |     chunk 0     |    chunk 1    |       B piece [cols, width]  of the columns of B, along K at the block's column
    |-----------------+---------------|
    |  warpgroup 1: 64 x cols         |       (wg_m = 2; with wg_n = 2 the warpgroups are side by side)
    '---------------------------------'

The kernel is persistent: a CTA walks the tiles that the schedule assigned to it. One producer warp loads pieces by
TMA into a ring; two consumer warpgroups multiply them from shared memory with wgmma.

Accumulation. Hopper's tensor cores keep about 14 bits of a sum of FP8 products (DeepSeek-V3, 2024, arXiv:2412.19437,
3.3.2). Partial sums over at most 128 of K are therefore promoted to float32 registers, times the scale of the block
if there is one. The error is 1.3e-4 at K = 32768 (H200, 2026-11-22). A numpy model gives the same, and 5e-4 if all
products are positive; without promotion it gives 5e-3 and a third. A thread cannot hold two sums of 64 x 256, so
wgmma computes 64 x `chunk` at a time, two chunks in flight: while one is promoted, the other is multiplied. A comes
from registers, because every chunk would read it from shared memory again. Gluon's max_num_imprecise_acc has the same
meaning but adds before it waits, and ptxas then serializes wgmma (C7514, Triton 3.6, 2026-11-22). With `fast_accum`
nothing is promoted, and the loop is that of hopper.spmm.

A finished tile waits in registers and leaves during the next one (spmm/multiply_fp8_register_tile.py), or in shared
memory (spmm/multiply_fp8.py) where something joins it, where C is float32 or where rows are split.

Scaling. Scales per row of A are applied at each promotion; scales per column of B when a tile is done, with bias and
alpha, in float32. Activations and other matrices are applied to boxes of C before they are stored (spmm/multiply.py).
Block rows with far more blocks than others are split: the parts write scaled float32 sums to a workspace, and
`merge_parts` adds them in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, ClassVar

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparsek.core import dtypes
from sparsek.engine.launch.gluon import Described, describe, describe_transposed, launch_on
from sparsek.engine.launch.kinds import source_of
from sparsek.engine.plan.kernel import beside, unless_aligned, unless_hopper, unless_whole
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.kernels.spmm import activation, hopper_ring
from sparsek.products.kernels.spmm import load as load_prims
from sparsek.products.kernels.spmm import multiply as prims
from sparsek.products.kernels.spmm import multiply_fp8 as scale_prims
from sparsek.products.kernels.spmm import multiply_fp8_register_tile as scale_held
from sparsek.products.kernels.spmm import multiply_register_tile as held_prims
from sparsek.products.kernels.spmm.load import load
from sparsek.products.kernels.spmm.multiply import Beside, Tile, deepened, most_boxes
from sparsek.products.kernels.spmm.multiply_fp8 import multiply
from sparsek.products.kernels.spmm.multiply_fp8_register_tile import multiply_held, multiply_held_sums
from sparsek.products.kernels.spmm.parts import (
    SplitSchedule,
    beside_c,
    busy_seconds,
    dealt,
    limits,
    merge_parts,
    uneven,
)
from sparsek.products.kernels.spmm.tiles import device_tiles
from sparsek.products.plan.kernels import SpmmKernel, rounding_seconds
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.plan.schedule import walk
from sparsek.products.reference.epilogue import PLAIN, Epilogue

PROMOTED = 128  # values of K that tensor cores accumulate before promotion to float32
HELD = 32  # columns of a piece of a tile that is held in registers


@dataclass(frozen=True, repr=False)
class Config(Tile):
    """The tensor cores accumulate `promote` pieces, `chunk` columns at a time; a stage holds a multiple of them. With
    `promote` 0, for `fast_accum`, they accumulate a whole tile in one chunk. `held`: the finished tile waits in
    registers and leaves in pieces of so many columns.

    `a_scale` is "tensor", "row" or "block", `b_scale` "tensor" or "column". `c_bytes`: of an element of C.
    """

    b_col: bool = True
    promote: int = 1
    a_scale: str = "row"
    b_scale: str = "column"
    c_bytes: int = 2

    in_order: ClassVar[bool] = True
    b_stack: ClassVar[bool] = False

    @property
    def texts(self) -> list[str]:
        return [
            f"tile {self.rows}x{self.block_cols} for {self.wg_m}x{self.wg_n} warpgroups in chunks of {self.chunk}",
            f"blocks {self.block[0]}x{self.block[1]}, {self.stages} stages of {self.pieces}x{self.width}",
            f"float32 sums of {self.promote}" if self.promote else "the tensor cores' own sums",
            f"C of {self.c_bytes} bytes an element, a scale per {self.a_scale} and {self.b_scale}",
            f"every {self.every}, box {self.box}", f"joined_rows {self.joined_rows}" * (self.joined_rows > 1),
            *self.true_values("a_col"), "b_col False" * (not self.b_col),
            *self.true_values("c_col", "bias", "has_alpha", "activation", "combine", "split", "direct", "slope"),
            *self.true_values("preload", "held"),
        ]  # fmt: skip

    @property
    def per_block(self) -> int:
        return self.block[1] // self.width

    @property
    def chunk(self) -> int:
        """Columns of one sum in the tensor cores."""
        return min(self.cols, 64) if self.promote else self.cols

    @property
    def chunks(self) -> int:
        return self.cols // self.chunk

    @property
    def a_box(self) -> int:
        return self.rows

    @property
    def a_boxed(self) -> int:
        return self.rows

    @property
    def c_box(self) -> int:
        fits = 128 // self.c_bytes if self.c_col else 64  # no wider than a swizzle
        return min(fits, super().c_box)

    @property
    def panel(self) -> int:
        fits = self.box if self.c_col else 128 // self.c_bytes
        return min(fits, super().panel)

    @property
    def stage_bytes(self) -> int:
        return self.pieces * self.width * (self.rows + self.block_cols)

    @property
    def smem_bytes(self) -> int:
        ring = self.stages * (self.stage_bytes + 16)
        across = 4 * self.block_cols * self.wg_m if self.b_scale == "column" else 0
        staged = (
            2 * self.wg_m * self.wg_n * self.c_box * self.panel if self.held else self.rows * self.block_cols
        )
        return ring + self.c_bytes * staged + across + 1024


SOURCE = source_of(
    __file__,
    load_prims.__file__,
    prims.__file__,
    held_prims.__file__,
    scale_prims.__file__,
    scale_held.__file__,
    activation.__file__,
)


@gluon.jit(do_not_specialize=["no_col", "no_block", "alpha", "m", "n", "lead8", "rows", "cols8", "beta"])
def spmm_fp8_kernel(
    a_desc, b_desc, c_desc, tiles, starts, cols, no_col, no_block,
    a_scale, b_scale, alpha, bias, m, n, part_sums, other, lead8, rows, cols8, beta,
    T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """CTA p computes tiles starts[p] to starts[p+1], RECORD numbers each.

    Step s multiplies stored block s with block column cols[s]. `no_col` and `no_block` are indices outside B and A.
    The remaining arguments belong to the epilogue; `m` and `n` are the sides of C. SOURCE only enters Triton's cache
    key.
    """
    PARTS: gl.constexpr = T.stages * T.pieces
    STAGES: gl.constexpr = T.stages
    GROUPS: gl.constexpr = T.wg_m * T.wg_n
    a_s = gl.allocate_shared_memory(a_desc.dtype, [PARTS, T.rows, T.width], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [PARTS * T.wg_n, T.cols, T.width], b_desc.layout)
    if T.held > 0:
        STAGE: gl.constexpr = [2 * GROUPS] + c_desc.block_type.shape
    else:
        STAGE: gl.constexpr = [GROUPS] + ([T.cols, 64] if T.c_col else [64, T.cols])
    c_s = gl.allocate_shared_memory(c_desc.dtype, STAGE, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    lists = (tiles, starts)
    scales = (a_scale, b_scale, alpha)
    before = (bias, m, n, part_sums)
    ring = (a_s, b_s, full, empty)
    steps = (cols, None, no_col, no_block)
    matrix = Beside(other, lead8, rows, cols8, beta, None, None)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (T, 0, c_desc, lists, scales, before, matrix, ring, c_s)),
                (load, (T, a_desc, b_desc, lists, steps, ring)),
            ],
            [1],
            [56],
        )
    elif T.held > 0 and T.promote > 0:
        columns_s = gl.allocate_shared_memory(
            gl.float32, [GROUPS, T.cols], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        gl.warp_specialize(
            [
                (multiply_held_sums, (T, 0, c_desc, lists, scales, before, ring, c_s, columns_s)),
                (multiply_held_sums, (T, 1, c_desc, lists, scales, before, ring, c_s, columns_s)),
                (load, (T, a_desc, b_desc, lists, steps, ring)),
            ],
            [4, 1],
            [232, 40],
        )
    elif T.held > 0:
        gl.warp_specialize(
            [
                (multiply_held, (T, 0, c_desc, lists, scales, before, ring, c_s)),
                (multiply_held, (T, 1, c_desc, lists, scales, before, ring, c_s)),
                (load, (T, a_desc, b_desc, lists, steps, ring)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (T, 0, c_desc, lists, scales, before, matrix, ring, c_s)),
                (multiply, (T, 1, c_desc, lists, scales, before, matrix, ring, c_s)),
                (load, (T, a_desc, b_desc, lists, steps, ring)),
            ],
            [4, 1],
            [232, 40],
        )


class HopperSpmmFp8(SpmmKernel):
    name = "hopper.spmm_fp8"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("bsr_fp8"):
            return foreign
        reasons = unless_hopper(p, ("e4m3", "e5m2"))
        if p.a.transposed:
            reasons.append(
                "Hopper's FP8 wgmma reads both operands along K, and the blocks of an A.T are contiguous across it"
            )
        if p.block[1] % 32:
            reasons.append(f"FP8 wgmma is 32 deep, and blocks are {p.block[1]} wide")
        whole = unless_whole("C", p.c_row, p.c.dtype)
        reasons += whole or unless_aligned(p, "rows of B (K values each), of C and of the other matrix")
        if p.c.dtype == "fp32" and (p.combine or p.activation not in ("", "relu")):
            reasons.append("a C in fp32 takes a bias and relu; other activations and matrices bf16 and fp16")
        return limits(p, self.configs, reasons)

    def configs(self, p: SpmmProblem) -> list[Config]:
        bm = p.block[0]
        flags = {
            "c_col": p.c.layout == "col",
            "bias": p.bias,
            "activation": p.activation,
            "combine": p.combine,
            "a_scale": p.a.scale,
            "b_scale": p.b.scale,
            "c_bytes": dtypes.itemsize(p.c.dtype),
        }
        found: dict[Config, None] = {}
        for (wg_m, wg_n), cols in product([(2, 1), (1, 2), (1, 1)], (16, 32, 64, 128, 256)):
            alone = wg_m * wg_n == 1
            if p.in_place and bm > 64 * wg_m and bm % (64 * wg_m):
                continue
            wasted = wg_m == 2 and bm <= 64
            too_low = wg_m == 1 and bm > 64 and p.n > 64 and not p.in_place
            too_wide = (cols > 16 and cols * wg_n >= 2 * p.n) or (alone and cols > 64)
            too_narrow = p.n > 64 and (cols < 64 or alone)
            if wasted or too_low or too_wide or too_narrow:
                continue
            for depth in (PROMOTED, PROMOTED // 2):
                width, pieces, promote = _pieces(p, depth)
                if p.a.fast_accum:
                    promote = 0
                c = Config(p.block, wg_m, wg_n, cols, width, pieces, 3, promote=promote, **flags)
                c = deepened(c, p.card.smem_bytes)
                if c.ctas_per_sm * (c.smem_bytes + 1024) <= p.card.smem_bytes + 1024:
                    found[_paced(p, c)] = None
                if _holdable(p, c):
                    found[_paced(p, deepened(replace(c, held=HELD), p.card.smem_bytes))] = None
                if (
                    c.stages > 2
                ):  # with two stages TMA waits for the tensor cores; four of half the depth may be better
                    break
        split = [replace(c, split=True) for c in found if not c.held] if uneven(p) else []
        return [*found, *split]

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        return hopper_ring.seconds_fp8(p, c)

    def rank(self, p: SpmmProblem, c: Config) -> float:
        """Seconds by which tiles are compared with each other, as for hopper.spmm: tiles of the fullest SM, but no less
        than all bytes from memory once.

        Twice its multiply-adds per cycle, half its bytes, and the clock that an H200 holds in FP8 layers of all sizes
        (2026-11-22). Promotion adds 6 % to a step. A tile of 128x256 that is held takes 1.1 us less, with float32 sums
        0.6 us (an H100, in ratios to cuBLAS; 2026-11-26).
        """
        rounding = rounding_seconds(p)
        if p.nnzb == 0 or p.n == 0:
            return p.card.launch_seconds + rounding
        slices = max(1, -(-p.block[0] // c.rows))
        mma = c.rows * c.block_cols * p.block[1] / (4096 * 1.36e9 * p.card.pace)
        bytes_ = p.block[1] * (c.rows + min(c.block_cols, -(-p.n // 8) * 8))
        fetch = bytes_ * p.card.sm_count / p.card.fabric
        step = (mma**4 + fetch**4) ** 0.25 * (1.15 if c.stages == 2 else 1.0) + 3.5e-8
        step *= 1.06 if c.promote else 1.0
        fixed = 0.55e-6 * c.c_bytes
        if c.held:
            fixed += (0.5e-6 if c.activation else 0.0) - (0.6e-6 if c.promote else 1.1e-6)
        elif c.finishes:
            fixed += 0.7e-6
        busy, extra = busy_seconds(p, c, p.nnzb * slices, p.grid[0] * slices, step, fixed)
        traffic = p.compulsory_bytes / ((0.80 if p.n <= 64 else 0.92) * p.card.bandwidth)
        return beside(busy, traffic) + extra + p.card.launch_seconds + rounding

    def prepare(self, p: SpmmProblem, c: Config, a: Quantized) -> SplitSchedule:
        pattern = a.matrix.pattern
        if p.stats.unread:
            found = device_tiles(pattern, p.n, c.rows, c.block_cols, p.card.sm_count * c.ctas_per_sm)
            if found is not None:
                tiles, starts, _ = found
                return SplitSchedule(tiles, starts, pattern.indices, len(starts) - 1, None)
        units = pattern.derived(("walk", c.rows, 1), lambda: walk(pattern, c.rows, 1))
        return dealt(units, c, p, a.device)

    def launch(
        self,
        c: Config,
        work: SplitSchedule,
        a: Quantized,
        b: QuantizedTensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        bm, bk = c.block
        matrix, dense = a.matrix, b.values
        values, none = matrix.values, work.tiles  # any int32 tensor stands for an absent one
        if matrix.nnzb == 0:  # TMA needs a valid address; the lists are empty, so nothing is read
            values, dense = values.new_empty(1, bm, bk), dense.new_empty(*dense.shape[:-1], bk)
        nnzb = values.shape[0]
        a_box, b_box, c_box, options = _boxes(c)
        a_desc = Described(values, (nnzb * bm, bk), (bk, 1), a_box)
        no_col = max(1, matrix.grid[1])  # after the end of B's memory
        lists = (work.tiles, work.starts, work.cols, no_col, nnzb)
        sums = none if work.parts is None else work.parts.workspace(c.rows, c.block_cols)
        describe_c = describe_transposed if c.c_col else describe
        bias, alpha = none if epilogue.bias is None else epilogue.bias, float(epilogue.alpha)
        for at in product(*(range(size) for size in out.shape[:-2])):
            c_one, other = _item(out, at), None if epilogue.other is None else _item(epilogue.other, at)
            one, scale = _item(dense, at), _item(b.scale, at) if c.b_scale == "column" else b.scale
            args = (  # one row of a contiguous B may have any stride, and gets one that TMA accepts
                a_desc, Described(one, one.shape, (one.shape[1], 1), b_box), describe_c(c_one, c_box), *lists,
                a.scale, scale, alpha, bias, *out.shape[-2:], sums,
                *beside_c(other, c.c_col, epilogue.beta, none), c, SOURCE,
            )  # fmt: skip
            launch_on(out.device, spmm_fp8_kernel, work.ctas, args, options)
            if work.parts is not None:  # its sums are scaled already
                merge_parts(work.parts, sums, c.height, c_one, replace(epilogue, alpha=1.0, other=other))


def _pieces(p: SpmmProblem, depth: int) -> tuple[int, int, int]:
    """Width of a piece, pieces of a stage about `depth` deep, and how many of them the tensor cores accumulate."""
    bk = p.block[1]
    width = min(depth, bk & -bk)
    promote = depth // width
    if p.a.scale == "block":  # no sum covers two blocks
        promote = max(d for d in range(1, promote + 1) if bk // width % d == 0)
    return width, promote * max(1, depth // (promote * width)), promote


def _holdable(p: SpmmProblem, c: Config) -> bool:
    """Whether the tile may wait in registers: it leaves whole, in 16 bits, with nothing beside it."""
    fits = c.c_bytes == 2 and c.cols >= 2 * HELD and c.wg_m * c.wg_n == 2
    return fits and c.height == c.rows and not p.combine


def _paced(p: SpmmProblem, c: Config) -> Config:
    """The config with stores of C spread over the next tile: one box of 64 rows at every stage.

    Faster than at every second or fourth stage (133, 138, 145 us at 8192^3, 12.5 % stored in blocks of 128: H200,
    docs/notes/fp8-products.md). With an epilogue, boxes have 32 rows, and as many stages between them as a tile of mean
    length allows; so have the pieces of a held tile. Held float32 sums all leave in the first stage.
    """
    if (c.held > 0 and c.promote > 0) or not (c.held or c.finishes):
        return replace(c, every=1)
    c = c if c.held else replace(c, box=32)
    stages = p.nnzb / max(1, p.grid[0]) * c.per_block / c.pieces
    every = max(1, int(stages / max(1, most_boxes(c))))
    return replace(c, every=every)


@cache
def _boxes(c: Config) -> tuple[Any, ...]:
    """The boxes of A, B and C, and the launch options: values that a launch would recompute from the config."""
    return (c.rows, c.width), (c.cols, c.width), c.c_shape, c.options


def _item(x: Tensor, at: tuple[int, ...]) -> Tensor:
    """One matrix, or one vector of scales, of a batch."""
    return x[at] if at else x


KERNEL: SpmmKernel = HopperSpmmFp8()
