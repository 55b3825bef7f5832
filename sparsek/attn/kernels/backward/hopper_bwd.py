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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from sparsek.attn.kernels.backward import bwd_narrow, bwd_steps
from sparsek.attn.kernels.backward import bwd_sums as tma_sums
from sparsek.attn.kernels.backward.bwd_dq import write
from sparsek.attn.kernels.backward.bwd_load import load, load_keys
from sparsek.attn.kernels.backward.delta import add_parts, cast_quantized, prepare_rows
from sparsek.attn.kernels.backward.schedule_bwd import padded_bounds, schedule
from sparsek.attn.kernels.forward import rules, score_args
from sparsek.attn.kernels.forward.hopper_fwd import query_rows
from sparsek.attn.kernels.forward.packed_rows import PackedRows
from sparsek.attn.kernels.forward.portable_tiles import DIMS as PORTABLE
from sparsek.attn.kernels.forward.rules import Ruled
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.attention_grad_schedule import VISIT_FIELDS, GradSchedule, padded_rows, tile_parts
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
    step, 64, or 128 for heads of at most 64 columns in blocks of 128 by 128. `parts`: tiles are parts of key tiles, and
    their sums are added afterwards. `paired`: the halves of a block have bits of their own, and a warpgroup passes over
    a step in which its half has none.
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
    parts: bool = False
    paired: bool = False

    @property
    def texts(self) -> list[str]:
        return [
            f"tile of {self.keys} keys, {self.halves} halves, heads {self.dim}/{self.v_dim}",
            f"blocks {self.block[0]}x{self.block[1]}, {self.stages} stages of {self.queries} queries",
            f"{self.dq_slots} of dQ", rules.named(self), f"{self.sums or 'no'} sums in order",
            *self.true_names("softcap", "alibi"), *(["tiles cut into parts"] if self.parts else []),
            *(["blocks in pairs"] if self.paired else []),
        ]  # fmt: skip

    @property
    def pack(self) -> int:
        """Heads of a token that are rows of one head: q, out and their gradients are read and written in place."""
        return max(1, self.members)

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
# Cost of adding dQ in order: H100, 2026-11-26, scripts; of one warpgroup H200, 2026-11-22.
ONE_WARPGROUP, TWO_SUMS, ONE_SUM = 1.4, 1.06, 1.02


