"""C = A @ B for a BSR A and up to 64 columns of B, in plain Triton: reads A once, at the card's bandwidth.

    block row of A, cut into parts of about `part` stored blocks     B        one program: tile_m rows of one part

      | b0 b1 b2 b3 | b4 b5 b6 b7 |         x                      [K, N]  =  sum over the part, float32 [tile_m, N]
           part 0        part 1

    a row of one part        its program applies the epilogue and writes C
    a row of several parts   each program writes its sum to a slot; the last to arrive adds the slots in the order of
                             the parts, applies the epilogue and writes C

Bytes of A dominate, so the bytes in flight count: an SM needs more than 32 KB in flight to draw its share of 4.28
TB/s. The programs that share an SM (limited by shared memory), each with a ring of num_stages steps, hold about 150
KB together. `part` is chosen so that all programs fit on the card at once. Splitting rows costs a write and a read of
float32 sums, which stay in L2, and one round trip between programs.

The program that arrives last differs from run to run, but its result does not: the bits repeat. Counters return to
zero at the end of every launch; a launch that a CUDA error aborts invalidates the context anyway. Calls of one plan
on two streams may overlap, so each stream has slots and counters of its own, made at its first call. So has each call
that a CUDA graph captures, and graphs may replay concurrently.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.kernels.lang import tensors
from sparsek.kernels.lang.blocks import blocks_times_dense, constants
from sparsek.kernels.lang.epilogue import store_finished
from sparsek.kernels.lang.launch import launch
from sparsek.kernels.lang.tensors import SIZE_LIMIT, times
from sparsek.matrix.bsr import BSR
from sparsek.plan.kernel import beside
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.plan.ring import DRIVER_LAUNCHES
from sparsek.reference.epilogue import PLAIN, Epilogue

WIDEST = 64
# Counters for this many captured calls are zeroed ahead; the graph zeroes those of later calls, in each replay.
SPARE = 16


@dataclass(frozen=True)
class Config:
    """tile_m rows of a block row per program, tile_k of the joined K axis per step; powers of two, 16 or more.

    `part`: a row of about so many stored blocks goes to one program, a longer one to several; 0: rows stay whole.
    """

    tile_m: int
    tile_k: int
    num_warps: int
    num_stages: int
    part: int = 0

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_k"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise InvalidInput(
                    f"{name} of portable.spmm_skinny must be a power of two from 16 up, not {size}"
                )


@dataclass(frozen=True, eq=False)
class Work:
    """`parts` int32 [parts, FIELDS]: block row (-1: padding), first stored block, stored blocks, slot, first slot of
    the row, slots of the row, counter of the row. Longest first.

    `slots` and `counters`: the most of each that one batch item needs; 0 if no row is split. `numbers` and
    `arrivals`: float32 numbers in all slots, and counters, of one call. `rooms` holds them for every stream. Captured
    calls take counters from `spare`; `taken` keeps those alive.
    """

    parts: Tensor
    slots: int
    counters: int
    numbers: int
    arrivals: int
    tf32: bool
    rooms: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    spare: list[Tensor] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)

    def room(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots and zeroed counters, exclusive to this call while it runs on the current stream."""
        if not self.slots:
            return self.parts, self.parts
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            arrivals = self.spare.pop() if self.spare else self._zeros(device)
            self.taken.append(arrivals)
            return self._sums(device), arrivals
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if stream not in self.rooms:
            self.rooms[stream] = self._sums(device), self._zeros(device)
        return self.rooms[stream]

    def _sums(self, device: torch.device) -> Tensor:
        return torch.empty(self.numbers, dtype=torch.float32, device=device)

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.arrivals, dtype=torch.int32, device=device)


FIELDS = 8


