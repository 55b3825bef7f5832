"""C = A @ B in FP8 for a Semi24 A, in plain Triton: CUDA GPUs with FP8 tensor cores, and Triton's interpreter.

One program makes one tile of C, tile_m x tile_n, and walks K, tile_k a step:

    A tile   values [TM, TK/2], meta [TM, TK/8]   unpacked as bytes  [TM, TK]    FP8
    B tile   b[columns of the tile, k]            [TN, TK], read along K and transposed for the product
    C tile   epilogue(sums * scale_A[row] * scale_B[column])

Tiles are unpacked in registers and multiplied dense: half the products are with zeros, so a NaN in a row of B reaches
every row of C. The tensor core sums one step, float32 the steps (`spmm/portable_fp8.py` says why).

8192^3 on an H200 (2026-11-22): 4.5 ms, 0.19 of the rate of cuBLAS FP8; hopper.semi24_fp8 is the kernel for Hopper.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.kernels.lang import tensors
from sparsek.kernels.lang.epilogue import store_finished
from sparsek.kernels.lang.launch import launch
from sparsek.kernels.lang.tensors import SIZE_LIMIT, times
from sparsek.kernels.spmm import tiles_fp8 as pieces
from sparsek.kernels.spmm.tiles_fp8 import FP8, Config, add_fp8, dense_tile, scaled_sums
from sparsek.kernels.spmm.unpack_24 import COLUMN_LIMIT, awaited, column_unit, tile_of
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.matrix.semi24 import Semi24
from sparsek.plan.kernel import SpmmKernel
from sparsek.plan.problem import SpmmProblem
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


def _constants(
    c: Config, shape: tuple[int, int], dtype: torch.dtype, scales: tuple[str, str], b: Tensor, out: Tensor,
    epilogue: Epilogue,
) -> dict[str, Any]:  # fmt: skip
    """Every constexpr of `_semi24_fp8` for an A of that shape and dtype. `scales`: what shares one in A and in B."""
    m, k = shape
    return {
        "TM": c.tile_m, "TN": c.tile_n, "TK": c.tile_k, "GROUP": c.group, "UNIT": column_unit(k),
        "RAGGED_M": m % c.tile_m != 0, "RAGGED_K": k % c.tile_k != 0, "A_TYPE": FP8[dtype],
        **pieces.constants(c, b, out, epilogue, *scales, SIZE_LIMIT),
    }  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Nothing is prepared."""


class PortableSemi24Fp8:
    """Plain Triton, by unpacking; no sparse tensor cores."""

    name = "portable.semi24_fp8"

    def why_not(self, p: SpmmProblem) -> list[str]:
        """Reasons why `p` cannot run here."""
        if foreign := p.a.unless("semi24_fp8"):
            return foreign
        why = pieces.why_not(p)
        if p.k > COLUMN_LIMIT:
            why.append(f"K must be at most {COLUMN_LIMIT}; got {p.k}")
        if not why and self._tiles(p, self.default(p)) > SIZE_LIMIT:
            why.append(f"more than {SIZE_LIMIT} tiles of C")
        return why

    def default(self, p: SpmmProblem) -> Config:
        """The first of `configs`, with smaller tiles while there are fewer of them than SMs."""
        return pieces.default(p, list(self.configs(p)), self._tiles)

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Serious alternatives, best guess first; no tile is more than twice as high as C."""
        tallest = max(16, min(128, 1 << max(0, p.m - 1).bit_length()))
        for height in (128, 64, 32, 16):
            if height <= tallest:
                yield from pieces.configs(p, height, 128, p.k)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """As `portable_fp8.seconds`, for the dense product of whole tiles."""
        tiles, steps = self._tiles(p, c), -(-p.k // c.tile_k)
        of_tile = 2.0 * c.tile_m * c.tile_n * c.tile_k * steps
        return pieces.seconds(p, c, tiles, of_tile * tiles, of_tile, steps * tiles)

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        return ["multiplies the zeros of A too: a NaN in a row of B reaches every row of C"]

    def prepare(self, p: SpmmProblem, c: Config, a: Quantized) -> Work:
        return Work()

    def launch(
        self, c: Config, work: Work, a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        """C into `out` [..., M, N], strides as they are; no sync, no allocation."""
        if out.numel() == 0:
            return
        matrix = a.matrix
        assert isinstance(matrix, Semi24)
        m, n = out.shape[-2:]
        row_tiles, column_tiles = -(-m // c.tile_m), -(-n // c.tile_n)
        options: dict[str, Any] = {"num_warps": c.num_warps, "num_stages": c.num_stages}
        for b3, b_scale, out3, other in pieces.folded(b, out, epilogue.other):
            scales, whole = (a.kind, b.kind), replace(epilogue, other=other)
            constants = _constants(c, a.shape, a.dtype, scales, b3, out3, whole)
            batch = b3.shape[0]
            with torch.cuda.device_of(b3):
                launch(
                    _semi24_fp8, (row_tiles * column_tiles * batch,),
                    matrix.values.view(torch.uint8), matrix.meta, b3, out3, epilogue.bias, other,
                    a.scale, b_scale, float(epilogue.alpha), float(epilogue.beta),
                    m, n, a.shape[1], row_tiles, column_tiles, column_tiles * batch,
                    *tensors.strides(out3), *tensors.strides(other), **constants, **options,
                )  # fmt: skip

    def _tiles(self, p: SpmmProblem, c: Config) -> int:
        return -(-p.m // c.tile_m) * -(-p.n // c.tile_n) * p.batch


KERNEL: SpmmKernel = PortableSemi24Fp8()
