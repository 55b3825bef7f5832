"""Pieces of plain Triton kernels that multiply a 2:4 matrix: its tiles are unpacked in registers, then go to tl.dot.

    stored, a group of four columns     values  v0 v1        meta  a nibble i0 | i1 << 2
    unpacked                            v0 in column i0, v1 in column i1, 0 elsewhere

What a tile of TK columns brings from memory is TK/2 values and TK/8 bytes a row; what tl.dot multiplies is dense. So
these kernels save bytes of A and no arithmetic: sparse tensor cores are not to be had from Triton.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.kernels.lang import epilogue as epilogues
from sparsek.kernels.lang import tensors
from sparsek.plan.problem import SpmmProblem
from sparsek.reference.epilogue import Epilogue

GROUP = 4
# So many columns that offsets inside a tile of 128 rows of values stay below 2^31.
COLUMN_LIMIT = 1 << 24


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
        for name, least in (("tile_m", 16), ("tile_n", 16), ("tile_k", 32)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                raise InvalidInput(
                    f"{name} of a 2:4 kernel must be a power of two from {least} up, not {size}"
                )


@triton.jit
def unpacked(values, nibbles, R: tl.constexpr, C: tl.constexpr):
    """Dense [R, C] of values [R, C/2] and metadata [R, C/8], each as loaded."""
    low, high = tl.split(tl.reshape(values, (R, C // 4, 2)))
    nibble = tl.reshape(tl.join(nibbles & 15, nibbles >> 4), (R, C // 4))
    i0, i1 = nibble & 3, nibble >> 2
    zero = tl.zeros_like(low)
    c0 = tl.where(i0 == 0, low, zero)
    c1 = tl.where(i0 == 1, low, tl.where(i1 == 1, high, zero))
    c2 = tl.where(i0 == 2, low, tl.where(i1 == 2, high, zero))
    c3 = tl.where(i1 == 3, high, zero)
    # Joining puts the pair last: (c0 c2) (c1 c3) joined again is [.., 2 (high bit), 2 (low bit)].
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (R, C))


@triton.jit
def tile_of(
    values, meta, row, row_live, columns, first,
    R: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, RAGGED_R: tl.constexpr, RAGGED_C: tl.constexpr,
):  # fmt: skip
    """Dense [R, C]: rows `row` [R] and columns first to first + C - 1 of a 2:4 matrix of so many `columns`.

    `values` and `meta` point at the row that `row` counts from. `columns` is a multiple of UNIT. `row_live` counts
    where RAGGED_R, and columns may be fewer than first + C where RAGGED_C; what is not there is 0.
    """
    units = columns // UNIT
    at_value = first // 2 + tl.arange(0, C // 2)
    at_byte = first // 8 + tl.arange(0, C // 8)
    v_ptr = values + ((row * (units * (UNIT // 2)))[:, None] + at_value[None, :])
    m_ptr = meta + ((row * (units * (UNIT // 8)))[:, None] + at_byte[None, :])
    if RAGGED_R or RAGGED_C:
        value_live = (at_value < units * (UNIT // 2))[None, :]
        byte_live = (at_byte < units * (UNIT // 8))[None, :]
        if RAGGED_R:
            value_live = value_live & row_live[:, None]
            byte_live = byte_live & row_live[:, None]
        v = tl.load(v_ptr, mask=value_live, other=0.0)
        found = tl.load(m_ptr, mask=byte_live, other=0)
    else:
        v = tl.load(v_ptr)
        found = tl.load(m_ptr)
    return unpacked(v, found, R, C)


@triton.jit
def awaited(z):
    """z, a sum of products whose left tile was unpacked, with an addition that Triton waits for.

    Such a tile stays in registers, and without a use of the sum Triton 3.6 lets wgmma run on while the next step
    writes them: some elements were wrong at 8192^3 (H200, 2026-11-22). -0 becomes +0.
    """
    return z + 0.0


def column_unit(columns: int) -> int:
    """What the compiler is told that a number of columns, a multiple of 8, is a multiple of."""
    return next(unit for unit in (128, 64, 32, 16, 8) if columns % unit == 0)


def constants(b: Tensor, out: Tensor, tf32: bool, epilogue: Epilogue, limit: int) -> dict[str, Any]:
    """Constexprs that follow from `b` [batch, K, N], `out` and `epilogue.other` [batch, M, N]. Offsets beyond `limit`
    are counted in 64 bits.
    """
    n, other = b.shape[2], epilogue.other
    (unit_bk, unit_bn), (unit_cm, unit_cn), (unit_om, unit_on) = map(tensors.units, (b, out, other))
    return {
        "WIDE": max(map(tensors.extent, (b, out, other))) > limit,
        "PRECISION": "tf32" if tf32 else "ieee", "UNIT_N": tensors.unit(n, b),
        "UNIT_BK": unit_bk, "UNIT_BN": unit_bn, "UNIT_CM": unit_cm, "UNIT_CN": unit_cn,
        "UNIT_OM": unit_om, "UNIT_ON": unit_on, **epilogues.constants(epilogue),
    }  # fmt: skip


# By falling tile_m: tile_m, tile_n, tile_k, warps, stages. None is tuned. What is unpacked and C share registers:
# 128x256, and 128x128 with four warps, would spill.
# fmt: off
LOW = (Config(32, 128, 64, 4, 3), Config(32, 64, 64, 4, 3), Config(16, 128, 64, 4, 3), Config(16, 64, 64, 4, 3))
HOPPER = (Config(128, 128, 64, 8, 3),
          Config(64, 128, 64, 4, 3), Config(64, 256, 64, 8, 3), Config(64, 64, 64, 4, 4), *LOW)
AMPERE = (Config(128, 128, 64, 8, 3), Config(64, 256, 64, 8, 3), Config(64, 128, 32, 4, 3), Config(64, 64, 64, 4, 4),
          *LOW)
SINGLE = (Config(64, 64, 32, 4, 3), Config(64, 64, 32, 8, 3), Config(32, 64, 32, 4, 3), Config(16, 64, 32, 4, 3))
# fmt: on


def configs(p: SpmmProblem, tallest: int) -> Iterator[Config]:
    """Serious alternatives for tiles of at most `tallest` rows, best guess first, cut to N and to shared memory."""
    widest = max(16, 1 << (p.n - 1).bit_length())
    table = SINGLE if p.dtype == "fp32" else HOPPER if p.on_cpu or p.card.capability[0] == 9 else AMPERE
    seen = set()
    for c in table:
        if c.tile_m > tallest:
            continue
        c = replace(c, tile_n=min(c.tile_n, widest))
        if p.combine and c.tile_m * c.tile_n > 64 * 32 * c.num_warps:  # two tiles of C at once spill
            c = replace(c, num_warps=2 * c.num_warps)
        c = replace(c, num_stages=tensors.stages(p, c.num_stages, c.tile_k * (c.tile_m + c.tile_n)))
        if c not in seen:
            seen.add(c)
            yield c


def default(p: SpmmProblem, tallest: int, rows: int) -> Config:
    """The first of `configs`, of those whose tiles are at least as many as the SMs if there is one, else the last.

    `rows` are those that tiles cover, all block rows together.
    """
    made = list(configs(p, tallest))
    return next((c for c in made if tiles(c, rows, p) >= p.card.sm_count), made[-1])


def tiles(c: Config, rows: int, p: SpmmProblem) -> int:
    """How many tiles cover so many rows of C, in all batches."""
    return -(-rows // c.tile_m) * -(-p.n // c.tile_n) * p.batch


def seconds(p: SpmmProblem, c: Config, rows: int, dense_flops: float) -> float:
    """Launch + the longest of arithmetic, which is dense, at 26 % of the dense rate (16 bits; less for lower tiles),
    with 1.5 us for each wave of tiles; 0.6 us for each step of one tile, however small; and compulsory bytes at 80 % of
    copy bandwidth. Tiles of 128 rows and of 16 tokens in bf16 are on record (H200, 2026-11-22): a tile is unpacked and
    multiplied in turns. The rest is a guess.
    """
    count = tiles(c, rows, p)
    if p.on_cpu:  # the interpreter: about two milliseconds for each program and step
        return 2e-3 * count * (1 + p.k / c.tile_k)
    if p.dtype == "fp32":
        rate = p.card.sustained("tf32") * 0.25 if p.tf32 else p.card.sustained("fp32") * 0.5
    else:
        rate = p.card.sustained(p.dtype) * {128: 0.26, 64: 0.22, 32: 0.13}.get(c.tile_m, 0.07)
    busy = max(1, min(p.card.sm_count, count)) / p.card.sm_count
    masked = math.prod(-(-side // tile) * tile / side for side, tile in ((p.n, c.tile_n),) if side)
    deep = min(p.k, dense_flops / (2.0 * max(1, rows * p.n * p.batch)))
    arithmetic = 1.5e-6 * -(-count // p.card.sm_count) + dense_flops * masked / (rate * 1e12 * busy)
    return p.card.launch_seconds + max(
        arithmetic, 0.6e-6 * deep / c.tile_k, 1.5e-6 + p.compulsory_bytes / (0.8 * p.card.bandwidth)
    )


def why_not(p: SpmmProblem) -> list[str]:
    """Reasons why no plain Triton kernel multiplies this 2:4 matrix."""
    why = tensors.why_not(p)
    if max(p.m, p.k, p.n) > COLUMN_LIMIT:
        why.append(f"M, K and N must be at most {COLUMN_LIMIT}; got {p.m}, {p.k}, {p.n}")
    return why
