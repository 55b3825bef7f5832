"""Gradients of block-sparse attention in plain Triton: any CUDA GPU from sm_80, and Triton's interpreter.

    P = exp(scale q k^T - lse)    dS = P * (grad v^T - delta)    delta = rowsum(grad * out) - grad_lse
    dv = P^T grad                 dk = scale dS^T q              dq = scale dS k

Two kernels follow a pass over the rows (attention_delta). Neither uses atomics: same inputs, same bits.

    _keys      a tile of keys walks the transposed lists: the query tiles that visit it, head by head of its group
               S^T = K Q^T   dP^T = V grad^T   dV += P^T grad   dK += dS^T Q       [keys, queries] in registers
    _queries   a tile of queries walks its own lists, partial blocks before full ones
               S = Q K^T     dP = grad V^T     dQ += dS K                          [queries, keys]

The products after the scores read P or dS from registers if one warp owns whole rows of a tile. S and dP are computed
twice, in seven products instead of five: the price of sums in a fixed order without a workspace for dq. Rows after
the last query have lse = +inf and so weight 0. Head dims 96 and 192 are zero-padded to 128 and 256.

Tiles run longest first; those with more than their share of the blocks are split into parts (attention_parts).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.backward.bwd_walks import Walks, parts_of, room, walks
from sparsek.attn.kernels.backward.delta import prepare_rows
from sparsek.attn.kernels.forward import portable_tiles as common
from sparsek.attn.kernels.forward import score_args
from sparsek.attn.kernels.forward.packed_rows import PackedRows
from sparsek.attn.kernels.forward.parts import FIELDS, add_parts, longest_part, share, turn
from sparsek.attn.kernels.forward.portable_tiles import (
    bias,
    capped,
    is_hopper,
    load_tile,
    members_of,
    padded,
    slope_of_cap,
)
from sparsek.attn.kernels.forward.rules import admitted
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionGradCall, AttentionGradKernel
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.core import dtypes
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.tensors import SIZE_LIMIT, at


@dataclass(frozen=True)
class Tile(KernelConfig):
    """`rows` of a program, and its `step` along the other side: powers of two from 16 up."""

    rows: int
    step: int
    num_warps: int
    num_stages: int

    SIDES = ("rows", "step")
    KERNEL = "portable.attention_bwd"


@dataclass(frozen=True)
class Config(KernelConfig):
    """`keys`: tiles of keys that step over queries, for dk and dv. `queries`: tiles of queries that step over keys.

    `apart`: dk and dv in two passes, which recompute the scores but hold only one of the sums each.
    """

    keys: Tile
    queries: Tile
    apart: bool = False


@triton.jit
def _over_queries(
    dk, dv, k_tile, v_tile, q, grad, lse, delta, first_key, inner, lo, hi, rules, bits,
    tiles, entries, start, steps, scale, cap, slope, slope_head, ahead, q_len, window, opening, sq_d, sg_d,
    SQ_M: tl.constexpr, SG_M: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, FOR_K: tl.constexpr, FOR_V: tl.constexpr, PARTIAL: tl.constexpr,
    WIDE: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """`dk` [tile_n, D] and `dv` [tile_n, Dv] after `steps` steps along one list; only those that FOR_K and FOR_V
    select.

    `k_tile`, `v_tile`: of the keys. `slope`: of ALiBi in base 2, or where those of the rows of a token are.
    """
    PER: tl.constexpr = BM // TM
    row = tl.arange(0, TM)
    tile = tl.load(tiles + start, mask=steps > 0, other=0)
    for step in range(steps):
        inside = step % PER * TM + row
        first = tile * BM + step % PER * TM
        q_tile = load_tile(q, first, q_len, SQ_M, sq_d, TM, D, True, WIDE)
        g_tile = load_tile(grad, first, q_len, SG_M, sg_d, TM, DV, True, WIDE)
        # Read one step ahead: an index loaded in the step that uses it would halve the pipeliner's buffers.
        tile = tl.load(tiles + start + (step + 1) // PER, mask=step + 1 < steps, other=0)

        s = tl.dot(k_tile, tl.trans(q_tile))
        if cap is not None:
            s = capped(s, cap)
        if PARTIAL:
            low = None
            high = None
            entry = 0
            if lo is not None:
                there = first + row < q_len
                low = tl.load(lo + first + row, mask=there, other=0)
                high = tl.load(hi + first + row, mask=there, other=0)
            if (bits is not None) or MEMBERS:
                entry = tl.load(entries + start + step // PER)
            ok = admitted(
                low, high, rules, bits, entry, inside, first_key, inner, window, opening, BM, BK, TN, MEMBERS, True,
            )  # fmt: skip
            s = tl.where(ok, s, float("-inf"))
        top = tl.load(lse + first + row)
        shift = top[None, :]
        if slope is not None:
            if MEMBERS > 1:
                each = tl.load(slope + inside % MEMBERS * slope_head) * 1.4426950408889634
                place = (first + row) // MEMBERS + ahead
                shift += bias(each[None, :], place[None, :], (first_key + tl.arange(0, TN))[:, None])
            else:
                shift += bias(slope, (first + row + ahead)[None, :], (first_key + tl.arange(0, TN))[:, None])
        p = tl.exp2(s * scale - shift)
        if FOR_V:
            dv = tl.dot(p.to(g_tile.dtype), g_tile, dv)
        if FOR_K:
            dp = tl.dot(v_tile, tl.trans(g_tile))
            ds = p * (dp - tl.load(delta + first + row)[None, :])
            if cap is not None:
                ds *= slope_of_cap(s)
            dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def _over_keys(
    dq, q_tile, g_tile, top, less, k, v, inside, low, high, rules, bits,
    columns, start, steps, scale, cap, slope, place, kv_len, window, opening, sk_d, sv_d,
    SK_N: tl.constexpr, SV_N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PARTIAL: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """`dq` [tile_m, D] after `steps` steps along one list. `top` and `less` [tile_m]: lse in base 2, and delta."""
    PER: tl.constexpr = BK // TN
    column = tl.load(columns + start, mask=steps > 0, other=0)
    for step in range(steps):
        inner = step % PER * TN
        first = column * BK + inner
        k_tile = load_tile(k, first, kv_len, SK_N, sk_d, TN, D, PARTIAL, WIDE)
        v_tile = load_tile(v, first, kv_len, SV_N, sv_d, TN, DV, PARTIAL, WIDE)
        column = tl.load(columns + start + (step + 1) // PER, mask=step + 1 < steps, other=0)

        s = tl.dot(q_tile, tl.trans(k_tile))
        if cap is not None:
            s = capped(s, cap)
        if PARTIAL:
            ok = admitted(
                low, high, rules, bits, start + step // PER, inside, first, inner, window, opening, BM, BK, TN, MEMBERS,
            )  # fmt: skip
            s = tl.where(ok, s, float("-inf"))
        shift = top[:, None]
        if slope is not None:
            shift += bias(slope, place[:, None], (first + tl.arange(0, TN))[None, :])
        p = tl.exp2(s * scale - shift)
        dp = tl.dot(g_tile, tl.trans(v_tile))
        ds = p * (dp - less[:, None])
        if cap is not None:
            ds *= slope_of_cap(s)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def _put(
    x, scale, out, sums, slot, first, limit, row_stride, col_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stores scale * x as the rows of `out` from `first` on; for a part, x as float32 into its slot in `sums`."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, triton.next_power_of_2(COLS))
    live = (row < limit - first)[:, None] & (col < COLS)[None, :]
    out += first.to(tl.int64) * row_stride
    out += (at(row, WIDE) * row_stride)[:, None] + (at(col, WIDE) * col_stride)[None, :]
    tl.store(out, (x * scale).to(out.dtype.element_ty), mask=live & (slot < 0))
    if sums is not None:
        tl.store(sums + ((row * WIDTH)[:, None] + col[None, :]), x, mask=live & (slot >= 0))


# A new length, mask or alignment of its lists compiles nothing: Triton does not specialize for these values.
_NUMBERS = (
    "q_len", "kv_len", "rows", "tiles", "all_heads", "entries", "lead", "section", "slots",
    "mask_step", "order_item", "rule_step", "slope_item", "slope_head", "ahead", "window", "opening",
)  # fmt: skip
_POINTERS = (
    "lse", "delta", "order", "part_starts", "part_counts", "part_tiles", "part_entries", "full_starts", "full_counts",
    "full_tiles", "part_columns", "full_columns", "lo", "hi", "rules", "bits", "slopes",
)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _keys(
    q, k, v, grad, lse, delta, dk, dv, sums, order,
    part_starts, part_counts, part_tiles, part_entries, full_starts, full_counts, full_tiles, lo, hi, rules, bits,
    factor, scale, q_len, kv_len, rows, tiles, all_heads, entries, lead, section, slots,
    mask_step, order_item, rule_step, cap, slopes, slope_item, slope_head, ahead, window, opening,
    sq_b, sq_h, sq_d, sk_b, sk_h, sk_n, sk_d, sv_b, sv_h, sv_n, sv_d, sg_b, sg_h, sg_d,
    sdk_b, sdk_h, sdk_n, sdk_d, sdv_b, sdv_h, sdv_n, sdv_d,
    SQ_M: tl.constexpr, SG_M: tl.constexpr,
    HEADS: tl.constexpr, KV_GROUP: tl.constexpr, MASK_GROUP: tl.constexpr, ORDER_GROUP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, FIELDS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    head, entry, sub = turn(entries, lead, section, all_heads, BK // TN)
    b = (head // HEADS).to(tl.int64)
    h = head % HEADS
    order += ((head // HEADS * order_item + h // ORDER_GROUP).to(tl.int64) * entries + entry) * FIELDS
    tile = tl.load(order)
    begin = tl.load(order + 1)
    end = tl.load(order + 2)
    first = tile * BK + sub * TN
    if (tile >= 0) & (first < kv_len):  # the last key block may end before its last program begins
        k_tile = load_tile(k + b * sk_b + h.to(tl.int64) * sk_h, first, kv_len, sk_n, sk_d, TN, D, True, WIDE)
        v_tile = k_tile
        dk_tile = 0.0
        dv_tile = 0.0
        if dk is not None:
            v_tile = load_tile(
                v + b * sv_b + h.to(tl.int64) * sv_h, first, kv_len, sv_n, sv_d, TN, DV, True, WIDE
            )
            dk_tile = tl.zeros((TN, triton.next_power_of_2(D)), dtype=tl.float32)
        if dv is not None:
            dv_tile = tl.zeros((TN, triton.next_power_of_2(DV)), dtype=tl.float32)
        before = 0
        for g in range(KV_GROUP):
            qh = h * KV_GROUP + g
            group = head // HEADS * mask_step + qh // MASK_GROUP
            row = group.to(tl.int64) * tiles + tile
            of_q = q + b * sq_b + qh.to(tl.int64) * sq_h
            of_g = grad + b * sg_b + qh.to(tl.int64) * sg_h
            of_rows = (b * (HEADS * KV_GROUP) + qh) * rows
            rule_at = group.to(tl.int64) * rule_step
            slope = None
            if slopes is not None:
                if MEMBERS > 1:
                    slope = slopes + b * slope_item + qh * MEMBERS * slope_head
                else:
                    slope = tl.load(slopes + b * slope_item + qh * slope_head) * 1.4426950408889634
            full = tl.load(full_counts + row)
            partial = 0
            if lo is not None or bits is not None:
                partial = tl.load(part_counts + row)
            p_first, p_count, f_first, f_count = share(partial, full, begin, end, before)
            before += partial + full
            if lo is not None or bits is not None:
                low = None
                high = None
                if lo is not None:
                    low = lo + rule_at
                    high = hi + rule_at
                dk_tile, dv_tile = _over_queries(
                    dk_tile, dv_tile, k_tile, v_tile, of_q, of_g, lse + of_rows, delta + of_rows,
                    first, sub * TN, low, high, rules, bits,
                    part_tiles, part_entries, tl.load(part_starts + row) + p_first, p_count * (BM // TM), factor,
                    cap, slope, slope_head, ahead, q_len, window, opening, sq_d, sg_d, SQ_M, SG_M, BM, BK, TM, TN, D,
                    DV, dk is not None, dv is not None, True, WIDE, MEMBERS,
                )  # fmt: skip
            dk_tile, dv_tile = _over_queries(
                dk_tile, dv_tile, k_tile, v_tile, of_q, of_g, lse + of_rows, delta + of_rows,
                first, sub * TN, None, None, None, None,
                full_tiles, None, tl.load(full_starts + row) + f_first, f_count * (BM // TM), factor, cap, slope,
                slope_head, ahead, q_len, None, None, sq_d, sg_d, SQ_M, SG_M, BM, BK, TM, TN, D, DV, dk is not None,
                dv is not None, False, WIDE, MEMBERS,
            )  # fmt: skip

        slot = tl.load(order + 3)
        if sums is not None:
            replica = (0 if order_item else head // HEADS) * ORDER_GROUP + h % ORDER_GROUP
            sums += ((replica * slots + slot).to(tl.int64) * BK + sub * TN) * (D + DV)
        if dk is not None:
            dk += b * sdk_b + h.to(tl.int64) * sdk_h
            _put(dk_tile, scale, dk, sums, slot, first, kv_len, sdk_n, sdk_d, TN, D, D + DV, WIDE)
        if dv is not None:
            dv += b * sdv_b + h.to(tl.int64) * sdv_h
            if sums is not None:
                sums += D
            _put(dv_tile, 1.0, dv, sums, slot, first, kv_len, sdv_n, sdv_d, TN, DV, D + DV, WIDE)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _queries(
    q, k, v, grad, lse, delta, dq, sums, order,
    part_starts, part_counts, part_columns, full_starts, full_counts, full_columns, lo, hi, rules, bits,
    factor, scale, q_len, kv_len, rows, tiles, all_heads, entries, lead, section, slots,
    mask_step, rule_step, cap, slopes, slope_item, slope_head, ahead, window, opening,
    sq_b, sq_h, sq_m, sq_d, sk_b, sk_h, sk_d, sv_b, sv_h, sv_d, sg_b, sg_h, sg_m, sg_d,
    sdq_b, sdq_h, sdq_m, sdq_d,
    SK_N: tl.constexpr, SV_N: tl.constexpr,
    HEADS: tl.constexpr, KV_GROUP: tl.constexpr, MASK_GROUP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, FIELDS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    head, entry, sub = turn(entries, lead, section, all_heads, BM // TM)
    b = (head // HEADS).to(tl.int64)
    h = (head % HEADS).to(tl.int64)
    group = head // HEADS * mask_step + head % HEADS // MASK_GROUP  # heads of one group share lists
    order += (group.to(tl.int64) * entries + entry) * FIELDS
    tile = tl.load(order)
    begin = tl.load(order + 1)
    end = tl.load(order + 2)
    first = tile * BM + sub * TM
    if (tile >= 0) & (first < q_len):  # the last query tile may end before its last program begins
        row = group.to(tl.int64) * tiles + tile
        inside = sub * TM + tl.arange(0, TM)
        query = first + tl.arange(0, TM)
        q_tile = load_tile(q + b * sq_b + h * sq_h, first, q_len, sq_m, sq_d, TM, D, True, WIDE)
        g_tile = load_tile(grad + b * sg_b + h * sg_h, first, q_len, sg_m, sg_d, TM, DV, True, WIDE)
        top = tl.load(lse + head.to(tl.int64) * rows + query)
        less = tl.load(delta + head.to(tl.int64) * rows + query)
        k += b * sk_b + h // KV_GROUP * sk_h
        v += b * sv_b + h // KV_GROUP * sv_h
        slope = None
        place = None
        if slopes is not None:
            if MEMBERS > 1:
                of_rows = h * MEMBERS + inside % MEMBERS
                slope = (tl.load(slopes + b * slope_item + of_rows * slope_head) * 1.4426950408889634)[
                    :, None
                ]
                place = query // MEMBERS + ahead
            else:
                slope = tl.load(slopes + b * slope_item + h * slope_head) * 1.4426950408889634
                place = query + ahead
        dq_tile = tl.zeros((TM, triton.next_power_of_2(D)), dtype=tl.float32)
        full = tl.load(full_counts + row)
        partial = 0
        if lo is not None or bits is not None:
            partial = tl.load(part_counts + row)
        p_first, p_count, f_first, f_count = share(partial, full, begin, end, 0)
        if lo is not None or bits is not None:
            low = None
            high = None
            if lo is not None:
                where = group.to(tl.int64) * rule_step + query
                low = tl.load(lo + where, mask=query < q_len, other=0)
                high = tl.load(hi + where, mask=query < q_len, other=0)
            dq_tile = _over_keys(
                dq_tile, q_tile, g_tile, top, less, k, v, inside, low, high, rules, bits,
                part_columns, tl.load(part_starts + row) + p_first, p_count * (BK // TN), factor,
                cap, slope, place, kv_len, window, opening, sk_d, sv_d,
                SK_N, SV_N, BM, BK, TN, D, DV, True, WIDE, MEMBERS,
            )  # fmt: skip
        dq_tile = _over_keys(
            dq_tile, q_tile, g_tile, top, less, k, v, inside, None, None, None, None,
            full_columns, tl.load(full_starts + row) + f_first, f_count * (BK // TN), factor,
            cap, slope, place, kv_len, None, None, sk_d, sv_d,
            SK_N, SV_N, BM, BK, TN, D, DV, False, WIDE, 0,
        )  # fmt: skip

        slot = tl.load(order + 3)
        if sums is not None:
            replica = (0 if mask_step else head // HEADS) * MASK_GROUP + head % HEADS % MASK_GROUP
            sums += ((replica * slots + slot).to(tl.int64) * BM + sub * TM) * D
        dq += b * sdq_b + h * sdq_h
        _put(dq_tile, scale, dq, sums, slot, first, q_len, sdq_m, sdq_d, TM, D, D, WIDE)


def _constants(c: Config, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Any]:
    """Constexprs that both kernels share; no length changes them, in [B, H, S, D] and in [B, S, H, D]."""
    rows = max(c.keys.rows, c.keys.step, c.queries.rows, c.queries.step)
    return {
        "KV_GROUP": q.shape[1] // k.shape[1], "MASK_GROUP": q.shape[1] // mask.heads,
        "BM": mask.block[0], "BK": mask.block[1], "D": q.shape[3], "DV": v.shape[3],
        "WIDE": common.is_wide(rows, q, k, v, grad), "FIELDS": FIELDS, "MEMBERS": members_of(mask),
    }  # fmt: skip


def _of_keys(c: Config, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Any]:
    """Every constexpr of `_keys`. It includes the strides along the loop axis, so that addresses of rows at known
    distances share registers.
    """
    heads = k.shape[1]
    more = {
        "SQ_M": q.stride(2), "SG_M": grad.stride(2), "HEADS": heads, "TM": c.keys.step, "TN": c.keys.rows,
        "ORDER_GROUP": heads if mask.heads == 1 else 1,
    }  # fmt: skip
    return _constants(c, mask, q, k, v, grad) | more


def _of_queries(c: Config, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Any]:
    """Every constexpr of `_queries`."""
    more = {
        "SK_N": k.stride(2), "SV_N": v.stride(2), "HEADS": q.shape[1], "TM": c.queries.rows, "TN": c.queries.step,
    }  # fmt: skip
    return _constants(c, mask, q, k, v, grad) | more


# Tables by the wider padded head dim. The order is a guess until it is measured. At a head dim of 128 the registers
# are full, and some addresses are spilled: one or two reloads for a step of 64 queries.
# fmt: off
HOPPER: dict[int, tuple[Config, ...]] = {
    64: (Config(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)), Config(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
         Config(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), Config(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))),
    128: (Config(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)), Config(Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
          Config(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)), Config(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
          Config(Tile(64, 32, 4, 3), Tile(64, 64, 4, 3))),
    256: (Config(Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), True), Config(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), True),
          Config(Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)), Config(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2))),
}
AMPERE: dict[int, tuple[Config, ...]] = {
    64: (Config(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)), Config(Tile(64, 32, 4, 3), Tile(64, 32, 4, 3))),
    128: (Config(Tile(64, 64, 8, 3), Tile(128, 32, 8, 3)), Config(Tile(64, 64, 8, 3), Tile(64, 64, 8, 3)),
          Config(Tile(64, 32, 8, 3), Tile(64, 32, 4, 3))),
    256: (Config(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)), Config(Tile(64, 16, 8, 2), Tile(64, 16, 4, 2))),
}
# fmt: on
# TFLOPS of each table over all products, padding included, with every SM busy: 128 from three records of an H200
# (2026-11-22), 256 from one (2026-11-23), 64 guessed.
RATES = {64: 450.0, 128: 540.0, 256: 445.0}
# The time of masks by members over that of others, beside hopper.attention_bwd: a block that all tokens see has as many
# visits as there are query tiles (nine masks of an H200, 2026-11-29: it took 1.4 to 2.3 times as long).
MEMBERS = 2.0


def _shared(p: AttentionGradProblem, c: Config) -> int:
    """Bytes of shared memory of the kernel that needs more, with a margin of 4 KiB. On sm_80 one stage is in
    registers, and P and dS may be in shared memory.
    """
    width = padded(p.dim) + padded(p.v_dim)

    def elements(t: Tile) -> int:
        buffers = t.num_stages - (0 if is_hopper(p) else 1)
        return (t.rows + buffers * t.step) * width + (0 if is_hopper(p) else t.rows * t.step)

    return max(elements(c.keys), elements(c.queries)) * dtypes.itemsize(p.dtype) + 4096


class PortableAttentionGrad(common.PortableKernel):
    """Gradients of attention in plain Triton; always deterministic."""

    name = "portable.attention_bwd"
    widens = True
    tables = (HOPPER, AMPERE)
    most, tiled = SIZE_LIMIT // 2, "queries or keys"  # parts may be half as many again

    def programs(self, p: AttentionGradProblem, c: Config) -> tuple[int, int]:
        """Programs of `_keys` and of `_queries`, without parts."""
        (tiles, columns), (bq, bk) = p.grid, p.block
        keys = columns * (bk // c.keys.rows) * p.batch * p.kv_heads
        return keys, tiles * (bq // c.queries.rows) * p.batch * p.q_heads

    def fits(self, p: AttentionGradProblem, c: Config) -> bool:
        bq, bk = p.block
        divides = max(c.keys.rows, c.queries.step) <= bk and max(c.queries.rows, c.keys.step) <= bq
        return divides and (p.on_cpu or _shared(p, c) <= p.card.smem_bytes)

    def seconds(self, p: AttentionGradProblem, c: Config) -> float:
        """Three launches, two passes over the rows, and the longer of two: arithmetic with padding, plus 1.5 us to
        begin and end each wave of tiles; the longest tile of queries on one SM. Two tiles of 64 rows fit an SM.
        """
        programs = self.programs(p, c)
        if p.on_cpu:  # the interpreter: about a millisecond per program and step
            (bq, bk), k, q = p.block, c.keys, c.queries
            steps = p.visited * (bk // k.rows * (bq // k.step) + bq // q.rows * (bk // q.step))
            return 1e-3 * (sum(programs) + steps)
        rate = 1e12 * RATES[common.table_of(p)] * p.card.sustained(p.dtype) / 690.0
        rate /= MEMBERS if p.members else 1.0
        d, dv = padded(p.dim), padded(p.v_dim)
        block = 2.0 * p.block[0] * p.block[1] * ((5 if c.apart else 4) * d + 3 * dv)
        resident = p.card.sm_count * (1 if min(c.keys.rows, c.queries.rows) >= 128 else 2)
        waves = 1.5e-6 * sum(-(-n // resident) for n in programs)
        longest = min(p.longest, longest_part(p.visited, p.block, p.card.sm_count))
        arithmetic = waves + block * p.visited / rate
        slowest = 3e-6 + block * longest / (rate / p.card.sm_count)
        return (
            3 * p.card.launch_seconds
            + max(arithmetic, slowest)
            + p.compulsory_bytes / (0.8 * p.card.bandwidth)
        )

    def notes(self, p: AttentionGradProblem, c: Config) -> list[str]:
        return super().notes(p, c) + parts_of(p)

    def prepare(self, p: AttentionGradProblem, c: Config, mask: BlockMask) -> Walks:
        return walks(p, mask)

    def launch(self, c: Config, work: Walks, call: AttentionGradCall) -> None:
        """Computes the gradients of attention into `dq`, `dk` and `dv`; all tensors may have any strides. No sync.

        Allocates two float32 per row of q, and the float32 sums of split tiles.
        """
        q, k, v, mask, scale, out, lse, grad, grad_lse, dq, dk, dv, scores = call
        batch, heads, q_len, dim = q.shape
        (tiles, columns), kv_heads, v_dim = mask.grid, k.shape[1], v.shape[3]
        rows = prepare_rows(out, grad, lse, grad_lse, tiles * mask.block[0])
        rules, by_entry = (
            (mask.lo, mask.hi, mask.rules, mask.bits),
            mask.bits is not None or members_of(mask) > 0,
        )
        rule_step = q_len if mask.lo is not None and len(mask.lo) > 1 else 0
        mask_step = mask.heads if mask.batch > 1 else 0
        lists = work.lists
        factor = score_args.factor(scale, scores)
        slopes = score_args.slopes(scores, q_len // max(members_of(mask), 1), k.shape[2])
        changed = score_args.cap(scale, scores), *slopes, *score_args.ends(mask)
        with torch.cuda.device_of(q):
            order, sums = work.keys.order, room(work.keys, mask.block[1], dim + v_dim, q.device)
            programs = order.shape[1] * (mask.block[1] // c.keys.rows) * batch * kv_heads
            for each in ((dk, None), (None, dv)) if c.apart else ((dk, dv),):
                launch(
                    _keys, (programs,),
                    q, k, v, grad, rows[0], rows[1], *each, sums, order,
                    *lists.partial, lists.partial_entries if by_entry else None, *lists.full, *rules,
                    factor, scale, q_len, k.shape[2], rows.shape[3], columns, batch * kv_heads,
                    order.shape[1], work.keys.lead, work.keys.section, work.keys.slots,
                    mask_step, order.shape[0] // mask.batch if mask.batch > 1 else 0, rule_step, *changed,
                    *q.stride()[:2], q.stride(3), *k.stride(), *v.stride(), *grad.stride()[:2], grad.stride(3),
                    *dk.stride(), *dv.stride(),
                    **_of_keys(c, mask, q, k, v, grad), **_options(c.keys),
                )  # fmt: skip
            if sums is not None:
                add_parts(sums, 0, work.keys, mask.batch, scale, dk)
                add_parts(sums, dim, work.keys, mask.batch, 1.0, dv)
            order, sums = work.queries.order, room(work.queries, mask.block[0], dim, q.device)
            launch(
                _queries, (order.shape[1] * (mask.block[0] // c.queries.rows) * batch * heads,),
                q, k, v, grad, rows[0], rows[1], dq, sums, order, *mask.partial, *mask.full, *rules,
                factor, scale, q_len, k.shape[2], rows.shape[3], tiles, batch * heads,
                order.shape[1], work.queries.lead, work.queries.section, work.queries.slots,
                mask_step, rule_step, *changed,
                *q.stride(), *k.stride()[:2], k.stride(3), *v.stride()[:2], v.stride(3), *grad.stride(), *dq.stride(),
                **_of_queries(c, mask, q, k, v, grad), **_options(c.queries),
            )  # fmt: skip
            if sums is not None:
                add_parts(sums, 0, work.queries, mask.batch, scale, dq)


def _options(t: Tile) -> dict[str, Any]:
    return {"num_warps": t.num_warps, "num_stages": t.num_stages}


KERNEL: AttentionGradKernel = PackedRows(PortableAttentionGrad())
