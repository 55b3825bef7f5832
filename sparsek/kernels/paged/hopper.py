"""Attention of a ragged batch over keys and values in pages, on Hopper: the pipeline of hopper.attention_fwd.

    one tile: 128 rows of [query, head]      a step loads into shared memory, from pages that the block table names
    .------- v_dim -------.
    |    warpgroup 0      | 64               K [keys, dim]       boxes of at most a page
    |---------------------|                  V [keys, v_dim]
    |    warpgroup 1      | 64
    '---------------------'

The kernel is persistent: a CTA walks the tiles of the schedule (schedule.py), longest first, in alternating
directions. One producer warp loads Q, then for each step of keys reads the block table and loads K and V by TMA. Each
consumer warpgroup owns 64 rows and runs the online softmax, as in kernels/attention/hopper_fwd.py. A row is one query
of one head; `pack` query heads that share a head of keys lie side by side, so that requests of few queries fill tiles.

Steps whose keys some query does not see come first. They compare each score's key with its row's bounds: keys from
`lo` to `hi`, and the first sinks. Where the keys of a request end, its page holds anything, NaN too, and 0 times NaN
is NaN: the producer clears such rows of V in shared memory before it passes them on. Pages that no key of a step lies
in, or none that a window or the sinks reach, are not read: TMA reads zeros outside a tensor.

Tiles of a request's last queries also hold rows of the next request; they are computed but not stored: a warpgroup
whose 64 rows all belong to the request stores by TMA, another one row by row.

Bottleneck: that of hopper.attention_fwd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from math import e, log2
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from sparsek.kernels.attention.softmax import capped, rescaled, scores, softmax, weighted, with_sink
from sparsek.kernels.lang.gluon import (
    Described,
    describe_heads,
    launch_on,
    tma_store,
    tma_store_wait,
)
from sparsek.kernels.paged.producer import load
from sparsek.kernels.paged.schedule import FAR, Shape, capacity, schedule
from sparsek.kernels.paged.steps import RECORD, allowed, masked_key, tile_at, tile_number, within
from sparsek.mask.pages import PageLists
from sparsek.plan.kernel import PagedCall, PagedKernel, unless_hopper
from sparsek.plan.problem import PagedProblem


@dataclass(frozen=True, repr=False)
class Config:
    """A tile and the rings that feed it. All of it is known at compile time.

    `dim` and `v_dim` are powers of two; narrower heads are padded by the zeros that TMA reads outside a tensor.
    `groups` consumer warpgroups own 64 rows each; a step has `keys` keys, and K and V rings have `stages` slots, Q
    has `q_slots`. `pack` query heads share a tile. `causal`, `window`, `sinks`: which keys a query sees; `list_block`:
    its tile's lists name them, in blocks (queries, keys), (0, 0) without lists. `softcap`, `sink_logits`: there is
    one. `lse`: write the logarithms of the sums.
    """

    dim: int
    v_dim: int
    page: int
    groups: int
    keys: int
    stages: int
    q_slots: int
    pack: int = 1
    causal: bool = True
    window: bool = False
    sinks: bool = False
    list_block: tuple[int, int] = (0, 0)
    softcap: bool = False
    sink_logits: bool = False
    lse: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def positions(self) -> int:
        """Query positions of a tile."""
        return self.rows // self.pack

    @property
    def lists(self) -> bool:
        return self.list_block[1] > 0

    @property
    def box(self) -> int:
        """Keys that one copy loads: they lie in one page."""
        return min(self.page, self.keys)

    @property
    def k_box(self) -> tuple[int, int]:
        """Rows and columns of a copy of K: whole rows, or 128 bytes of each where a step has several boxes."""
        return self.box, self.dim if self.box == self.keys else 64

    @property
    def v_box(self) -> tuple[int, int]:
        return self.box, self.v_dim if self.box == self.keys else 64

    @property
    def o_in_q(self) -> bool:
        """Whether O is staged in Q's memory: that saves memory, but the next Q waits until O is stored."""
        return self.q_slots == 1 and self.v_dim == self.dim

    @property
    def smem_bytes(self) -> int:
        o = 0 if self.o_in_q else self.rows * self.v_dim
        halves = self.q_slots * self.rows * self.dim + o + self.stages * self.keys * (self.dim + self.v_dim)
        return 2 * halves + 16 * self.q_slots * self.groups + 32 * self.stages + 72

    @property
    def ctas_per_sm(self) -> int:
        """Two CTAs of one consumer warpgroup each hide each other's softmax."""
        return 2 if self.groups == 1 and self.smem_bytes <= HALF_AN_SM else 1

    @property
    def options(self) -> dict[str, int]:
        return {"maxnreg": 128} if self.ctas_per_sm == 2 else {}

    def __str__(self) -> str:
        """Names every field, because Triton caches compiled kernels by the text of their constants."""
        rules = ("causal", "window", "sinks", "softcap", "sink_logits", "lse")
        extras = "".join(f", {name}" for name in rules if getattr(self, name))
        packed = f"{self.pack} heads packed, " if self.pack > 1 else ""
        listed = f", lists of {self.list_block[0]}x{self.list_block[1]}"
        return (
            f"tile {self.rows}x{self.keys} for {self.groups} warpgroups, {packed}heads {self.dim}/{self.v_dim}, pages "
            f"of {self.page}, {self.stages} stages, {self.q_slots} of Q{extras}{listed}"
        )

    __repr__ = __str__


