"""C = A @ B for a BSR A, in plain Triton with pointers: any CUDA GPU from sm_80, and Triton's interpreter.

One program computes one tile of C, tile_m rows of one block row by tile_n columns, and walks the K axis of that block
row, or of a part of it, tile_k per step (`kernels/common/blocks.py`):

    stored blocks of the row   | b0      | b1      | b2      |      times   the matching block rows of B
    steps                      | s0   | s1   | s2   | s3   | s4 |   C tile  epilogue(sum of A tile @ B tile)

One kernel is portable.spmm, portable.spmm_skinny, which cuts block rows into parts (`spmm/portable_skinny.py`),
portable.spmm_fp8, whose sums have scales (`spmm/portable_fp8.py`), and both, which also rounds B
(`spmm/portable_skinny_fp8.py`). Several programs share the list of a block taller than tile_m. Each element is one sum
in fixed order. C is stored in its memory order, in whole vectors along rows or, for a transpose view, along columns.
The epilogue is applied to the sums in float32.

    a row of one part        its program applies the epilogue and writes C
    a row of several parts   each program writes its sum to a slot; the last to arrive adds the slots in the order of
                             the parts, applies the epilogue and writes C

H200, 8192^3 bf16, 12.5 % stored, 2026-11-20, the first config of each table: blocks of 128 276 us (498 TFLOPS
useful), of 64 318 us, of 32 545 us, of 16 975 us. Tiles lower than 64 use mma.sync instead of wgmma; computing C^T =
B^T A^T, which uses wgmma, was 1 % slower for 32 and 4 % for 16. Streaming stores of C, as in these runs, made 128x256
tiles 2 % slower.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch import tensors
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.tensors import SIZE_LIMIT, times
from sparsek.engine.plan.kernel import beside
from sparsek.engine.plan.ring import TRITON_LAUNCHES
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.kernels.common.blocks import blocks_times_dense, constants
from sparsek.products.kernels.common.epilogue import store_finished
from sparsek.products.kernels.common.rounding import column_scales
from sparsek.products.plan.kernels import SpmmKernel
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue


@dataclass(frozen=True)
class Config(KernelConfig):
    """tile_m x tile_n of C per program, tile_k of the joined K axis per step; all powers of two, 16 or more.

    `group`: how many column tiles are walked down all rows together, for reuse in L2. `part`: a row of about so many
    stored blocks goes to one program, a longer one to several; 0: rows stay whole.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    group: int = 2
    part: int = 0

    SIDES = ("tile_m", "tile_n", "tile_k")
    KERNEL = "a portable kernel"