@triton.jit(do_not_specialize=("pieces", "slots", "counters"))
def _skinny(
    values, indices, order, parts, sums, arrivals, b, c, bias, other,
    alpha, beta, m, n, k, pieces, slots, counters,
    sb_batch, sb_k, sb_n, sc_batch, sc_m, sc_n, so_batch, so_m, so_n,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    SPAN: tl.constexpr, VIEW: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr,
    RAGGED_K: tl.constexpr, RAGGED_N: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
    UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, UNIT_K: tl.constexpr,
    UNIT_BK: tl.constexpr, UNIT_BN: tl.constexpr, UNIT_CM: tl.constexpr, UNIT_CN: tl.constexpr,
    UNIT_OM: tl.constexpr, UNIT_ON: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = (BM + TM - 1) // TM
    m, n, k = times(m, UNIT_M), times(n, UNIT_N), times(k, UNIT_K)
    sb_k, sb_n, sb_batch = times(sb_k, UNIT_BK), times(sb_n, UNIT_BN), times(sb_batch, UNIT_BK * UNIT_BN)
    sc_m, sc_n, sc_batch = times(sc_m, UNIT_CM), times(sc_n, UNIT_CN), times(sc_batch, UNIT_CM * UNIT_CN)
    so_m, so_n, so_batch = times(so_m, UNIT_OM), times(so_n, UNIT_ON), times(so_batch, UNIT_OM * UNIT_ON)

    # The slices of a part run concurrently: they read the same rows of B.
    pid = tl.program_id(0)
    sub = pid % SUBS
    batch = (pid // SUBS // pieces).to(tl.int64)
    part = parts + pid // SUBS % pieces * FIELDS
    row = tl.load(part)
    start = tl.load(part + 1)
    length = tl.load(part + 2)
    if row < 0:
        return

    i = sub * TM + tl.arange(0, TM)  # row inside the block
    col = tl.arange(0, TN)
    z = blocks_times_dense(
        values, indices, order, start, length, i, col, b + batch * sb_batch, n, k, sb_k, sb_n,
        BM, BK, TM, TN, TK, SPAN, VIEW, WIDE, RAGGED_K, RAGGED_N, PRECISION,
    )  # fmt: skip

    last = row >= 0
    if SPLIT:
        count = tl.load(part + 5)
        if count > 1:
            # A slot is [N, TM] per slice: for a single column only that column is moved.
            local = col[None, :] * TM + tl.arange(0, TM)[:, None]
            kept = (col < n)[None, :] & (i < BM)[:, None]
            first = (batch * slots + tl.load(part + 4)) * SUBS + sub
            mine = (batch * slots + tl.load(part + 3)) * SUBS + sub
            tl.store(sums + mine * (TM * TN) + local, z, mask=kept)
            arrival = arrivals + (batch * counters + tl.load(part + 6)) * SUBS + sub
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
            z, c, row * BM, i, (i < BM) & (row * BM + i < m), col, col < n, batch, sc_batch, sc_m, sc_n,
            alpha, bias, other, so_batch, so_m, so_n, beta, WIDE, SCALED, ACTIVATION, COMBINE,
        )  # fmt: skip


def _tile_n(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _constants(c: Config, work: Work, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue) -> dict[str, Any]:
    """Every constexpr of `_skinny` for one launch. `b` [batch, K, N], `out` and `epilogue.other` [batch, M, N]."""
    tile_n = _tile_n(b.shape[2])
    return {
        "TM": c.tile_m, "TN": tile_n, "TK": c.tile_k, "RAGGED_N": b.shape[2] != tile_n, "SPLIT": work.slots > 0,
        "AT_ONCE": max(1, min(4, 8192 // (c.tile_m * tile_n))), "FIELDS": FIELDS,
        **constants(c.tile_k, a, b, out, work.tf32, epilogue, SIZE_LIMIT),
    }  # fmt: skip


# Tile_m, tile_k, warps, stages; best guess first, by the padded N.
# fmt: off
LOW: dict[int, tuple[Config, ...]] = {
    16: (Config(64, 128, 4, 5), Config(64, 128, 4, 4), Config(32, 128, 4, 4), Config(64, 64, 4, 8),
         Config(32, 128, 4, 6), Config(128, 128, 4, 3), Config(128, 64, 4, 6), Config(64, 128, 4, 3),
         Config(16, 128, 2, 6), Config(32, 256, 4, 3), Config(16, 256, 4, 4)),
    32: (Config(64, 128, 4, 4), Config(64, 64, 4, 6), Config(32, 128, 4, 4), Config(128, 128, 4, 3),
         Config(128, 64, 4, 6), Config(64, 128, 4, 3), Config(16, 128, 2, 4)),
    64: (Config(64, 128, 4, 3), Config(64, 64, 4, 6), Config(128, 128, 8, 3), Config(128, 64, 4, 6),
         Config(128, 64, 8, 6), Config(64, 64, 4, 4), Config(32, 128, 4, 3), Config(32, 64, 4, 6),
         Config(16, 64, 2, 6)),
}
FULL = (Config(64, 32, 4, 6), Config(32, 64, 4, 4), Config(32, 32, 4, 6), Config(64, 64, 4, 3),
        Config(16, 64, 2, 4))
# fmt: on


def _stage_bytes(p: SpmmProblem, c: Config) -> int:
    return c.tile_k * (c.tile_m + _tile_n(p.n)) * dtypes.itemsize(p.dtype)


def _resident(p: SpmmProblem, c: Config) -> int:
    """Programs that an SM holds at once."""
    if p.on_cpu:
        return 1
    return max(
        1, min(2048 // (32 * c.num_warps), 8, p.card.smem_bytes // (c.num_stages * _stage_bytes(p, c) + 1024))
    )


def _subs(p: SpmmProblem, c: Config) -> int:
    return -(-p.block[0] // c.tile_m)


def _most_parts(length: int, part: int) -> int:
    """Number of parts of a row of `length` blocks: the nearest number of parts of `part` blocks, at least one."""
    return max(1, (length + part // 2) // part) if part else 1


def _counts(p: SpmmProblem, c: Config) -> tuple[int, int]:
    """Upper bounds from `p` alone, for one batch item: the parts, and those of rows in several parts."""
    rows = p.grid[0]
    if _most_parts(p.row_max, c.part) == 1:
        return rows, 0
    parts = min(p.nnzb // c.part + rows, rows * _most_parts(p.row_max, c.part))
    return parts, min(parts, 4 * p.nnzb // (3 * c.part))


def _parts(a: BSR, most: int, part: int) -> Tensor:
    """`Work.parts` with `most` entries: rows split evenly, longest parts first, ties by position, padding last."""
    rows = a.grid[0]
    table = torch.zeros((most, FIELDS), dtype=torch.int64, device=a.device)
    if rows == 0:
        return table.int()
    lengths = a.pattern.row_lengths.long()
    count = ((lengths + part // 2) // part).clamp(min=1) if part else torch.ones_like(lengths)
    ends = count.cumsum(0)
    cut = count > 1
    slot_ends, cut_ends = (count * cut).cumsum(0), cut.cumsum(0)
    place = torch.arange(most, device=a.device)
    found = torch.searchsorted(ends, place, right=True)
    row = found.clamp(max=rows - 1)
    inside = place - (ends - count)[row]
    begin, end = (which * lengths[row] // count[row] for which in (inside, inside + 1))
    first_slot = (slot_ends - count)[row]
    columns = (
        row,
        a.pattern.indptr[row] + begin,
        end - begin,
        first_slot + inside,
        first_slot,
        count[row],
        cut_ends[row] - 1,
    )
    for at_column, column in enumerate(columns):
        table[:, at_column] = column
    padding = found >= rows
    table[:, 0].masked_fill_(padding, -1)
    size = (end - begin).masked_fill(padding, -1)
    return table[torch.argsort(size, descending=True, stable=True)].int()


class PortableSpmmSkinny:
    """Up to 64 columns of B."""

    name = "portable.spmm_skinny"

    def why_not(self, p: SpmmProblem) -> list[str]:
        """Reasons why `p` cannot run here."""
        if foreign := p.a.unless("bsr"):
            return foreign
        why = tensors.why_not(p)
        if p.n > WIDEST:
            why.append(f"multiplies up to {WIDEST} columns of B; got {p.n}")
        if max(p.m, p.k) > SIZE_LIMIT:
            why.append(f"M and K must be at most {SIZE_LIMIT}; got {p.m}, {p.k}")
        if not why:
            c = self.default(p)
            if _counts(p, c)[0] * _subs(p, c) * p.batch > SIZE_LIMIT:
                why.append(f"more than {SIZE_LIMIT} programs")
        return why

    def default(self, p: SpmmProblem) -> Config:
        """The first of `configs` with whole rows, if rows are even and fill half of the SMs; else the first.

        Few programs with whole rows were faster than four times as many with rows in parts (docs/notes/portable.md).
        """
        found = list(self.configs(p))
        mean = p.nnzb / max(1, p.grid[0])
        whole = [c for c in found if c.part == 0]
        even = p.row_max <= 4 * mean
        if whole and even and 2 * p.grid[0] * _subs(p, whole[0]) * p.batch >= p.card.sm_count - 4:
            return whole[0]
        return found[0]

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Tiles of the table for N, limited by the block, the rows and shared memory. Each with parts for half a
        wave, one and two waves of programs, and with whole rows.
        """
        table = FULL if p.dtype == "fp32" else LOW[_tile_n(p.n)]
        tallest = 1 << (p.block[0] - 1).bit_length()
        deepest = max(32, 1 << (max(p.row_max * p.block[1], 1) - 1).bit_length())
        seen = set()
        for entry in table:
            c = replace(entry, tile_m=min(entry.tile_m, tallest), tile_k=min(entry.tile_k, deepest))
            c = replace(c, num_stages=tensors.stages(p, c.num_stages, c.tile_k * (c.tile_m + _tile_n(p.n))))
            programs = p.card.sm_count * _resident(p, c)
            for wave in (1.0, 0.5, 2.0, 0.0):
                part = int(-(-p.nnzb * _subs(p, c) * p.batch // (programs * wave))) if wave else 0
                part = max(part, -(-c.tile_k // p.block[1])) if part else 0
                if _most_parts(p.row_max, part) == 1:
                    part = 0
                config = replace(c, part=part)
                if config not in seen:
                    seen.add(config)
                    yield config

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Launch + two beside each other: the longer of compulsory bytes at 92 % of copy bandwidth and, from L2, A, B
        for each tile of A, and sums of parts; and the longest part at 2.7 times one SM's share of the bandwidth, which
        is what one program has in flight. Plus 1 us for each further wave of programs and for combining parts. Fitted
        to 20 rows of op planner (H200, 2026-11-23).
        """
        parts, slots = _counts(p, c)
        tiles = p.nnzb * _subs(p, c) * p.batch
        if p.on_cpu:  # the interpreter: about a millisecond per program and step
            return 1e-3 * (parts * _subs(p, c) * p.batch + tiles * p.block[1] / c.tile_k)
        size, tile_n = dtypes.itemsize(p.dtype), _tile_n(p.n)
        block = p.block[1] * (c.tile_m + min(p.n, tile_n)) * size
        sums = 8.0 * slots * _subs(p, c) * p.batch * c.tile_m * p.n
        programs = parts * _subs(p, c) * p.batch
        waves = -(-programs // (p.card.sm_count * _resident(p, c)))
        longest = (
            -(-p.row_max // _most_parts(p.row_max, c.part)) * block / (p.card.bandwidth / p.card.sm_count)
        )
        moved = max(
            p.compulsory_bytes / (0.92 * p.card.bandwidth), (tiles * block + sums) / (0.75 * p.card.fabric)
        )
        late = 1e-6 * (waves - 1 + (slots > 0))
        return DRIVER_LAUNCHES * p.card.launch_seconds + beside(moved, longest / 2.7) + late

    def prepare(self, p: SpmmProblem, c: Config, a: BSR) -> Work:
        """The parts of all block rows and the slots of split rows; on A's device, without a sync."""
        most, slots = _counts(p, c)
        counters = slots // 2
        tiles = _subs(p, c) * p.batch
        numbers = slots * tiles * c.tile_m * _tile_n(p.n)
        spare = torch.zeros((SPARE if slots else 0, counters * tiles), dtype=torch.int32, device=a.device)
        parts = _parts(a, most, c.part if slots else 0)
        return Work(parts, slots, counters, numbers, counters * tiles, p.tf32, spare=list(spare))

    def launch(
        self, c: Config, work: Work, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        """Computes C into `out` [..., M, N] from `b` [..., K, N], strides as they are; no sync.

        Allocates at a stream's first call if rows are split.
        """
        if out.numel() == 0:
            return
        m, n = out.shape[-2:]
        pieces, subs = work.parts.shape[0], -(-a.block[0] // c.tile_m)
        order = a.pattern.indices if a.order is None else a.order
        options: dict[str, Any] = {"num_warps": c.num_warps, "num_stages": c.num_stages}
        with torch.cuda.device_of(b):
            sums, arrivals = work.room(b.device)
            for b3, out3, other in tensors.folded(b, out, epilogue.other):
                whole = replace(epilogue, other=other)
                launch(
                    _skinny, (pieces * subs * b3.shape[0],),
                    a.values, a.pattern.indices, order, work.parts, sums, arrivals, b3, out3, epilogue.bias, other,
                    float(epilogue.alpha), float(epilogue.beta), m, n, a.shape[1], pieces, work.slots, work.counters,
                    *tensors.strides(b3), *tensors.strides(out3), *tensors.strides(other),
                    **_constants(c, work, a, b3, out3, whole), **options,
                )  # fmt: skip


KERNEL: SpmmKernel = PortableSpmmSkinny()
