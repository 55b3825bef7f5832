"""dQ, dK and dV of attention on Hopper: one pass over the stored blocks, float32 accumulation.

    P = exp(scale Q K^T - lse) where the mask allows      dV = P^T dO         dK = scale dS^T Q
    dS = P (dO V^T - delta)                               dQ = scale dS K     delta = rowsum(dO O) - dlse

    a CTA holds a tile of keys       a step loads 64 queries of one head       and computes [keys, queries]
    .------- dim -------.
    |   warpgroup 0     | 64 keys    Q  [64, dim]                              S^T = K Q^T        64 x 64, float32
    |-------------------|            dO [64, v_dim]                            dP^T = V dO^T      64 x 64
    |   warpgroup 1     | 64 keys                                              dV += P^T dO       64 x v_dim, kept
    '-------------------'                                                      dK += dS^T Q       64 x dim, kept
                                                                               dQ = dS K          64 x dim, to memory

S and dP are computed transposed, so that P^T and dS^T are wgmma operands directly from registers (Shah et al. 2024,
arXiv:2407.08608). S starts from -lse / scale, so that P is one exp2 of it, and needs no registers for lse. dS passes
through shared memory once more for dQ. With blocks of 128 keys (`halves` 2) dQ needs the dS of both warpgroups. In
every second step a warpgroup multiplies the dQ of the step before, whose dS the other one has written by then: so
neither waits for the other. With blocks of 64 keys both hold the same keys, each computes every second step alone, and
they add up dK and dV at the end (`halves` 1). Heads of at most 64 columns with blocks of 128 by 128 take 128 queries a
step (bwd_narrow.py).

Two writer warps, each for every second 64 queries, add dQ to float32 in memory by TMA. In deterministic mode every
visit of a query tile has a ticket, assigned by the schedule in its own time order, and waits for its turn. To wait for
the turn, add, wait for the write and pass the turn on takes longer than a step, hence two warps. A step of narrow heads
is shorter still, so their tickets go to two sums in turn (`sums` 2), and half as many wait for each other; the cast at
the end adds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import e, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek.attn.kernels.backward import bwd_narrow
from sparsek.attn.kernels.backward import bwd_sums as tma_sums
from sparsek.attn.kernels.backward.bwd_dq import exchanged, stage_dq, start_dq, write
from sparsek.attn.kernels.backward.bwd_load import load, load_keys
from sparsek.attn.kernels.backward.bwd_records import of_members, step_at, tile_at, word_at
from sparsek.attn.kernels.backward.delta import cast_quantized, prepare_rows
from sparsek.attn.kernels.backward.schedule_bwd import padded_bounds, schedule
from sparsek.attn.kernels.forward import rules, score_args
from sparsek.attn.kernels.forward.packed_rows import PackedRows
from sparsek.attn.kernels.forward.portable_tiles import DIMS as PORTABLE
from sparsek.attn.kernels.forward.rules import Ruled, by_step
from sparsek.attn.kernels.forward.softmax import capped, distances
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.attention_grad_schedule import VISIT_FIELDS, GradSchedule, padded_rows
from sparsek.attn.plan.kernels import (
    AttentionGradCall,
    AttentionGradKernel,
    padded_heads,
    padding_notes,
    unless_heads,
)
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.engine.launch.gluon import (
    Described,
    describe_heads,
    launch_on,
    opaque,
    reinterpret,
    tma_store,
    tma_store_wait,
)
from sparsek.engine.launch.kinds import KernelConfig, source_of
from sparsek.engine.plan.kernel import unless_aligned, unless_hopper
from sparsek.engine.plan.ring import flops_per_second, throttled


@dataclass(frozen=True, repr=False)
class Config(KernelConfig, Ruled):
    """A tile of keys and the rings that feed it. All of it is known at compile time.

    `dim` and `v_dim` are powers of two; narrower heads are padded by the zeros that TMA reads outside a tensor.
    `halves`: warpgroups with 64 keys each; with one half both share the tile's keys. Q and dO rings have `stages`
    slots, dQ has `dq_slots`. `interval`, `bits`, `members` and `member_ends`: the rules that partial blocks may have,
    as in the forward pass; without any only the end of the keys. `sums`: float32 sums of every dQ that are added to in
    the order of tickets; 0 is one sum, in any order. `softcap`, `alibi`: what changes scores. `queries`: those of a
    step, 64, or 128 for heads of at most 64 columns in blocks of 128 by 128.
    """

    dim: int
    v_dim: int
    block: tuple[int, int]
    halves: int
    stages: int
    dq_slots: int = 2
    interval: bool = False
    bits: bool = False
    sums: int = 1
    softcap: bool = False
    alibi: bool = False
    queries: int = 64
    members: int = 0
    member_ends: bool = False

    @property
    def texts(self) -> list[str]:
        return [
            f"tile of {self.keys} keys, {self.halves} halves, heads {self.dim}/{self.v_dim}",
            f"blocks {self.block[0]}x{self.block[1]}, {self.stages} stages of {self.queries} queries",
            f"{self.dq_slots} of dQ", rules.named(self), f"{self.sums or 'no'} sums in order",
            *self.true_names("softcap", "alibi"),
        ]  # fmt: skip

    @property
    def ordered(self) -> bool:
        return self.sums > 0

    @property
    def accumulators(self) -> int:
        """Float32 sums of every dQ in memory."""
        return max(1, self.sums)

    @property
    def order_price(self) -> float:
        """The time in order over that in any order."""
        if not self.ordered:
            return 1.0
        if self.halves == 1:
            return ONE_WARPGROUP
        return TWO_SUMS if self.sums == 2 else ONE_SUM

    @property
    def keys(self) -> int:
        return 64 * self.halves

    @property
    def subs(self) -> int:
        """Steps of a visit."""
        return self.block[0] // self.queries

    @property
    def barriers(self) -> int:
        """Barriers of a ring. The same warpgroups wait for each of its phases: a warpgroup that waits only for every
        second phase cannot tell the last phase from the one two before. So with one half each warpgroup has its own.
        """
        return self.stages * (2 if self.halves == 1 and self.stages % 2 else 1)

    @property
    def row_slots(self) -> int:
        """Numbers per query that a stage holds: lse and delta, and the bounds of its keys."""
        return 4 if self.interval else 2

    @property
    def spare(self) -> bool:
        """Whether dV is exchanged through memory of its own."""
        return self.halves == 1 and self.v_dim != self.dim

    @property
    def smem_bytes(self) -> int:
        halves = (self.keys + self.queries * self.stages) * (self.dim + self.v_dim)
        halves += 2 * self.keys * self.queries
        spare = 64 * self.v_dim if self.spare else 0
        floats = self.dq_slots * 64 * self.dim + spare + self.queries * self.row_slots * self.stages
        return 2 * halves + 4 * floats + 24 * self.barriers + 512


SOURCE = source_of(__file__, tma_sums.__file__)
LOG2E = gl.constexpr(log2(e))
# Cost of adding dQ in order: H100, 2026-11-26, scripts; of one warpgroup H200, 2026-11-22.
ONE_WARPGROUP, TWO_SUMS, ONE_SUM = 1.4, 1.06, 1.02


@gluon.jit
def step(
    T: gl.constexpr, WG: gl.constexpr, side, DTYPE: gl.constexpr, dk, dv, word, at, partial, masked, visits, first, i,
    key, scale, lists, changes, k_s, v_s, q_s, do_s, rows_s, ds_s, dq_s, ring_bars, dq_bars,
):  # fmt: skip
    """Step `i` of a tile, number `at` of this CTA, by warpgroup WG. `side` is the parity of `at`.

    `partial`: the step may belong to a partial block, as the first `masked` do. `word`: see `word_at`; that of the next
    step is returned.
    """
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    HALF: gl.constexpr = WG if T.halves == 2 else 0
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    COL: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    q_full, do_full, ring_empty = ring_bars
    ds_full, ds_empty, dq_full, dq_empty = dq_bars
    rules, bits, kv_len, ends = lists
    cap, slopes, slope_head, ahead = changes
    NUMBERS: gl.constexpr = T.row_slots
    slot = at % T.stages
    bar = at % T.barriers
    phase = at // T.barriers & 1
    q = q_s.index(slot).reshape((64, DIM))
    do = do_s.index(slot).reshape((64, VDIM))
    mbarrier.wait(q_full.index(bar), phase)  # until Q has landed
    less = rows_s.index(NUMBERS * slot).reshape((64,)).load(COL)
    if T.members > 0 and not T.member_ends:
        if partial:
            less = of_members(T, less, word, visits, first, i, rules)
        word = word_at(T, visits, first, i + 3 - T.halves, masked, rules)
    less = gl.expand_dims(less, 0)
    zero = gl.zeros((64, 64), gl.float32, S_LAYOUT)
    k = k_s.index(HALF).reshape((64, DIM))
    start = zero if T.softcap else zero + less
    s = warpgroup_mma(k, q.permute((1, 0)), start, use_acc=not T.softcap, is_async=True)
    mbarrier.wait(do_full.index(bar), phase)  # until dO has landed
    v = v_s.index(HALF + opaque(0)).reshape((64, VDIM))
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not T.softcap:
        delta = gl.expand_dims(rows_s.index(NUMBERS * slot + 1).reshape((64,)).load(COL), 0)
    s = warpgroup_mma_wait(1, deps=(s,))  # S is done, dP still runs
    if T.softcap:
        s = capped(s, cap)
    if partial:
        # A stage's last two rows of numbers are bounds where the rules need them, and are not read elsewhere.
        low = rows_s.index(NUMBERS * slot + NUMBERS - 2)
        high = rows_s.index(NUMBERS * slot + NUMBERS - 1)
        if T.bits or T.members > 0:
            pos, h, entry, ticket = step_at(T, visits, first, i)
            if entry >= 0:
                s = by_step(T, s, entry, key + HALF * 64, pos, rules, bits, low, high, kv_len, ends)
        else:
            s = by_step(T, s, 0, key + HALF * 64, 0, rules, bits, low, high, kv_len)
    above = s
    if T.softcap:
        above += less
    if T.alibi:
        pos, h, entry, ticket = step_at(T, visits, first, i)
        away = key + HALF * 64 - pos - ahead + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        p = gl.exp2(above * scale - distances(s, away) * (gl.load(slopes + h * slope_head) * LOG2E))
    else:
        p = gl.exp2(above * scale)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    D_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    if T.softcap:  # S is needed until dS, so that registers are short: dV waits
        dp = warpgroup_mma_wait(0, deps=(dp,))
        delta = gl.expand_dims(rows_s.index(NUMBERS * slot + 1).reshape((64,)).load(COL), 0)
        bounded = gl.maximum(s, -1.0)  # a masked score is -inf, and 0 * inf NaN
        ds = (p * (1.0 - bounded * bounded) * (dp - delta)).to(DTYPE)
    else:
        dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), P_LAYOUT), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))  # dP is done, dV still runs
        ds = (p * (dp - delta)).to(DTYPE)
    if T.halves == 2:
        if side == WG:
            # Until the other warpgroup has read the dS of two steps ago. Where this one reads it, it has.
            mbarrier.wait(ds_empty.index(side), (at // 2 & 1) ^ 1)
    ds_s.index(side).slice(HALF * 64, 64).store(ds)
    if T.softcap:
        dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), P_LAYOUT), do, dv, is_async=True)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    ds = gl.convert_layout(ds, D_LAYOUT)
    if T.halves == 2:
        in_flight = warpgroup_mma(ds, q, dk, is_async=True)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(side), count=1)
        if (side == WG) & (i > 0):
            pair = (at - 1) // 2
            dq = start_dq(T, 1 - WG, 1 - WG, pair & 1, k_s, ds_s, dq_bars)
            # dK is done, dQ still runs. It reads dS and K only, and the next Q and dO take longer to load than dQ.
            dk = warpgroup_mma_wait(2, deps=(in_flight,))
            mbarrier.arrive(ring_empty.index(bar), count=1)
            stage_dq(T, 1 - WG, 1 - WG, pair, warpgroup_mma_wait(0, deps=(dq,)), dq_s, dq_bars)
        else:
            dk = warpgroup_mma_wait(0, deps=(in_flight,))
            mbarrier.arrive(ring_empty.index(bar), count=1)
    else:
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        fence_async_shared()
        dq = start_dq(T, WG, WG, at // 2 & 1, k_s, ds_s, dq_bars)
        dk = warpgroup_mma_wait(1, deps=(dk,))
        mbarrier.arrive(ring_empty.index(bar), count=1)  # dQ reads dS and K only
        stage_dq(T, WG, WG, at // 2, warpgroup_mma_wait(0, deps=(dq,)), dq_s, dq_bars)
    return dk, dv, word


@gluon.jit
def differentiate(
    T: gl.constexpr, WG: gl.constexpr, dk_desc, dv_desc, tiles, starts, visits, lists, changes, scale, factor,
    k_s, v_s, q_s, do_s, rows_s, ds_s, dq_s, spare_s, bars,
):  # fmt: skip
    """Consumer warpgroup WG: dK and dV of its half of every tile, and the dQ of every second step."""
    DTYPE: gl.constexpr = dk_desc.dtype
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.dim, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 16])
    tile_bars, ring_bars, dq_bars, done = bars
    k_full, k_empty, v_full, v_empty = tile_bars
    cap, alibi = changes
    slopes, slope_item, slope_head, ahead = alibi
    turn = 0
    at = 0
    for t in range(gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1)):
        b, g, key, first, masked, pairs = tile_at(tiles, t)
        of_tile = (cap, slopes + b * slope_item if T.alibi else 0, slope_head, ahead)
        dk = gl.zeros((64, DIM), gl.float32, K_LAYOUT)
        dv = gl.zeros((64, VDIM), gl.float32, V_LAYOUT)
        mbarrier.wait(k_full, turn)  # until K has landed
        mbarrier.wait(v_full, turn)  # until V has landed
        word = 0
        if T.members > 0 and not T.member_ends:
            word = word_at(T, visits, first, 0 if T.halves == 2 else WG, 2 * masked, lists[0])
        UNROLLED: gl.constexpr = 1 if T.halves == 2 else 2
        for i in range(0, 2 * pairs, UNROLLED):
            for side in gl.static_range(UNROLLED):
                if T.halves == 2 or side == WG:
                    dk, dv, word = step(
                        T, WG, at & 1 if T.halves == 2 else side, DTYPE, dk, dv, word, at + side, i < 2 * masked,
                        2 * masked, visits, first, i + side, key, scale, lists, of_tile, k_s, v_s, q_s, do_s, rows_s,
                        ds_s, dq_s, ring_bars, dq_bars,
                    )  # fmt: skip
            at += UNROLLED
        if T.halves == 2:
            if WG == 0:
                if pairs > 0:
                    dq = start_dq(T, 1, 1, (at - 1) // 2 & 1, k_s, ds_s, dq_bars)
                    stage_dq(T, 1, 1, (at - 1) // 2, warpgroup_mma_wait(0, deps=(dq,)), dq_s, dq_bars)
            mbarrier.arrive(k_empty, count=1)
            # dK is staged in place of the last dS that this warpgroup read, and dV in place of V. Both write dS there
            # again only after the next V has landed, which waits for `v_empty`.
            SLOTS: gl.constexpr = [128 // DIM] + dk_desc.block_type.shape
            dk_s = reinterpret(ds_s.index(1 - WG), DTYPE, SLOTS, dk_desc.layout).index(0)
            dv_s = v_s.index(WG)
            dk_s.reshape((64, DIM)).store((dk * factor).to(DTYPE))
            dv_s.reshape((64, VDIM)).store(dv.to(DTYPE))
            fence_async_shared()
            tma_store(dk_desc, [b, g, key + WG * 64, 0], dk_s)
            tma_store(dv_desc, [b, g, key + WG * 64, 0], dv_s)
            tma_store_wait(0)  # until TMA has read them
            mbarrier.arrive(v_empty, count=1)
        else:
            dk, dv = exchanged(T, WG, dk, dv, at // 2, turn, dq_s, spare_s, dq_bars, done)
            if WG == 0:
                k_s.index(0).reshape((64, DIM)).store((dk * factor).to(DTYPE))
                fence_async_shared()
                tma_store(dk_desc, [b, g, key, 0], k_s.index(0))
            else:
                v_s.index(0).reshape((64, VDIM)).store(dv.to(DTYPE))
                fence_async_shared()
                tma_store(dv_desc, [b, g, key, 0], v_s.index(0))
            tma_store_wait(0)  # until TMA has read it
            mbarrier.arrive(k_empty, count=1)
            mbarrier.arrive(v_empty, count=1)
        turn ^= 1


NUMBERS = [
    "kv_len", "rows", "plane", "heads", "bound_item", "bound_head", "bound_group", "bound_plane", "slope_item",
    "slope_head", "ahead", "window", "sunk",
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["slopes"])
def attention_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, bounds_desc, dq_desc, dk_desc, dv_desc, tiles, starts, visits, rules,
    bits, turns, scale, factor, kv_len, rows, plane, heads, bound_item, bound_head, bound_group, bound_plane,
    cap, slopes, slope_item, slope_head, ahead, window, sunk, T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """Records: see attn/plan/attention_grad_schedule.py. `factor` is the softmax scale, `scale` that times log2(e).

    `rows_desc` and `bounds_desc` describe per-query numbers in rows of a step. Query x of head h of item b has lse in
    base 2 at (b * heads + h) * rows + x, and delta `plane` rows later. Its first key is at b * bound_item + h //
    bound_group * bound_head + x, and the end of its keys `bound_plane` rows later, int32 viewed as float32. SOURCE
    only enters Triton's cache key. `cap` and those behind it: as in hopper.attention_fwd.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    STAGES: gl.constexpr = T.stages
    BARS: gl.constexpr = T.barriers
    HALVES: gl.constexpr = T.halves
    SLOTS: gl.constexpr = T.dq_slots
    VDIM: gl.constexpr = T.v_dim
    k_s = gl.allocate_shared_memory(DTYPE, [HALVES] + k_desc.block_type.shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [HALVES] + v_desc.block_type.shape, v_desc.layout)
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    rows_s = gl.allocate_shared_memory(
        gl.float32, [T.row_slots * STAGES] + rows_desc.block_type.shape, rows_desc.layout
    )
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALVES * 64, T.queries], DTYPE)
    ds_s = gl.allocate_shared_memory(DTYPE, [2, HALVES * 64, T.queries], DS)
    dq_s = gl.allocate_shared_memory(gl.float32, [SLOTS] + dq_desc.block_type.shape, dq_desc.layout)
    if T.spare:
        SPARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 64, VDIM], gl.float32)
        spare_s = gl.allocate_shared_memory(gl.float32, [1, 1, 64, VDIM], SPARE)
    else:
        spare_s = dq_s
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [BARS, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [BARS, 1], BARRIER)
    ring_empty = gl.allocate_shared_memory(gl.int64, [BARS, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(k_empty, count=2)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    mbarrier.init(done, count=2)
    for i in gl.static_range(BARS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=HALVES)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=T.queries // 64)
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    fence_async_shared()
    tile_bars = (k_full, k_empty, v_full, v_empty)
    ring_bars = (q_full, do_full, ring_empty)
    dq_bars = (ds_full, ds_empty, dq_full, dq_empty)
    lists = (rules, bits, kv_len, (window, sunk) if T.member_ends else (0, 0))
    bounds = (bound_item, bound_head, bound_group, bound_plane)
    changes = (cap if T.softcap else 0, (slopes, slope_item, slope_head, ahead) if T.alibi else (0, 0, 0, 0))
    consumer = (
        dk_desc, dv_desc, tiles, starts, visits, lists, changes, scale, factor, k_s, v_s, q_s, do_s, rows_s, ds_s, dq_s,
        spare_s, (tile_bars, ring_bars, dq_bars, done),
    )  # fmt: skip
    producer = (
        q_desc, do_desc, rows_desc, bounds_desc, tiles, starts, visits, heads, rows, plane, bounds, q_s, do_s, rows_s,
        ring_bars,
    )  # fmt: skip
    writer = (dq_desc, tiles, starts, visits, turns, heads, rows, dq_s, dq_bars)
    gl.warp_specialize(
        [
            (bwd_narrow.differentiate if T.queries == 128 else differentiate, (T, 0) + consumer),
            (bwd_narrow.differentiate if T.queries == 128 else differentiate, (T, 1) + consumer),
            (load_keys, (T, k_desc, v_desc, tiles, starts, k_s, v_s, tile_bars)),
            (load, (T,) + producer),
            (write, (T, 0) + writer),
            (write, (T, 1) + writer),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )


class Work(NamedTuple):
    """A schedule on the device, the mask's bounds [2, lists, rows] as float32, and a placeholder for absent tensors."""

    schedule: GradSchedule
    bounds: Tensor | None
    none: Tensor

    @property
    def imbalance(self) -> Any:
        return self.schedule.imbalance


class HopperAttentionGrad:
    """Implements the Kernel protocol for the device code above."""

    name = "hopper.attention_bwd"

    def why_not(self, p: AttentionGradProblem) -> list[str]:
        reasons = unless_hopper(p) + unless_heads(p, "registers hold dK and dV of at most 128 columns", 128)
        reasons += unless_aligned(p, "strides of q, k, v and grad")
        if p.block[0] < 64:
            reasons.append(f"a step has 64 query rows of a block, and blocks of {p.block[0]} have fewer")
        if p.members > 1 and p.alibi:
            reasons.append("has no ALiBi of several heads in one tile")
        if p.deterministic and p.block[1] == 64 and p.dim in PORTABLE and p.v_dim in PORTABLE:
            reasons.append(
                "portable.attention_bwd is faster in order with blocks of 64 keys; name that, or deterministic=False"
            )
        tiles = p.batch * p.kv_heads * p.grid[1]
        if p.batch * p.q_heads * padded_rows(p) >= 2**31 or VISIT_FIELDS * (p.visited + tiles) >= 2**31:
            reasons.append(f"numbers of rows and visits are 32 bits: at most 2^31 rows and {2**29} visits")
        return reasons

    def default(self, p: AttentionGradProblem) -> Config:
        return next(iter(self.configs(p)))

    def configs(self, p: AttentionGradProblem) -> Iterable[Config]:
        dim, v_dim = padded_heads(p)
        halves = p.block[1] // 64
        if halves == 2:
            rings = [(4, 2), (3, 2), (2, 2)]
        elif p.deterministic:
            rings = [(4, 2), (3, 2), (4, 1), (2, 2)]
        else:  # nobody holds dQ in a slot while waiting for a ticket, so one slot suffices, used alternately
            rings = [(4, 2), (4, 1), (3, 2), (2, 2)]
        # A second sum is 1.03 to 1.1 times as fast for narrow heads, and no faster for wide ones (H100, 2026-11-26).
        narrow = halves == 2 and max(dim, v_dim) <= 64
        sums = (2 if narrow else 1) if p.deterministic else 0
        # What changes scores needs more registers than steps of 128 queries leave.
        wide_steps = narrow and p.block[0] == 128 and not (p.softcap or p.alibi)
        steps = [(128, *ring) for ring in rings] if wide_steps else []
        found = []
        for queries, stages, slots in [*steps, *((64, *ring) for ring in rings)]:
            c = Config(dim, v_dim, p.block, halves, stages, slots, p.by_interval, p.by_bits, sums)
            c = replace(
                c,
                softcap=p.softcap,
                alibi=p.alibi,
                queries=queries,
                members=p.members,
                member_ends=p.member_ends,
            )
            if c.smem_bytes <= p.card.smem_bytes:
                found.append(c)
        return found

    def seconds(self, p: AttentionGradProblem, c: Config) -> float:
        """Steps of an SM, begin and end of every tile, and a pass over rows before and after.

        Constants are from records of an H200 and an H100 (24 rows, 2026-11-26): at boost clocks a step takes 1.34
        times its products, at least 1.12 us; a tile 8 us more. The power limit slows the products
        (engine/plan/ring.py).
        """
        steps = p.visited * c.subs
        mma = 2 * c.queries * c.keys * (3 * c.dim + 2 * c.v_dim) / flops_per_second(p.card)
        step = max(1.12e-6, 1.34 * mma)
        tiles = p.batch * p.kv_heads * p.grid[1]
        busy = throttled((steps * step + tiles * 8e-6) / p.card.sm_count, mma / step) * c.order_price
        rows = p.batch * p.q_heads * p.q_len
        summed = 8 * c.sums if c.ordered else 12  # bytes: written and cast, in any order set to zero first
        around = rows * (4 * p.v_dim + summed * c.dim + 2 * p.dim) / p.card.bandwidth
        return busy + around + 4 * p.card.launch_seconds

    def notes(self, p: AttentionGradProblem, c: Config) -> list[str]:
        rows = p.batch * p.q_heads * padded_rows(p)
        size = rows * (c.dim * 4 * c.accumulators + 8) / 1e6
        found = [f"dQ is summed in float32: workspace of {size:.4g} MB a call"]
        if c.ordered:
            found.append(
                f"dQ is added in a fixed order; by scripts, deterministic=False is {c.order_price} times as fast"
            )
        return found + padding_notes(p, c)

    def prepare(self, p: AttentionGradProblem, c: Config, mask: BlockMask) -> Work:
        made, bounds = schedule(p, mask, p.card.sm_count, ordered=c.ordered), None
        if c.interval and mask.lo is not None and mask.hi is not None:
            bounds = padded_bounds(mask.lo, mask.hi, made.rows)
        return Work(made, bounds, made.starts)

    def launch(self, c: Config, work: Work, call: AttentionGradCall) -> None:
        q, k, v, mask, scale, out, lse, grad, grad_lse, dq, dk, dv, scores = call
        made, bounds, none = work
        batch, heads = q.shape[:2]
        rows = made.rows
        factor = score_args.factor(scale, scores)
        sums = batch * heads * c.accumulators
        # The host's time goes with allocations, so there is one. Its parts begin at multiples of 512 bytes.
        sizes = 2 * batch * heads * rows, sums * rows * c.dim, sums * (rows // 64) if c.ordered else 4
        known, acc, turns = q.new_empty(sum(sizes), dtype=torch.float32).split(sizes)
        prepare_rows(out, grad, lse, grad_lse, rows, -1 / factor, known.view(2, batch, heads, rows))
        known, turns = known.view(-1, c.queries), turns.view(torch.int32)
        acc = acc.view(batch, heads, c.accumulators, rows, c.dim)
        # In order, the first dQ of a tile is stored and not added; rows that no step visits have had no turn.
        (turns if c.ordered else acc).zero_()
        lists = 1 if bounds is None else bounds[0].numel() // rows
        held = known if bounds is None else bounds.view(-1, c.queries)
        args = (
            describe_heads(q, c.queries, c.dim), describe_heads(k, 64, c.dim),
            describe_heads(v, 64, c.v_dim), describe_heads(grad, c.queries, c.v_dim),
            *(Described(x, tuple(x.shape), (c.queries, 1), (1, c.queries)) for x in (known, held)),
            Described(acc, (sums, rows * c.dim // 32, 32), (rows * c.dim, 32, 1), (1, 2 * c.dim, 32)),
            describe_heads(dk, 64, c.dim), describe_heads(dv, 64, c.v_dim), made.tiles, made.starts, made.visits,
            *(none if x is None or x.numel() == 0 else x for x in (mask.rules, mask.bits)), turns,
            factor, scale, k.shape[2], rows, len(known) // 2, heads,
            mask.heads * rows if lists > 1 and mask.batch > 1 else 0, rows if lists > 1 and mask.heads > 1 else 0,
            heads // mask.heads, lists * (rows // c.queries),
            score_args.cap(scale, scores), *score_args.slopes(scores, q.shape[2], k.shape[2]),
            *score_args.ends(mask), c, SOURCE,
        )  # fmt: skip
        # Tickets wait for CTAs of the same launch, so all CTAs must be resident together.
        options = {"launch_cooperative_grid": True} if c.ordered else None
        launch_on(q.device, attention_bwd_kernel, made.ctas, args, options)
        cast_quantized(acc, scale, dq, turns if c.ordered else None)


KERNEL: AttentionGradKernel = PackedRows(HopperAttentionGrad())
