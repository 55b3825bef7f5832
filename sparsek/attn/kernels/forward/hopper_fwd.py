"""O = softmax(scale Q K^T, where the mask allows) V on Hopper: only stored blocks are visited, float32 accumulation.

    one tile of O                    a step loads into shared memory         and holds in registers
    .------- v_dim -------.
    |    warpgroup 0      | 64       K [keys, dim]                           S = Q K^T           64 x keys, float32
    |---------------------|          V [keys, v_dim]                         P = exp2(S - m)     64 x keys, in pairs
    |    warpgroup 1      | 64                                               O += P V            64 x v_dim, float32
    '---------------------'

The kernel is persistent: a CTA walks the tiles that the schedule assigned to it, longest first. One producer warp
loads Q, then K and V of the stored blocks, by TMA; steps of partial blocks come first. Each consumer warpgroup owns
64 rows and runs the online softmax of FlashAttention (Dao 2023; Shah et al. 2024 for Hopper). S of step i is issued
before P V of step i - 1, so that the softmax of step i overlaps with P V (pipeline.py). The scale is folded into exp2.
O is rescaled only if a row's maximum grew by more than 2^8: a warp vote makes this a branch, and until then P may
reach 2^8.

A row of a tile is one query of one head. With `pack` > 1 a tile holds `pack` query heads at each position, made
adjacent by the tensor map. A tile stores O through shared memory and TMA. Tiles that the schedule split write float32
O and the logarithm of their sum instead, which `merge_parts` merges in a fixed order.

Bottleneck (docs/notes/attention-forward.md): at dim 128 a step of 128 x 128 is 2048 cycles of
tensor core and 1024 of exp2 on each SM, plus some 400 other instructions a thread. All of these must overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from sparsek.attn.kernels.forward import pipeline, rules, score_args
from sparsek.attn.kernels.forward.fwd_load import (
    Where,
    bits_at,
    bounds_at,
    inner_bounds,
    load,
    masked_column,
    tile_at,
)
from sparsek.attn.kernels.forward.merge import merge_parts
from sparsek.attn.kernels.forward.pipeline import (
    LN2,
    LOG2E,
    BlockPipeline,
    attended,
    attended_by_some,
    fitted,
    rings,
    room_of_o,
    step_seconds,
    stored,
)
from sparsek.attn.kernels.forward.rules import by_members, by_words, interval_words, no_words, stored_words
from sparsek.attn.kernels.forward.schedule_fwd import schedule
from sparsek.attn.kernels.forward.softmax import biased, capped, with_sink
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_schedule as tiling
from sparsek.attn.plan.attention_schedule import AttentionSchedule, TileShape
from sparsek.attn.plan.kernels import (
    AttentionCall,
    AttentionKernel,
    padded_heads,
    padding_notes,
    unless_heads,
)
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.engine.launch.gluon import Described, describe_heads, launch_on, tma_store, tma_store_wait
from sparsek.engine.launch.kinds import source_of
from sparsek.engine.plan.kernel import unless_aligned, unless_hopper


@dataclass(frozen=True, repr=False)
class Config(BlockPipeline):
    """`softcap`, `alibi`: what changes scores. `sinks`: the dtype of the learned sinks, "" without."""

    softcap: bool = False
    alibi: bool = False
    sinks: str = ""

    @property
    def texts(self) -> list[str]:
        shape = self.pipeline_texts(f"blocks {self.block[0]}x{self.block[1]}")
        flags = self.true_names("split", "lse", "softcap", "alibi")
        return [*shape, rules.named(self), *flags, f"sinks in {self.sinks}" * bool(self.sinks)]


SOURCE = source_of(__file__, pipeline.__file__)


@gluon.jit
def changed(T: gl.constexpr, s, i, masked, tile):
    """Scores of step i, of a partial block if i < masked: capped, then less slope times distance, in base 2 then."""
    if T.softcap:
        s = capped(s, tile[3])
    if T.alibi:
        SUB: gl.constexpr = T.block[1] // T.keys
        at = tile[0]
        partial, rules, bits, full = tile[1]
        if i < masked:
            col = masked_column(T, partial, at.p_begin, i)
        else:
            col = gl.load(full + at.f_begin + (i - masked) // SUB)
        s = biased(s, tile[2], at.slope, at.place - (col * T.block[1] + i % SUB * T.keys))
    return s


@gluon.jit
def rule_of(T: gl.constexpr, MASKED: gl.constexpr, i, masked, tile):
    """The words of step i, of a partial block if MASKED. Row 0 is row `row` of the mask's block."""
    words = no_words(T)
    if MASKED and T.members == 0:
        at = tile[0]
        partial, rules, bits, full = tile[1]
        SUB: gl.constexpr = T.block[1] // T.keys
        key = masked_column(T, partial, at.p_begin, i) * T.block[1] + i % SUB * T.keys
        if T.bits:
            rule = gl.load(rules + at.p_begin + i // SUB, mask=at.p_begin >= 0, other=-1)
            if rule >= 0:
                stored = bits + rule.to(gl.int64) * (T.block[0] * (T.block[1] // 32))
                words = stored_words(T, stored + i % SUB * (T.keys // 32), at.row)
            else:
                words = interval_words(T, key, at.lo, at.hi)
        else:
            words = interval_words(T, key, at.lo, at.hi)
    return words


@gluon.jit
def allowed(T: gl.constexpr, MASKED: gl.constexpr, s, words, i, masked, tile):
    """Scores of step i after its block's rule, if that is partial."""
    if MASKED:
        if T.members > 0:
            at = tile[0]
            partial, rules, bits, full = tile[1]
            SUB: gl.constexpr = T.block[1] // T.keys
            key = masked_column(T, partial, at.p_begin, i) * T.block[1] + i % SUB * T.keys
            members = rules + gl.maximum(at.p_begin + i // SUB, 0) * T.words
            s = by_members(T, s, key, members, at.row, at.lo, at.hi, at.inner, at.ends)
        else:
            s = by_words(T, s, words)
    return s


@gluon.jit
def sees(T: gl.constexpr, i, masked, tile):
    """The bits of a warpgroup's rows in masked step i."""
    at = tile[0]
    partial, rules, bits, full = tile[1]
    return bits_at(T, rules, at.p_begin, at.row, i, masked)


@gluon.jit
def finished(T: gl.constexpr, WG: gl.constexpr, o_desc, acc, lse, r, at, where, outs, at_q, q_s, o_s, bars):
    """Writes O and lse, in base 2, of a tile or of its part: of its rows r, at positions `at`. The next slot of Q."""
    DTYPE: gl.constexpr = o_desc.dtype
    VDIM: gl.constexpr = T.v_dim
    O_LAYOUT: gl.constexpr = acc.type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    b, h, pos, part, q_len, heads = where
    lse_ptr, part_ptr, part_lse_ptr = outs
    q_slot, q_phase = at_q
    if T.split:
        if part >= 0:
            own = part.to(gl.int64) * 128 + r
            gl.store(part_lse_ptr + own, lse)
            own = gl.expand_dims(gl.convert_layout(own, O_ROW), 1) * VDIM
            gl.store(part_ptr + own + gl.expand_dims(gl.arange(0, VDIM, gl.SliceLayout(0, O_LAYOUT)), 0), acc)
    if T.lse:
        if part < 0:
            row = (b.to(gl.int64) * heads + h + r % T.pack) * q_len + at
            gl.store(lse_ptr + row, lse * LN2, mask=at < q_len)
    o = room_of_o(T, WG, q_slot, q_s, o_s)
    if part < 0:
        o.reshape((64, VDIM)).store(acc.to(DTYPE))
        fence_async_shared()
        tma_store(o_desc, [b, h // T.pack, pos + WG * (64 // T.pack), 0, 0], o)
    return stored(T, WG, at_q, bars)


@gluon.jit
def attend(
    T: gl.constexpr, WG: gl.constexpr, o_desc, tiles, count, lists, bounds, outs, scale, sizes, changes, q_s, k_s, v_s,
    o_s, bars,
):  # fmt: skip
    """Consumer warpgroup WG: computes its 64 rows of every tile."""
    DTYPE: gl.constexpr = o_desc.dtype
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.keys, 16]))
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 16])
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q_len, heads, kv_len = sizes
    cap, alibi, learned, ends = changes
    slopes, slope_item, slope_head, ahead = alibi
    sinks, sink_step = learned
    r = WG * 64 + gl.arange(0, 64, ROW)
    slot = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    for t in range(gl.program_id(0), gl.load(count), gl.num_programs(0)):
        pos, b, h, p_begin, masked, f_begin, steps, part = tile_at(T, tiles, t)
        at = pos + r // T.pack
        lo, hi = bounds_at(T, bounds, b, h, at, q_len, kv_len)
        place, slope = 0, 0
        if T.alibi:
            place = at + ahead
            slope = gl.load(slopes + b * slope_item + (h + r % T.pack) * slope_head) * LOG2E
        inner = (0, 0)
        if T.members > 0:
            inner = inner_bounds(T, bounds, b, h, pos + WG * (64 // T.pack), q_len, kv_len)
        row = pos % T.block[0] * T.pack + WG * 64
        where = Where(p_begin, f_begin, row, lo, hi, place, slope, inner, ends)
        tile = (where, lists, scale, cap)
        factor = 1.0 if T.alibi else scale
        if T.skips:
            acc, m, l, slot, phase = attended_by_some(
                T, changed, rule_of, allowed, sees, WG, DTYPE, masked, steps, tile, factor, (q_slot, q_phase),
                (slot, phase), q_s, k_s, v_s, bars,
            )  # fmt: skip
        else:
            acc, m, l, slot, phase = attended(
                T, changed, rule_of, allowed, WG, DTYPE, masked, steps, tile, factor, (q_slot, q_phase),
                (slot, phase), q_s, k_s, v_s, bars,
            )  # fmt: skip
        if T.sinks != "":
            # Parts of a tile have no sink: merge_parts adds it once.
            sink = gl.load(sinks + (h + r % T.pack) * sink_step, mask=r * 0 + part < 0, other=float("-inf"))
            m, l, kept = with_sink(m, l, sink.to(gl.float32) * LOG2E)
            seen = l != 0
            divided = gl.where(seen, kept / l, 0.0)
        else:
            seen = l != 0
            divided = gl.where(seen, 1.0 / l, 0.0)
        acc = acc * gl.expand_dims(gl.convert_layout(divided, O_ROW), 1)
        lse = gl.where(seen, m + gl.log2(l), float("-inf"))
        where = (b, h, pos, part, q_len, heads)
        q_slot, q_phase = finished(
            T, WG, o_desc, acc, lse, r, at, where, outs, (q_slot, q_phase), q_s, o_s, bars
        )
    tma_store_wait(0)  # shared memory must outlive the copies that read it


NUMBERS = ["group", "q_len", "heads", "kv_len", "bound_item", "bound_head", "bound_group"]


@gluon.jit(
    do_not_specialize=[*NUMBERS, "slope_item", "slope_head", "ahead", "sink_step", "window", "sunk"],
    do_not_specialize_on_alignment=["slopes", "sinks"],
)
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, tiles, count, partial, full, rules, bits, lo, hi, lse, part, part_lse, scale, group,
    q_len, heads, kv_len, bound_item, bound_head, bound_group, cap, slopes, slope_item, slope_head, ahead, sinks,
    sink_step, window, sunk, T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """Record t of the schedule is tiles[FIELDS t : FIELDS (t + 1)], see attn/plan/attention_schedule.py.

    `scale` is the softmax scale times log2(e). The bounds lo and hi of query x of head h of item b are at b *
    bound_item + h // bound_group * bound_head + x. SOURCE only enters Triton's cache key.

    With softcap, `cap` is 2 log2(e) times the softmax scale over softcap, and `scale` softcap times log2(e). Query x
    stands at key x + ahead; the slope of head h of item b is at b * slope_item + h * slope_head. The sink of head h
    is at h * sink_step. `window`, `sunk`: keys that rows without their bit see, of a mask with members. What a call
    lacks is None.
    """
    GROUPS: gl.constexpr = T.groups
    q_s, k_s, v_s, o_s, bars = rings(T, q_desc, o_desc)
    lists = (partial, rules, bits, full)
    outs = (lse, part, part_lse)
    sizes = (q_len, heads, kv_len)
    bounds = (lo, hi, bound_item, bound_head, bound_group)
    changes = (
        cap if T.softcap else 0,
        (slopes, slope_item, slope_head, ahead) if T.alibi else (0, 0, 0, 0),
        (sinks, sink_step) if T.sinks != "" else (0, 0),
        (window, sunk) if T.member_ends else (0, 0),
    )
    consumer = (o_desc, tiles, count, lists, bounds, outs, scale, sizes, changes, q_s, k_s, v_s, o_s, bars)
    seen = rules if T.passes else 0
    producer = (q_desc, k_desc, v_desc, tiles, count, partial, full, group, q_s, k_s, v_s, bars, seen)
    if GROUPS == 1:
        gl.warp_specialize([(attend, (T, 0) + consumer), (load, (T,) + producer)], [1], [40])
    else:
        gl.warp_specialize(
            [(attend, (T, 0) + consumer), (attend, (T, 1) + consumer), (load, (T,) + producer)],
            [4, 1],
            [240, 24],
        )


class Outputs(NamedTuple):
    """What a launch writes: O as wide as a tile, and lse, O and lse of parts of tiles, or placeholders for these."""

    whole: Tensor
    sums: tuple[Tensor, Tensor, Tensor]


class Work(NamedTuple):
    """A schedule on the device, and a placeholder for tensors that a mask or call lacks."""

    schedule: AttentionSchedule
    none: Tensor

    @property
    def imbalance(self) -> Any:
        return self.schedule.imbalance

    @property
    def ctas(self) -> int:
        return min(self.schedule.ctas, len(self.schedule.tiles))

    def outputs(self, c: Any, call: AttentionCall) -> Outputs:
        """The call's outputs, and a workspace for parts if tiles may be cut."""
        made, none = self
        out, lse = call.out, none if call.lse is None else call.lse
        if not c.split:
            return Outputs(out, (lse, none, none))
        room = (max(1, made.slots), tiling.SLOT_ROWS)
        o_part, lse_part = (out.new_empty(shape, dtype=torch.float32) for shape in ((*room, c.v_dim), room))
        # Parts are as wide as a tile; merge_parts reads the width of the output.
        whole = out if c.v_dim == out.shape[3] else out.new_empty((*out.shape[:3], c.v_dim))
        return Outputs(whole, (lse, o_part, lse_part))

    def finish(self, c: Any, outs: Outputs, call: AttentionCall) -> None:
        """Merges parts, and copies O where it is narrower than a tile."""
        whole, (_, o_part, lse_part) = outs
        if c.split and self.schedule.merges is not None:
            sinks = score_args.sinks(call.scores)
            merge_parts(o_part, lse_part, self.schedule.merges, whole, call.lse, c.pack, c.rows, sinks)
        if whole is not call.out:
            call.out.copy_(whole[..., : call.out.shape[3]])


class HopperAttention:
    """Implements the Kernel protocol for the device code above; hopper.attention_fp8 launches another one."""

    name = "hopper.attention_fwd"
    _config: type[Any] = Config
    _device: tuple[Any, str] = attention_kernel, SOURCE
    _tile_seconds = 1.2e-6  # beside the steps of a tile of 128 rows

    def why_not(self, p: AttentionProblem) -> list[str]:
        reasons = unless_hopper(p) + unless_heads(p, "registers hold heads of at most 256", 256)
        if p.members and not list(self.configs(p)):
            reasons.append(
                f"a tile has 64 rows or more of a block, and {p.block[0]} queries of {packs(p)[0]} heads are fewer"
            )
        return reasons + unless_aligned(p, "strides of q, k and v") + too_long(p)

    def default(self, p: AttentionProblem) -> Config:
        return min(self.configs(p), key=lambda c: self.seconds(p, c))

    def configs(self, p: AttentionProblem) -> Iterable[Any]:
        dim, v_dim = padded_heads(p)
        rules = {"interval": p.by_interval, "bits": p.by_bits, "lse": p.lse, **self._own_rules(p)}
        found: dict[Any, None] = {}
        for groups in (2, 1) if p.block[0] == 128 or p.members else (1,):
            for keys in (128, 64):
                if not self._fits(p, keys) or (groups == 1 and keys == 128 and max(dim, v_dim) > 64):
                    continue
                for pack in packs(p):
                    if 64 * groups // pack > p.block[0]:
                        continue
                    c = self._config(dim, v_dim, p.block, groups, keys, 2, 2, pack, **rules)
                    c = fitted(c, p.card.smem_bytes)
                    found[replace(c, split=tiling.is_cut(p, self._shape(p, c)))] = None
        return list(found)

    def _own_rules(self, p: Any) -> dict[str, Any]:
        """Fields of the config that the kernel of the other dtype lacks."""
        changes = {"softcap": p.softcap, "alibi": p.alibi, "sinks": p.sink_logits}
        return changes | {"members": p.members, "member_ends": p.member_ends}

    def _fits(self, p: Any, keys: int) -> bool:
        """Whether a step may have so many keys."""
        return keys <= min(64 if max(p.dim, p.v_dim) > 128 else 128, p.block[1])

    def _shape(self, p: AttentionProblem, c: Config) -> TileShape:
        return TileShape(c.positions, c.pack, p.card.sm_count * c.ctas_per_sm)

    def _step_seconds(self, p: AttentionProblem, c: Config) -> float:
        """A step of a whole SM."""
        return step_seconds(c, p.card, p.change_price)

    def _loaded(self, p: AttentionProblem, c: Any) -> float:
        """What is left of a step's time where two CTAs of 64 rows each load only what their tokens see.

        By times of 16 blocks of 64 keys a token on an H200 (2026-11-29), over those of tiles of 128 rows: 0.97 (tokens
        that agree) and 0.87 (random) with 64 key blocks for each token of a tile of the mask, 1.01 with 16. It goes by
        the grid: counts of stored blocks are bounds until they are read, and a plan would change then.
        """
        sparse = p.members > 0 and p.grid[1] >= 32 * p.block[0] // p.members
        return 0.9 if sparse and c.passes and c.ctas_per_sm == 2 else 1.0

    def seconds(self, p: AttentionProblem, c: Any) -> float:
        """Steps of the fullest SM, and begin and end of every tile; or the memory traffic, if that is longer."""
        shape = self._shape(p, c)
        tiles = tiling.tiles_of(p, shape)
        sms = p.card.sm_count
        per_tile = p.stored / max(1, p.mask_batch * p.mask_heads * p.grid[0]) * (p.block[1] // c.keys)
        step = self._step_seconds(p, c) * self._loaded(p, c)
        tile = max(1.0, per_tile) * step + self._tile_seconds * c.rows / 128
        longest = min(p.longest, tiling.part_blocks(p, shape)) * (p.block[1] // c.keys) * step
        compute = max(tiles * tile / sms, longest * (1 if c.split else c.ctas_per_sm))
        merge = 1e-5 if c.split else 0.0
        return max(compute, p.compulsory_bytes / (0.92 * p.card.bandwidth)) + merge + p.card.launch_seconds

    def notes(self, p: AttentionProblem, c: Config) -> list[str]:
        found = []
        if c.pack > 1:
            few = "a tile has few queries" if p.members else "queries are few"
            found.append(f"{c.pack} query heads share a tile, because they share a list and {few}")
        if c.split:
            shape = self._shape(p, c)
            slots = 2 * tiling.extra_tiles(p, p.stored, shape)
            found.append(
                f"tiles of more than {tiling.part_blocks(p, shape)} blocks are cut and merged in a fixed order; "
                f"workspace of at most {slots * tiling.SLOT_ROWS * (c.v_dim + 1) * 4 / 1e6:.4g} MB a call"
            )
        return found + padding_notes(p, c)

    def prepare(self, p: AttentionProblem, c: Config, mask: BlockMask) -> Work:
        made = schedule(p, mask, self._shape(p, c))
        return Work(made, made.count)

    def launch(self, c: Any, work: Work, call: AttentionCall) -> None:
        q, k, _, mask, scale, _, _, scores = call
        heads, outs, (kernel, source) = q.shape[1], work.outputs(c, call), self._device
        lists, strides = mask_args(mask, q.shape[2], work.none)
        described, scales, others = self._own_args(c, call)
        args = (
            *described, query_rows(outs.whole, c.pack, c.v_dim), work.schedule.tiles, work.schedule.count, *lists,
            *outs.sums, *scales, score_args.factor(scale, scores), heads // k.shape[1], q.shape[2], heads, k.shape[2],
            *strides, heads // mask.heads, *others, c, source,
        )  # fmt: skip
        launch_on(q.device, kernel, work.ctas, args, c.options)
        work.finish(c, outs, call)

    def _own_args(self, c: Any, call: AttentionCall) -> tuple[tuple[Any, ...], ...]:
        """The descriptions of q, k and v, their scales, and the last arguments."""
        q, k, v, mask, scale, _, _, scores = call
        described = (
            query_rows(q, c.pack, c.dim), describe_heads(k, c.keys, c.dim), describe_heads(v, c.keys, c.v_dim)
        )  # fmt: skip
        slopes = score_args.slopes(scores, q.shape[2], k.shape[2])
        changes = score_args.cap(scale, scores), *slopes, *score_args.sinks(scores)
        return described, (), (*changes, *score_args.ends(mask))


def too_long(p: AttentionProblem) -> list[str]:
    """The reason why_not, if positions or bounds exceed 32 bits."""
    if p.mask_batch * p.mask_heads * p.q_len < 2**31 and max(p.q_len, p.kv_len) <= p.block[1] << 22:
        return []
    return ["positions are 32 bits: lengths may be 2^22 key blocks, and bounds 2^31"]


def mask_args(mask: BlockMask, q_len: int, none: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """A mask's lists, rules and bounds, `none` for what it lacks; and the strides of bounds by item and head."""
    bounds = (none, none) if mask.lo is None or mask.hi is None else (mask.lo, mask.hi)
    own = bounds[0].dim() == 2 and bounds[0].shape[0] > 1
    lists = (mask.partial.indices, mask.full.indices, mask.rules, mask.bits, *bounds)
    strides = (mask.heads * q_len if own and mask.batch > 1 else 0, q_len if own and mask.heads > 1 else 0)
    return tuple(none if x is None or x.numel() == 0 else x for x in lists), strides


def packs(p: AttentionProblem) -> list[int]:
    """Query heads per tile: 1, and the largest power of two that divides the group, if that makes fewer tiles. This
    one alone where queries of a block have bits.
    """
    pack = min(64, p.group & -p.group)
    if p.members:
        return [pack] if p.mask_heads in (1, p.kv_heads) else [1]
    if pack == 1 or p.mask_heads not in (1, p.kv_heads) or p.q_len > p.block[0] // 2:
        return [1]
    return [1, pack]


def query_rows(x: Tensor, pack: int, dim: int, rows: int = 64) -> Described:
    """TMA description of q or out: `rows` rows of [query, head of the pack]."""
    (b, h, s, d), (sb, sh, ss, _) = x.shape, x.stride()
    return Described(
        x, (b, h // pack, s, pack, d), (sb, sh * pack, ss, sh, 1), (1, 1, rows // pack, pack, dim)
    )


KERNEL: AttentionKernel = HopperAttention()
