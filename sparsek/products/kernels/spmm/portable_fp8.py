"""C = A @ B in FP8 for a BSR A, in plain Triton with pointers: CUDA GPUs with FP8 tensor cores, Triton's interpreter.

The kernel of portable.spmm (`spmm/portable.py`). A step lies in one block; the part beyond a narrower block is masked:

    A tile   values[block][rows of the tile, k]           [TM, TK]    FP8
    B tile   b[columns of the tile, k under the block]    [TK, TN]    FP8, contiguous along K
    sums     float32: z += A tile @ B tile                (scale per block: z += scale[block] * (A tile @ B tile))
    C tile   epilogue(z * scale_A[row] * scale_B[column])

The tensor core sums within a step only (`kernels/common/blocks.py`), so long K costs no accuracy.

Blocks of 128, 12.5 % stored, 8192^3 on an H200 (2026-11-22): 0.29 to 0.30 ms, 0.34 of the rate of cuBLAS FP8 on the
dense matrix. hopper.spmm_fp8 is the kernel for Hopper.
"""

from collections.abc import Iterator

from sparsek.core import env
from sparsek.engine.launch import tensors
from sparsek.engine.plan.ring import TRITON_LAUNCHES
from sparsek.products.kernels.spmm.portable import Config, PortableSpmm, fitted, tiles
from sparsek.products.plan.kernels import SpmmKernel, rounding_seconds
from sparsek.products.plan.problems import SpmmProblem

LEAST_K = 32  # minimum K of an FP8 product on tensor cores

# By falling tile_m: tile_m, tile_n, tile_k, warps, stages; the order is a guess. A step of 128 is 128 bytes of a row,
# the widest swizzle of shared memory. A thread holds two sums: the tensor core's and the float32 one.
# fmt: off
TABLE = (Config(128, 128, 128, 8, 4, 4), Config(128, 128, 128, 8, 3, 4), Config(128, 128, 64, 8, 4, 4),
         Config(64, 128, 128, 4, 3, 4), Config(64, 128, 128, 4, 4, 4), Config(64, 256, 128, 8, 3, 4),
         Config(64, 64, 128, 4, 4, 4), Config(32, 128, 128, 4, 3, 4), Config(32, 64, 128, 4, 3, 4),
         Config(16, 128, 128, 4, 3, 4), Config(16, 64, 128, 4, 3, 4))
# fmt: on


class PortableSpmmFp8(PortableSpmm):
    """Plain Triton twin of hopper.spmm_fp8."""

    name = "portable.spmm_fp8"
    storage = "bsr_fp8"
    lowest = 128

    def unable(self, p: SpmmProblem) -> list[str]:
        why = []
        if p.on_cpu and not env.interpreting():
            why.append("CPU tensors need Triton's interpreter (TRITON_INTERPRET=1 before the import)")
        if p.on_cpu and p.c.dtype == "bf16":
            why.append("bf16 is wrong in Triton's interpreter; use dtype=torch.float16 or float32 there")
        if not p.on_cpu and p.card.capability < (8, 9):
            has = ".".join(map(str, p.card.capability))
            why.append(
                f"FP8 tensor cores came with compute capability 8.9; {p.card.name} has {has}. A BSR in bf16 runs "
                "there: .dequantize(torch.bfloat16)"
            )
        return why

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first: tiles as tall as a block, up to a limit."""
        bm, bk = p.block
        tallest = tensors.tile_side(bm, 128)
        deepest = min(1 << (bk - 1).bit_length(), 1 << max(0, p.row_max * bk - 1).bit_length())
        return fitted(p, (c for c in TABLE if c.tile_m == tallest), max(LEAST_K, deepest))

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Launch + the longest of: FLOP with padding at 50 % of the FP8 rate (less for lower tiles), with 1.5 us for
        each wave of tiles; the longest block row on one SM; compulsory bytes at 80 % of copy bandwidth. Plus the
        rounding of B. Tiles of 128 and 64 rows were measured (H200, 2026-11-22); the rest is a guess.
        """
        down, along = tiles(p, c)
        steps = -(-p.block[1] // c.tile_k)
        if p.on_cpu:  # the interpreter: about two milliseconds for each program and step
            return 2e-3 * along * (down + steps * p.nnzb)
        of_block = 2.0 * c.tile_m * steps * c.tile_k * c.tile_n
        flops = of_block * -(-p.block[0] // c.tile_m) * along * p.nnzb
        rate = p.card.sustained("fp8") * 1e12 * {128: 0.5, 64: 0.46, 32: 0.2}.get(c.tile_m, 0.1)
        rate *= min(1.0, c.tile_n / 64)
        busy = max(1, min(p.card.sm_count, down * along)) / p.card.sm_count
        arithmetic = 1.5e-6 * -(-down * along // p.card.sm_count) + flops / (rate * busy)
        alone = 1.5e-6 + of_block * p.row_max * p.card.sm_count / rate
        moved = 1.5e-6 + p.compulsory_bytes / (0.8 * p.card.bandwidth)
        return TRITON_LAUNCHES * p.card.launch_seconds + max(arithmetic, alone, moved) + rounding_seconds(p)


KERNEL: SpmmKernel = PortableSpmmFp8()