HALF_AN_SM = (228 << 10) // 2 - 1024  # shared memory for each of two CTAs on an SM of sm_90
# Triton caches compiled kernels by the text of device functions and constants. That text does not cover what Config
# computes from its fields, so the source of this file is a constant too.
SOURCE = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def step(
    T: gl.constexpr,
    MASKED: gl.constexpr,
    DTYPE: gl.constexpr,
    i,
    state,
    tile,
    scales,
    lists,
    q,
    k_s,
    v_s,
    bars,
):
    """S of step i in parallel with P V of the previous step, with V in the slot of `state`; then step i's softmax."""
    acc, pairs, m, l, v_slot, v_phase = state
    of_tile, lo, hi, sunk = tile
    where, masked, blocks, length = of_tile
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    scale, bend = scales
    slot = v_slot + 1
    phase = v_phase
    if slot == T.stages:
        slot = 0
        phase = v_phase ^ 1
    mbarrier.wait(k_full.index(slot), phase)  # until K has landed
    s = scores(T, q, k_s, slot)
    mbarrier.wait(v_full.index(v_slot), v_phase)  # until V of the previous step has landed
    pv = weighted(T, pairs, v_s, v_slot, acc, DTYPE)
    s = warpgroup_mma_wait(1, deps=(s,))  # S is done, P V still runs
    mbarrier.arrive(k_empty.index(slot), count=1)
    if T.softcap:
        s = capped(s, bend)
    if MASKED:
        s = allowed(T, s, masked_key(T, where, lists, i), lo, hi, sunk)
    else:
        s = within(T, s, of_tile, lists, i - masked, lo, hi, sunk)
    pairs, m, l, alpha = softmax(T, s, m, l, scale, DTYPE)
    # Passes at once. It contains a branch, and ptxas does not move the next wait above it; otherwise P V would be
    # waited for before the softmax that should overlap with it.
    mbarrier.wait(v_full.index(v_slot), v_phase)
    acc = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    return rescaled(T, acc, alpha), pairs, m, l, slot, phase


