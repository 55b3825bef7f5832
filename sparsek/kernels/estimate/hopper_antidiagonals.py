"""XAttention's estimate on Hopper, in Gluon: the product of `antidiagonals.py` with a producer warp and two warpgroups.

    load: the producer warp            ring in shared memory         consume: 2 warpgroups
    per step: TMA Q' [128, width],  -> [slot 0][slot 1] .. [slot 3] -> wgmma 64 x 256 each, float32 in registers
              K' [256, width]                                          end of a key tile: softmax, sums by block

Softmax and sums need no tensor core. So warpgroup 1 begins a key tile when warpgroup 0 has done `lag` steps of it: one
multiplies while the other is at the end of its tile. A warpgroup keeps its own 64 rows throughout, so the two share
nothing but the ring: the column sums of a row tile wait in memory as in `antidiagonals.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek.kernels.lang.gluon import tma_load

SOURCE = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
NUMBERS = (
    "factor", "q_len", "k_groups", "q_offset", "q_tiles", "tiles_m", "blocks_n", "units", "slots",
    "heads", "shared_by",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """`cols` rows of K' in a tile, `width` elements of a row in a step, `stages` of the ring, `lag` in steps. The rest
    is given by the call: `steps` of a tile, `groups` of a block of queries and of keys, bytes of an element.
    """

    cols: int = 256
    stages: int = 4
    lag: int = 2
    width: int = 128
    steps: int = 16
    stride: int = 16
    groups: tuple[int, int] = (8, 8)
    causal: bool = True
    scaled: bool = True
    biased: bool = False
    itemsize: int = 1

    @property
    def stage_bytes(self) -> int:
        return (128 + self.cols) * self.width * self.itemsize

    @property
    def stored(self) -> gl.DistributedLinearLayout:
        """The layout of sums [64, blocks of a tile] where a thread has adjacent blocks, and four threads each row."""
        blocks = self.cols // self.groups[1]
        across = [[0, 1 << bit] for bit in range(blocks.bit_length() - 1)]
        lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout([*across, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, blocks])

    @property
    def waits(self) -> bool:
        """Whether warpgroup 1 lags. Its wait for a tile must come before warpgroup 0 arrives for the next one."""
        return 0 < self.lag < self.steps and self.steps + self.lag > self.stages


@gluon.jit
def at_turn(T: gl.constexpr, turn, sizes):
    """Head, row tile, whether there is one, and key tiles of a turn; first rows of Q' and K'."""
    q_len, k_groups, q_offset, q_tiles, units, slots, heads, shared_by = sizes
    TURNS: gl.constexpr = 2 if T.causal else 1
    per_head = (q_tiles + TURNS - 1) // TURNS
    unit = gl.program_id(0) + turn // TURNS * gl.num_programs(0)
    head = unit // per_head
    tile = unit % per_head
    last = gl.minimum((tile + 1) * 128 * T.stride, q_len) - 1
    live = tile >= 0
    limit = k_groups
    if T.causal:
        other = q_tiles - 1 - tile
        live = (turn % 2 == 0) | (other != tile)
        tile = gl.where(turn % 2 == 0, other, tile)
        last = q_offset + gl.minimum((tile + 1) * 128 * T.stride, q_len) - 1
        limit = gl.minimum(k_groups, gl.where(last < 0, 0, last // T.stride + 1))
    count = gl.where(live, (limit + T.cols - 1) // T.cols, 0)
    kv_head = head // heads * (heads // shared_by) + head % heads // shared_by
    return head, tile, live, count, (head * q_tiles + tile) * 128, kv_head * slots * T.cols


@gluon.jit
def turns_of(T: gl.constexpr, units):
    TURNS: gl.constexpr = 2 if T.causal else 1
    return (units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * TURNS


@gluon.jit
def load(T: gl.constexpr, q_desc, k_desc, sizes, ring):
    """Producer warp: the operands of every step."""
    a_s, b_s, full, empty, lead = ring
    slot = 0
    phase = 1  # waiting on the phase before a barrier's first returns at once, so every slot starts empty
    for turn in range(turns_of(T, sizes[4])):
        head, tile, live, count, q_first, k_first = at_turn(T, turn, sizes)
        for step in range(count * T.steps):
            at = step % T.steps * T.width
            mbarrier.wait(empty.index(slot), phase)  # until both warpgroups have read the slot
            landed = full.index(slot)
            mbarrier.expect(landed, T.stage_bytes)
            tma_load(q_desc, [q_first, at], landed, a_s.index(slot))
            tma_load(k_desc, [k_first + step // T.steps * T.cols, at], landed, b_s.index(slot))
            slot += 1
            if slot == T.stages:
                slot = 0
                phase ^= 1


@gluon.jit
def consume(T: gl.constexpr, WG: gl.constexpr, scales, memory, out, factor, shape, sizes, ring):
    """Warpgroup WG: rows 64 WG to 64 WG + 63 of every row tile."""
    q_scale, k_scale, k_bias = scales
    parts, tops = memory
    tiles_m, blocks_n = shape
    q_len, k_groups, q_offset, q_tiles, units, slots, heads, shared_by = sizes
    a_s, b_s, full, empty, lead = ring
    COLS: gl.constexpr = T.cols
    STAGES: gl.constexpr = T.stages
    RQ: gl.constexpr = T.groups[0]
    RK: gl.constexpr = T.groups[1]
    PER: gl.constexpr = COLS // RK
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32 // T.itemsize])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    FOLD: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [4, 1], [1, 0])
    FOLDED: gl.constexpr = 64
    r = gl.arange(0, 64, ROW)
    own = gl.arange(0, 64, gl.SliceLayout(1, FOLD))
    width = slots * PER
    parts += (gl.program_id(0) * 2 + WG).to(gl.int64) * 64 * width
    tops += (gl.program_id(0) * 2 + WG).to(gl.int64) * 64 * slots
    slot = 0
    phase = 0
    lead_phase = 0
    for turn in range(turns_of(T, units)):
        head, tile, live, count, q_first, k_first = at_turn(T, turn, sizes)
        row = tile * 128 + WG * 64 + r
        limit = gl.where(row * T.stride < q_len, k_groups, 0)
        if T.causal:
            last = q_offset + gl.minimum((row + 1) * T.stride, q_len) - 1
            limit = gl.minimum(limit, gl.where(last < 0, 0, last // T.stride + 1))
        whole = gl.min(gl.where(row * T.stride < q_len, limit, k_groups), axis=0)
        scale = gl.full((64,), 1.0, gl.float32, ROW) * factor
        if T.scaled:
            scale = scale * gl.load(q_scale + q_first + WG * 64 + r)
        total = gl.zeros((64,), gl.float32, ROW)
        top = gl.full((64,), float("-inf"), gl.float32, ROW)
        for step in range(count):
            acc = warpgroup_mma_init(gl.zeros((64, COLS), gl.float32, LAYOUT))
            if T.waits:
                if WG == 1:
                    mbarrier.wait(lead, lead_phase)  # until warpgroup 0 is `lag` steps ahead
                    lead_phase ^= 1
            for inner in range(T.steps):
                mbarrier.wait(full.index(slot), phase)  # until TMA has written the slot
                a = a_s.index(slot).slice(64 * WG, 64)
                acc = warpgroup_mma(a, b_s.index(slot).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))  # the previous step has been read
                acc = warpgroup_mma_init(acc)
                if inner > 0:
                    mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
                if T.waits:
                    if WG == 0:
                        if inner == T.lag:
                            mbarrier.arrive(lead, count=1)
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
            s = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
            column = step * COLS + gl.arange(0, COLS, COLUMN)
            if T.scaled:
                s = s * gl.expand_dims(gl.load(k_scale + k_first + column), 0)
            if T.biased:
                s = s + gl.expand_dims(gl.load(gl.multiple_of(k_bias + k_first + column, 16)), 0)
            if (step + 1) * COLS > whole:
                s = gl.where(gl.expand_dims(column, 0) < gl.expand_dims(limit, 1), s, float("-inf"))
            now = gl.maximum(top, gl.max(s, axis=1) * scale)
            base = gl.where(now == float("-inf"), 0.0, now)
            p = gl.exp2(s * gl.expand_dims(scale, 1) - gl.expand_dims(base, 1))
            part = gl.sum(p.reshape((64, PER, RK)), axis=2)
            total = total * gl.exp2(top - base) + gl.convert_layout(gl.sum(part, axis=1), ROW)
            top = now
            if RK >= 8:
                part = gl.convert_layout(
                    part, T.stored
                )  # the same threads: only registers change their order
            PART: gl.constexpr = part.type.layout
            block = step * PER + gl.arange(0, PER, gl.SliceLayout(0, PART))
            here = gl.arange(0, 64, gl.SliceLayout(1, PART)) * width
            to = parts + gl.expand_dims(here, 1) + gl.expand_dims(block, 0)
            gl.store(gl.multiple_of(to, (16, 16)), part)
            gl.store(tops + step * 64 + r, base)
        gl.thread_barrier()  # the warpgroup's stores come before its loads
        top = gl.where(top == float("-inf"), 0.0, top)
        share = 1.0 / gl.where(total == 0.0, 1.0, total)
        top_own = gl.expand_dims(gl.convert_layout(top, gl.SliceLayout(1, FOLD)), 1)
        share_own = gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, FOLD)), 1)
        for first in range(0, blocks_n, FOLDED):
            block = first + gl.arange(0, FOLDED, gl.SliceLayout(0, FOLD))
            there = gl.expand_dims(block < count * PER, 0) & gl.expand_dims(own < 64, 1)
            at = gl.expand_dims(own * width, 1) + gl.expand_dims(block, 0)
            part = gl.load(parts + at, mask=there, other=0.0)
            at = gl.expand_dims(own, 1) + gl.expand_dims(block // PER * 64, 0)
            base = gl.load(tops + at, mask=there, other=0.0)
            weight = gl.where(there, gl.exp2(base - top_own) * share_own, 0.0)
            mass = gl.sum((part * weight).reshape((64 // RQ, RQ, FOLDED)), axis=1)
            MASS: gl.constexpr = mass.type.layout
            to_row = (tile * 128 + WG * 64) // RQ + gl.arange(0, 64 // RQ, gl.SliceLayout(1, MASS))
            to_column = first + gl.arange(0, FOLDED, gl.SliceLayout(0, MASS))
            inside = gl.expand_dims((to_row < tiles_m) & live, 1) & gl.expand_dims(to_column < blocks_n, 0)
            to = out + gl.expand_dims((head.to(gl.int64) * tiles_m + to_row) * blocks_n, 1)
            gl.store(to + gl.expand_dims(to_column, 0), mass, mask=inside)
        gl.thread_barrier()  # the next row tile overwrites what was loaded here


@gluon.jit(do_not_specialize=NUMBERS)
def estimate(
    q_desc, k_desc, q_scale, k_scale, k_bias, parts, tops, out,
    factor, q_len, k_groups, q_offset, q_tiles, tiles_m, blocks_n, units, slots,
    heads, shared_by, T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """The arguments of `_estimate` in `antidiagonals.py`. SOURCE only enters Triton's cache key."""
    STAGES: gl.constexpr = T.stages
    a_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 128, T.width], q_desc.layout)
    b_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, T.cols, T.width], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    ring = (a_s, b_s, full, empty, lead)
    sizes = (q_len, k_groups, q_offset, q_tiles, units, slots, heads, shared_by)
    rest = ((q_scale, k_scale, k_bias), (parts, tops), out, factor, (tiles_m, blocks_n), sizes, ring)
    gl.warp_specialize(
        [
            (consume, (T, 0) + rest),
            (consume, (T, 1) + rest),
            (load, (T, q_desc, k_desc, sizes, ring)),
        ],
        [4, 1],
        [240, 24],
    )
