"""C = A @ B for a BSR A, in plain Triton with pointers: any CUDA GPU from sm_80, and Triton's interpreter.

One program makes one tile of C, tile_m rows of one block row by tile_n columns. It walks the K axis of that
block row as if its stored blocks were laid end to end, tile_k a step:

    stored blocks   | b0      | b1      | b2      |          kk = 0 .. length * bk
    steps           | s0   | s1   | s2   | s3   | s4 |
    A tile          values[start + kk // bk][rows of the tile, kk % bk]                   [tile_m, tile_k]
    B tile          B[indices[start + kk // bk] * bk + kk % bk, columns of the tile]      [tile_k, tile_n]

Where tile_k divides bk a step lies in one block and has one index. Otherwise it joins several small blocks or
straddles two, and the index is a vector along tile_k: blocks 16 wide still fill a dot 64 deep. Blocks higher
than tile_m are walked by several programs that share the list. What lies outside the row's blocks is masked,
never read: NaN in rows of B that no block names cannot reach C. Each element is one sum in fixed order.

H200, 8192^3 bf16, 12.5 % stored, 2026-11-20, the first config of each table: blocks of 128 276 us (498 TFLOPS
useful), of 64 318 us, of 32 545 us, of 16 975 us. Tiles lower than 64 leave wgmma for mma.sync; computing
C^T = B^T A^T, which wgmma takes, was 1 % slower for 32 and 4 % for 16. Writing C past the caches, as these runs
did, made 128x256 tiles 2 % slower.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import dtypes, env
from sparsek.core.errors import InvalidInput
from sparsek.formats.bsr import BSR
from sparsek.plan.kernel import SpmmKernel
from sparsek.plan.problem import SpmmProblem

# Sizes stay this far under 2^31 so that a last tile's int32 row and column numbers do not wrap.
SIZE_LIMIT = 2**31 - 2048


@dataclass(frozen=True)
class Config:
    """tile_m x tile_n of C per program, tile_k of the joined K axis per step; all powers of two, 16 or more.

    `group`: column tiles walked side by side down all the rows before the next ones, for L2.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    group: int = 2

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise InvalidInput(f"{name} of portable.spmm must be a power of two from 16 up, not {size}")


@dataclass(frozen=True, eq=False)
class Work:
    """`rows` int32 [3, Mb]: block row, first stored block, stored blocks; longest first, ties by position."""

    rows: Tensor
    tf32: bool


@triton.jit
def _at(x, wide: tl.constexpr):
    """An index as int64 where offsets may pass 2^31."""
    return x.to(tl.int64) if wide else x


@triton.jit
def _times(x, unit: tl.constexpr):
    """`x`, which the host knows to be a multiple of `unit`, in a form that tells the compiler too."""
    if unit > 1:
        x = x // unit * unit
    return x


@triton.jit
def _along(step, BK: tl.constexpr, TK: tl.constexpr):
    """[TK]: k counted from the beginning of the step's first block."""
    begin = 0
    if TK % BK != 0:
        begin = _times(step * TK % BK, 16)
    return begin + tl.arange(0, TK)


@triton.jit
def _which(kt, BK: tl.constexpr, SPAN: tl.constexpr):
    """kt // BK for kt below SPAN * BK, by compares: for bk 112 a step of 200 instructions on sm_90, not 309."""
    which = (kt >= BK).to(tl.int32)
    for s in tl.static_range(2, SPAN):
        which += (kt >= s * BK).to(tl.int32)
    return which


@triton.jit
def _find(
    indices, order, start, length, step,
    BK: tl.constexpr, TK: tl.constexpr, SPAN: tl.constexpr, VIEW: tl.constexpr,
):  # fmt: skip
    """Block columns of step `step`, and the places of its blocks in `values`: scalars, or [TK] when gathered.

    A step touches at most SPAN blocks: SPAN scalar loads that all threads share, then selects along tile_k.
    """
    q = step * TK // BK
    column = tl.load(indices + start + q, mask=q < length, other=0)
    place = start + q
    if VIEW:
        place = tl.load(order + start + q, mask=q < length, other=0)
    if BK % TK != 0:
        which = _which(_along(step, BK, TK), BK, SPAN)
        column += tl.zeros([TK], dtype=tl.int32)
        place += which * (0 if VIEW else 1)
        for s in tl.static_range(1, SPAN):
            live = q + s < length
            column = tl.where(which == s, tl.load(indices + start + q + s, mask=live, other=0), column)
            if VIEW:
                place = tl.where(which == s, tl.load(order + start + q + s, mask=live, other=0), place)
    return column, place


