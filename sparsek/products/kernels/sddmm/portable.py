"""S = X @ Y at the stored blocks of a pattern, in plain Triton with pointers: any CUDA GPU from sm_80, the
interpreter.

One program computes one tile of S, tile_m rows of one block row by tile_n of the columns that the row stores, as if
contiguous, and walks K, tile_k per step:

    stored blocks of the row   | b0      | b1      | b2      |          jj = 0 .. length * bn
    tiles                      | t0   | t1   | t2   | t3   | t4 |
    X tile                     X[rows of the tile, k]                                            [tile_m, tile_k]
    Y tile                     Y[k, indices[start + jj // bn] * bn + jj % bn]                    [tile_k, tile_n]
    S tile                     values[start + jj // bn][rows of the tile, jj % bn]               [tile_m, tile_n]

If tile_n divides bn, a tile lies in one block. Otherwise it joins several small blocks or straddles two, so that
blocks 16 wide still fill a wide dot. A block taller than tile_m takes several programs. Programs run in groups of
`group` block rows, and by columns inside a group: concurrent programs read the same rows of X and columns of Y, from
L2. Rows and columns of empty block rows and columns are never read. Padding outside the matrix becomes 0, also if X
or Y has NaN. Each element is one sum in fixed order. X and Y may have any strides.

Bottleneck: arithmetic, for tiles 64 high or more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch import tensors
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.tensors import SIZE_LIMIT, at, times
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.kernels.common.blocks import add_product, find, inside_blocks, span
from sparsek.products.plan.kernels import SddmmKernel
from sparsek.products.plan.problems import SddmmProblem


@dataclass(frozen=True)
class Config(KernelConfig):
    """tile_m x tile_n of S per program, tile_k of K per step; all powers of two, 16 or more.

    `group`: block rows that are walked column by column together, for reuse in L2.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    group: int = 32

    SIDES = ("tile_m", "tile_n", "tile_k")
    KERNEL = "portable.sddmm"


@dataclass(frozen=True, eq=False)
class Work:
    """`tiles` int32 [tiles, 4]: block row (-1: padding), first stored block of the row, stored blocks, tile in it."""

    tiles: Tensor
    tf32: bool


