"""C = A @ B for a BSR24 A, or for its transpose, in plain Triton: any CUDA GPU from sm_80, and Triton's interpreter.

One program computes one tile of C, tile_m rows of one block row by tile_n columns, and walks the stored blocks of
that block row, tile_k per step. A step lies in one block, whose sides are multiples of 64:

    A @ B      values [TM, TK/2], meta [TM, TK/8]   unpacked  [TM, TK]     times B [TK, TN], rows under the block
    A.T @ B    values [TK, TM/2], meta [TK, TM/8]   unpacked  [TK, TM].T   blocks of a block column, by `order`

Tiles are unpacked in registers (`spmm/unpack_24.py`) and multiplied as dense tiles. A NaN or Inf in a row of B
reaches all rows of the blocks in that block column, and no others. Each element is one sum in fixed order.

Blocks of 128, 12.5 % stored, 8192^3 in bf16 on an H200 (2026-11-22): 0.88 ms, a quarter of the rate of hopper.spmm on
the same blocks with all values. On Hopper hopper.bsr24 uses sparse tensor cores.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.kernels.lang.blocks import add_product, find
from sparsek.kernels.lang.epilogue import store_finished
from sparsek.kernels.lang.tensors import at, times
from sparsek.kernels.spmm import unpack_24 as pieces
from sparsek.kernels.spmm.unpack_24 import Config, awaited, tile_of
from sparsek.matrix.bsr24 import BSR24
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue

SMALLEST = 64  # a side of a block


@dataclass(frozen=True, eq=False)
class Work:
    """`rows` int32 [3, Mb]: block row of the product, first stored block, stored blocks; longest first, ties by
    position. `indices`: their block columns. `order`: their storage positions; None if consecutive.
    """

    rows: Tensor
    indices: Tensor
    order: Tensor | None
    tf32: bool


@triton.jit
def _bsr24(
    values, meta, indices, order, rows, b, c, bias, other,
    alpha, beta, m, n, k, row_blocks, column_tiles, batch_tiles,
    sb_batch, sb_k, sb_n, sc_batch, sc_m, sc_n, so_batch, so_m, so_n,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    GROUP: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
    RAGGED_N: tl.constexpr, RAGGED_K: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
    UNIT_N: tl.constexpr,
    UNIT_BK: tl.constexpr, UNIT_BN: tl.constexpr, UNIT_CM: tl.constexpr, UNIT_CN: tl.constexpr,
    UNIT_OM: tl.constexpr, UNIT_ON: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = BM // TM
    n = times(n, UNIT_N)
    sb_k, sb_n, sb_batch = times(sb_k, UNIT_BK), times(sb_n, UNIT_BN), times(sb_batch, UNIT_BK * UNIT_BN)
    sc_m, sc_n, sc_batch = times(sc_m, UNIT_CM), times(sc_n, UNIT_CN), times(sc_batch, UNIT_CM * UNIT_CN)
    so_m, so_n, so_batch = times(so_m, UNIT_OM), times(so_n, UNIT_ON), times(so_batch, UNIT_OM * UNIT_ON)

    # Groups of GROUP column tiles (of all batches) outermost, then rows, then the columns of the group.
    pid = tl.program_id(0)
    in_group = row_blocks * SUBS * GROUP
    first = pid // in_group * GROUP
    width = min(batch_tiles - first, GROUP)
    within = pid % in_group
    tile = first + within % width
    batch = (tile // column_tiles).to(tl.int64)
    place_row = within // width // SUBS
    inside = within // width % SUBS * TM
    row = tl.load(rows + place_row)
    start = tl.load(rows + row_blocks + place_row)
    length = tl.load(rows + 2 * row_blocks + place_row)

    i = tl.arange(0, TM)
    kt = tl.arange(0, TK)
    col = tile % column_tiles * TN + tl.arange(0, TN)
    b += batch * sb_batch
    b_off = (at(kt, WIDE) * sb_k)[:, None] + (at(col, WIDE) * sb_n)[None, :]
    z = tl.zeros((TM, TN), dtype=tl.float32)
    column, place = find(indices, None, order, None, start, length, 0, BK, TK, 1, TRANSPOSED)
    for step in range(length * (BK // TK)):
        k0 = step % (BK // TK) * TK
        v, found = values + place.to(tl.int64) * (BM * BK // 2), meta + place.to(tl.int64) * (BM * BK // 8)
        if TRANSPOSED:
            stored = tile_of(v, found, k0 + kt, kt < TK, BM, inside, TK, TM, UNIT, False, False)
            a_tile = tl.trans(stored)
        else:
            a_tile = tile_of(v, found, inside + i, i < TM, BK, k0, TM, TK, UNIT, False, False)
        b_row = column * BK + k0
        b_live = (kt < TK)[:, None]
        if RAGGED_K:
            b_live = (b_row + kt < k)[:, None]
        if RAGGED_N:
            b_live = b_live & (col < n)[None, :]
        b_tile = tl.load(b + b_row.to(tl.int64) * sb_k + b_off, mask=b_live, other=0.0)
        # Read one step ahead: an index loaded in the step that uses it would halve the pipeliner's buffers.
        column, place = find(indices, None, order, None, start, length, step + 1, BK, TK, 1, TRANSPOSED)
        z = awaited(add_product(z, a_tile, b_tile, PRECISION))
    row0 = row * BM + inside
    store_finished(
        z, c, row0, i, row0 + i < m, col, col < n, batch, sc_batch, sc_m, sc_n,
        alpha, bias, other, so_batch, so_m, so_n, beta, WIDE, SCALED, ACTIVATION, COMBINE,
    )  # fmt: skip


def _own(c: Config, block: tuple[int, int], transposed: bool, k: int) -> dict[str, Any]:
    """Constexprs of `_bsr24` that follow from an A with stored blocks of `block` and from K."""
    bm, bk = block[::-1] if transposed else block
    return {
        "BM": bm, "BK": bk, "TRANSPOSED": transposed, "UNIT": pieces.column_unit(block[1]), "RAGGED_K": k % bk != 0,
    }  # fmt: skip


class PortableBsr24(pieces.Unpacking):
    """Plain Triton, for A and its transpose, by unpacking. Sparse tensor cores: hopper.bsr24."""

    name = "portable.bsr24"
    storage = "bsr24"

    def rows(self, p: SpmmProblem) -> int:
        return p.grid[0] * p.block[0]

    def tallest(self, p: SpmmProblem) -> int:
        """The tallest tile that divides a block's rows."""
        return 128 if p.block[0] % 128 == 0 else SMALLEST

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """As the Semi24 twin's, and at least the longest block row on one SM."""
        spread = pieces.seconds(p, c, self.rows(p), 2 * p.useful_flops)
        rate = p.card.sustained(p.dtype) * 0.5e12 / p.card.sm_count
        longest = 2.0 * c.tile_m * p.block[1] * c.tile_n * p.row_max / rate
        return spread if p.on_cpu else max(spread, p.card.launch_seconds + longest)

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        return [
            "multiplies the zeros inside blocks too: a NaN or Inf in B reaches all rows of the blocks that it meets"
        ]

    def prepare(self, p: SpmmProblem, c: Config, a: BSR24) -> Work:
        """Block rows of the product, their first stored blocks and lengths; on A's device, without a sync."""
        pattern, order = a.pattern.transposed if p.a.transposed else (a.pattern, None)
        return Work(pattern.longest_first, pattern.indices, order, p.tf32)

    def launch(
        self, c: Config, work: Work, a: BSR24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        if out.numel():
            order = work.indices if work.order is None else work.order
            own = _own(c, a.block, work.order is not None, b.shape[-2])
            stored, down = (a.values, a.meta, work.indices, order, work.rows), work.rows.shape[1]
            pieces.start(_bsr24, c, stored, down, own["BM"] // c.tile_m, b, out, epilogue, work.tf32, own)


KERNEL: SpmmKernel = PortableBsr24()