@dataclass(frozen=True, eq=False)
class Work:
    """`rows` int32 [Mb, 3]: block row, first stored block, stored blocks; longest first, ties by position.

    Of rows that are cut into parts int32 [parts, 8]: the same of each part (a block row of -1: padding), its slot, the
    first slot of the row, its number of slots, and its counter. `slots` and `counters`: the most of each that one item
    of a batch needs; 0 if no row is cut. `sizes`: float32 numbers in all slots, and counters, of one call. `rooms` has
    those of every stream. Captured calls take counters from `spare`, zeroed ahead; the graph zeroes those of later
    calls in each replay. `taken` keeps them alive.
    """

    rows: Tensor
    tf32: bool = False
    slots: int = 0
    counters: int = 0
    sizes: tuple[int, int] = (0, 0)
    rooms: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    spare: list[Tensor] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)

    def room(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Slots and zeroed counters, exclusive to this call while it runs on the current stream."""
        if not self.slots:
            return None, None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            arrivals = self.spare.pop() if self.spare else self._zeros(device)
            self.taken.append(arrivals)
            return self._sums(device), arrivals
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if stream not in self.rooms:
            self.rooms[stream] = self._sums(device), self._zeros(device)
        return self.rooms[stream]

    def _sums(self, device: torch.device) -> Tensor:
        return torch.empty(self.sizes[0], dtype=torch.float32, device=device)

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.sizes[1], dtype=torch.int32, device=device)


@triton.jit
def _scaled(
    z, a_scale, row, row_live, b_scale, column, column_live, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr
):
    """The sums z [TM, TN] times the row scales of A and column scales of B; scales per block are already applied."""
    if B_SCALE == "found":
        of_b = b_scale[None, :]
    elif B_SCALE == "column":
        of_b = tl.load(b_scale + column, mask=column_live, other=1.0)[None, :]
    else:
        of_b = tl.load(b_scale)
    if A_SCALE == "row":
        return z * tl.load(a_scale + row, mask=row_live, other=1.0)[:, None] * of_b
    elif A_SCALE == "tensor":
        return z * (tl.load(a_scale) * of_b)
    else:
        return z * of_b


@triton.jit(do_not_specialize=("pieces", "slots", "counters"))
def _spmm(
    values, indices, order, rows, sums, arrivals, b, c, bias, other, a_scale, b_scale,
    alpha, beta, m, n, k, pieces, slots, counters, column_tiles, batch_tiles,
    sb_batch, sb_k, sb_n, sc_batch, sc_m, sc_n, so_batch, so_m, so_n,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, VIEW: tl.constexpr, WIDE: tl.constexpr,
    FIELDS: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr,
    RAGGED_K: tl.constexpr, RAGGED_N: tl.constexpr, PRECISION: tl.constexpr,
    UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT_K: tl.constexpr,
    UNIT_BK: tl.constexpr, UNIT_BN: tl.constexpr, UNIT_CM: tl.constexpr, UNIT_CN: tl.constexpr,
    UNIT_OM: tl.constexpr, UNIT_ON: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr, RN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = (BM + TM - 1) // TM
    m, n, k = times(m, UNIT_M), times(n, UNIT_N), times(k, UNIT_K)
    sb_k, sb_n, sb_batch = times(sb_k, UNIT_BK), times(sb_n, UNIT_BN), times(sb_batch, UNIT_BK * UNIT_BN)
    sc_m, sc_n, sc_batch = times(sc_m, UNIT_CM), times(sc_n, UNIT_CN), times(sc_batch, UNIT_CM * UNIT_CN)
    so_m, so_n, so_batch = times(so_m, UNIT_OM), times(so_n, UNIT_ON), times(so_batch, UNIT_OM * UNIT_ON)

    # Groups of GROUP column tiles (of all batches) outermost, then rows, then the columns of the group. The slices of a
    # block row run concurrently where a group is one tile: they read the same rows of B.
    pid = tl.program_id(0)
    in_group = pieces * SUBS * GROUP
    tile = pid // in_group * GROUP
    within = pid % in_group
    if GROUP > 1:
        width = min(batch_tiles - tile, GROUP)
        tile += within % width
        within = within // width
    batch = (tile // column_tiles).to(tl.int64)
    piece = rows + within // SUBS * FIELDS
    sub = within % SUBS
    row = tl.load(piece)
    start = tl.load(piece + 1)
    length = tl.load(piece + 2)
    if SPLIT:
        if row < 0:
            return

    i = sub * TM + tl.arange(0, TM)  # row inside the block
    row_live = (i < BM) & (row * BM + i < m)
    col = tile % column_tiles * TN + tl.arange(0, TN)
    b += batch * sb_batch
    found = None
    if B_SCALE == "found":
        found = column_scales(b, col, n, k, sb_k, sb_n, WIDE, RN, STEP)
        b_scale = found
    z = blocks_times_dense(
        values, indices, order, start, length, i, col, b, n, k, sb_k, sb_n, a_scale,
        BM, BK, TM, TN, TK, SPAN, VIEW, WIDE, RAGGED_K, RAGGED_N, PRECISION, A_SCALE, found,
    )  # fmt: skip
    if A_SCALE != "":
        z = _scaled(z, a_scale, row * BM + i, row_live, b_scale, batch * n + col, col < n, A_SCALE, B_SCALE)

    last = True
    if SPLIT:
        last = row >= 0
        count = tl.load(piece + 5)
        if count > 1:
            # A slot is [N, TM] per slice: for a single column only that column is moved.
            local = col[None, :] * TM + tl.arange(0, TM)[:, None]
            kept = (col < n)[None, :] & (i < BM)[:, None]
            first = (batch * slots + tl.load(piece + 4)) * SUBS + sub
            mine = (batch * slots + tl.load(piece + 3)) * SUBS + sub
            tl.store(sums + mine * (TM * TN) + local, z, mask=kept)
            arrival = arrivals + (batch * counters + tl.load(piece + 6)) * SUBS + sub
            tl.debug_barrier()  # every thread's stores come before the one thread's release
            arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
            last = arrived == count - 1
            if last:
                tl.store(arrival, 0)
                z = tl.zeros((TM, TN), dtype=tl.float32)
                for q in range(0, count, AT_ONCE):
                    for s in tl.static_range(AT_ONCE):  # independent loads
                        slot = sums + (first + (q + s) * SUBS) * (TM * TN)
                        z += tl.load(
                            slot + local, mask=kept & (q + s < count), other=0.0, cache_modifier=".cg"
                        )
    if last:
        store_finished(
            z, c, row * BM, i, row_live, col, col < n, batch, sc_batch, sc_m, sc_n,
            alpha, bias, other, so_batch, so_m, so_n, beta, WIDE, SCALED, ACTIVATION, COMBINE,
        )  # fmt: skip


def _constants(c: Config, work: Work, a: Any, b: Tensor, out: Tensor, epilogue: Epilogue, scales: Any) -> Any:
    """Every constexpr of `_spmm` for one launch. `b` [batch, K, N], `out` and `epilogue.other` [batch, M, N].

    `scales`: what of A and of B shares one; "found" for a B that the kernel rounds.
    """
    of_a, of_b = scales
    # At once of a B that is rounded: 32 KB of up to RN of its columns.
    rows = 1 << (b.shape[2] - 1).bit_length() if of_b == "found" else 1
    step = max(16, min(32768 // (rows * b.element_size()), 1 << (b.shape[1] - 1).bit_length()))
    return {
        "TM": c.tile_m, "TN": c.tile_n, "TK": c.tile_k, "GROUP": c.group, "RAGGED_N": b.shape[2] % c.tile_n != 0,
        "FIELDS": work.rows.shape[1], "SPLIT": work.slots > 0, "AT_ONCE": max(1, min(4, 8192 // (c.tile_m * c.tile_n))),
        "A_SCALE": of_a, "B_SCALE": "column" if of_b == "row" else of_b,
        "RN": rows, "STEP": step if of_b == "found" else 1,
        **constants(c.tile_k, a, b, out, work.tf32, epilogue, SIZE_LIMIT),
    }  # fmt: skip


def start(c: Config, work: Work, a: Any, b: Any, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
    """Computes C into `out` [..., M, N] from `b` [..., K, N], strides as they are; no sync. Allocates slots of cut rows
    at a stream's first call.
    """
    if out.numel() == 0:
        return
    matrix, scales = a, ("", "")
    if isinstance(a, Quantized):
        matrix, scales = a.matrix, (a.kind, b.kind if isinstance(b, QuantizedTensor) else "found")
    m, n = out.shape[-2:]
    pieces, subs, column_tiles = work.rows.shape[0], -(-matrix.block[0] // c.tile_m), -(-n // c.tile_n)
    order = matrix.pattern.indices if matrix.order is None else matrix.order
    options: dict[str, Any] = {"num_warps": c.num_warps, "num_stages": c.num_stages}
    with torch.cuda.device_of(out):
        room = work.room(out.device)
        for b3, b_scale, out3, other in _folded(b, out, epilogue.other):
            whole, batch = replace(epilogue, other=other), b3.shape[0]
            launch(
                _spmm, (pieces * subs * column_tiles * batch,),
                matrix.values, matrix.pattern.indices, order, work.rows, *room, b3, out3, epilogue.bias, other,
                a.scale if scales[0] else None, b_scale, float(epilogue.alpha), float(epilogue.beta),
                m, n, matrix.shape[1], pieces, work.slots, work.counters, column_tiles, column_tiles * batch,
                *tensors.strides(b3), *tensors.strides(out3), *tensors.strides(other),
                **_constants(c, work, matrix, b3, out3, whole, scales), **options,
            )  # fmt: skip


def _folded(b: Any, out: Tensor, other: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """B [batch, K, N], its scales, C and the epilogue's matrix [batch, M, N]: one tuple if all collapse."""
    if not isinstance(b, QuantizedTensor):
        for b3, out3, other3 in tensors.folded(b, out, other):
            yield b3, None, out3, other3
        return
    by_row = b.kind == "row"
    scale = b.scale.unsqueeze(-1) if by_row else b.values[..., :1, :1]
    for values, of_b, out3, other3 in tensors.folded(b.values, scale, out, other):
        yield values.mT, of_b if by_row else b.scale, out3, other3


def fitted(p: SpmmProblem, table: Iterable[Config], deepest: int) -> Iterator[Config]:
    """The configs of a table, limited by N, by a depth along K and by shared memory; each once."""
    widest = max(16, 1 << (p.n - 1).bit_length())
    seen = set()
    for c in table:
        c = replace(c, tile_n=min(c.tile_n, widest), tile_k=min(c.tile_k, deepest))
        if p.combine and c.tile_m * c.tile_n > 64 * 32 * c.num_warps:  # two tiles of C at once spill
            c = replace(c, num_warps=2 * c.num_warps)
        if p.n <= 64 and not p.a.quantized:  # 16 bytes of the smaller tile for each thread to copy
            copies = c.tile_k * min(c.tile_m, c.tile_n) * dtypes.itemsize(p.dtype) // 16
            c = replace(c, num_warps=max(1, min(c.num_warps, copies // 32)))
        c = replace(c, num_stages=tensors.stages(p, c.num_stages, c.tile_k * (c.tile_m + c.tile_n)))
        if c not in seen:
            seen.add(c)
            yield c


def tiles(p: SpmmProblem, c: Config) -> tuple[int, int]:
    """Number of tiles of C down the rows, and along the columns of all batches."""
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
TF32 = (Config(64, 128, 32, 4, 3, 4), Config(128, 128, 32, 8, 3, 4), Config(32, 128, 32, 4, 3, 4),
        Config(16, 128, 32, 4, 3, 4))
IEEE = (Config(64, 64, 16, 4, 3, 4), Config(64, 64, 32, 8, 3, 4), Config(32, 64, 32, 4, 3, 4),
        Config(16, 64, 32, 4, 3, 4))
# fmt: on


def _table(p: SpmmProblem) -> tuple[Config, ...]:
    tallest = 1 << (p.block[0] - 1).bit_length()
    if p.dtype == "fp32":
        table = TF32 if p.tf32 else IEEE
        return tuple(c for c in table if c.tile_m <= tallest)
    table = HOPPER if p.on_cpu or p.card.capability[0] == 9 else AMPERE
    return table[tensors.tile_side(p.block[0], 256)]


class PortableSpmm:
    """Plain Triton twin of hopper.spmm."""

    name = "portable.spmm"
    storage = "bsr"
    lowest = 32  # rows of tiles that become lower to be more

    def unable(self, p: SpmmProblem) -> list[str]:
        """Reasons from the device and the dtypes."""
        return tensors.why_not(p)

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless(self.storage):
            return foreign
        why = self.unable(p)
        if max(p.m, p.k, p.n) > SIZE_LIMIT:
            why.append(f"M, K and N must be at most {SIZE_LIMIT}; got {p.m}, {p.k}, {p.n}")
        if not why and math.prod(tiles(p, self.default(p))) > SIZE_LIMIT:
            why.append(f"more than {SIZE_LIMIT} tiles of C")
        return why

    def default(self, p: SpmmProblem) -> Config:
        """The first of `configs`, with smaller tiles while there are fewer of them than SMs."""
        c = next(iter(self.configs(p)))
        while c.tile_n > 64 and math.prod(tiles(p, c)) < p.card.sm_count:
            c = replace(c, tile_n=c.tile_n // 2, num_warps=4)
        while c.tile_m > self.lowest and math.prod(tiles(p, c)) < p.card.sm_count:
            c = replace(c, tile_m=c.tile_m // 2, num_warps=4)
        return c

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first: the block's table, limited by N and by shared memory."""
        deepest = max(32, 1 << (max(p.row_max * p.block[1], 1) - 1).bit_length())
        return fitted(p, _table(p), deepest)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Launch + the longer of two: arithmetic at a rate per tile_m (masked rows, masked columns and idle SMs
        count), with 1.5 us to begin and end each wave of tiles; the longest block row in one program, which shares its
        SM with two others while there are any (Zipf rows in blocks of 64 and 128, 39 to 242 us: within 12 %, H200,
        2026-11-30). At least the compulsory bytes at 80 % of copy bandwidth. Rates fit the H200 times of 2026-11-20
        above. For N up to 64, the range of portable.spmm_skinny, a guess: 60 % of that bandwidth, and 1.5 us until the
        first bytes arrive.
        """
        down, along = tiles(p, c)
        if p.on_cpu:  # the interpreter: about a millisecond per program and step
            return 1e-3 * along * (down + p.nnzb * p.block[0] * p.block[1] / (c.tile_m * c.tile_k))
        if p.dtype == "fp32":
            rate = p.card.sustained("tf32") * 0.25 if p.tf32 else p.card.sustained("fp32") * 0.5
        else:
            rate = {128: 614.0, 64: 517.0, 32: 308.0}.get(c.tile_m, 175.0) * p.card.sustained(p.dtype) / 690.0
        rate *= 1e12 * min(1.0, c.tile_n / 128) ** 0.75
        tile = 2.0 * c.tile_m * p.block[1] * c.tile_n
        slices = -(-p.block[0] // c.tile_m)
        busy = max(1, min(p.card.sm_count, down * along)) / p.card.sm_count
        waves = 1.2e-6 * -(-down * along // p.card.sm_count)
        spread = tile * slices * p.nnzb * along / (rate * busy)
        alone = tile * p.row_long / (rate / p.card.sm_count)
        longest = 1.2e-6 + min(3 * alone, 1.2 * (alone + spread))
        first, share = (1.5e-6, 0.6) if p.n <= 64 else (0.0, 0.8)
        moved = first + p.compulsory_bytes / (share * p.card.bandwidth)
        return TRITON_LAUNCHES * p.card.launch_seconds + beside(max(waves + spread, longest), moved)

    def prepare(self, p: SpmmProblem, c: Config, a: Any) -> Work:
        """Block rows, their first stored blocks and lengths, longest first; on A's device, without a sync."""
        matrix = a.matrix if isinstance(a, Quantized) else a
        return Work(matrix.pattern.longest_first, p.tf32)

    def launch(self, c: Config, work: Work, a: Any, b: Any, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
        start(c, work, a, b, out, epilogue)


KERNEL: SpmmKernel = PortableSpmm()
