"""Pieces of plain Triton kernels that multiply a 2:4 matrix: its tiles are unpacked in registers for tl.dot.

    stored, a group of four columns     values  v0 v1        meta  a nibble i0 | i1 << 2
    unpacked                            v0 in column i0, v1 in column i1, 0 elsewhere

A tile of TK columns loads TK/2 values and TK/8 bytes a row; tl.dot multiplies dense tiles. So these kernels save
bytes of A and no arithmetic: Triton gives no access to sparse tensor cores.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.kernels.lang import epilogue as epilogues
from sparsek.kernels.lang import tensors
from sparsek.kernels.lang.launch import launch
from sparsek.kernels.lang.tensors import SIZE_LIMIT
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import Epilogue

GROUP = 4
# A column limit that keeps offsets inside a tile of 128 rows of values below 2^31.
COLUMN_LIMIT = 1 << 24


@dataclass(frozen=True)
class Config:
    """tile_m x tile_n of C per program, tile_k of the inner side per step; powers of two, 16 or more (tile_k 32).

    `group`: how many column tiles are walked down all rows together, for reuse in L2.
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
    """Dense [R, C]: rows `row` [R] and columns first to first + C - 1 of a 2:4 matrix of `columns` columns.

    `values` and `meta` point at the row that `row` counts from. `columns` is a multiple of UNIT. `row_live` applies
    if RAGGED_R, and columns may be fewer than first + C if RAGGED_C; absent elements are 0.
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
    """z, a sum of products whose left tile was unpacked, plus an addition that forces Triton to wait for wgmma.

    The tile stays in registers. Without a use of the sum Triton 3.6 lets wgmma run on while the next step overwrites
    them: some elements were wrong at 8192^3 (H200, 2026-11-22). -0 becomes +0.
    """
    return z + 0.0


def column_unit(columns: int) -> int:
    """A unit for the compiler that divides a number of columns, itself a multiple of 8."""
    return next(unit for unit in (128, 64, 32, 16, 8) if columns % unit == 0)


def start(
    kernel: Any, c: Config, stored: tuple[Any, ...], down: int, cut: int, b: Tensor, out: Tensor,
    epilogue: Epilogue, tf32: bool, own: dict[str, Any],
) -> None:  # fmt: skip
    """Launches a kernel for C [..., M, N] and b [..., K, N], strides as they are; no sync, no allocation.

    `stored` are its first arguments, `own` its constexprs that follow from A. `down`: rows of tiles or block rows,
    `cut` tiles high.
    """
    m, n = out.shape[-2:]
    column_tiles = -(-n // c.tile_n)
    for b3, out3, other in tensors.folded(b, out, epilogue.other):
        shared = constants(c, b3, out3, tf32, replace(epilogue, other=other))
        batch = b3.shape[0]
        with torch.cuda.device_of(b3):
            launch(
                kernel, (down * cut * column_tiles * batch,),
                *stored, b3, out3, epilogue.bias, other, float(epilogue.alpha), float(epilogue.beta),
                m, n, b3.shape[1], down, column_tiles, column_tiles * batch,
                *tensors.strides(b3), *tensors.strides(out3), *tensors.strides(other),
                **own, **shared, num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip


def constants(c: Config, b: Tensor, out: Tensor, tf32: bool, epilogue: Epilogue) -> dict[str, Any]:
    """Constexprs that follow from the config, `b` [batch, K, N], `out` and `epilogue.other` [batch, M, N]."""
    n, other = b.shape[2], epilogue.other
    (unit_bk, unit_bn), (unit_cm, unit_cn), (unit_om, unit_on) = map(tensors.units, (b, out, other))
    return {
        "TM": c.tile_m, "TN": c.tile_n, "TK": c.tile_k, "GROUP": c.group, "RAGGED_N": n % c.tile_n != 0,
        "WIDE": max(map(tensors.extent, (b, out, other))) > SIZE_LIMIT,
        "PRECISION": "tf32" if tf32 else "ieee", "UNIT_N": tensors.unit(n, b),
        "UNIT_BK": unit_bk, "UNIT_BN": unit_bn, "UNIT_CM": unit_cm, "UNIT_CN": unit_cn,
        "UNIT_OM": unit_om, "UNIT_ON": unit_on, **epilogues.constants(epilogue),
    }  # fmt: skip


# By falling tile_m: tile_m, tile_n, tile_k, warps, stages. None is tuned. The unpacked tile and C share registers:
# 128x256, and 128x128 with four warps, would spill.
# fmt: off
LOW = (Config(32, 128, 64, 4, 3), Config(32, 64, 64, 4, 3), Config(16, 128, 64, 4, 3), Config(16, 64, 64, 4, 3))
HOPPER = (Config(128, 128, 64, 8, 3),
          Config(64, 128, 64, 4, 3), Config(64, 256, 64, 8, 3), Config(64, 64, 64, 4, 4), *LOW)
AMPERE = (Config(128, 128, 64, 8, 3), Config(64, 256, 64, 8, 3), Config(64, 128, 32, 4, 3), Config(64, 64, 64, 4, 4),
          *LOW)
SINGLE = (Config(64, 64, 32, 4, 3), Config(64, 64, 32, 8, 3), Config(32, 64, 32, 4, 3), Config(16, 64, 32, 4, 3))
# fmt: on


class Unpacking:
    """What both kernels share. `storage` is what they multiply."""

    storage: str

    def rows(self, p: SpmmProblem) -> int:
        """Rows that tiles cover, all block rows together."""
        raise NotImplementedError

    def tallest(self, p: SpmmProblem) -> int:
        """The tallest tile allowed."""
        raise NotImplementedError

    def why_not(self, p: SpmmProblem) -> list[str]:
        """Reasons why `p` cannot run here."""
        if foreign := p.a.unless(self.storage):
            return foreign
        why = tensors.why_not(p)
        if max(p.m, p.k, p.n) > COLUMN_LIMIT:
            why.append(f"M, K and N must be at most {COLUMN_LIMIT}; got {p.m}, {p.k}, {p.n}")
        if not why and tiles(self.default(p), self.rows(p), p) > SIZE_LIMIT:
            why.append(f"more than {SIZE_LIMIT} tiles of C")
        return why

    def default(self, p: SpmmProblem) -> Config:
        """The first of `configs` with at least as many tiles as SMs, else the last."""
        made = list(self.configs(p))
        return next((c for c in made if tiles(c, self.rows(p), p) >= p.card.sm_count), made[-1])

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first, limited by N and by shared memory."""
        widest = max(16, 1 << (p.n - 1).bit_length())
        table = SINGLE if p.dtype == "fp32" else HOPPER if p.on_cpu or p.card.capability[0] == 9 else AMPERE
        seen = set()
        for c in table:
            if c.tile_m > self.tallest(p):
                continue
            c = replace(c, tile_n=min(c.tile_n, widest))
            if p.combine and c.tile_m * c.tile_n > 64 * 32 * c.num_warps:  # two tiles of C at once spill
                c = replace(c, num_warps=2 * c.num_warps)
            c = replace(c, num_stages=tensors.stages(p, c.num_stages, c.tile_k * (c.tile_m + c.tile_n)))
            if c not in seen:
                seen.add(c)
                yield c


def tiles(c: Config, rows: int, p: SpmmProblem) -> int:
    """How many tiles cover `rows` rows of C, in all batches."""
    return -(-rows // c.tile_m) * -(-p.n // c.tile_n) * p.batch


def seconds(p: SpmmProblem, c: Config, rows: int, dense_flops: float) -> float:
    """Launch + the longest of: dense arithmetic at 26 % of the dense rate (16 bits; less for lower tiles), with 1.5
    us per wave of tiles; 0.6 us per step of one tile, however small; compulsory bytes at 80 % of copy bandwidth.
    Measured for tiles of 128 rows and of 16 tokens in bf16 (H200, 2026-11-22): unpacking and multiplying alternate.
    The rest is a guess.
    """
    count = tiles(c, rows, p)
    if p.on_cpu:  # the interpreter: about two milliseconds per program and step
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
