"""C = A @ B in FP8 for a BSR24 A, in plain Triton: CUDA GPUs with FP8 tensor cores, and Triton's interpreter.

One program computes one tile of C, tile_m rows of one block row by tile_n columns, and walks the stored blocks of
that block row, tile_k per step. A step lies in one block, whose sides are multiples of 64:

    A tile   values [TM, TK/2], meta [TM, TK/8]   unpacked as bytes  [TM, TK]    FP8
    B tile   b[columns of the tile, k under the block]    [TN, TK], read along K and transposed for the product
    C tile   epilogue(sums * scale_A[row] * scale_B[column]); a scale per block multiplies every step

Tiles are unpacked in registers and multiplied as dense tiles. A NaN in a row of B reaches all rows of the blocks in
that block column. The tensor core sums within a step, float32 over the steps (see `spmm/portable_fp8.py`). Not timed
yet.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.kernels.lang.blocks import find
from sparsek.kernels.lang.epilogue import store_finished
from sparsek.kernels.lang.tensors import times
from sparsek.kernels.spmm import tiles_fp8 as pieces
from sparsek.kernels.spmm.tiles_fp8 import FP8, Config, add_fp8, dense_tile, scaled_sums
from sparsek.kernels.spmm.unpack_24 import awaited, column_unit, tile_of
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue

SMALLEST = 64  # a side of a block


@triton.jit
def _bsr24_fp8(
    values, meta, indices, rows, b, c, bias, other, a_scale, b_scale,
    alpha, beta, m, n, k, row_blocks, column_tiles, batch_tiles,
    sc_batch, sc_m, sc_n, so_batch, so_m, so_n,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    GROUP: tl.constexpr, WIDE: tl.constexpr, RAGGED_K: tl.constexpr, RAGGED_N: tl.constexpr, UNIT: tl.constexpr,
    UNIT_K: tl.constexpr, UNIT_CM: tl.constexpr, UNIT_CN: tl.constexpr, UNIT_OM: tl.constexpr, UNIT_ON: tl.constexpr,
    A_TYPE: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = BM // TM
    k = times(k, UNIT_K)
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
    b += batch * n * k
    z = tl.zeros((TM, TN), dtype=tl.float32)
    column, place = find(indices, None, indices, None, start, length, 0, BK, TK, 1, False)
    for step in range(length * (BK // TK)):
        k0 = step % (BK // TK) * TK
        v, found = values + place.to(tl.int64) * (BM * BK // 2), meta + place.to(tl.int64) * (BM * BK // 8)
        packed = tile_of(v, found, inside + i, i < TM, BK, k0, TM, TK, UNIT, False, False)
        k_live = kt < TK
        if RAGGED_K:
            k_live = column * BK + k0 + kt < k
        b_tile = dense_tile(b, column * BK + k0, kt, k_live, col, col < n, k, WIDE, RAGGED_N)
        scale = 1.0
        if A_SCALE == "block":
            scale = tl.load(a_scale + place)
        # Read one step ahead: an index loaded in the step that uses it would halve the pipeliner's buffers.
        column, place = find(indices, None, indices, None, start, length, step + 1, BK, TK, 1, False)
        z = awaited(add_fp8(z, packed.to(A_TYPE, bitcast=True), b_tile, scale, A_SCALE == "block"))
    row0 = row * BM + inside
    row_live = row0 + i < m
    z = scaled_sums(z, a_scale, row0 + i, row_live, b_scale, batch * n + col, col < n, A_SCALE, B_SCALE)
    store_finished(
        z, c, row0, i, row_live, col, col < n, batch, sc_batch, sc_m, sc_n,
        alpha, bias, other, so_batch, so_m, so_n, beta, WIDE, SCALED, ACTIVATION, COMBINE,
    )  # fmt: skip


def _own(block: tuple[int, int], dtype: torch.dtype, k: int) -> dict[str, Any]:
    """Constexprs of `_bsr24_fp8` that follow from an A of that block and dtype, and from K."""
    bm, bk = block
    return {"BM": bm, "BK": bk, "RAGGED_K": k % bk != 0, "UNIT": column_unit(bk), "A_TYPE": FP8[dtype]}


class PortableBsr24Fp8(pieces.Fp8Kernel):
    """Plain Triton, by unpacking; no sparse tensor cores."""

    name = "portable.bsr24_fp8"
    storage = "bsr24_fp8"

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first: tiles and steps that divide a block."""
        bm, bk = p.block
        deepest = 128 if bk % 128 == 0 else SMALLEST
        for height in (128, SMALLEST):
            if bm % height == 0:
                yield from pieces.configs(p, height, deepest, deepest)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """As `tiles_fp8.seconds`, for the dense product of all blocks; at least the longest row on one SM."""
        bm, bk = p.block
        of_block = 2.0 * c.tile_m * bk * c.tile_n
        visits = p.nnzb * (bm // c.tile_m) * -(-p.n // c.tile_n) * p.batch
        steps = visits * (bk // c.tile_k)
        return pieces.seconds(p, c, self.tiles(p, c), of_block * visits, of_block * p.row_max, steps)

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        return [
            "multiplies the zeros inside blocks too: a NaN in B reaches all rows of the blocks that it meets"
        ]

    def prepare(self, p: SpmmProblem, c: Config, a: Quantized) -> Tensor:
        """Block rows, their first stored blocks and lengths, longest first; on A's device, without a sync."""
        assert isinstance(a.matrix, BSR24)
        return a.matrix.pattern.longest_first

    def launch(
        self,
        c: Config,
        work: Tensor,
        a: Quantized,
        b: QuantizedTensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        matrix = a.matrix
        assert isinstance(matrix, BSR24)
        if out.numel():
            stored = (matrix.values.view(torch.uint8), matrix.meta, matrix.pattern.indices, work)
            down, cut = matrix.grid[0], matrix.block[0] // c.tile_m
            own = _own(matrix.block, a.dtype, a.shape[1])
            pieces.start(_bsr24_fp8, c, stored, down, cut, a, b, out, epilogue, own)


KERNEL: SpmmKernel = PortableBsr24Fp8()
