"""O = softmax(scale Q K^T, where the mask allows) V on Hopper over e4m3: only stored blocks are visited.

    one tile of O                    a step loads into shared memory         and holds in registers
    .------- v_dim -------.
    |    warpgroup 0      | 64       K [keys, dim]                           S = Q K^T           64 x keys, float32
    |---------------------|          V [v_dim, keys]                         P = exp2(S - m)     64 x keys, e4m3
    |    warpgroup 1      | 64                                               P V and O           64 x v_dim, float32
    '---------------------'

Schedule, producer warp, rules of partial blocks and the end of a tile are those of hopper.attention_fwd. What differs:

FP8 wgmma reads both operands along the sum, so V lies turned, with its keys in the order in which the accumulators of
S hold them: P goes from registers to the next product without a shuffle (softmax_fp8.py).

The tensor core sums e4m3 products in about 14 bits and truncates. Q K^T is one such sum over D. P V is one over the
keys of a step only, and is then added to O in float32. That addition also rescales O, so maxima need not lag.

Scales: those of Q and K times the softmax scale are one factor of a row. With scales of blocks of K or V (`by_block`)
the consumer loads those of each step. O is then in units of the last scale of V, and the factor that rescales its
rows to new maxima also brings it to the next unit, so no element is multiplied by a scale.

Order of a step: S of this step and P V of the one before are issued together; maxima and exp2 run beside P V. Then it
waits for V of this step and K of the next one, so that the next step begins without a wait. The branch of that wait
also keeps ptxas from mixing sums and rounding with exp2. P is rounded after P V of the step before is done: earlier,
ptxas would serialize wgmma, whose registers it would write (C7513). The two warpgroups take turns at exp2: in phase,
each would take twice as long for it, and leave the unit idle otherwise.

Bottleneck (docs/notes/attention-fp8.md): latency. At dim 128 a step of 128 x 128 is 1024 cycles of tensor core and
1056 of exp2 on each SM, but takes 2050. A warpgroup waits for S, then computes maxima, exp2, sums and rounding one
after another. Registers have no room for a second S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from sparsek.attn.kernels.forward import pipeline, rules
from sparsek.attn.kernels.forward.fwd_load import Where, bounds_at, load, masked_column, tile_at
from sparsek.attn.kernels.forward.hopper_fwd import (
    NUMBERS,
    HopperAttention,
    allowed,
    finished,
    query_rows,
    too_long,
)
from sparsek.attn.kernels.forward.pipeline import BlockPipeline, after, rings
from sparsek.attn.kernels.forward.softmax_fp8 import (
    PEAK,
    next_unit,
    own_sums,
    packed,
    promoted,
    scores,
    unpacked,
    weighted,
    weights,
)
from sparsek.attn.plan.kernels import AttentionCall, AttentionKernel, unless_heads, unless_members
from sparsek.engine.launch.gluon import Described, describe_heads, tma_store_wait
from sparsek.engine.launch.kinds import source_of
from sparsek.engine.plan.kernel import unless_aligned, unless_hopper

WHOLE_HEAD = 1 << 30  # rows of a scale, where a head has one
LEAST = gl.constexpr(1e-37)  # of a row's factor: 0 times a score of -inf would be NaN


@dataclass(frozen=True, repr=False)
class Config(BlockPipeline):
    """In e4m3. `by_block`: scales of K and V change between steps."""

    by_block: bool = False

    itemsize: ClassVar[int] = 1
    v_turned: ClassVar[bool] = True
    alibi: ClassVar[bool] = False

    @property
    def texts(self) -> list[str]:
        scales = f"scales of {'blocks' if self.by_block else 'heads'}"
        shape = self.pipeline_texts(scales, f"blocks {self.block[0]}x{self.block[1]}", of=" in e4m3")
        return [*shape, rules.named(self), *self.true_names("split", "lse")]


SOURCE = source_of(__file__, pipeline.__file__)


@gluon.jit
def reciprocal(rows):
    """2^40 over `rows`, a multiple of 64 up to 65536 or WHOLE_HEAD, in units of 64, rounded up."""
    sixties = rows // 64
    high = (1 << 30) // sixties  # in two parts: a division in 64 bits would be a call
    low = ((1 << 30) % sixties * 1024 + sixties - 1) // sixties
    return high.to(gl.int64) * 1024 + low


@gluon.jit
def quotient(key, per):
    """`key`, a multiple of 64 below 2^29, over the rows whose `reciprocal` is `per`, without the 30 instructions of an
    integer division. Exact: `per` is too large by less than 1 (by 0 for powers of 2), so the product by less than 2^23,
    which is less than 2^40 over 2^10.
    """
    return ((key // 64).to(gl.int64) * per >> 40).to(gl.int32)


@gluon.jit
def step_scales(T: gl.constexpr, MASKED: gl.constexpr, i, masked, tile, scale):
    """The rows' factors of scores in step i, and the scale of its values."""
    if T.by_block:
        SUB: gl.constexpr = T.block[1] // T.keys
        partial, rules, bits, full = tile[1]
        k_scale, v_scale, per_k, per_v, kv_len = tile[2]
        if MASKED:
            col = masked_column(T, partial, tile[0].p_begin, i)
        else:
            col = gl.load(full + tile[0].f_begin + (i - masked) // SUB)
        key = col * T.block[1] + i % SUB * T.keys
        there = key < kv_len
        of_k = gl.load(k_scale + quotient(key, per_k), mask=there, other=1.0)
        of_v = gl.load(v_scale + quotient(key, per_v), mask=there, other=LEAST)
        return gl.maximum(scale * of_k, LEAST), of_v
    else:
        return scale, 1.0


@gluon.jit
def turn_barriers(T: gl.constexpr):
    """A barrier for each warpgroup that completes when it is its turn, and zeros that it reads then."""
    GROUPS: gl.constexpr = T.groups
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    zeros = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    zeros.store(gl.zeros((64,), gl.float32, gl.BlockedLayout([1], [32], [4], [0])))
    return turns, zeros


@gluon.jit
def pass_on(T: gl.constexpr, WG: gl.constexpr, turns):
    """Lets the other warpgroup compute its exp2."""
    if T.groups == 2:
        mbarrier.arrive(turns[0].index(1 - WG), count=1)


@gluon.jit
def landed(T: gl.constexpr, i, steps, slot, phase, bars):
    """Waits for V of step i, and K of the next step of the tile, if there is one."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    mbarrier.wait(v_full.index(slot), phase)
    next_slot, next_phase = after(slot, phase, T.stages)
    if i + 1 < steps:
        mbarrier.wait(k_full.index(next_slot), next_phase)


@gluon.jit
def step(
    T: gl.constexpr, WG: gl.constexpr, MASKED: gl.constexpr, i, masked, steps, state, tile, scale, q, k_s, v_s, bars,
    turns,
):  # fmt: skip
    """S of step i in parallel with P V of the previous step, then step i's softmax.

    V in the slot of `state`, and K in the next one, have landed.
    """
    acc, quads, m, l, alpha, unit, most, v_slot, v_phase, turn = state
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    slot, phase = after(v_slot, v_phase, T.stages)
    own, of_v = step_scales(T, MASKED, i, masked, tile, scale)
    p = unpacked(T, quads)  # before S is issued: between two wgmma ptxas would serialize both (C7513)
    s = scores(T, q, k_s, slot)
    pv = weighted(T, p, v_s, v_slot, acc)
    s = warpgroup_mma_wait(1, deps=(s,))  # S is done, P V still runs
    mbarrier.arrive(k_empty.index(slot), count=1)
    s = allowed(T, MASKED, s, i, masked, tile)
    p, m, kept = weights(T, WG, False, s, m, own, turns, turn)
    landed(T, i, steps, slot, phase, bars)
    pass_on(T, WG, turns)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    l = l * gl.expand_dims(gl.convert_layout(kept, gl.SliceLayout(1, l.type.layout)), 1) + own_sums(T, p)
    quads = packed(T, p)
    acc = promoted(acc, alpha, pv)
    unit, most, alpha, quads = next_unit(T, of_v, unit, most, kept, quads)
    return acc, quads, m, l, alpha, unit, most, slot, phase, turn ^ 1


@gluon.jit
def attended(
    T: gl.constexpr, WG: gl.constexpr, masked, steps, tile, scale, at_q, at_k, turn, q_s, k_s, v_s, bars, turns
):  # fmt: skip
    """Sums of a tile's P V [64, v_dim], maxima and sums of its rows, the next slot of K and V with its phase, and that
    of the next turn.

    The first `masked` of the `steps` have a rule. `scale` [64] times scores is in base 2. `at_q`, `at_k`: slot and
    phase of Q, and of the first K and V. `turn`: the phase of the first turn.
    """
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    GROUPS: gl.constexpr = T.groups
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 32])
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_slot, q_phase = at_q
    slot, phase = at_k
    mbarrier.wait(q_full.index(q_slot * GROUPS + WG), q_phase)  # until Q has landed
    q = q_s.index(q_slot * GROUPS + WG).reshape((64, DIM))
    mbarrier.wait(k_full.index(slot), phase)  # and the first K
    s = warpgroup_mma_wait(0, deps=(scores(T, q, k_s, slot),))
    mbarrier.arrive(k_empty.index(slot), count=1)
    if masked > 0:
        own, unit = step_scales(T, True, 0, masked, tile, scale)
        s = allowed(T, True, s, 0, masked, tile)
    else:
        own, unit = step_scales(T, False, 0, masked, tile, scale)
    p, m, alpha = weights(T, WG, True, s, 0, own, turns, turn)
    landed(T, 0, steps, slot, phase, bars)
    pass_on(T, WG, turns)
    turn ^= 1
    l = own_sums(T, p)
    quads = packed(T, p)
    acc = gl.zeros((64, VDIM), gl.float32, O_LAYOUT)
    most = unit
    for i in range(1, masked):
        state = (acc, quads, m, l, alpha, unit, most, slot, phase, turn)
        acc, quads, m, l, alpha, unit, most, slot, phase, turn = step(
            T, WG, True, i, masked, steps, state, tile, scale, q, k_s, v_s, bars, turns
        )
    for i in range(gl.maximum(masked, 1), steps):
        state = (acc, quads, m, l, alpha, unit, most, slot, phase, turn)
        acc, quads, m, l, alpha, unit, most, slot, phase, turn = step(
            T, WG, False, i, masked, steps, state, tile, scale, q, k_s, v_s, bars, turns
        )
    mbarrier.arrive(q_empty.index(q_slot * GROUPS + WG), count=1)
    pv = warpgroup_mma_wait(0, deps=(weighted(T, unpacked(T, quads), v_s, slot, acc),))
    acc = promoted(acc, alpha, pv)
    mbarrier.arrive(v_empty.index(slot), count=1)
    slot, phase = after(slot, phase, T.stages)
    return acc, m, gl.convert_layout(gl.sum(l, 1), scale.type.layout), unit, slot, phase, turn


@gluon.jit
def attend(
    T: gl.constexpr, WG: gl.constexpr, o_desc, tiles, count, lists, bounds, outs, scale, sizes, scales, q_s, k_s, v_s,
    o_s, bars, turns,
):  # fmt: skip
    """Consumer warpgroup WG: computes its 64 rows of every tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.keys, 32]))
    O_ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 32]))
    q_len, heads, kv_len, group = sizes
    q_scale, k_scale, v_scale, of_q, of_k, of_v, q_rows, k_rows, v_rows = scales
    r = WG * 64 + gl.arange(0, 64, ROW)
    slot = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    per_k = reciprocal(k_rows) if T.by_block else 0
    per_v = reciprocal(v_rows) if T.by_block else 0
    turn = 1 - WG  # waiting on the phase before a barrier's first returns at once, so warpgroup 0 begins
    for t in range(gl.program_id(0), gl.load(count), gl.num_programs(0)):
        pos, b, h, p_begin, masked, f_begin, steps, part = tile_at(T, tiles, t)
        at = pos + r // T.pack
        lo, hi = bounds_at(T, bounds, b, h, at, q_len, kv_len)
        kv = b * (heads // group) + h // group
        k_scales = k_scale + kv * of_k
        v_scales = v_scale + kv * of_v
        of_row = (b * heads + h + r % T.pack) * of_q + at // q_rows
        factor = gl.load(q_scale + of_row, mask=at < q_len, other=1.0) * scale
        if not T.by_block:
            factor = gl.maximum(factor * gl.load(k_scales), LEAST)
        where = Where(p_begin, f_begin, pos % T.block[0] * T.pack + WG * 64, lo, hi, 0, 0, (0, 0), (0, 0))
        of_keys = (k_scales, v_scales, per_k, per_v, kv_len)
        acc, m, l, unit, slot, phase, turn = attended(
            T, WG, masked, steps, (where, lists, of_keys), factor, (q_slot, q_phase), (slot, phase), turn, q_s, k_s,
            v_s, bars, turns,
        )  # fmt: skip
        seen = l > 0
        if T.by_block:
            divided = gl.where(seen, unit / l, 0.0)
        else:
            divided = gl.where(seen, gl.load(v_scales) / l, 0.0)
        acc = acc * gl.expand_dims(gl.convert_layout(divided, O_ROW), 1)
        lse = gl.where(seen, m - PEAK + gl.log2(l), float("-inf"))
        where = (b, h, pos, part, q_len, heads)
        q_slot, q_phase = finished(
            T, WG, o_desc, acc, lse, r, at, where, outs, (q_slot, q_phase), q_s, o_s, bars
        )
    tma_store_wait(0)  # shared memory must outlive the copies that read it


@gluon.jit(
    do_not_specialize=[*NUMBERS, "of_q", "of_k", "of_v", "q_rows", "k_rows", "v_rows"],
    do_not_specialize_on_alignment=["q_scale", "k_scale", "v_scale"],
)
def attention_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, tiles, count, partial, full, rules, bits, lo, hi, lse, part, part_lse, q_scale,
    k_scale, v_scale, scale, group, q_len, heads, kv_len, bound_item, bound_head, bound_group, of_q, of_k, of_v, q_rows,
    k_rows, v_rows, T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """Arguments as of hopper.attention_fwd, and: query x of head h of item b has the scale q_scale[(b * heads + h) *
    of_q + x // q_rows]. So have keys, and values by their keys, of heads // group heads.
    """
    GROUPS: gl.constexpr = T.groups
    q_s, k_s, v_s, o_s, bars = rings(T, q_desc, o_desc)
    turns = turn_barriers(T)
    outs = (lse, part, part_lse)
    sizes = (q_len, heads, kv_len, group)
    bounds = (lo, hi, bound_item, bound_head, bound_group)
    scales = (q_scale, k_scale, v_scale, of_q, of_k, of_v, q_rows, k_rows, v_rows)
    lists = (partial, rules, bits, full)
    of_tiles = (lists, bounds, outs, scale, sizes, scales)
    consumer = (o_desc, tiles, count) + of_tiles + (q_s, k_s, v_s, o_s, bars, turns)
    producer = (q_desc, k_desc, v_desc, tiles, count, partial, full, group, q_s, k_s, v_s, bars)
    if GROUPS == 1:
        gl.warp_specialize([(attend, (T, 0) + consumer), (load, (T,) + producer)], [1], [40])
    else:
        gl.warp_specialize(
            [(attend, (T, 0) + consumer), (attend, (T, 1) + consumer), (load, (T,) + producer)],
            [4, 1],
            [240, 24],
        )


class HopperAttentionFp8(HopperAttention):
    """Implements the Kernel protocol for the device code above."""

    name = "hopper.attention_fp8"
    _config = Config
    _device = attention_fp8_kernel, SOURCE
    _tile_seconds = 2.7e-6

    def why_not(self, p: Any) -> list[str]:
        reasons = unless_hopper(p, ("e4m3",))
        if p.out not in ("bf16", "fp16"):
            reasons.append(f"gives bf16 and fp16, not {p.out}")
        if p.changes:
            reasons.append(f"does not change scores, and these have {', '.join(p.changes)}")
        reasons += unless_heads(p, "registers hold O twice", 256, 128, unit=16)
        return reasons + unless_members(p) + unless_aligned(p, "strides of the values") + too_long(p)

    def _own_rules(self, p: Any) -> dict[str, Any]:
        return {"by_block": any(p.scale_rows[1:])}

    def _fits(self, p: Any, keys: int) -> bool:
        """A step's keys lie in one block of the mask, and have one scale."""
        return keys <= p.block[1] and not any(each % keys for each in p.scale_rows[1:])

    def _step_seconds(self, p: Any, c: Any) -> float:
        """A step of a whole SM: 1.69 times the smooth maximum of tensor core and exp2 at 1.6 GHz. Fitted to nine
        records with tiles of 128x128 (an H200 and an H100, 2026-11-26); other tiles as in bf16.
        """
        card = p.card
        mma = c.rows * c.keys * (c.dim + c.v_dim) / (4096 * card.pace)
        exp = c.rows * c.keys / 16
        slower = (1.2 if c.keys == 64 else 0.9 if c.groups == 1 else 1.0) * (1.1 if c.by_block else 1.0)
        busy = 1.69 * slower * (mma**3 + exp**3) ** (1 / 3) / 1.6e9
        return max(busy, c.keys * (c.dim + c.v_dim) * card.sm_count / (0.9 * card.fabric))

    def _own_args(self, c: Any, call: AttentionCall) -> tuple[tuple[Any, ...], ...]:
        q, k, v = operands = call[:3]
        described = (
            query_rows(q.values, c.pack, c.dim), describe_heads(k.values, c.keys, c.dim),
            describe_turned(v.values, c.keys, c.v_dim),
        )  # fmt: skip
        per_head = [x.scale.shape[2] if x.rows else 1 for x in operands]
        rows = [x.rows or WHOLE_HEAD for x in operands]
        return described, (q.scale, k.scale, v.scale), (*per_head, *rows)


def describe_turned(values: Any, keys: int, v_dim: int) -> Described:
    """A TMA description of V [B, H, Dv, T]: `keys` keys of one head at a time, zero-padded to `v_dim` rows."""
    return Described(values, tuple(values.shape), (*values.stride()[:3], 1), (1, 1, v_dim, keys))


KERNEL: AttentionKernel = HopperAttentionFp8()
