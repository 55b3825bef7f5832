"""Device code of attention's backward pass by 64 queries a step: the consumer warpgroups of hopper_bwd.py."""

from math import e, log2

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek.attn.kernels.backward.bwd_dq import exchanged, keep_part, stage_dq, start_dq
from sparsek.attn.kernels.backward.bwd_records import (
    of_members,
    own_bits,
    read_halves,
    sees,
    step_at,
    tile_at,
    word_at,
)
from sparsek.attn.kernels.forward.rules import by_step
from sparsek.attn.kernels.forward.softmax import capped, distances
from sparsek.engine.launch.gluon import opaque, reinterpret, tma_store, tma_store_wait

LOG2E = gl.constexpr(log2(e))


@gluon.jit
def step(
    T: gl.constexpr, WG: gl.constexpr, side, DTYPE: gl.constexpr, dk, dv, word, at, partial, masked, visits, first, i,
    key, scale, lists, changes, k_s, v_s, q_s, do_s, rows_s, ds_s, dq_s, ring_bars, dq_bars, halves,
):  # fmt: skip
    """Step `i` of a tile, number `at` of this CTA, by warpgroup WG. `side` is the parity of `at`.

    `partial`: the step may belong to a partial block, as the first `masked` do. `word`: see `word_at`; that of the next
    step is returned. `halves`: those of the step before, by `read_halves`.
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
            less = of_members(T, less, own_bits(T, HALF, word), visits, first, i, rules)
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
            dq = start_dq(T, 1 - WG, 1 - WG, pair & 1, k_s, ds_s, dq_bars, halves)
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
        dq = start_dq(T, WG, WG, at // 2 & 1, k_s, ds_s, dq_bars, halves)
        dk = warpgroup_mma_wait(1, deps=(dk,))
        mbarrier.arrive(ring_empty.index(bar), count=1)  # dQ reads dS and K only
        stage_dq(T, WG, WG, at // 2, warpgroup_mma_wait(0, deps=(dq,)), dq_s, dq_bars)
    return dk, dv, word


@gluon.jit
def pass_over(
    T: gl.constexpr, WG: gl.constexpr, side, DTYPE: gl.constexpr, at, masked, visits, first, i, rules, k_s, ds_s, dq_s,
    ring_bars, dq_bars, halves,
):  # fmt: skip
    """As `step` where no query sees a key of this half: dS is 0. The word of the next step is returned."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    q_full, do_full, ring_empty = ring_bars
    ds_full, ds_empty, dq_full, dq_empty = dq_bars
    bar = at % T.barriers
    phase = at // T.barriers & 1
    word = word_at(T, visits, first, i + 1, masked, rules)
    if side == WG:
        # Until the other warpgroup has read the dS of two steps ago. Where this one reads it, it has.
        mbarrier.wait(ds_empty.index(side), (at // 2 & 1) ^ 1)
    ds_s.index(side).slice(WG * 64, 64).store(gl.zeros((64, 64), DTYPE, S_LAYOUT))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(side), count=1)
    # A slot is freed in its own phase: nobody runs ahead of loads that he does not read.
    mbarrier.wait(q_full.index(bar), phase)
    mbarrier.wait(do_full.index(bar), phase)
    mbarrier.arrive(ring_empty.index(bar), count=1)
    if (side == WG) & (i > 0):
        pair = (at - 1) // 2
        dq = start_dq(T, 1 - WG, 1 - WG, pair & 1, k_s, ds_s, dq_bars, halves)
        stage_dq(T, 1 - WG, 1 - WG, pair, warpgroup_mma_wait(0, deps=(dq,)), dq_s, dq_bars)
    return word


@gluon.jit
def differentiate(
    T: gl.constexpr, WG: gl.constexpr, dk_desc, dv_desc, tiles, starts, visits, lists, changes, scale, factor,
    part_sums, k_s, v_s, q_s, do_s, rows_s, ds_s, dq_s, spare_s, bars,
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
        left, right = 0, 0  # the first visit sees one of them
        UNROLLED: gl.constexpr = 1 if T.halves == 2 else 2
        for i in range(0, 2 * pairs, UNROLLED):
            for side in gl.static_range(UNROLLED):
                if T.halves == 2 or side == WG:
                    before = left, right
                    if T.paired:
                        left, right = read_halves(T, word, left)
                    if T.paired and not sees(T, WG, word):
                        word = pass_over(
                            T, WG, at & 1, DTYPE, at, 2 * masked, visits, first, i, lists[0], k_s, ds_s, dq_s,
                            ring_bars, dq_bars, before,
                        )  # fmt: skip
                    else:
                        dk, dv, word = step(
                            T, WG, at & 1 if T.halves == 2 else side, DTYPE, dk, dv, word, at + side, i < 2 * masked,
                            2 * masked, visits, first, i + side, key, scale, lists, of_tile, k_s, v_s, q_s, do_s,
                            rows_s, ds_s, dq_s, ring_bars, dq_bars, before,
                        )  # fmt: skip
            at += UNROLLED
        if T.halves == 2:
            if WG == 0:
                if pairs > 0:
                    dq = start_dq(T, 1, 1, (at - 1) // 2 & 1, k_s, ds_s, dq_bars, (left, right))
                    stage_dq(T, 1, 1, (at - 1) // 2, warpgroup_mma_wait(0, deps=(dq,)), dq_s, dq_bars)
            mbarrier.arrive(k_empty, count=1)
            if T.parts:
                mbarrier.arrive(v_empty, count=1)
                keep_part(T, 0, WG * 64, dk, part_sums, tiles, t)
                keep_part(T, DIM, WG * 64, dv, part_sums, tiles, t)
            else:
                # dK is staged in place of the last dS that this warpgroup read, and dV in place of V. Both write dS
                # there again only after the next V has landed, which waits for `v_empty`.
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
            if T.parts:
                if WG == 0:
                    keep_part(T, 0, 0, dk, part_sums, tiles, t)
                else:
                    keep_part(T, DIM, 0, dv, part_sums, tiles, t)
            elif WG == 0:
                k_s.index(0).reshape((64, DIM)).store((dk * factor).to(DTYPE))
                fence_async_shared()
                tma_store(dk_desc, [b, g, key, 0], k_s.index(0))
            else:
                v_s.index(0).reshape((64, VDIM)).store(dv.to(DTYPE))
                fence_async_shared()
                tma_store(dv_desc, [b, g, key, 0], v_s.index(0))
            if not T.parts:
                tma_store_wait(0)  # until TMA has read it
            mbarrier.arrive(k_empty, count=1)
            mbarrier.arrive(v_empty, count=1)
        turn ^= 1
