"""Pieces of plain Triton kernels that multiply FP8 matrices: tiles, steps, scales, and what a card must have.

B lies along K: b [batch, N, K], contiguous, because FP8 tensor cores read both operands along K. A scale per row of A
and per column of B multiplies the finished sums; a scale per block of A multiplies every step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.core.errors import InvalidInput
from sparsek.kernels.lang import epilogue as epilogues
from sparsek.kernels.lang import tensors
from sparsek.kernels.lang.tensors import SIZE_LIMIT, at
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.pattern import BlockPattern
from sparsek.plan.kernel import rounding_seconds
from sparsek.reference.epilogue import Epilogue

LEAST_K = 32  # of an FP8 product on tensor cores
FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@dataclass(frozen=True)
class Config:
    """tile_m x tile_n of C per program, tile_k of the inner side per step; powers of two, 16 or more (tile_k 32).

    `group`: column tiles walked side by side down all the rows before the next ones, for L2.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    group: int = 4

    def __post_init__(self) -> None:
        for name, least in (("tile_m", 16), ("tile_n", 16), ("tile_k", LEAST_K)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                raise InvalidInput(
                    f"{name} of an FP8 kernel must be a power of two from {least} up, not {size}"
                )


@dataclass(frozen=True, eq=False)
class Work:
    """`rows` int32 [3, Mb]: block row, first stored block, stored blocks; longest first, ties by position. `indices`
    are block columns, and `order` where the blocks are stored (`indices` again where they lie one after the other).
    """

    rows: Tensor
    indices: Tensor
    order: Tensor


@triton.jit
def dense_tile(b, k0, kt, k_live, col, col_live, k, WIDE: tl.constexpr, RAGGED_N: tl.constexpr):
    """[TK, TN]: k from k0 on and columns `col` of B, which lies as b [N, k]. What is not live is 0."""
    live = k_live[None, :]
    if RAGGED_N:
        live = live & col_live[:, None]
    ptr = b + k0.to(tl.int64) + ((at(col, WIDE) * k)[:, None] + kt[None, :])
    return tl.trans(tl.load(ptr, mask=live, other=0.0))


@triton.jit
def add_fp8(z, a, b, scale, STRETCHED: tl.constexpr):
    """z + a @ b, or z + scale * (a @ b) if STRETCHED. The tensor core sums one step, float32 the steps."""
    TK: tl.constexpr = a.shape[1]
    if STRETCHED:
        step = tl.dot(a, b, max_num_imprecise_acc=TK)
        return z + scale * step
    return tl.dot(a, b, z, max_num_imprecise_acc=TK)


@triton.jit
def scaled_sums(
    z, a_scale, row, row_live, b_scale, column, column_live, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr
):
    """The sums z [TM, TN] times the scales of their rows of A and columns of B; those per block are in the sums."""
    if B_SCALE == "column":
        of_b = tl.load(b_scale + column, mask=column_live, other=1.0)[None, :]
    else:
        of_b = tl.load(b_scale)
    if A_SCALE == "row":
        return z * tl.load(a_scale + row, mask=row_live, other=1.0)[:, None] * of_b
    elif A_SCALE == "tensor":
        return z * (tl.load(a_scale) * of_b)
    else:
        return z * of_b


def constants(
    c: Config, b: Tensor, out: Tensor, epilogue: Epilogue, a_kind: str, b_kind: str, limit: int
) -> dict[str, Any]:
    """Constexprs that follow from `b` [batch, N, K], `out` and `epilogue.other` [batch, M, N]. Offsets beyond `limit`
    are counted in 64 bits."""
    (_, n, k), other = b.shape, epilogue.other
    (unit_cm, unit_cn), (unit_om, unit_on) = tensors.units(out), tensors.units(other)
    return {
        "WIDE": max(map(tensors.extent, (b, out, other))) > limit, "RAGGED_N": n % c.tile_n != 0,
        "UNIT_K": 16 if k % 16 == 0 else 1, "UNIT_CM": unit_cm, "UNIT_CN": unit_cn,
        "UNIT_OM": unit_om, "UNIT_ON": unit_on, "A_SCALE": a_kind,
        "B_SCALE": "column" if b_kind == "row" else "tensor", **epilogues.constants(epilogue),
    }  # fmt: skip


def folded(b: QuantizedTensor, out: Tensor, other: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Values of B [batch, N, K], its scales, C and the epilogue's matrix [batch, M, N]: one tuple if all collapse."""
    by_row = b.kind == "row"
    scale = b.scale.unsqueeze(-1) if by_row else b.values[..., :1, :1]
    for values, of_b, out3, other3 in tensors.folded(b.values, scale, out, other):
        yield values, of_b if by_row else b.scale, out3, other3


def rows_of(pattern: BlockPattern, order: Tensor | None) -> Work:
    """Block rows, their first stored blocks and lengths, longest first; on the pattern's device, without a sync."""
    lengths = pattern.row_lengths
    longest = torch.argsort(lengths, descending=True, stable=True)
    rows = torch.stack((longest.int(), pattern.indptr[:-1][longest], lengths[longest].int()))
    return Work(rows, pattern.indices, pattern.indices if order is None else order)


# By falling tile_m: tile_m, tile_n, tile_k, warps, stages; the order is a guess. A step of 128 is 128 bytes of a row,
# the widest swizzle of shared memory. A thread holds the sums twice: those of the tensor core, and those of float32.
# fmt: off
TABLE = (Config(128, 128, 128, 8, 4), Config(128, 128, 128, 8, 3), Config(128, 128, 64, 8, 4),
         Config(64, 128, 128, 4, 3), Config(64, 128, 128, 4, 4), Config(64, 256, 128, 8, 3), Config(64, 64, 128, 4, 4),
         Config(32, 128, 128, 4, 3), Config(32, 64, 128, 4, 3), Config(16, 128, 128, 4, 3), Config(16, 64, 128, 4, 3))
# fmt: on


def configs(p: Any, tallest: int, deepest: int, inner: int) -> Iterator[Config]:
    """Serious alternatives for tiles of `tallest` rows and steps of at most `deepest`, best guess first.

    Cut to N, to `inner`, the longest way along K, and to shared memory.
    """
    widest = max(16, 1 << (p.n - 1).bit_length())
    deepest = max(LEAST_K, min(deepest, 1 << max(0, inner - 1).bit_length()))
    seen = set()
    for c in TABLE:
        if c.tile_m != tallest:
            continue
        c = replace(c, tile_n=min(c.tile_n, widest), tile_k=min(c.tile_k, deepest))
        if p.combine and c.tile_m * c.tile_n > 64 * 32 * c.num_warps:  # two tiles of C at once spill
            c = replace(c, num_warps=2 * c.num_warps)
        c = replace(c, num_stages=tensors.stages(p, c.num_stages, c.tile_k * (c.tile_m + c.tile_n)))
        if c not in seen:
            seen.add(c)
            yield c


def default(p: Any, made: list[Config], tiles: Callable[[Any, Config], int]) -> Config:
    """The first of `made` that has a tile for every SM if there is one, else the one of the most tiles."""
    return next(
        (c for c in made if tiles(p, c) >= p.card.sm_count), max(made, key=lambda each: tiles(p, each))
    )


def seconds(p: Any, c: Config, tiles: int, flops: float, longest: float, steps: int) -> float:
    """Launch + the longest of: `flops`, padding with them, at 50 % of the FP8 rate, 27 % where tiles are unpacked (less
    for lower tiles), with 1.5 us for each wave of tiles; `longest` FLOP on one SM; compulsory bytes at 80 % of copy
    bandwidth. And the rounding of B. Tiles of 128 rows are on record (H200, 2026-11-22), the rest is a guess. `steps`
    of all tiles count in the interpreter."""
    if p.on_cpu:  # about two milliseconds for each program and step
        return 2e-3 * (tiles + steps)
    rate = p.card.sustained("fp8") * 1e12 * {128: 0.5, 64: 0.4, 32: 0.2}.get(c.tile_m, 0.1)
    rate *= min(1.0, c.tile_n / 64) * (1.0 if not p.a.two_four else 0.55)
    busy = max(1, min(p.card.sm_count, tiles)) / p.card.sm_count
    arithmetic = 1.5e-6 * -(-tiles // p.card.sm_count) + flops / (rate * busy)
    alone = 1.5e-6 + longest * p.card.sm_count / rate
    moved = 1.5e-6 + p.compulsory_bytes / (0.8 * p.card.bandwidth)
    return p.card.launch_seconds + max(arithmetic, alone, moved) + rounding_seconds(p)


def why_not(p: Any) -> list[str]:
    """Reasons why no plain Triton kernel multiplies this FP8 matrix."""
    why = []
    if p.on_cpu and not env.interpreting():
        why.append("CPU tensors need Triton's interpreter (TRITON_INTERPRET=1 before the import)")
    if p.on_cpu and p.c.dtype == "bf16":
        why.append("bf16 is wrong in Triton's interpreter; ask for dtype=torch.float16 or float32 there")
    if not p.on_cpu and p.card.capability < (8, 9):
        has = ".".join(map(str, p.card.capability))
        why.append(
            f"FP8 tensor cores came with compute capability 8.9; {p.card.name} has {has}. A BSR in bf16 runs there: "
            ".dequantize(torch.bfloat16)"
        )
    if max(p.m, p.k, p.n) > SIZE_LIMIT:
        why.append(f"M, K and N must be at most {SIZE_LIMIT}; got {p.m}, {p.k}, {p.n}")
    return why