@gluon.jit
def attend(
    T: gl.constexpr, WG: gl.constexpr, o_desc, tiles, count, lists, outs, scales, rules, sizes, q_s, k_s, v_s, o_s, bars
):  # fmt: skip
    """Consumer warpgroup WG: computes its 64 rows of every tile."""
    DTYPE: gl.constexpr = o_desc.dtype
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    GROUPS: gl.constexpr = T.groups
    POSITIONS: gl.constexpr = 64 // T.pack
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.keys, 16]))
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 16])
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    out_ptr, lse_ptr, sink_ptr, whole_rows = outs
    window, sinks = rules
    units, tokens, v_len, out_row, out_head = sizes
    scale, bend = scales
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    r = WG * 64 + gl.arange(0, 64, ROW)
    slot = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    for t in range(gl.program_id(0), gl.load(count) * units, gl.num_programs(0)):
        total = gl.load(count) * units
        number = tile_number(t, total)
        record = tiles + RECORD * (number // units)
        h = number % units * T.pack
        row_0 = gl.load(record)
        live = gl.load(record + 3)
        length = gl.load(record + 4)
        masked, steps, where = tile_at(T, record, h, lists)
        blocks = gl.load(record + 13)
        at = gl.load(record + 2) + r // T.pack  # the row's position among the keys
        lo = at * 0
        hi = at * 0 + length
        if T.window:
            lo = at - window + 1
        if T.causal:
            hi = gl.minimum(hi, at + 1)
        sunk = gl.minimum(hi, sinks)
        if T.window and not T.causal:
            hi = gl.minimum(hi, at + window)
        of_tile = (where, masked, blocks, length)
        tile = (of_tile, lo, hi, sunk)
        mbarrier.wait(q_full.index(q_slot * GROUPS + WG), q_phase)  # until Q has landed
        q = q_s.index(q_slot * GROUPS + WG).reshape((64, DIM))
        mbarrier.wait(k_full.index(slot), phase)  # and the first K
        s = warpgroup_mma_wait(0, deps=(scores(T, q, k_s, slot),))
        mbarrier.arrive(k_empty.index(slot), count=1)
        if T.softcap:
            s = capped(s, bend)
        if masked > 0:
            s = allowed(T, s, masked_key(T, where, lists, 0), lo, hi, sunk)
        else:
            s = within(T, s, of_tile, lists, 0, lo, hi, sunk)
        m = gl.full((64,), float("-inf"), gl.float32, ROW)
        l = gl.zeros((64,), gl.float32, ROW)
        pairs, m, l, alpha = softmax(T, s, m, l, scale, DTYPE)
        acc = gl.zeros((64, VDIM), gl.float32, O_LAYOUT)
        for i in range(1, masked):
            state = (acc, pairs, m, l, slot, phase)
            acc, pairs, m, l, slot, phase = step(
                T, True, DTYPE, i, state, tile, scales, lists, q, k_s, v_s, bars
            )
        for i in range(gl.maximum(masked, 1), steps):
            state = (acc, pairs, m, l, slot, phase)
            acc, pairs, m, l, slot, phase = step(
                T, False, DTYPE, i, state, tile, scales, lists, q, k_s, v_s, bars
            )
        if not T.o_in_q:
            mbarrier.arrive(q_empty.index(q_slot * GROUPS + WG), count=1)
        mbarrier.wait(v_full.index(slot), phase)  # until the last V has landed
        acc = warpgroup_mma_wait(0, deps=(weighted(T, pairs, v_s, slot, acc, DTYPE),))
        mbarrier.arrive(v_empty.index(slot), count=1)
        slot += 1
        if slot == T.stages:
            slot = 0
            phase ^= 1
        kept = 1.0
        if T.sink_logits:
            m, l, kept = with_sink(m, l, gl.load(sink_ptr + h + r % T.pack) * LOG2E)
        seen = l > 0
        factor = gl.where(seen, kept / l, 0.0)
        lse = gl.where(seen, m + gl.log2(l), float("-inf"))
        acc = acc * gl.expand_dims(gl.convert_layout(factor, O_ROW), 1)
        if T.lse:
            row = (h + r % T.pack).to(gl.int64) * tokens + row_0 + r // T.pack
            gl.store(lse_ptr + row, lse * LN2, mask=r // T.pack < live)
        if T.o_in_q:
            o = q_s.index(q_slot * GROUPS + WG)
        else:
            o = o_s.index(WG)
            tma_store_wait(0)  # until TMA has read the previous O, which is overwritten next
        if (whole_rows > 0) & (live >= (WG + 1) * POSITIONS):
            o.reshape((64, VDIM)).store(acc.to(DTYPE))
            fence_async_shared()
            tma_store(o_desc, [h // T.pack, row_0 + WG * POSITIONS, 0, 0], o)
        else:
            own = WG * 64 + gl.arange(0, 64, O_ROW)
            column = gl.arange(0, VDIM, gl.SliceLayout(0, O_LAYOUT))
            base = (row_0 + own // T.pack).to(gl.int64) * out_row + (h + own % T.pack).to(gl.int64) * out_head
            there = gl.expand_dims(own // T.pack < live, 1) & gl.expand_dims(column < v_len, 0)
            gl.store(out_ptr + gl.expand_dims(base, 1) + gl.expand_dims(column, 0), acc.to(DTYPE), mask=there)
        if T.o_in_q:
            tma_store_wait(0)  # until TMA has read O, which the next Q overwrites
            mbarrier.arrive(q_empty.index(q_slot * GROUPS + WG), count=1)
        q_slot += 1
        if q_slot == T.q_slots:
            q_slot = 0
            q_phase ^= 1
    tma_store_wait(0)  # shared memory must outlive the copies that read it


NUMBERS = [
    "p_size", "f_size", "list_rows", "of_list", "longest", "whole_rows", "window", "sinks", "units", "group", "pages",
    "table_row", "table_step", "tokens", "v_len", "out_row", "out_head",
]  # fmt: skip
# Compiled code is found by config and dtype, so it must be right for any address.
POINTERS = [
    "out", "table", "p_starts", "p_counts", "partial", "f_starts", "f_counts", "full", "sink_logits", "lse",
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def attention_paged_kernel(
    q_desc, k_desc, v_desc, o_desc, out, tiles, count, table, p_starts, p_counts, partial, f_starts, f_counts, full,
    sink_logits, lse, scale, bend, p_size, f_size, list_rows, of_list, longest, whole_rows, window, sinks, units,
    group, pages, table_row, table_step, tokens, v_len, out_row, out_head, T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """The records of the schedule are described in schedule.py. Each stands for `units` tiles, of `pack` heads each.

    Without softcap `scale` is the softmax scale times log2(e). With it `scale` is softcap times log2(e), and `bend`
    twice the softmax scale times log2(e) over softcap. `whole_rows`: rows of out may be stored by TMA. Strides of out
    and of the table are in elements. SOURCE only enters Triton's cache key.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    STAGES: gl.constexpr = T.stages
    GROUPS: gl.constexpr = T.groups
    KEYS: gl.constexpr = T.keys
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    QS: gl.constexpr = T.q_slots * T.groups
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], DTYPE)
    V_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, VDIM], DTYPE)
    q_s = gl.allocate_shared_memory(DTYPE, [QS] + q_desc.block_type.shape, q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, DIM], K_LAYOUT)
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, VDIM], V_LAYOUT)
    if T.o_in_q:
        o_s = q_s
    else:
        o_s = gl.allocate_shared_memory(DTYPE, [GROUPS] + o_desc.block_type.shape, o_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(
        gl.int64, [STAGES + 1, 1], BARRIER
    )  # the last one is the producer's own
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    mbarrier.init(v_full.index(STAGES), count=1)
    fence_async_shared()
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    # fmt: off
    lists = (p_starts, p_counts, partial, p_size, f_starts, f_counts, full, f_size, list_rows, of_list, longest)
    # fmt: on
    outs = (out, lse, sink_logits, whole_rows)
    of_load = (units, group, pages, table_row, table_step, window, sinks)
    of_attend = (units, tokens, v_len, out_row, out_head)
    producer = (q_desc, k_desc, v_desc, tiles, count, lists, table, of_load, q_s, k_s, v_s, bars)
    consumer = (
        o_desc, tiles, count, lists, outs, (scale, bend), (window, sinks), of_attend, q_s, k_s, v_s, o_s, bars
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize([(attend, (T, 0) + consumer), (load, (T,) + producer)], [1], [40])
    else:
        gl.warp_specialize(
            [(attend, (T, 0) + consumer), (attend, (T, 1) + consumer), (load, (T,) + producer)],
            [4, 1],
            [240, 24],
        )


class Work(NamedTuple):
    """The problem's facts that a launch needs: the rules of the schedule, most CTAs, and blocks of a list."""

    shape: Shape
    ctas: int
    longest: int


class HopperPaged:
    """Implements the Kernel protocol for the device code above."""

    name = "hopper.attention_paged"

    def why_not(self, p: PagedProblem) -> list[str]:
        reasons = unless_hopper(p)
        if p.kv_dtype != p.dtype:
            reasons.append(f"multiplies pages of q's dtype, {p.dtype}, not {p.kv_dtype}")
        if max(p.dim, p.v_dim) > 256 or p.dim % 8 or p.v_dim % 8:
            reasons.append(
                f"TMA moves whole 16 bytes and registers hold heads of at most 256, so head dims must be multiples "
                f"of 8 up to 256, not {p.dim} and {p.v_dim}"
            )
        if p.page < 16 or p.page & (p.page - 1):
            reasons.append(
                f"a copy lies in one page, so pages must be powers of two from 16 on, not {p.page}"
            )
        if not p.aligned:
            reasons.append(
                "TMA needs contiguous last dims and pointers and strides of q and the pages that are multiples of 16 "
                "bytes"
            )
        if max(p.tokens, p.max_k) >= FAR:
            reasons.append("positions are 32 bits: there may be 2^30 queries, and as many keys of a request")
        if p.list_heads and not list(_tiles(p)):
            reasons.append(
                f"a tile of 64 or 128 rows lies in one tile of the lists, and a step in one block, so blocks need 64 "
                f"keys or more, and at least 64 queries or heads that share a list, not {p.list_block}"
            )
        return reasons

    def default(self, p: PagedProblem) -> Config:
        return min(self.configs(p), key=lambda c: self.seconds(p, c))

    def configs(self, p: PagedProblem) -> Iterable[Config]:
        dim, v_dim = (max(64, 1 << (side - 1).bit_length()) for side in (p.dim, p.v_dim))
        rules = {
            "causal": p.causal, "window": p.window > 0, "sinks": p.window > 0 and p.sinks > 0, "softcap": p.softcap,
            "list_block": p.list_block if p.list_heads else (0, 0), "sink_logits": p.sink_logits, "lse": p.lse,
        }  # fmt: skip
        found: dict[Config, None] = {}
        for groups, keys, pack in _tiles(p):
            c = Config(dim, v_dim, p.page, groups, keys, 2, 2, pack, **rules)
            found[_fitted(c, p.card.smem_bytes)] = None
        return list(found)

    def seconds(self, p: PagedProblem, c: Config) -> float:
        """Steps of all tiles over SMs, and begin and end of every tile; or the memory traffic, if that is longer.

        A step takes as long as in hopper.attention_fwd, whose constants these are, and 4 % more with packed heads
        (H100 and H200: 1 to 4 %). Every request has `max_q` queries and `max_k` keys, as far as there are tokens.
        """
        requests = max(1, min(p.requests, -(-p.tokens // max(1, p.max_q))))
        tiles = requests * -(-p.tokens // (requests * c.positions)) * (p.q_heads // c.pack)
        sms = p.card.sm_count
        seen = min(p.seen, p.max_k - min(p.max_q, p.max_k) // 2) if p.causal else p.seen
        per_tile = max(1.0, seen / c.keys)
        if p.window and not p.list_heads:
            per_tile += c.positions / c.keys
        mma = c.rows * c.keys * (c.dim + c.v_dim) / (2048 * p.card.pace)
        exp = c.rows * c.keys / 8 * (3 if c.softcap else 1)
        slower = 1.2 if c.keys == 64 else 0.9 if c.groups == 1 else 1.0
        slower *= 1.04 if c.pack > 1 else 1.0
        busy = 1.03 * slower * (mma**3 + exp**3) ** (1 / 3) / 1.6e9
        fetch = 2 * c.keys * (c.dim + c.v_dim) * sms / (0.9 * p.card.fabric)
        step = max(busy, fetch)
        tile = per_tile * step + 1.2e-6 * c.rows / 128
        compute = max(tiles * tile / sms, tile * c.ctas_per_sm)
        moved = p.compulsory_bytes / (0.92 * p.card.bandwidth)
        return max(compute, moved) + 2 * p.card.launch_seconds

    def notes(self, p: PagedProblem, c: Config) -> list[str]:
        found = []
        if c.pack > 1:
            found.append(f"{c.pack} query heads share a tile: its rows are {c.positions} queries of each")
        if (c.dim, c.v_dim) != (p.dim, p.v_dim):
            found.append(f"heads of {p.dim}/{p.v_dim} are computed as {c.dim}/{c.v_dim}")
        return found

    def prepare(self, p: PagedProblem, c: Config, device: torch.device) -> Work:
        bound = FAR
        if p.list_heads:
            bound = p.listed * p.list_block[1]
        elif p.window:
            bound = p.window + p.sinks + c.positions
        window, sinks = (
            min(p.window, FAR),
            min(p.sinks, FAR),
        )  # no key is further, and sums with positions fit int32
        shape = Shape(c.positions, c.keys, p.causal, window, sinks, c.list_block[0], min(bound, FAR))
        return Work(shape, p.card.sm_count * c.ctas_per_sm, p.listed)

    def launch(self, c: Config, work: Work, call: PagedCall) -> None:
        q, k, v, table, out = call.q, call.k, call.v, call.block_table, call.out
        if 0 in q.shape or call.seq_lens.shape[0] == 0:
            return
        tiles, count = schedule(call, work.shape)
        units = q.shape[1] // c.pack
        # TMA stores whole rows of an aligned `out`; otherwise its description is not used, and q's is as good.
        whole_rows = out.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in out.stride()[:2])
        bend, scale = 0.0, call.scale * log2(e)
        if c.softcap:
            bend, scale = 2 * scale / call.softcap, call.softcap * log2(e)
        lists = _lists(call.lists, tiles)
        described = (
            _rows(q, c.pack, c.dim), describe_heads(k, *c.k_box), describe_heads(v, *c.v_box),
            _rows(out if whole_rows else q, c.pack, c.v_dim),
        )  # fmt: skip
        optional = (tiles if x is None else x for x in (call.sink_logits, call.lse))
        of_lists = (call.lists.tiles, q.shape[1] // call.lists.heads) if call.lists else (0, 1)
        sizes = (
            lists[2].numel(), lists[5].numel(), *of_lists, work.longest, int(whole_rows), work.shape.window,
            work.shape.sinks, units, q.shape[1] // k.shape[1], k.shape[0], *table.stride(), q.shape[0], out.shape[2],
            *out.stride()[:2],
        )  # fmt: skip
        args = (*described, out, tiles, count, table, *lists, *optional, scale, bend, *sizes, c, SOURCE)
        ctas = min(work.ctas, capacity(q.shape[0], call.seq_lens.shape[0], c.positions) * units)
        launch_on(out.device, attention_paged_kernel, ctas, args, c.options)


def _tiles(p: PagedProblem) -> Iterable[tuple[int, int, int]]:
    """Warpgroups, keys of a step and packed heads that suit `p`, in order of preference."""
    widest = 64 if max(p.dim, p.v_dim) > 128 else 128
    per_list = p.group if p.list_heads in (0, 1, p.kv_heads) else 1
    packs = [pack for pack in (64, 32, 16, 8, 4, 2, 1) if per_list % pack == 0]
    for groups in (2, 1):
        for keys in (128, 64):
            if keys > widest or (groups == 1 and keys == 128 and max(p.dim, p.v_dim) > 64):
                continue
            for pack in (packs[0], 1) if packs[0] > 1 and not p.list_heads else packs:
                if p.list_heads and (p.list_block[0] % (64 * groups // pack) or p.list_block[1] % keys):
                    continue
                yield groups, keys, pack


def _fitted(c: Config, smem: int) -> Config:
    """The same tile with two slots of Q if they fit next to two stages, and then as many stages, up to 4, as fit."""
    # Two CTAs have 128 registers a thread at launch, too few for 64 x 256 accumulators.
    room = HALF_AN_SM if c.groups == 1 and c.v_dim <= 128 else smem - 1024
    for q_slots, stages in ((2, 4), (2, 3), (2, 2), (1, 4), (1, 3)):
        found = replace(c, q_slots=q_slots, stages=stages)
        if found.smem_bytes <= room:
            return found
    return replace(c, q_slots=1, stages=2)


def _rows(x: Tensor, pack: int, dim: int) -> Described:
    """TMA description of q or out [tokens, heads, D]: 64 rows of [query, head of the pack]."""
    (tokens, h, d), (row, head, _) = x.shape, x.stride()
    return Described(x, (h // pack, tokens, pack, d), (head * pack, row, head, 1), (1, 64 // pack, pack, dim))


def _lists(lists: PageLists | None, none: Tensor) -> tuple[Tensor, ...]:
    """Starts, counts and entries of both lists; `none` for a list without entries."""
    if lists is None:
        return (none,) * 6
    return tuple(none if x.numel() == 0 else x for x in (*lists.partial, *lists.full))


KERNEL: PagedKernel = HopperPaged()
