"""Block-sparse attention forward in plain Triton with pointers: any CUDA GPU from sm_80, and Triton's interpreter.

    out[q] = sum over visited keys k of exp(scale q.k - lse[q]) v[k],   lse[q] = log of the sum of exp(scale q.k)

One program computes one tile of `out`: tile_m queries of one query tile of the mask, for one head. It walks that
row's two lists, tile_n keys per step, and keeps a running maximum, sum and weighted sum of V in float32:

    partial blocks   | p0      | p1      |               every score is tested by the block's rule
    full blocks                            | f0      |   no test
    steps            | s0 | s1 | s0 | s1 | | s0 | s1 |   bk / tile_n of them for each block
    S = Q K^T  [tile_m, tile_n];   P = exp2(scale S - top);   acc = acc exp2(top before - top) + P V

A rule is an interval of keys for each query, a word of 32 bits for each query and 32 keys of the block, or a bit for
each token of the block. In the last case rows of a tile are several heads of each token (packed_rows). Only partial
blocks may extend beyond the last key; that part is masked, never read. Scores are in base 2: log2(e) is folded into the
scale. Head dims 96 and 192 are zero-padded to 128 and 256: a third more products than needed. Every sum has one order:
same mask, same bits.

Bottleneck: the same warps multiply and compute exponentials, so the tensor cores idle during the softmax unless
another program on the SM uses them. hopper.attention_fwd overlaps the two. On sm_80 Triton gives each warp whole rows
of both products only if tile_m is at least tile_n and Dv; otherwise P goes through shared memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.forward import portable_tiles as common
from sparsek.attn.kernels.forward import score_args
from sparsek.attn.kernels.forward.lengths import Lengths, longest_first
from sparsek.attn.kernels.forward.packed_rows import PackedRows
from sparsek.attn.kernels.forward.portable_tiles import (
    bias,
    capped,
    is_hopper,
    load_tile,
    members_of,
    padded,
)
from sparsek.attn.kernels.forward.rules import admitted
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall, AttentionKernel
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core import dtypes
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.tensors import SIZE_LIMIT, at

DIMS = common.DIMS


@dataclass(frozen=True)
class Config(KernelConfig):
    """tile_m queries per program, tile_n keys per step: powers of two from 16 up that divide the mask's block."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    SIDES = ("tile_m", "tile_n")
    KERNEL = "portable.attention_fwd"


@dataclass(frozen=True, eq=False)
class Work:
    """`order` int32 [1 or mask.batch * mask.heads, Mb]: query tiles of a head, longest first, ties by position.

    `section` heads are walked together, tile after tile, before the next ones begin.
    """

    order: Tensor
    section: int