@triton.jit
def _sddmm(
    x, y, values, indices, tiles,
    m, n, k, sx_m, sx_k, sy_k, sy_n,
    BM: tl.constexpr, BN: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    SPAN: tl.constexpr, WIDE: tl.constexpr, RAGGED_M: tl.constexpr, RAGGED_N: tl.constexpr,
    RAGGED_K: tl.constexpr, PRECISION: tl.constexpr,
    UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT_K: tl.constexpr,
    UNIT_XM: tl.constexpr, UNIT_XK: tl.constexpr, UNIT_YK: tl.constexpr, UNIT_YN: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = (BM + TM - 1) // TM
    m, n, k = times(m, UNIT_M), times(n, UNIT_N), times(k, UNIT_K)
    sx_m, sx_k = times(sx_m, UNIT_XM), times(sx_k, UNIT_XK)
    sy_k, sy_n = times(sy_k, UNIT_YK), times(sy_n, UNIT_YN)

    pid = tl.program_id(0)
    sub = pid % SUBS
    tile_at = tiles + pid // SUBS * 4
    row = tl.load(tile_at)
    start = tl.load(tile_at + 1)
    length = tl.load(tile_at + 2)
    tile = tl.load(tile_at + 3)
    if row < 0:
        return

    i = sub * TM + tl.arange(0, TM)  # row inside the block
    block_column, place = find(indices, None, None, None, start, length, tile, BN, TN, SPAN, False)
    inside = inside_blocks(tile, BN, TN, SPAN)
    col = block_column * BN + inside
    stored_i = i < BM
    stored_j = tl.arange(0, TN) < length * BN - tile * TN
    live_i = stored_i
    live_j = stored_j
    if RAGGED_M:
        live_i = live_i & (row * BM + i < m)
    if RAGGED_N:
        live_j = live_j & (col < n)

    kt = tl.arange(0, TK)
    x_ptr = x + (row * BM).to(tl.int64) * sx_m
    x_ptr = x_ptr + ((at(i, WIDE) * sx_m)[:, None] + (at(kt, WIDE) * sx_k)[None, :])
    y_ptr = y + ((at(kt, WIDE) * sy_k)[:, None] + (at(col, WIDE) * sy_n)[None, :])
    acc = tl.zeros((TM, TN), dtype=tl.float32)
    for step in range(tl.cdiv(k, TK)):
        first = step * TK
        if WIDE:
            first = tl.zeros((1, 1), dtype=tl.int64) + first
        x_live = live_i[:, None]
        y_live = live_j[None, :]
        if RAGGED_K:
            x_live = x_live & (step * TK + kt < k)[None, :]
            y_live = y_live & (step * TK + kt < k)[:, None]
        x_tile = tl.load(x_ptr + first * sx_k, mask=x_live, other=0.0)
        y_tile = tl.load(y_ptr + first * sy_k, mask=y_live, other=0.0)
        acc = add_product(acc, x_tile, y_tile, PRECISION)

    # Outside the matrix a zero may have been multiplied by infinity.
    acc = tl.where(live_i[:, None] & live_j[None, :], acc, 0.0)
    s_ptr = values + ((i * BN)[:, None] + (place.to(tl.int64) * (BM * BN) + inside)[None, :])
    tl.store(s_ptr, acc.to(values.dtype.element_ty), mask=stored_i[:, None] & stored_j[None, :])


def _constants(
    c: Config, block: tuple[int, int], x: Tensor, y: Tensor, tf32: bool, limit: int
) -> dict[str, Any]:
    """Every constexpr of `_sddmm` for one launch of x [M, K] and y [K, N]."""
    (bm, bn), (m, k), n = block, x.shape, y.shape[1]
    (unit_xm, unit_xk), (unit_yk, unit_yn) = tensors.units(x[None]), tensors.units(y[None])
    return {
        "BM": bm, "BN": bn, "TM": c.tile_m, "TN": c.tile_n, "TK": c.tile_k, "SPAN": span(bn, c.tile_n),
        "WIDE": max(tensors.extent(x[None]), tensors.extent(y[None])) > limit,
        "RAGGED_M": m % bm != 0, "RAGGED_N": n % bn != 0, "RAGGED_K": k % c.tile_k != 0,
        "PRECISION": "tf32" if tf32 else "ieee",
        "UNIT_M": tensors.unit(m, x), "UNIT_N": tensors.unit(n, x), "UNIT_K": tensors.unit(k, x),
        "UNIT_XM": unit_xm, "UNIT_XK": unit_xk, "UNIT_YK": unit_yk, "UNIT_YN": unit_yn,
    }  # fmt: skip


def _count(p: SddmmProblem, c: Config) -> int:
    """An upper bound of the tiles along the joined columns of all block rows, from `p` alone."""
    bn = p.block[1]
    if bn % c.tile_n == 0:
        return p.nnzb * (bn // c.tile_n)
    rows = p.grid[0]
    return min(p.nnzb * bn // c.tile_n + rows, rows * -(-p.row_max * bn // c.tile_n))


def _subs(p: SddmmProblem, c: Config) -> int:
    return -(-p.block[0] // c.tile_m)


# Tables by tile_m, best guess first: tile_m, tile_n, tile_k, warps, stages.
# fmt: off
LOW: dict[int, tuple[Config, ...]] = {
    128: (Config(128, 128, 64, 4, 4), Config(128, 128, 64, 8, 4), Config(128, 256, 64, 8, 3),
          Config(128, 128, 64, 4, 3)),
    64: (Config(64, 128, 64, 4, 4), Config(64, 256, 64, 4, 4), Config(64, 256, 32, 4, 5), Config(64, 128, 64, 4, 3)),
    32: (Config(32, 128, 64, 4, 4), Config(32, 256, 64, 4, 3), Config(32, 128, 64, 4, 3)),
    16: (Config(16, 128, 64, 4, 4), Config(16, 256, 64, 4, 3), Config(16, 128, 64, 2, 4)),
}
TF32 = (Config(64, 128, 32, 4, 3), Config(128, 128, 32, 8, 3), Config(32, 128, 32, 4, 3), Config(16, 128, 32, 4, 3))
IEEE = (Config(64, 64, 16, 4, 3), Config(64, 64, 32, 8, 3), Config(32, 64, 32, 4, 3), Config(16, 64, 32, 4, 3))
# fmt: on


class PortableSddmm:
    """Plain Triton twin of hopper.sddmm."""

    name = "portable.sddmm"

    def why_not(self, p: SddmmProblem) -> list[str]:
        why = tensors.why_not(p)
        if max(p.m, p.k, p.n) > SIZE_LIMIT:
            why.append(f"M, K and N must be at most {SIZE_LIMIT}; got {p.m}, {p.k}, {p.n}")
        if not why and _count(p, self.default(p)) * _subs(p, self.default(p)) > SIZE_LIMIT:
            why.append(f"more than {SIZE_LIMIT} tiles of S")
        return why

    def default(self, p: SddmmProblem) -> Config:
        """The first of `configs`, with smaller tiles while there are fewer of them than SMs."""
        c = next(iter(self.configs(p)))
        while c.tile_n > 32 and _count(p, c) * _subs(p, c) < p.card.sm_count:
            c = replace(c, tile_n=c.tile_n // 2, num_warps=4)
        return c

    def configs(self, p: SddmmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first: the block's table, limited by block rows and shared memory."""
        tallest = 1 << (p.block[0] - 1).bit_length()
        widest = max(16, 1 << (max(p.row_max, 1) * p.block[1] - 1).bit_length())
        if p.dtype == "fp32":
            table = tuple(c for c in (TF32 if p.tf32 else IEEE) if c.tile_m <= tallest)
        else:
            table = LOW[tensors.tile_side(p.block[0], 128)]
        deepest = max(16, 1 << (max(p.k, 1) - 1).bit_length())
        seen = set()
        for entry in table:
            c = replace(entry, tile_n=min(entry.tile_n, widest), tile_k=min(entry.tile_k, deepest))
            c = replace(c, num_stages=tensors.stages(p, c.num_stages, c.tile_k * (c.tile_m + c.tile_n)))
            if p.card.capability[0] < 9 and c.tile_m * c.tile_n > 64 * 32 * c.num_warps:
                c = replace(
                    c, num_warps=2 * c.num_warps
                )  # without wgmma, fragments of X and Y are in registers too
            for group in (32, 8):
                c = replace(c, group=group)
                if c not in seen:
                    seen.add(c)
                    yield c

    def seconds(self, p: SddmmProblem, c: Config) -> float:
        """Launch + the longest of: arithmetic of whole tiles in whole waves, at portable.spmm's rate for tile_m;
        compulsory bytes at 80 % of copy bandwidth; X and Y tiles from L2."""
        programs = _count(p, c) * _subs(p, c)
        if p.on_cpu:  # the interpreter: about a millisecond per program and step
            return 1e-3 * programs * (1 + p.k / c.tile_k)
        if p.dtype == "fp32":
            rate = p.card.sustained("tf32") * 0.25 if p.tf32 else p.card.sustained("fp32") * 0.5
        else:
            rate = {128: 560.0, 64: 450.0, 32: 280.0}.get(c.tile_m, 150.0) * p.card.sustained(p.dtype) / 690.0
        rate *= 1e12 * min(1.0, c.tile_n / 128)
        one = 2.0 * c.tile_m * c.tile_n * p.k / (rate / p.card.sm_count)
        waves = max(1.0, programs / p.card.sm_count)
        fed = programs * (c.tile_m + c.tile_n) * p.k * dtypes.itemsize(p.dtype) / p.card.fabric
        stored = p.compulsory_bytes / (0.8 * p.card.bandwidth)
        return p.card.launch_seconds + 1.5e-6 + max(one * waves, fed, stored)

    def prepare(self, p: SddmmProblem, c: Config, pattern: BlockPattern) -> Work:
        """The tiles of all block rows, ordered for L2; on the pattern's device, without a sync."""
        rows, most, bn = pattern.grid[0], _count(p, c), pattern.block[1]
        if rows == 0 or most == 0:
            return Work(torch.zeros((0, 4), dtype=torch.int32, device=pattern.device), p.tf32)
        lengths = pattern.row_lengths.long()
        ends = (-(-lengths * bn // c.tile_n)).cumsum(0)
        place = torch.arange(most, device=pattern.device)
        found = torch.searchsorted(ends, place, right=True)
        row = found.clamp(max=rows - 1)
        start, padding = pattern.indptr[row], found >= rows
        tile = place - torch.where(row > 0, ends[row - 1], 0)
        first_block = (start + tile * c.tile_n // bn).clamp(max=pattern.nnzb - 1)
        groups = row // c.group * pattern.grid[1] + pattern.indices[first_block]
        key = (groups * c.group + row % c.group).masked_fill(padding, torch.iinfo(torch.int64).max)
        table = torch.stack((row.masked_fill(padding, -1), start.long(), lengths[row], tile), dim=1)
        return Work(table[torch.argsort(key, stable=True)].int(), p.tf32)

    def launch(
        self, c: Config, work: Work, x: Tensor, y: Tensor, pattern: BlockPattern, values: Tensor
    ) -> None:
        """Computes S into `values` [nnzb, bm, bn] from x [M, K] and y [K, N] of any strides; no sync, no allocation."""
        if values.numel() == 0:
            return
        (m, k), n = x.shape, y.shape[1]
        subs = math.ceil(pattern.block[0] / c.tile_m)
        options: dict[str, Any] = {"num_warps": c.num_warps, "num_stages": c.num_stages}
        with torch.cuda.device_of(x):
            launch(
                _sddmm, (work.tiles.shape[0] * subs,),
                x, y, values, pattern.indices, work.tiles, m, n, k,
                *tensors.strides(x[None])[1:], *tensors.strides(y[None])[1:],
                **_constants(c, pattern.block, x, y, work.tf32, SIZE_LIMIT), **options,
            )  # fmt: skip


KERNEL: SddmmKernel = PortableSddmm()