NUMBERS = [
    "kv_len", "rows", "plane", "heads", "bound_item", "bound_head", "bound_group", "bound_plane", "slope_item",
    "slope_head", "ahead", "window", "sunk",
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["slopes"])
def attention_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, bounds_desc, dq_desc, dk_desc, dv_desc, tiles, starts, visits, rules,
    bits, turns, scale, factor, kv_len, rows, plane, heads, bound_item, bound_head, bound_group, bound_plane,
    cap, slopes, slope_item, slope_head, ahead, window, sunk, part_sums, T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """Records: see attn/plan/attention_grad_schedule.py. `factor` is the softmax scale, `scale` that times log2(e).

    `rows_desc` and `bounds_desc` describe per-query numbers in rows of a step. Query x of head h of item b has lse in
    base 2 at (b * heads + h) * rows + x, and delta `plane` rows later. Its first key is at b * bound_item + h //
    bound_group * bound_head + x, and the end of its keys `bound_plane` rows later, int32 viewed as float32. SOURCE
    only enters Triton's cache key. `cap` to `sunk`: as in hopper.attention_fwd. `part_sums`: float32 [parts, keys of a
    tile, columns of dK and dV], or None.
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
        dk_desc, dv_desc, tiles, starts, visits, lists, changes, scale, factor, part_sums if T.parts else 0, k_s, v_s,
        q_s, do_s, rows_s, ds_s, dq_s, spare_s, (tile_bars, ring_bars, dq_bars, done),
    )  # fmt: skip
    producer = (
        q_desc, do_desc, rows_desc, bounds_desc, tiles, starts, visits, heads, rows, plane, bounds, q_s, do_s, rows_s,
        ring_bars,
    )  # fmt: skip
    writer = (dq_desc, tiles, starts, visits, turns, heads, rows, dq_s, dq_bars)
    gl.warp_specialize(
        [
            (bwd_narrow.differentiate if T.queries == 128 else bwd_steps.differentiate, (T, 0) + consumer),
            (bwd_narrow.differentiate if T.queries == 128 else bwd_steps.differentiate, (T, 1) + consumer),
            (load_keys, (T, k_desc, v_desc, tiles, starts, k_s, v_s, tile_bars)),
            (load, (T,) + producer),
            (write, (T, 0) + writer),
            (write, (T, 1) + writer),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )


def part_bytes(c: Config) -> int:
    """Of the sums of dK and dV of a tile."""
    return 4 * c.keys * (c.dim + c.v_dim)


def key_tiles(p: AttentionGradProblem) -> int:
    """Tiles of keys of all heads, or their parts."""
    return p.batch * p.kv_heads * p.grid[1] * tile_parts(p, p.card.sm_count).count(p)


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
    widens = True  # as sums of one part

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
        tiles = key_tiles(p)
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
                parts=p.wide or tile_parts(p, p.card.sm_count).count(p) > 1,
                paired=p.paired,
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
        tiles = min(key_tiles(p), p.visited)
        busy = throttled((steps * step + tiles * 8e-6) / p.card.sm_count, mma / step) * c.order_price
        rows = p.batch * p.q_heads * p.q_len
        summed = 8 * c.sums if c.ordered else 12  # bytes: written and cast, in any order set to zero first
        around = rows * (4 * p.v_dim + summed * c.dim + 2 * p.dim) / p.card.bandwidth
        around += 2 * min(tiles * part_bytes(c), 4 * rows * c.dim) / p.card.bandwidth if c.parts else 0.0
        return busy + around + 4 * p.card.launch_seconds

    def notes(self, p: AttentionGradProblem, c: Config) -> list[str]:
        rows = p.batch * p.q_heads * padded_rows(p)
        size = rows * (c.dim * 4 * c.accumulators + 8) / 1e6
        found = [f"dQ is summed in float32: workspace of {size:.4g} MB a call"]
        if c.parts:
            cut = tile_parts(p, p.card.sm_count).count(p)
            size = key_tiles(p) * part_bytes(c) / 1e6
            cut_into = (
                f"are cut into {cut} parts, whose float32 sums" if cut > 1 else "have float32 sums, which"
            )
            found.append(f"key tiles {cut_into} are {size:.4g} MB a call")
        if c.ordered:
            found.append(
                f"dQ is added in a fixed order; by scripts, deterministic=False is {c.order_price} times as fast"
            )
        return found + padding_notes(p, c)

    def prepare(self, p: AttentionGradProblem, c: Config, mask: BlockMask) -> Work:
        cut = tile_parts(p, p.card.sm_count) if c.parts else None
        made, bounds = schedule(p, mask, p.card.sm_count, ordered=c.ordered, cut=cut), None
        if c.interval and mask.lo is not None and mask.hi is not None:
            bounds = padded_bounds(mask.lo, mask.hi, made.rows)
        return Work(made, bounds, made.starts)

    def launch(self, c: Config, work: Work, call: AttentionGradCall) -> None:
        q, k, v, mask, scale, out, lse, grad, grad_lse, dq, dk, dv, scores = call
        made, bounds, none = work
        batch, heads = q.shape[0], q.shape[1] // c.pack
        rows = made.rows
        factor = score_args.factor(scale, scores)
        sums = batch * heads * c.accumulators
        # The host's time goes with allocations, so there is one. Its parts begin at multiples of 512 bytes.
        sizes = [2 * batch * heads * rows, sums * rows * c.dim]
        sizes += [len(made.lengths) * part_bytes(c) // 4] if c.parts else []
        sizes += [sums * (rows // 64) if c.ordered else 4]
        known, acc, *of_parts, turns = q.new_empty(sum(sizes), dtype=torch.float32).split(sizes)
        prepare_rows(out, grad, lse, grad_lse, rows, -1 / factor, known.view(2, batch, heads, rows), c.pack)
        known, turns = known.view(-1, c.queries), turns.view(torch.int32)
        acc = acc.view(batch, heads, c.accumulators, rows, c.dim)
        # In order, the first dQ of a tile is stored and not added; rows that no step visits have had no turn.
        (turns if c.ordered else acc).zero_()
        lists = 1 if bounds is None else bounds[0].numel() // rows
        held = known if bounds is None else bounds.view(-1, c.queries)
        # Of parts only the dtype is read, which is that of k.
        stored = (k, v) if of_parts else (dk, dv)
        described = [describe_heads(x, 64, dim) for x, dim in zip(stored, (c.dim, c.v_dim), strict=True)]
        args = (
            describe_queries(c, q, c.dim), describe_heads(k, 64, c.dim),
            describe_heads(v, 64, c.v_dim), describe_queries(c, grad, c.v_dim),
            *(Described(x, tuple(x.shape), (c.queries, 1), (1, c.queries)) for x in (known, held)),
            Described(acc, (sums, rows * c.dim // 32, 32), (rows * c.dim, 32, 1), (1, 2 * c.dim, 32)),
            *described, made.tiles, made.starts, made.visits,
            *(none if x is None or x.numel() == 0 else x for x in (mask.rules, mask.bits)), turns,
            factor, scale, k.shape[2], rows, len(known) // 2, heads,
            mask.heads * rows if lists > 1 and mask.batch > 1 else 0, rows if lists > 1 and mask.heads > 1 else 0,
            heads // mask.heads, lists * (rows // c.queries),
            score_args.cap(scale, scores), *score_args.slopes(scores, q.shape[2], k.shape[2]),
            *score_args.ends(mask), of_parts[0] if of_parts else None, c, SOURCE,
        )  # fmt: skip
        # Tickets wait for CTAs of the same launch, so all CTAs must be resident together.
        options = {"launch_cooperative_grid": True} if c.ordered else None
        launch_on(q.device, attention_bwd_kernel, made.ctas, args, options)
        cast_quantized(acc, scale, dq, turns if c.ordered else None, c.pack)
        if of_parts:
            add_parts(
                of_parts[0].view(-1, c.keys, c.dim + c.v_dim), made.lengths, made.parts, scale, dk, dv, c.dim
            )


def describe_queries(c: Config, x: Tensor, dim: int) -> Described:
    """A TMA description of q or grad: the rows of a step."""
    return query_rows(x, c.pack, dim, c.queries) if c.pack > 1 else describe_heads(x, c.queries, dim)


KERNEL: AttentionGradKernel = PackedRows(HopperAttentionGrad(), copies=False)
