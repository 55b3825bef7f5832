"""Device pieces of attention's backward pass for heads of at most 64 columns: steps of 128 queries, a visit each.

    a step of a warpgroup                               registers a thread at dim 64       wgmma
    S^T  = K Q^T      64 keys x 128 queries             64, then P                         m64 n128
    dP^T = V dO^T     64 x 128, from -delta             64, then dS                        m64 n128
    dV  += P^T dO     64 x 64, kept                     32                                 m64 n64, P in 16 bits: 32
    dK  += dS^T Q     64 x 64, kept                     32                                 m64 n64, dS in 16 bits: 32
    dQ   = dS K       64 queries x 64, of the step      32, once P and dS are done         m64 n64
                      before, from both dS

With 64 queries a step of such heads waits longer than it multiplies: it has half the products of heads of 128, behind
as many barriers, fences and latencies. A step of 128 queries has them once for twice the products, and reads K and V
from shared memory half as often. dP starts from -delta, which then needs no registers while P is computed.

Both warpgroups multiply dQ in every step, each that of its half of the queries, one step late: the other's dS of the
step before is written by then. dS keeps two places. A place is free again when both have read it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek.attn.kernels.backward.bwd_dq import keep_part, stage_dq, start_dq
from sparsek.attn.kernels.backward.bwd_records import of_members, step_at, tile_at, word_at
from sparsek.attn.kernels.forward.rules import by_step
from sparsek.engine.launch.gluon import opaque, reinterpret, tma_store, tma_store_wait


@gluon.jit
def negated(x):
    """-x by instructions that keep their place: where ptxas copies the values from which dP starts after S has begun,
    it lets S end before dP begins.
    """
    return gl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def step(
    T: gl.constexpr, WG: gl.constexpr, DTYPE: gl.constexpr, dk, dv, word, at, partial, masked, visits, first, i, key,
    scale, lists, k_s, v_s, q_s, do_s, rows_s, ds_s, dq_s, ring_bars, dq_bars,
):  # fmt: skip
    """Step `i` of a tile, number `at` of this CTA, by warpgroup WG. `word` to `masked`: as in hopper_bwd.py."""
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    COL: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    D_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    NUMBERS: gl.constexpr = T.row_slots
    q_full, do_full, ring_empty = ring_bars
    ds_full, ds_empty, dq_full, dq_empty = dq_bars
    rules, bits, kv_len, ends = lists
    slot = at % T.stages
    phase = at // T.stages & 1
    q = q_s.index(slot).reshape((128, DIM))
    do = do_s.index(slot).reshape((128, VDIM))
    mbarrier.wait(q_full.index(slot), phase)  # until Q, lse and delta have landed
    zero = gl.zeros((64, 128), gl.float32, S_LAYOUT)
    less = rows_s.index(NUMBERS * slot).reshape((128,)).load(COL)
    if T.members > 0 and not T.member_ends:
        if partial:
            less = of_members(T, less, word, visits, first, i, rules)
        word = word_at(T, visits, first, i + 1, masked, rules)
    less = zero + gl.expand_dims(less, 0)
    delta = negated(zero + gl.expand_dims(rows_s.index(NUMBERS * slot + 1).reshape((128,)).load(COL), 0))
    k = k_s.index(WG + opaque(0)).reshape((64, DIM))
    s = warpgroup_mma(k, q.permute((1, 0)), less, is_async=True)
    mbarrier.wait(do_full.index(slot), phase)  # until dO has landed
    v = v_s.index(WG + opaque(0)).reshape((64, VDIM))
    dp = warpgroup_mma(v, do.permute((1, 0)), delta, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))  # S is done, dP still runs
    if partial:
        # A stage's last two rows of numbers are bounds where the rules need them, and are not read elsewhere.
        low = rows_s.index(NUMBERS * slot + NUMBERS - 2)
        high = rows_s.index(NUMBERS * slot + NUMBERS - 1)
        if T.bits or T.members > 0:
            pos, h, entry, ticket = step_at(T, visits, first, i)
            if entry >= 0:
                s = by_step(T, s, entry, key + WG * 64, pos, rules, bits, low, high, kv_len, ends)
        else:
            s = by_step(T, s, 0, key + WG * 64, 0, rules, bits, low, high, kv_len)
    p = gl.exp2(s * scale)
    dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), P_LAYOUT), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))  # dP is done, dV still runs
    ds = (p * dp).to(DTYPE)
    # Until both warpgroups have read the dS of two steps ago.
    mbarrier.wait(ds_empty.index(at & 1), (at // 2 & 1) ^ 1)
    ds_s.index(at & 1).slice(WG * 64, 64).store(ds)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    in_flight = warpgroup_mma(gl.convert_layout(ds, D_LAYOUT), q, dk, is_async=True)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(at & 1), count=1)
    if i > 0:
        dq = start_dq(T, WG, (at - 1) & 1, (at - 1) // 2 & 1, k_s, ds_s, dq_bars, (0, 1))
        # dK is done, dQ still runs. It reads dS and K only.
        dk = warpgroup_mma_wait(2, deps=(in_flight,))
        mbarrier.arrive(ring_empty.index(slot), count=1)
        stage_dq(T, WG, (at - 1) & 1, at - 1, warpgroup_mma_wait(0, deps=(dq,)), dq_s, dq_bars)
    else:
        dk = warpgroup_mma_wait(0, deps=(in_flight,))
        mbarrier.arrive(ring_empty.index(slot), count=1)
    return dk, dv, word


@gluon.jit
def differentiate(
    T: gl.constexpr, WG: gl.constexpr, dk_desc, dv_desc, tiles, starts, visits, lists, changes, scale, factor,
    part_sums, k_s, v_s, q_s, do_s, rows_s, ds_s, dq_s, spare_s, bars,
):  # fmt: skip
    """Consumer warpgroup WG: dK and dV of its 64 keys of every tile, and half of the dQ of every step."""
    DTYPE: gl.constexpr = dk_desc.dtype
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.dim, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 16])
    SLOTS: gl.constexpr = [256 // DIM] + dk_desc.block_type.shape
    tile_bars, ring_bars, dq_bars, done = bars
    k_full, k_empty, v_full, v_empty = tile_bars
    turn = 0
    at = 0
    for t in range(gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1)):
        b, g, key, first, masked, steps = tile_at(tiles, t)
        dk = gl.zeros((64, DIM), gl.float32, K_LAYOUT)
        dv = gl.zeros((64, VDIM), gl.float32, V_LAYOUT)
        mbarrier.wait(k_full, turn)  # until K has landed
        mbarrier.wait(v_full, turn)  # until V has landed
        word = 0
        if T.members > 0 and not T.member_ends:
            word = word_at(T, visits, first, 0, masked, lists[0])
        for i in range(steps):
            dk, dv, word = step(
                T, WG, DTYPE, dk, dv, word, at, i < masked, masked, visits, first, i, key, scale, lists, k_s, v_s, q_s,
                do_s, rows_s, ds_s, dq_s, ring_bars, dq_bars,
            )  # fmt: skip
            at += 1
        if steps > 0:
            dq = start_dq(T, WG, (at - 1) & 1, (at - 1) // 2 & 1, k_s, ds_s, dq_bars, (0, 1))
            stage_dq(T, WG, (at - 1) & 1, at - 1, warpgroup_mma_wait(0, deps=(dq,)), dq_s, dq_bars)
        mbarrier.arrive(k_empty, count=1)
        if T.parts:
            mbarrier.arrive(v_empty, count=1)
            keep_part(T, 0, WG * 64, dk, part_sums, tiles, t)
            keep_part(T, DIM, WG * 64, dv, part_sums, tiles, t)
        else:
            # dV is staged in place of V, and dK in place of the dS that this warpgroup writes next, in its own 64 rows:
            # so it waits here, as that step does, until both have read the dS of two steps ago.
            dv_s = v_s.index(WG)
            dv_s.reshape((64, VDIM)).store(dv.to(DTYPE))
            mbarrier.wait(dq_bars[1].index(at & 1), (at // 2 & 1) ^ 1)
            dk_s = reinterpret(ds_s.index(at & 1), DTYPE, SLOTS, dk_desc.layout).index(WG * 64 // DIM)
            dk_s.reshape((64, DIM)).store((dk * factor).to(DTYPE))
            fence_async_shared()
            tma_store(dk_desc, [b, g, key + WG * 64, 0], dk_s)
            tma_store(dv_desc, [b, g, key + WG * 64, 0], dv_s)
            tma_store_wait(0)  # until TMA has read them
            mbarrier.arrive(v_empty, count=1)
        turn ^= 1
