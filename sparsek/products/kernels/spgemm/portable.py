"""C = A @ B for two BSR matrices, in plain Triton with pointers: any CUDA GPU from sm_80, and Triton's interpreter.

One program computes one tile of a block of C, tile_m x tile_n, and walks the pairs of that block as if their inner
sides were contiguous, tile_k per step:

    pairs of block r of C   | (a0, b0) | (a1, b1) | (a2, b2) |     kk = 0 .. pairs * bk,  q = indptr[r] + kk // bk
    steps                   | s0   | s1   | s2   | s3   | s4 |
    A tile                  A.values[left[q]][rows of the tile, kk % bk]                    [tile_m, tile_k]
    B tile                  B.values[right[q]][kk % bk, columns of the tile]                [tile_k, tile_n]

If tile_k divides bk, a step lies in one pair; otherwise it joins several or straddles two. A transposed view is read
in place: its block q is stored as the transpose at order[q]. C is dense, or the values of a pattern. Blocks of a
dense C without a pair are zeroed by programs of their own. Blocks with the most pairs start first. Blocks of A and B
without a pair are never read; padding outside the matrix becomes 0. Each element is one sum in fixed order.

Bottleneck with few pairs: writing C. 8192^3, both 12.5 % stored in blocks of 128, has 8 pairs to a block of C and 137
GFLOP over 201 MB. Not measured yet (2026-11-21).
"""

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
from sparsek.products.formats.bsr import BSR
from sparsek.products.kernels.common.blocks import add_product, find, inside_blocks, span
from sparsek.products.plan.kernels import SpgemmKernel
from sparsek.products.plan.matches import Matches
from sparsek.products.plan.problems import SpgemmProblem


