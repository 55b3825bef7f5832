"""C = A @ B in FP8 for a BSR A, in plain Triton with pointers: CUDA GPUs with FP8 tensor cores, Triton's interpreter.

One program computes one tile of C, tile_m rows of one block row by tile_n columns, and walks the stored blocks of
that block row, tile_k per step. A step lies in one block; the part beyond a narrower block is masked:

    A tile   values[block][rows of the tile, k]           [TM, TK]    FP8
    B tile   b[columns of the tile, k under the block]    [TN, TK]    FP8, read along K and transposed for the product
    sums     float32: z += A tile @ B tile                (scale per block: z += scale[block] * (A tile @ B tile))
    C tile   epilogue(z * scale_A[row] * scale_B[column])

Hopper's tensor cores keep some 14 bits of a running FP8 sum. So they sum only within a step of K; the steps are added
in float32, and long K costs no accuracy.

Blocks of 128, 12.5 % stored, 8192^3 on an H200 (2026-11-22): 0.29 to 0.30 ms, 0.34 of the rate of cuBLAS FP8 on the
dense matrix. hopper.spmm_fp8 is the kernel for Hopper.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.kernels.lang import tensors
from sparsek.kernels.lang.blocks import find
from sparsek.kernels.lang.epilogue import store_finished
from sparsek.kernels.lang.tensors import times
from sparsek.kernels.spmm import tiles_fp8 as pieces
from sparsek.kernels.spmm.tiles_fp8 import Config, add_fp8, dense_tile, scaled_sums
from sparsek.matrix.bsr import BSR
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue


@triton.jit
def _spmm_fp8(
    values, indices, order, rows, b, c, bias, other, a_scale, b_scale,
    alpha, beta, m, n, k, row_blocks, column_tiles, batch_tiles,
    sc_batch, sc_m, sc_n, so_batch, so_m, so_n,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    GROUP: tl.constexpr, VIEW: tl.constexpr, WIDE: tl.constexpr, RAGGED_K: tl.constexpr, RAGGED_N: tl.constexpr,
    UNIT_K: tl.constexpr, UNIT_CM: tl.constexpr, UNIT_CN: tl.constexpr, UNIT_OM: tl.constexpr, UNIT_ON: tl.constexpr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = (BM + TM - 1) // TM
    STEPS: tl.constexpr = (BK + TK - 1) // TK
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
    sub = within // width % SUBS
    row = tl.load(rows + place_row)
    start = tl.load(rows + row_blocks + place_row)
    length = tl.load(rows + 2 * row_blocks + place_row)

    i = sub * TM + tl.arange(0, TM)  # row inside the block
    kt = tl.arange(0, TK)
    col = tile % column_tiles * TN + tl.arange(0, TN)
    b += batch * n * k
    if VIEW:
        a_off = i[:, None] + (kt * BM)[None, :]
    else:
        a_off = (i * BK)[:, None] + kt[None, :]
    z = tl.zeros((TM, TN), dtype=tl.float32)
    column, place = find(indices, None, order, None, start, length, 0, BK, BK, 1, VIEW)
    for step in range(length * STEPS):
        k0 = step % STEPS * TK
        a_ptr = values + place.to(tl.int64) * (BM * BK) + k0 * (BM if VIEW else 1)
        a_live = kt[None, :] < TK
        k_live = kt < TK
        if BK % TK != 0:
            k_live = k0 + kt < BK
            a_live = k_live[None, :]
        if BM % TM != 0:
            a_live = a_live & (i < BM)[:, None]
        if RAGGED_K:
            k_live = k_live & (column * BK + k0 + kt < k)
        a_tile = tl.load(a_ptr + a_off, mask=a_live, other=0.0)
        b_tile = dense_tile(b, column * BK + k0, kt, k_live, col, col < n, k, WIDE, RAGGED_N)
        scale = 1.0
        if A_SCALE == "block":
            scale = tl.load(a_scale + place)
        # Read one step ahead: an index loaded in the step that uses it would halve the pipeliner's buffers.
        column, place = find(indices, None, order, None, start, length, (step + 1) // STEPS, BK, BK, 1, VIEW)
        z = add_fp8(z, a_tile, b_tile, scale, A_SCALE == "block")
    row_live = (i < BM) & (row * BM + i < m)
    z = scaled_sums(z, a_scale, row * BM + i, row_live, b_scale, batch * n + col, col < n, A_SCALE, B_SCALE)
    store_finished(
        z, c, row * BM, i, row_live, col, col < n, batch, sc_batch, sc_m, sc_n,
        alpha, bias, other, so_batch, so_m, so_n, beta, WIDE, SCALED, ACTIVATION, COMBINE,
    )  # fmt: skip


def _own(a: Any) -> dict[str, Any]:
    """Constexprs of `_spmm_fp8` that follow from A."""
    bm, bk = a.block
    return {"BM": bm, "BK": bk, "VIEW": a.order is not None, "RAGGED_K": a.shape[1] % bk != 0}


class PortableSpmmFp8(pieces.Fp8Kernel):
    """Plain Triton twin of hopper.spmm_fp8."""

    name = "portable.spmm_fp8"
    storage = "bsr_fp8"

    def default(self, p: SpmmProblem) -> Config:
        """The first of `configs`, with narrower tiles while there are fewer of them than SMs."""
        c = next(iter(self.configs(p)))
        while c.tile_n > 64 and self.tiles(p, c) < p.card.sm_count:
            c = replace(c, tile_n=c.tile_n // 2, num_warps=4)
        return c

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first: tiles as tall as a block, up to a limit."""
        bm, bk = p.block
        return pieces.configs(p, tensors.tile_side(bm, 128), 1 << (bk - 1).bit_length(), p.row_max * bk)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """As `tiles_fp8.seconds`, padding of blocks included; at least the longest row on one SM."""
        bm, bk = p.block
        steps, along = -(-bk // c.tile_k), -(-p.n // c.tile_n) * p.batch
        of_block = 2.0 * c.tile_m * steps * c.tile_k * c.tile_n
        flops = of_block * -(-bm // c.tile_m) * along * p.nnzb
        return pieces.seconds(p, c, self.tiles(p, c), flops, of_block * p.row_max, steps * p.nnzb * along)

    def prepare(self, p: SpmmProblem, c: Config, a: Quantized) -> Tensor:
        """Block rows, their first stored blocks and lengths, longest first; on A's device, without a sync."""
        assert isinstance(a.matrix, BSR)
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
        assert isinstance(matrix, BSR)
        if out.numel():
            indices = matrix.pattern.indices
            stored = (matrix.values, indices, indices if matrix.order is None else matrix.order, work)
            down, cut = matrix.grid[0], -(-matrix.block[0] // c.tile_m)
            pieces.start(_spmm_fp8, c, stored, down, cut, a, b, out, epilogue, _own(matrix))


KERNEL: SpmmKernel = PortableSpmmFp8()