@triton.jit
def _spmm(
    values, indices, order, rows, b, c,
    m, n, k, row_blocks, column_tiles, batch_tiles,
    sb_batch, sb_k, sb_n, sc_batch, sc_m, sc_n,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, VIEW: tl.constexpr, WIDE: tl.constexpr,
    RAGGED_K: tl.constexpr, RAGGED_N: tl.constexpr, PRECISION: tl.constexpr,
    UNIT_K: tl.constexpr, UNIT_N: tl.constexpr, UNIT_BK: tl.constexpr, UNIT_BN: tl.constexpr,
    UNIT_C: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = (BM + TM - 1) // TM
    n = _times(n, UNIT_N)
    k = _times(k, UNIT_K)
    sb_k = _times(sb_k, UNIT_BK)
    sb_n = _times(sb_n, UNIT_BN)
    sb_batch = _times(sb_batch, UNIT_BK * UNIT_BN)
    sc_m = _times(sc_m, UNIT_C)
    sc_batch = _times(sc_batch, UNIT_C)

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
    col = tile % column_tiles * TN + tl.arange(0, TN)
    kt = tl.arange(0, TK)
    if VIEW:  # blocks are stored as their transposes
        a_i = i
        a_step: tl.constexpr = BM
    else:
        a_i = i * BK
        a_step: tl.constexpr = 1
    col_off = _at(col, WIDE) * sb_n
    b += batch * sb_batch

    acc = tl.zeros((TM, TN), dtype=tl.float32)
    steps = tl.cdiv(length * BK, TK)
    column, place = _find(indices, order, start, length, 0, BK, TK, SPAN, VIEW)
    for step in range(steps):
        if BK % TK == 0:
            inner = step % (BK // TK) * TK
            a_ptr = values + place.to(tl.int64) * (BM * BK) + inner * a_step
            a_ptr = a_ptr + (a_i[:, None] + (kt * a_step)[None, :])
            b_row = column * BK + inner + kt
            b_ptr = b + (column * BK + inner).to(tl.int64) * sb_k
            b_ptr = b_ptr + ((_at(kt, WIDE) * sb_k)[:, None] + col_off[None, :])
            a_live = kt[None, :] < TK
            b_live = kt[:, None] < TK
        else:
            from_first = _along(step, BK, TK)
            inside = from_first - _which(from_first, BK, SPAN) * BK
            a_ptr = values + (a_i[:, None] + (_at(place, WIDE) * (BM * BK) + inside * a_step)[None, :])
            b_row = column * BK + inside
            b_ptr = b + ((_at(b_row, WIDE) * sb_k)[:, None] + col_off[None, :])
            left = length * BK - step * TK
            a_live = (kt < left)[None, :]
            b_live = (kt < left)[:, None]
        if BM % TM != 0:
            a_live = a_live & (i < BM)[:, None]
        if RAGGED_K:
            b_live = b_live & (b_row < k)[:, None]
        if RAGGED_N:
            b_live = b_live & (col < n)[None, :]
        a_tile = tl.load(a_ptr, mask=a_live, other=0.0)
        b_tile = tl.load(b_ptr, mask=b_live, other=0.0)
        # Read one step ahead: an index loaded in the step that uses it would halve the pipeliner's buffers.
        column, place = _find(indices, order, start, length, step + 1, BK, TK, SPAN, VIEW)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)

    at_m = row * BM + i
    c += batch * sc_batch + (row * BM).to(tl.int64) * sc_m
    c_ptr = c + ((_at(i, WIDE) * sc_m)[:, None] + (_at(col, WIDE) * sc_n)[None, :])
    c_live = ((i < BM) & (at_m < m))[:, None] & (col < n)[None, :]
    tl.store(c_ptr, acc.to(c.dtype.element_ty), mask=c_live)


def _folded(b: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`b` and `out` as pairs of [batch, ., .] views: one pair where the batch dims collapse, else several."""
    if b.ndim == 2:
        yield b[None], out[None]
    elif b.ndim == 3:
        yield b, out
    else:
        batch = math.prod(b.shape[:-2])
        try:
            pair = b.view(batch, *b.shape[-2:]), out.view(batch, *out.shape[-2:])
        except RuntimeError:
            for one_b, one_out in zip(b, out, strict=True):
                yield from _folded(one_b, one_out)
        else:
            yield pair


def _span(bk: int, tile_k: int) -> int:
    """The most blocks that a step of tile_k can touch."""
    return -(-(bk - math.gcd(bk, tile_k) + tile_k) // bk)


def _constants(c: Config, a: BSR, b: Tensor, out: Tensor, tf32: bool) -> dict[str, Any]:
    """Every constexpr of `_spmm` for one launch. `b` [batch, K, N], `out` [batch, M, N]."""
    bm, bk = a.block
    vector = 16 // b.element_size()

    def unit(*sizes: int) -> int:
        return vector if all(size % vector == 0 for size in sizes) else 1

    def extent(x: Tensor) -> int:
        return sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))

    b_batch = b.stride(0) if b.shape[0] > 1 else 0
    out_batch = out.stride(0) if out.shape[0] > 1 else 0
    b_by_rows = b.stride(2) == 1
    return {
        "BM": bm, "BK": bk, "TM": c.tile_m, "TN": c.tile_n, "TK": c.tile_k,
        "SPAN": _span(bk, c.tile_k), "GROUP": c.group,
        "VIEW": a.order is not None, "WIDE": max(extent(b), extent(out), a.values.numel()) > SIZE_LIMIT,
        "RAGGED_K": a.shape[1] % bk != 0, "RAGGED_N": b.shape[2] % c.tile_n != 0,
        "UNIT_K": unit(a.shape[1]), "UNIT_N": unit(b.shape[2]),
        "UNIT_BK": unit(b.stride(1), b_batch) if b_by_rows else 1,
        "UNIT_BN": 1 if b_by_rows else unit(b.stride(2), b_batch),
        "UNIT_C": unit(out.stride(1), out_batch), "PRECISION": "tf32" if tf32 else "ieee",
    }  # fmt: skip


def _tiles(p: SpmmProblem, c: Config) -> tuple[int, int]:
    """Tiles of C down the rows, and along the columns of all batches."""
    return p.grid[0] * -(-p.block[0] // c.tile_m), -(-p.n // c.tile_n) * p.batch


# Tables by tile_m, fastest first: tile_m, tile_n, tile_k, warps, stages, group. HOPPER's order is measured.
# fmt: off
HOPPER: dict[int, tuple[Config, ...]] = {
    128: (Config(128, 128, 64, 4, 3, 4), Config(128, 256, 64, 8, 4), Config(128, 128, 64, 8, 3, 4),
          Config(128, 256, 64, 8, 3)),
    64: (Config(64, 256, 32, 4, 5), Config(64, 256, 32, 4, 5, 4), Config(64, 256, 64, 4, 4),
         Config(64, 128, 64, 4, 3, 4)),
    32: (Config(32, 256, 64, 4, 3), Config(32, 256, 64, 8, 3), Config(32, 128, 64, 4, 4, 4)),
    16: (Config(16, 256, 64, 4, 3), Config(16, 256, 64, 8, 3), Config(16, 128, 64, 4, 4, 4)),
}
AMPERE: dict[int, tuple[Config, ...]] = {
    128: (Config(128, 128, 32, 4, 4, 4), Config(128, 128, 64, 8, 3, 4), Config(128, 256, 32, 8, 3)),
    64: (Config(64, 128, 64, 4, 3, 4), Config(64, 256, 32, 8, 4), Config(64, 128, 32, 4, 4, 4)),
    32: (Config(32, 128, 64, 4, 3, 4), Config(32, 256, 32, 4, 4), Config(32, 64, 64, 4, 3, 4)),
    16: (Config(16, 128, 64, 4, 3, 4), Config(16, 256, 32, 4, 4), Config(16, 64, 64, 4, 3, 4)),
}
# N up to 64: bytes of A decide. Deep rings of small tiles keep more than 30 KB per SM under way.
NARROW = (Config(64, 16, 128, 4, 5, 1), Config(64, 16, 64, 4, 8, 1), Config(64, 16, 64, 4, 6, 1),
          Config(32, 16, 128, 4, 5, 1), Config(32, 16, 128, 4, 4, 1), Config(128, 16, 64, 4, 6, 1),
          Config(16, 16, 128, 4, 5, 1))
TF32 = (Config(64, 128, 32, 4, 3, 4), Config(128, 128, 32, 8, 3, 4), Config(32, 128, 32, 4, 3, 4),
        Config(16, 128, 32, 4, 3, 4))
IEEE = (Config(64, 64, 16, 4, 3, 4), Config(64, 64, 32, 8, 3, 4), Config(32, 64, 32, 4, 3, 4),
        Config(16, 64, 32, 4, 3, 4))
# fmt: on


def _tile_m(bm: int) -> int:
    """The tile height with the most useful FLOP per byte for blocks of `bm` rows; padding is not useful."""
    return max((128, 64, 32, 16), key=lambda t: t * 256 / (t + 256) * bm / (-(-bm // t) * t))


def _table(p: SpmmProblem) -> tuple[Config, ...]:
    tallest = 1 << (p.block[0] - 1).bit_length()
    if p.dtype == "fp32":
        table = TF32 if p.tf32 else IEEE
        return tuple(c for c in table if c.tile_m <= tallest)
    if p.n <= 64:
        return tuple(c for c in NARROW if c.tile_m <= tallest)
    table = HOPPER if p.on_cpu or p.card.capability[0] == 9 else AMPERE
    return table[_tile_m(p.block[0])]


class PortableSpmm:
    """Plain Triton twin of hopper.spmm."""

    name = "portable.spmm"

    def why_not(self, p: SpmmProblem) -> list[str]:
        """Reasons why `p` cannot run here."""
        why = []
        if p.on_cpu and not env.interpreting():
            why.append("CPU tensors need Triton's interpreter (TRITON_INTERPRET=1 before the import)")
        if p.on_cpu and p.dtype == "bf16":
            why.append("bf16 is wrong in Triton's interpreter; use fp16 or fp32 there")
        if not p.on_cpu and p.card.capability < (8, 0):
            has = ".".join(map(str, p.card.capability))
            why.append(f"needs compute capability 8.0 or newer; {p.card.name} has {has}")
        if p.dtype not in ("bf16", "fp16", "fp32"):
            why.append(f"dtype must be bf16, fp16 or fp32, not {p.dtype}")
        if max(p.m, p.k, p.n) > SIZE_LIMIT:
            why.append(f"M, K and N must be at most {SIZE_LIMIT}; got {p.m}, {p.k}, {p.n}")
        if not why and math.prod(_tiles(p, self.default(p))) > SIZE_LIMIT:
            why.append(f"more than {SIZE_LIMIT} tiles of C")
        return why

    def default(self, p: SpmmProblem) -> Config:
        """The first of `configs`, made smaller while there are fewer tiles of C than SMs."""
        c = next(iter(self.configs(p)))
        while c.tile_n > 64 and math.prod(_tiles(p, c)) < p.card.sm_count:
            c = replace(c, tile_n=c.tile_n // 2, num_warps=4)
        while c.tile_m > 32 and math.prod(_tiles(p, c)) < p.card.sm_count:
            c = replace(c, tile_m=c.tile_m // 2, num_warps=4)
        return c

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Serious alternatives, best guess first: the block's table, cut to N and to shared memory."""
        widest = max(16, 1 << (p.n - 1).bit_length())
        room = p.card.smem_bytes - 1024
        deepest = max(32, 1 << (max(p.row_max * p.block[1], 1) - 1).bit_length())
        seen = set()
        for c in _table(p):
            tile_n = widest if p.n <= 64 else min(c.tile_n, widest)
            c = replace(c, tile_n=tile_n, tile_k=min(c.tile_k, deepest))
            stage = c.tile_k * (c.tile_m + c.tile_n) * dtypes.itemsize(p.dtype)
            if not p.on_cpu and c.num_stages * stage > room:
                c = replace(c, num_stages=max(1, room // stage))
            if c not in seen:
                seen.add(c)
                yield c

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Launch + the longest of: arithmetic at a rate for each tile_m (masked rows and columns count, so do idle
        SMs) and 1.5 us for each wave of tiles to begin and end; the longest block row on one SM; compulsory bytes
        at 80 % of copy bandwidth. Rates fit the H200's times of 2026-11-20 above."""
        down, along = _tiles(p, c)
        if p.on_cpu:  # the interpreter: about a millisecond for each program and step
            return 1e-3 * along * (down + p.nnzb * p.block[0] * p.block[1] / (c.tile_m * c.tile_k))
        if p.dtype == "fp32":
            rate = p.card.tflops["tf32"] * 0.25 if p.tf32 else p.card.tflops["fp32"] * 0.5
        else:
            rate = {128: 614.0, 64: 517.0, 32: 308.0}.get(c.tile_m, 175.0) * p.card.tflops[p.dtype] / 690.0
        rate *= 1e12 * min(1.0, c.tile_n / 64)
        tile = 2.0 * c.tile_m * p.block[1] * c.tile_n
        slices = -(-p.block[0] // c.tile_m)
        busy = max(1, min(p.card.sm_count, down * along)) / p.card.sm_count
        waves = 1.5e-6 * -(-down * along // p.card.sm_count)
        arithmetic = waves + tile * slices * p.nnzb * along / (rate * busy)
        longest = 1.5e-6 + tile * p.row_max / (rate / p.card.sm_count)
        return p.card.launch_seconds + max(arithmetic, longest, p.compulsory_bytes / (0.8 * p.card.bandwidth))

    def prepare(self, p: SpmmProblem, c: Config, a: BSR) -> Work:
        """Block rows, their first stored blocks and lengths, longest first; on A's device, without a sync."""
        lengths = a.pattern.row_lengths
        order = torch.argsort(lengths, descending=True, stable=True)
        starts = a.pattern.indptr[:-1]
        rows = torch.stack((order.int(), starts[order], lengths[order].int()))
        return Work(rows, p.tf32)

    def launch(self, c: Config, work: Work, a: BSR, b: Tensor, out: Tensor) -> None:
        """C = A @ B into `out` [..., M, N] from `b` [..., K, N], strides as they are; no sync, no allocation."""
        m, n = out.shape[-2:]
        if out.numel() == 0:
            return
        row_blocks, subs, column_tiles = a.grid[0], -(-a.block[0] // c.tile_m), -(-n // c.tile_n)
        order = a.pattern.indices if a.order is None else a.order
        options: dict[str, Any] = {"num_warps": c.num_warps, "num_stages": c.num_stages}
        for b3, out3 in _folded(b, out):
            batch = b3.shape[0]
            sb, sc = b3.stride(), out3.stride()
            with torch.cuda.device_of(b3):
                _spmm[(row_blocks * subs * column_tiles * batch,)](
                    a.values, a.pattern.indices, order, work.rows, b3, out3,
                    m, n, a.shape[1], row_blocks, column_tiles, column_tiles * batch,
                    sb[0] if batch > 1 else 0, sb[1], sb[2], sc[0] if batch > 1 else 0, sc[1], sc[2],
                    **_constants(c, a, b3, out3, work.tf32), **options,
                )  # fmt: skip


KERNEL: SpmmKernel = PortableSpmm()