@dataclass(frozen=True)
class Config(KernelConfig):
    """tile_m x tile_n of a block of C per program, tile_k of the joined pairs per step; powers of two, 16 or more."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int

    SIDES = ("tile_m", "tile_n", "tile_k")
    KERNEL = "portable.spgemm"


@dataclass(frozen=True, eq=False)
class Work:
    """`targets` int32 [targets, 4]: block row and block column of C, first pair, pairs; most pairs first.

    A dense C has one for every block, stored or not. `places` int32 [targets]: their positions among the values.
    """

    targets: Tensor
    places: Tensor
    dense: bool
    tf32: bool


@triton.jit
def _spgemm(
    a_values, b_values, a_order, b_order, left, right, targets, places, c,
    m, n, sc_m, sc_n,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, SPAN: tl.constexpr,
    DENSE: tl.constexpr, WIDE: tl.constexpr, WIDE_AB: tl.constexpr, RAGGED_M: tl.constexpr,
    RAGGED_N: tl.constexpr, PRECISION: tl.constexpr, UNIT_M: tl.constexpr, UNIT_N: tl.constexpr,
    UNIT_CM: tl.constexpr, UNIT_CN: tl.constexpr,
):  # fmt: skip
    SUBS_M: tl.constexpr = (BM + TM - 1) // TM
    SUBS_N: tl.constexpr = (BN + TN - 1) // TN
    m, n = times(m, UNIT_M), times(n, UNIT_N)
    sc_m, sc_n = times(sc_m, UNIT_CM), times(sc_n, UNIT_CN)

    # The tiles of a block run concurrently: they read the same blocks of A and B.
    pid = tl.program_id(0)
    target = pid // (SUBS_M * SUBS_N)
    row = tl.load(targets + target * 4)
    column = tl.load(targets + target * 4 + 1)
    start = tl.load(targets + target * 4 + 2)
    length = tl.load(targets + target * 4 + 3)

    i = pid % SUBS_M * TM + tl.arange(0, TM)  # row inside the block
    j = pid // SUBS_M % SUBS_N * TN + tl.arange(0, TN)  # column inside the block
    kt = tl.arange(0, TK)
    if a_order is not None:
        a_i = i
        a_step: tl.constexpr = BM
    else:
        a_i = i * BK
        a_step: tl.constexpr = 1
    if b_order is not None:
        b_j = j * BK
        b_step: tl.constexpr = 1
    else:
        b_j = j
        b_step: tl.constexpr = BN

    acc = tl.zeros((TM, TN), dtype=tl.float32)
    b_place, a_place = find(right, b_order, left, a_order, start, length, 0, BK, TK, SPAN, True)
    for step in range(tl.cdiv(length * BK, TK)):
        if BK % TK == 0:
            inner = step % (BK // TK) * TK
            a_ptr = a_values + a_place.to(tl.int64) * (BM * BK) + inner * a_step
            a_ptr = a_ptr + (a_i[:, None] + (kt * a_step)[None, :])
            b_ptr = b_values + b_place.to(tl.int64) * (BK * BN) + inner * b_step
            b_ptr = b_ptr + ((kt * b_step)[:, None] + b_j[None, :])
            a_live = kt[None, :] < TK
            b_live = kt[:, None] < TK
        else:
            inside = inside_blocks(step, BK, TK, SPAN)
            a_ptr = a_values + (a_i[:, None] + (at(a_place, WIDE_AB) * (BM * BK) + inside * a_step)[None, :])
            b_ptr = b_values + ((at(b_place, WIDE_AB) * (BK * BN) + inside * b_step)[:, None] + b_j[None, :])
            a_live = (kt < length * BK - step * TK)[None, :]
            b_live = (kt < length * BK - step * TK)[:, None]
        if BM % TM != 0:
            a_live = a_live & (i < BM)[:, None]
        if BN % TN != 0:
            b_live = b_live & (j < BN)[None, :]
        a_tile = tl.load(a_ptr, mask=a_live, other=0.0)
        b_tile = tl.load(b_ptr, mask=b_live, other=0.0)
        # Read one step ahead: a position loaded in the step that uses it would halve the pipeliner's buffers.
        b_place, a_place = find(right, b_order, left, a_order, start, length, step + 1, BK, TK, SPAN, True)
        acc = add_product(acc, a_tile, b_tile, PRECISION)

    inside_c = (i < BM)[:, None] & (j < BN)[None, :]
    live_i = row * BM + i < m
    live_j = column * BN + j < n
    if DENSE:
        c += (row * BM).to(tl.int64) * sc_m + (column * BN).to(tl.int64) * sc_n
        c_ptr = c + ((at(i, WIDE) * sc_m)[:, None] + (at(j, WIDE) * sc_n)[None, :])
        tl.store(c_ptr, acc.to(c.dtype.element_ty), mask=inside_c & live_i[:, None] & live_j[None, :])
    else:
        if RAGGED_M:
            acc = tl.where(live_i[:, None], acc, 0.0)  # a zero may have been multiplied by infinity
        if RAGGED_N:
            acc = tl.where(live_j[None, :], acc, 0.0)
        c += tl.load(places + target).to(tl.int64) * (BM * BN)
        tl.store(c + (i * BN)[:, None] + j[None, :], acc.to(c.dtype.element_ty), mask=inside_c)


def _constants(c: Config, a: BSR, b: BSR, out: Tensor, work: Work, limit: int) -> dict[str, Any]:
    """Every constexpr of `_spgemm` for one launch."""
    (bm, bk), bn, (m, n) = a.block, b.block[1], (a.shape[0], b.shape[1])
    unit_cm, unit_cn = tensors.units(out[None]) if work.dense else (1, 1)
    return {
        "BM": bm, "BK": bk, "BN": bn, "TM": c.tile_m, "TN": c.tile_n, "TK": c.tile_k,
        "SPAN": span(bk, c.tile_k), "DENSE": work.dense,
        "WIDE": work.dense and tensors.extent(out[None]) > limit,
        "WIDE_AB": max(a.values.numel(), b.values.numel()) > limit,
        "RAGGED_M": m % bm != 0, "RAGGED_N": n % bn != 0, "PRECISION": "tf32" if work.tf32 else "ieee",
        "UNIT_M": tensors.unit(m, out), "UNIT_N": tensors.unit(n, out), "UNIT_CM": unit_cm, "UNIT_CN": unit_cn,
    }  # fmt: skip


def _targets(p: SpgemmProblem) -> int:
    """Number of blocks of C that are written."""
    return p.grid[0] * p.grid[1] if p.dense_out else p.nnzb_out


def _subs(p: SpgemmProblem, c: Config) -> int:
    """Number of tiles of a block of C."""
    return -(-p.block[0] // c.tile_m) * -(-p.block[1] // c.tile_n)


# Tile_k, warps and stages for tiles of C, best guess first.
# fmt: off
LOW: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {
    (128, 128): ((64, 4, 3), (64, 8, 4), (64, 8, 3), (32, 4, 4)),
    (128, 64): ((64, 4, 4), (64, 4, 3), (128, 4, 3)),
    (64, 128): ((64, 4, 4), (64, 4, 3), (128, 4, 3)),
    (64, 64): ((64, 4, 4), (128, 4, 3), (64, 4, 3)),
}
SMALL = ((64, 4, 4), (32, 4, 4), (128, 4, 3))
TF32 = ((32, 4, 3), (32, 8, 3))
IEEE = ((16, 4, 3), (32, 8, 3))
# fmt: on


class PortableSpgemm:
    """Plain Triton twin of hopper.spgemm."""

    name = "portable.spgemm"

    def why_not(self, p: SpgemmProblem) -> list[str]:
        why = tensors.why_not(p)
        if max(p.m, p.k, p.n) > SIZE_LIMIT:
            why.append(f"M, K and N must be at most {SIZE_LIMIT}; got {p.m}, {p.k}, {p.n}")
        if p.pairs_max * p.a_block[1] > SIZE_LIMIT:
            why.append(
                f"pairs of a block of C must be at most {SIZE_LIMIT // p.a_block[1]}; got {p.pairs_max}"
            )
        if not why and _targets(p) * _subs(p, self.default(p)) > SIZE_LIMIT:
            why.append(f"more than {SIZE_LIMIT} tiles of C")
        return why

    def default(self, p: SpgemmProblem) -> Config:
        """The first of `configs`, with smaller tiles while there are fewer of them with pairs than SMs."""
        c = next(iter(self.configs(p)))
        while max(c.tile_m, c.tile_n) > 32 and p.nnzb_out * _subs(p, c) < p.card.sm_count:
            name = "tile_m" if c.tile_m >= c.tile_n else "tile_n"
            c = replace(c, **{name: getattr(c, name) // 2}, num_warps=4)
        return c

    def configs(self, p: SpgemmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first: tiles that fit C's blocks, limited by pairs and memory."""
        widest = 64 if p.dtype == "fp32" and not p.tf32 else 128
        tile_m, tile_n = (tensors.tile_side(size, 128, widest) for size in p.block)
        deepest = max(16, 1 << (max(p.pairs_max, 1) * p.a_block[1] - 1).bit_length())
        half_m, half_n = (tile_m // 2, tile_n), (tile_m, tile_n // 2)
        tiles = [(tile_m, tile_n), *(each for each in (half_n, half_m) if min(each) >= 32)]
        seen = set()
        for tile in tiles:
            rest = LOW.get(tile, SMALL) if p.dtype != "fp32" else TF32 if p.tf32 else IEEE
            for tile_k, warps, stages in rest:
                c = Config(*tile, min(tile_k, deepest), min(warps, max(1, tile[0] * tile[1] // 512)), stages)
                c = replace(c, num_stages=tensors.stages(p, stages, c.tile_k * (c.tile_m + c.tile_n)))
                if p.card.capability[0] < 9 and c.tile_m * c.tile_n > 64 * 32 * c.num_warps:
                    c = replace(c, num_warps=2 * c.num_warps)  # without wgmma fragments are in registers too
                if c not in seen:
                    seen.add(c)
                    yield c

    def seconds(self, p: SpgemmProblem, c: Config) -> float:
        """Launch + the longest of: arithmetic of whole tiles, at portable.spmm's rate for tile_m, with 1.5 us to
        begin and end each wave of tiles; the block of most pairs on one SM; tiles of A and B from L2. Nothing hides the
        compulsory bytes, at 90 % of copy bandwidth (8192^3, 12.5 % of blocks of 128 to dense, H200, 2026-11-23).
        """
        subs, programs = _subs(p, c), _targets(p) * _subs(p, c)
        depth = p.pairs * subs * p.a_block[1]
        if p.on_cpu:  # the interpreter: about a millisecond per program and step
            return 1e-3 * (programs + depth / c.tile_k)
        if p.dtype == "fp32":
            rate = p.card.sustained("tf32") * 0.25 if p.tf32 else p.card.sustained("fp32") * 0.5
        else:
            rate = {128: 560.0, 64: 450.0, 32: 280.0}.get(c.tile_m, 150.0) * p.card.sustained(p.dtype) / 690.0
        rate *= 1e12 * min(1.0, c.tile_n / 128)
        busy = max(1, min(p.card.sm_count, p.nnzb_out * subs)) / p.card.sm_count
        waves = 1.5e-6 * -(-programs // (4 * p.card.sm_count))
        arithmetic = waves + 2.0 * c.tile_m * c.tile_n * depth / (rate * busy)
        longest = 2.0 * c.tile_m * c.tile_n * p.pairs_max * p.a_block[1] / (rate / p.card.sm_count)
        fed = (c.tile_m + c.tile_n) * depth * dtypes.itemsize(p.dtype) / p.card.fabric
        moved = p.compulsory_bytes / (0.9 * p.card.bandwidth)
        return p.card.launch_seconds + 1.5e-6 + max(arithmetic, longest, fed) + moved

    def prepare(self, p: SpgemmProblem, c: Config, matches: Matches) -> Work:
        """The blocks of C that are written, most pairs first; on the pattern's device, without a sync."""
        pattern, columns = matches.pattern, matches.pattern.grid[1]
        starts, pairs = matches.indptr[:-1], matches.indptr[1:] - matches.indptr[:-1]
        rows, place = pattern.block_rows, torch.arange(pattern.nnzb, device=pattern.device)
        if p.dense_out:
            cells = torch.arange(pattern.grid[0] * columns, device=pattern.device)
            at_cell = rows.long() * columns + pattern.indices
            of_stored = torch.stack((starts, pairs, place.int()))
            of_cells = torch.zeros((3, cells.shape[0]), dtype=torch.int32, device=pattern.device)
            of_cells[:, at_cell] = of_stored
            starts, pairs, place = of_cells
            rows, indices = (cells // max(columns, 1)).int(), (cells % max(columns, 1)).int()
        else:
            indices = pattern.indices
        order = torch.argsort(pairs, descending=True, stable=True)
        targets = torch.stack((rows, indices, starts, pairs), dim=1)[order]
        return Work(targets.contiguous(), place[order].int(), p.dense_out, p.tf32)

    def launch(self, c: Config, work: Work, a: BSR, b: BSR, matches: Matches, out: Tensor) -> None:
        """Computes C into `out`: dense [M, N], or values [nnzb, bm, bn] of C's pattern; no sync, no allocation."""
        if out.numel() == 0:
            return
        bm, bn = a.block[0], b.block[1]
        tiles = work.targets.shape[0] * -(-bm // c.tile_m) * -(-bn // c.tile_n)
        options: dict[str, Any] = {"num_warps": c.num_warps, "num_stages": c.num_stages}
        strides = tensors.strides(out[None])[1:] if work.dense else (0, 0)
        with torch.cuda.device_of(out):
            launch(
                _spgemm, (tiles,),
                a.values, b.values, a.order, b.order, matches.left, matches.right, work.targets, work.places, out,
                a.shape[0], b.shape[1], *strides,
                **_constants(c, a, b, out, work, SIZE_LIMIT), **options,
            )  # fmt: skip


KERNEL: SpgemmKernel = PortableSpgemm()