@triton.jit
def _walk(
    acc, total, top, q, k, v, inside, low, high, rules, bits,
    columns, start, steps, scale, cap, slope, place, kv_len, window, opening, sk_d, sv_d,
    SK_N: tl.constexpr, SV_N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PARTIAL: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """`acc` [tile_m, Dv], `total` and `top` [tile_m] after `steps` steps along one list. `q` is [tile_m, D].

    `slope`, a number or [tile_m, 1], and `place` [tile_m]: of ALiBi in base 2, and positions of the queries.
    """
    factor = scale
    if slope is not None:
        factor = 1.0  # biased scores are in base 2
    PER: tl.constexpr = BK // TN
    column = tl.load(columns + start, mask=steps > 0, other=0)
    for step in range(steps):
        inner = step % PER * TN
        first = column * BK + inner
        k_tile = load_tile(k, first, kv_len, SK_N, sk_d, TN, D, PARTIAL, WIDE)
        v_tile = load_tile(v, first, kv_len, SV_N, sv_d, TN, DV, PARTIAL, WIDE)
        # Read one step ahead: an index loaded in the step that uses it would halve the pipeliner's buffers.
        column = tl.load(columns + start + (step + 1) // PER, mask=step + 1 < steps, other=0)

        s = tl.dot(q, tl.trans(k_tile))
        if cap is not None:
            s = capped(s, cap)
        if slope is not None:
            s = s * scale - bias(slope, place[:, None], (first + tl.arange(0, TN))[None, :])
        if PARTIAL:
            ok = admitted(
                low, high, rules, bits, start + step // PER, inside, first, inner, window, opening, BM, BK, TN, MEMBERS,
            )  # fmt: skip
            s = tl.where(ok, s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 1) * factor)
        base = now
        if PARTIAL:  # a query may have had no key yet, and -inf - -inf is NaN
            base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        top = now
    return acc, total, top


# A new length, mask or alignment of its lists compiles nothing: Triton does not specialize for these values.
_NUMBERS = ("q_len", "kv_len", "tiles", "all_heads", "section", "mask_step", "order_step", "rule_step",
            "slope_item", "slope_head", "ahead", "sink_step", "window", "opening")  # fmt: skip
_POINTERS = (
    "lse", "order", "part_starts", "part_counts", "part_columns", "full_starts", "full_counts", "full_columns",
    "lo", "hi", "rules", "bits", "slopes", "sinks",
)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _attention(
    q, k, v, out, lse, order,
    part_starts, part_counts, part_columns, full_starts, full_counts, full_columns, lo, hi, rules, bits,
    scale, q_len, kv_len, tiles, all_heads, section, mask_step, order_step, rule_step,
    cap, slopes, slope_item, slope_head, ahead, sinks, sink_step, window, opening,
    sq_b, sq_h, sq_m, sq_d, sk_b, sk_h, sk_d, sv_b, sv_h, sv_d, so_b, so_h, so_m, so_d,
    SK_N: tl.constexpr, SV_N: tl.constexpr,
    HEADS: tl.constexpr, KV_GROUP: tl.constexpr, MASK_GROUP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    SUBS: tl.constexpr = BM // TM
    PER: tl.constexpr = BK // TN
    PADDED_DV: tl.constexpr = triton.next_power_of_2(DV)

    # Sections of heads outermost, then query tiles, longest first, then the heads of the section.
    pid = tl.program_id(0)
    in_section = tiles * SUBS * section
    first_head = pid // in_section * section
    width = min(all_heads - first_head, section)
    within = pid % in_section
    head = first_head + within % width
    b = (head // HEADS).to(tl.int64)
    h = (head % HEADS).to(tl.int64)
    group = head // HEADS * mask_step + head % HEADS // MASK_GROUP  # heads of one group share lists
    tile = tl.load(order + group * order_step + within // width // SUBS)
    sub = within // width % SUBS
    list_row = group * tiles + tile

    begin = tile * BM + sub * TM
    inside = sub * TM + tl.arange(0, TM)
    query = begin + tl.arange(0, TM)
    q_tile = load_tile(q + b * sq_b + h * sq_h, begin, q_len, sq_m, sq_d, TM, D, True, WIDE)
    k += b * sk_b + h // KV_GROUP * sk_h
    v += b * sv_b + h // KV_GROUP * sv_h
    low = None
    high = None
    if lo is not None:
        where = group.to(tl.int64) * rule_step + query
        low = tl.load(lo + where, mask=query < q_len, other=0)
        high = tl.load(hi + where, mask=query < q_len, other=0)

    slope = None
    place = None
    if slopes is not None:
        if MEMBERS > 1:
            heads = h * MEMBERS + inside % MEMBERS
            slope = (tl.load(slopes + b * slope_item + heads * slope_head) * 1.4426950408889634)[:, None]
            place = query // MEMBERS + ahead
        else:
            slope = tl.load(slopes + b * slope_item + h * slope_head) * 1.4426950408889634
            place = query + ahead

    acc = tl.zeros((TM, PADDED_DV), dtype=tl.float32)
    total = tl.zeros((TM,), dtype=tl.float32)
    top = tl.full((TM,), float("-inf"), dtype=tl.float32)
    live = begin < q_len  # the last query tile may end before its last program begins
    if lo is not None or bits is not None:
        start = tl.load(part_starts + list_row)
        steps = tl.load(part_counts + list_row, mask=live, other=0) * PER
        acc, total, top = _walk(
            acc, total, top, q_tile, k, v, inside, low, high, rules, bits,
            part_columns, start, steps, scale, cap, slope, place, kv_len, window, opening, sk_d, sv_d,
            SK_N, SV_N, BM, BK, TN, D, DV, True, WIDE, MEMBERS,
        )  # fmt: skip
    start = tl.load(full_starts + list_row)
    steps = tl.load(full_counts + list_row, mask=live, other=0) * PER
    acc, total, top = _walk(
        acc, total, top, q_tile, k, v, inside, None, None, None, None,
        full_columns, start, steps, scale, cap, slope, place, kv_len, None, None, sk_d, sv_d,
        SK_N, SV_N, BM, BK, TN, D, DV, False, WIDE, 0,
    )  # fmt: skip

    if sinks is not None:  # one more key, whose value is 0
        of_sinks = h
        if MEMBERS > 1:
            of_sinks = h * MEMBERS + inside % MEMBERS
        sink = tl.load(sinks + of_sinks * sink_step).to(tl.float32) * 1.4426950408889634
        now = tl.maximum(top, sink)
        base = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        acc = acc * shrink[:, None]
        top = now

    # A query without any key has total 0 and top -inf: it gets 0 / 1, and -inf + 0.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    col = tl.arange(0, PADDED_DV)
    out += b * so_b + h * so_h + begin.to(tl.int64) * so_m
    out += (at(tl.arange(0, TM), WIDE) * so_m)[:, None] + (at(col, WIDE) * so_d)[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=(query < q_len)[:, None] & (col < DV)[None, :])
    if lse is not None:
        lse += head.to(tl.int64) * q_len + query
        tl.store(lse, (top + tl.log2(total)) * 0.6931471805599453, mask=query < q_len)


def _constants(c: Config, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> dict[str, Any]:
    """Every constexpr of `_attention` for one launch.

    It includes strides along keys, so that addresses of rows at known distances share registers. No length changes
    them, in [B, H, S, D] and in [B, S, H, D].
    """
    heads, (bq, bk) = q.shape[1], mask.block
    return {
        "SK_N": k.stride(2), "SV_N": v.stride(2),
        "HEADS": heads, "KV_GROUP": heads // k.shape[1], "MASK_GROUP": heads // mask.heads,
        "BM": bq, "BK": bk, "TM": c.tile_m, "TN": c.tile_n, "D": q.shape[3], "DV": v.shape[3],
        "WIDE": common.is_wide(max(c.tile_m, c.tile_n), q, k, v, out), "MEMBERS": members_of(mask),
    }  # fmt: skip


# Tables by the wider padded head dim: tile_m, tile_n, warps, stages. The order is a guess until it is measured.
# fmt: off
HOPPER: dict[int, tuple[Config, ...]] = {
    64: (Config(128, 128, 8, 3), Config(128, 64, 4, 3), Config(128, 64, 8, 3), Config(64, 128, 4, 2),
         Config(64, 64, 4, 3)),
    128: (Config(128, 128, 8, 2), Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 4, 3),
          Config(64, 64, 4, 2)),
    256: (Config(128, 64, 8, 2), Config(128, 32, 8, 3), Config(64, 32, 4, 3), Config(64, 32, 4, 2)),
}
AMPERE: dict[int, tuple[Config, ...]] = {
    64: (Config(128, 64, 4, 3), Config(128, 64, 8, 3), Config(128, 32, 4, 4), Config(64, 64, 4, 3),
         Config(64, 32, 4, 4)),
    128: (Config(128, 64, 8, 3), Config(128, 32, 8, 4), Config(128, 32, 8, 3), Config(64, 64, 4, 3),
          Config(64, 32, 4, 3)),
    256: (Config(64, 32, 4, 3), Config(64, 32, 8, 3), Config(64, 64, 8, 3), Config(64, 16, 4, 3)),
}
# fmt: on
# Guessed TFLOPS of each table, padding included, with every SM busy: FlexAttention's Triton kernel has 332 to 384 on
# an H200 at a head dim of 128.
RATES = {64: 320.0, 128: 380.0, 256: 340.0}


def _shared(p: AttentionProblem, c: Config) -> int:
    """Bytes of shared memory, 3 KiB of margin included. On sm_80 one stage is in registers, and P may need memory."""
    buffers = c.num_stages if is_hopper(p) else c.num_stages - 1
    d, dv = padded(p.dim), padded(p.v_dim)
    spread = not is_hopper(p) and c.tile_m < max(c.tile_n, dv)
    elements = c.tile_m * d + buffers * c.tile_n * (d + dv) + (c.tile_m * c.tile_n if spread else 0)
    return elements * dtypes.itemsize(p.dtype) + 3072


def _section(p: AttentionProblem) -> int:
    """How many query heads are walked together: those that share K and V, as far as these fit in L2."""
    head_bytes = p.kv_len * (p.dim + p.v_dim) * dtypes.itemsize(p.dtype)
    return common.section(p, p.batch * p.q_heads, head_bytes, p.group)


class PortableAttention(common.PortableKernel):
    """Plain Triton twin of hopper.attention_fwd."""

    name = "portable.attention_fwd"
    tables = (HOPPER, AMPERE)
    most, tiled = SIZE_LIMIT, "queries"

    def programs(self, p: AttentionProblem, c: Config) -> tuple[int]:
        return (p.grid[0] * (p.block[0] // c.tile_m) * p.batch * p.q_heads,)

    def fits(self, p: AttentionProblem, c: Config) -> bool:
        divides = c.tile_m <= p.block[0] and c.tile_n <= p.block[1]
        return divides and (p.on_cpu or _shared(p, c) <= p.card.smem_bytes)

    def seconds(self, p: AttentionProblem, c: Config) -> float:
        """Launch + the longest of: arithmetic with padding, plus 1.5 us to begin and end each wave of tiles; the
        longest row on one SM; compulsory bytes at 80 % of copy bandwidth. Its rates are guesses (`RATES`).
        """
        (programs,) = self.programs(p, c)
        if p.on_cpu:  # the interpreter: about a millisecond per program and step
            steps = p.visited * p.block[0] // c.tile_m * p.block[1] // c.tile_n
            return 1e-3 * (programs + steps)
        rate = 1e12 * RATES[common.table_of(p)] * p.card.sustained(p.dtype) / 690.0
        # Two tiles of 64 rows share an SM, and one hides the end of the other (8K, 12.5 %, H200, 2026-11-26).
        rate *= 1.0 if c.tile_m >= 128 else 1.12
        rate /= p.change_price
        block = 2.0 * p.block[0] * p.block[1] * (padded(p.dim) + padded(p.v_dim))
        busy = max(1, min(p.card.sm_count, programs)) / p.card.sm_count
        waves = 1.5e-6 * -(-programs // p.card.sm_count)
        arithmetic = waves + block * p.visited / (rate * busy)
        tile = block * c.tile_m / p.block[0]
        longest = 1.5e-6 + tile * p.longest / (rate / p.card.sm_count)
        return p.card.launch_seconds + max(arithmetic, longest, p.compulsory_bytes / (0.8 * p.card.bandwidth))

    def prepare(self, p: AttentionProblem, c: Config, mask: BlockMask) -> Work:
        """The order of query tiles, on the mask's device, without a sync; one for all heads if all rows are as long."""
        uniform = p.exact and p.stored == p.longest * mask.rows
        groups, tiles = 1 if uniform else mask.batch * mask.heads, mask.grid[0]
        order = longest_first(Lengths(mask.partial.counts, mask.full.counts, groups, tiles, p.longest))
        return Work(order, _section(p))

    def launch(self, c: Config, work: Work, call: AttentionCall) -> None:
        """Computes attention of `q`, `k` and `v` into `out` [B, Hq, S, Dv], all with any strides, and `lse` [B, Hq,
        S], contiguous; no sync, no allocation. `scale` is above 0.
        """
        q, k, v, mask, scale, out, lse, scores = call
        batch, heads, q_len, _ = q.shape
        tiles, rows = mask.grid[0], max(members_of(mask), 1)
        with torch.cuda.device_of(q):
            launch(
                _attention, (tiles * (mask.block[0] // c.tile_m) * batch * heads,),
                q, k, v, out, lse, work.order,
                *mask.partial, *mask.full, mask.lo, mask.hi, mask.rules, mask.bits,
                score_args.factor(scale, scores), q_len, k.shape[2], tiles, batch * heads, work.section,
                mask.heads if mask.batch > 1 else 0, tiles if len(work.order) > 1 else 0,
                q_len if mask.lo is not None and len(mask.lo) > 1 else 0,
                score_args.cap(scale, scores), *score_args.slopes(scores, q_len // rows, k.shape[2]),
                *score_args.sinks(scores), *score_args.ends(mask),
                *q.stride(), *k.stride()[:2], k.stride(3), *v.stride()[:2], v.stride(3), *out.stride(),
                **_constants(c, mask, q, k, v, out), num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip


KERNEL: AttentionKernel = PackedRows(PortableAttention())
