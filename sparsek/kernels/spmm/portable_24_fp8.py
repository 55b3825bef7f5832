"""C = A @ B in FP8 for a Semi24 A, in plain Triton: CUDA GPUs with FP8 tensor cores, and Triton's interpreter.

One program computes one tile of C, tile_m x tile_n, and walks K, tile_k per step:

    A tile   values [TM, TK/2], meta [TM, TK/8]   unpacked as bytes  [TM, TK]    FP8
    B tile   b[columns of the tile, k]            [TN, TK], read along K and transposed for the product
    C tile   epilogue(sums * scale_A[row] * scale_B[column])

Tiles are unpacked in registers and multiplied as dense tiles. Half the products are with zeros, so a NaN in a row of
B reaches every row of C. The tensor core sums within a step, float32 over the steps (see `spmm/portable_fp8.py`).

8192^3 on an H200 (2026-11-22): 4.5 ms, 0.19 of the rate of cuBLAS FP8; hopper.semi24_fp8 is the kernel for Hopper.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.kernels.lang.epilogue import store_finished
from sparsek.kernels.lang.tensors import times
from sparsek.kernels.spmm import tiles_fp8 as pieces
from sparsek.kernels.spmm.tiles_fp8 import FP8, Config, add_fp8, dense_tile, scaled_sums
from sparsek.kernels.spmm.unpack_24 import COLUMN_LIMIT, awaited, column_unit, tile_of
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.matrix.semi24 import Semi24
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue


@triton.jit
def _semi24_fp8(
    values, meta, b, c, bias, other, a_scale, b_scale,
    alpha, beta, m, n, k, row_tiles, column_tiles, batch_tiles,
    sc_batch, sc_m, sc_n, so_batch, so_m, so_n,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    RAGGED_M: tl.constexpr, RAGGED_N: tl.constexpr, RAGGED_K: tl.constexpr, UNIT: tl.constexpr,
    UNIT_K: tl.constexpr, UNIT_CM: tl.constexpr, UNIT_CN: tl.constexpr, UNIT_OM: tl.constexpr, UNIT_ON: tl.constexpr,
    A_TYPE: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    k = times(k, UNIT_K)
    sc_m, sc_n, sc_batch = times(sc_m, UNIT_CM), times(sc_n, UNIT_CN), times(sc_batch, UNIT_CM * UNIT_CN)
    so_m, so_n, so_batch = times(so_m, UNIT_OM), times(so_n, UNIT_ON), times(so_batch, UNIT_OM * UNIT_ON)

    # Groups of GROUP column tiles (of all batches) outermost, then rows, then the columns of the group.
    pid = tl.program_id(0)
    in_group = row_tiles * GROUP
    first = pid // in_group * GROUP
    width = min(batch_tiles - first, GROUP)
    within = pid % in_group
    tile = first + within % width
    batch = (tile // column_tiles).to(tl.int64)
    row0 = within // width * TM

    i = tl.arange(0, TM)
    kt = tl.arange(0, TK)
    col = tile % column_tiles * TN + tl.arange(0, TN)
    values += row0.to(tl.int64) * (k // 2)
    meta += row0.to(tl.int64) * (k // 8)
    b += batch * n * k
    z = tl.zeros((TM, TN), dtype=tl.float32)
    for k0 in range(0, k, TK):
        packed = tile_of(values, meta, i, row0 + i < m, k, k0, TM, TK, UNIT, RAGGED_M, RAGGED_K)
        k_live = kt < TK
        if RAGGED_K:
            k_live = k0 + kt < k
        b_tile = dense_tile(b, tl.cast(k0, tl.int64), kt, k_live, col, col < n, k, WIDE, RAGGED_N)
        z = awaited(add_fp8(z, packed.to(A_TYPE, bitcast=True), b_tile, 1.0, False))
    row_live = row0 + i < m
    z = scaled_sums(z, a_scale, row0 + i, row_live, b_scale, batch * n + col, col < n, A_SCALE, B_SCALE)
    store_finished(
        z, c, row0, i, row_live, col, col < n, batch, sc_batch, sc_m, sc_n,
        alpha, bias, other, so_batch, so_m, so_n, beta, WIDE, SCALED, ACTIVATION, COMBINE,
    )  # fmt: skip


def _own(c: Config, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Constexprs of `_semi24_fp8` that follow from an A of that shape and dtype."""
    m, k = shape
    ragged = {"RAGGED_M": m % c.tile_m != 0, "RAGGED_K": k % c.tile_k != 0}
    return {"UNIT": column_unit(k), "A_TYPE": FP8[dtype], **ragged}


class PortableSemi24Fp8(pieces.Fp8Kernel):
    """Plain Triton, by unpacking; no sparse tensor cores."""

    name = "portable.semi24_fp8"
    storage = "semi24_fp8"
    most_k = COLUMN_LIMIT

    def down(self, p: SpmmProblem, c: Config) -> int:
        return -(-p.m // c.tile_m)

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first; no tile is more than twice as tall as C."""
        tallest = max(16, min(128, 1 << max(0, p.m - 1).bit_length()))
        for height in (128, 64, 32, 16):
            if height <= tallest:
                yield from pieces.configs(p, height, 128, p.k)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """As `tiles_fp8.seconds`, for the dense product of whole tiles, which takes 1.36 times as long as its FLOP in
        blocks (8192^3, H200, 2026-11-23).
        """
        tiles, steps = self.tiles(p, c), -(-p.k // c.tile_k)
        of_tile = 1.36 * 2.0 * c.tile_m * c.tile_n * c.tile_k * steps
        return pieces.seconds(p, c, tiles, of_tile * tiles, of_tile, steps * tiles)

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        return ["multiplies the zeros of A too: a NaN in a row of B reaches every row of C"]

    def prepare(self, p: SpmmProblem, c: Config, a: Quantized) -> None:
        return None

    def launch(
        self, c: Config, work: None, a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        matrix = a.matrix
        assert isinstance(matrix, Semi24)
        if out.numel():
            stored, down = (matrix.values.view(torch.uint8), matrix.meta), -(-a.shape[0] // c.tile_m)
            pieces.start(_semi24_fp8, c, stored, down, 1, a, b, out, epilogue, _own(c, a.shape, a.dtype))


KERNEL: SpmmKernel = PortableSemi24Fp8()
