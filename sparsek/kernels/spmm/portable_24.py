"""C = A @ B for a Semi24 A, or for its transpose, in plain Triton: any CUDA GPU from sm_80, and Triton's interpreter.

One program computes one tile of C, tile_m x tile_n, and walks the inner side, tile_k per step:

    A @ B      values [TM, TK/2], meta [TM, TK/8]   unpacked  [TM, TK]     times B [TK, TN]
    A.T @ B    values [TK, TM/2], meta [TK, TM/8]   unpacked  [TK, TM].T   times B [TK, TN]

Tiles are unpacked in registers (`spmm/unpack_24.py`) and multiplied as dense tiles. Half the products are with zeros,
so a NaN or Inf in a row of B reaches every row of C. Each element is one sum in fixed order; the epilogue is applied
in float32.

8192^3 in bf16 on an H200 (2026-11-22): 6.5 ms, 0.26 of the rate of cuBLAS on the dense matrix. On Hopper this kernel
saves memory, not time; hopper.semi24 uses sparse tensor cores.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.kernels.lang.blocks import add_product
from sparsek.kernels.lang.epilogue import store_finished
from sparsek.kernels.lang.tensors import at, times
from sparsek.kernels.spmm import unpack_24 as pieces
from sparsek.kernels.spmm.unpack_24 import Config, awaited, tile_of
from sparsek.matrix.semi24 import Semi24
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue


@dataclass(frozen=True)
class Work:
    """Whether A is transposed in the product, and whether torch allows TF32."""

    transposed: bool
    tf32: bool


@triton.jit
def _semi24(
    values, meta, b, c, bias, other,
    alpha, beta, m, n, k, row_tiles, column_tiles, batch_tiles,
    sb_batch, sb_k, sb_n, sc_batch, sc_m, sc_n, so_batch, so_m, so_n,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
    RAGGED_M: tl.constexpr, RAGGED_N: tl.constexpr, RAGGED_K: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, UNIT_N: tl.constexpr,
    UNIT_BK: tl.constexpr, UNIT_BN: tl.constexpr, UNIT_CM: tl.constexpr, UNIT_CN: tl.constexpr,
    UNIT_OM: tl.constexpr, UNIT_ON: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    n = times(n, UNIT_N)
    sb_k, sb_n, sb_batch = times(sb_k, UNIT_BK), times(sb_n, UNIT_BN), times(sb_batch, UNIT_BK * UNIT_BN)
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
    stored_columns = m if TRANSPOSED else k
    if not TRANSPOSED:
        values += row0.to(tl.int64) * (k // 2)
        meta += row0.to(tl.int64) * (k // 8)
    b += batch * sb_batch
    b_off = (at(kt, WIDE) * sb_k)[:, None] + (at(col, WIDE) * sb_n)[None, :]
    z = tl.zeros((TM, TN), dtype=tl.float32)
    for k0 in range(0, k, TK):
        if TRANSPOSED:
            here = tl.cast(k0, tl.int64)
            stored = tile_of(
                values + here * (m // 2), meta + here * (m // 8), kt, k0 + kt < k, stored_columns, row0,
                TK, TM, UNIT, RAGGED_K, RAGGED_M,
            )  # fmt: skip
            a_tile = tl.trans(stored)
        else:
            a_tile = tile_of(
                values, meta, i, row0 + i < m, stored_columns, k0, TM, TK, UNIT, RAGGED_M, RAGGED_K
            )
        b_live = (kt < TK)[:, None]
        if RAGGED_K:
            b_live = (k0 + kt < k)[:, None]
        if RAGGED_N:
            b_live = b_live & (col < n)[None, :]
        b_tile = tl.load(b + tl.cast(k0, tl.int64) * sb_k + b_off, mask=b_live, other=0.0)
        z = awaited(add_product(z, a_tile, b_tile, PRECISION))
    store_finished(
        z, c, row0, i, row0 + i < m, col, col < n, batch, sc_batch, sc_m, sc_n,
        alpha, bias, other, so_batch, so_m, so_n, beta, WIDE, SCALED, ACTIVATION, COMBINE,
    )  # fmt: skip


def _own(c: Config, shape: tuple[int, int], transposed: bool) -> dict[str, Any]:
    """Constexprs of `_semi24` that follow from a stored matrix of `shape`."""
    m, k = shape[::-1] if transposed else shape
    return {
        "TRANSPOSED": transposed, "UNIT": pieces.column_unit(shape[1]),
        "RAGGED_M": m % c.tile_m != 0, "RAGGED_K": k % c.tile_k != 0,
    }  # fmt: skip


class PortableSemi24(pieces.Unpacking):
    """Plain Triton, for A and its transpose, by unpacking. Sparse tensor cores: hopper.semi24."""

    name = "portable.semi24"
    storage = "semi24"

    def rows(self, p: SpmmProblem) -> int:
        return p.m

    def tallest(self, p: SpmmProblem) -> int:
        """The tallest tile: at most twice C's height, and for the transpose no narrower than a step of metadata."""
        return max(16, min(128, 1 << max(0, p.m - 1).bit_length()))

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        return pieces.seconds(p, c, p.m, p.dense_flops * (-(-p.m // c.tile_m) * c.tile_m / max(1, p.m)))

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        return ["multiplies the zeros of A too: a NaN or Inf in a row of B reaches every row of C"]

    def prepare(self, p: SpmmProblem, c: Config, a: Semi24) -> Work:
        return Work(p.a.transposed, p.tf32)

    def launch(
        self, c: Config, work: Work, a: Semi24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        if out.numel():
            own = _own(c, a.shape, work.transposed)
            down = -(-out.shape[-2] // c.tile_m)
            pieces.start(_semi24, c, (a.values, a.meta), down, 1, b, out, epilogue, work.tf32, own)


KERNEL: SpmmKernel = PortableSemi24()
