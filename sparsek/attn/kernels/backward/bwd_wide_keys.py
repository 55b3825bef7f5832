"""Attention's backward pass for wide heads, over keys: dK and dV of 64 keys in a CTA. See hopper_bwd_wide.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsek.attn.kernels.backward.bwd_wide_lists import (
    NUMBERS,
    ORDER,
    POINTERS,
    bounds_of,
    put_sums,
    taken,
    tile_of,
    visited,
)
from sparsek.attn.kernels.forward.parts import turn
from sparsek.attn.kernels.forward.rules import by_entry
from sparsek.engine.launch.gluon import tma_load, tma_store, tma_store_wait


@gluon.jit
def load_queries(
    T: gl.constexpr,
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    rows_desc,
    tile,
    lists,
    k_s,
    v_s,
    q_s,
    do_s,
    rows_s,
    bars,
):
    """Producer warp: K and V, then Q and dO of every step with their lse and delta."""
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    SUBS: gl.constexpr = T.block[0] // 64
    kv_full, q_full, do_full, q_empty, do_empty, p_full, p_empty, v_free = bars
    b, h, first, group, row, shared, columns, begin, end, rows, plane = tile
    mbarrier.expect(kv_full, 64 * (DIM + VDIM) * 2)
    tma_load(k_desc, [b, h, first, 0], kv_full, k_s)
    tma_load(v_desc, [b, h, first, 0], kv_full, v_s)
    at = 0
    before = 0
    for g in range(group):
        q_head = h * group + g
        entries = taken(lists, row + q_head // shared * columns, begin, end, before)
        before = entries.before
        of_head = (b * rows[1] + q_head) * (rows[0] // 64)
        for i in range((entries.p_count + entries.f_count) * SUBS):
            pos = visited(lists, entries, i // SUBS) * (64 * SUBS) + i % SUBS * 64
            slot = at % T.stages
            phase = at // T.stages & 1 ^ 1
            mbarrier.wait(q_empty.index(slot), phase)  # until nobody reads the Q in this slot
            mbarrier.expect(q_full.index(slot), 64 * DIM * 2 + 256)
            tma_load(q_desc, [b, q_head, pos, 0], q_full.index(slot), q_s.index(slot))
            tma_load(rows_desc, [of_head + pos // 64, 0], q_full.index(slot), rows_s.index(2 * slot))
            mbarrier.wait(do_empty.index(slot), phase)
            mbarrier.expect(do_full.index(slot), 64 * VDIM * 2 + 256)
            tma_load(do_desc, [b, q_head, pos, 0], do_full.index(slot), do_s.index(slot))
            tma_load(
                rows_desc, [of_head + plane + pos // 64, 0], do_full.index(slot), rows_s.index(2 * slot + 1)
            )
            at += 1


@gluon.jit
def differentiate_scores(
    T: gl.constexpr, dk_desc, sums, slot_at, tile, lists, factor, k_s, v_s, q_s, do_s, rows_s, p_s, bars
):
    """Warpgroup 0: dP, dS and dK."""
    DTYPE: gl.constexpr = dk_desc.dtype
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    SUBS: gl.constexpr = T.block[0] // 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.dim, 16])
    D_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, K_LAYOUT, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    kv_full, q_full, do_full, q_empty, do_empty, p_full, p_empty, v_free = bars
    b, h, first, group, row, shared, columns, begin, end, rows, plane = tile
    dk = gl.zeros((64, DIM), gl.float32, K_LAYOUT)
    mbarrier.wait(kv_full, 0)  # until K and V have landed
    for i in range((end - begin) * SUBS):
        slot = i % T.stages
        phase = i // T.stages & 1
        mbarrier.wait(do_full.index(slot), phase)  # until dO has landed
        do = do_s.index(slot).reshape((64, VDIM))
        zero = gl.zeros((64, 64), gl.float32, S_LAYOUT)
        v = v_s.reshape((64, VDIM))
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        delta = gl.expand_dims(rows_s.index(2 * slot + 1).reshape((64,)).load(COL), 0)
        mbarrier.arrive(do_empty.index(slot), count=1)
        mbarrier.wait(p_full.index(slot), phase)  # until the other warpgroup has written P
        p = p_s.index(slot).load(S_LAYOUT).to(gl.float32)
        mbarrier.arrive(p_empty.index(slot), count=1)
        ds = gl.convert_layout((p * (dp - delta)).to(DTYPE), D_LAYOUT)
        mbarrier.wait(q_full.index(slot), phase)  # long since: P comes of it
        dk = warpgroup_mma(ds, q_s.index(slot).reshape((64, DIM)), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    mbarrier.arrive(v_free, count=1)
    if slot_at >= 0:
        put_sums(sums + slot_at, dk, DIM + VDIM, 64, DIM)
    else:
        # Only S reads K, and the last P came after the last S.
        k_s.reshape((64, DIM)).store((dk * factor).to(DTYPE))
        fence_async_shared()
        tma_store(dk_desc, [b, h, first, 0], k_s)
        tma_store_wait(0)  # until TMA has read it


@gluon.jit
def weigh(
    T: gl.constexpr, dv_desc, sums, slot_at, tile, lists, rule, scale, k_s, v_s, q_s, do_s, rows_s, p_s, bars
):
    """Warpgroup 1: S, P and dV."""
    DTYPE: gl.constexpr = dv_desc.dtype
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    BM: gl.constexpr = T.block[0]
    SUBS: gl.constexpr = T.block[0] // 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, V_LAYOUT, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    kv_full, q_full, do_full, q_empty, do_empty, p_full, p_empty, v_free = bars
    b, h, first, group, row, shared, columns, begin, end, rows, plane = tile
    lo, hi, rules, bits, entry_of, rule_step, q_len, kv_len, ends = rule
    dv = gl.zeros((64, VDIM), gl.float32, V_LAYOUT)
    mbarrier.wait(kv_full, 0)  # until K and V have landed
    at = 0
    before = 0
    for g in range(group):
        of_list = row + (h * group + g) // shared * columns
        entries = taken(lists, of_list, begin, end, before)
        before = entries.before
        bound = (of_list // columns).to(gl.int64) * rule_step
        for i in range((entries.p_count + entries.f_count) * SUBS):
            slot = at % T.stages
            phase = at // T.stages & 1
            mbarrier.wait(q_full.index(slot), phase)  # until Q has landed
            q = q_s.index(slot).reshape((64, DIM))
            zero = gl.zeros((64, 64), gl.float32, S_LAYOUT)
            s = warpgroup_mma(k_s.reshape((64, DIM)), q.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            less = gl.expand_dims(rows_s.index(2 * slot).reshape((64,)).load(COL), 0)
            mbarrier.arrive(q_empty.index(slot), count=1)
            if i < entries.p_count * SUBS:
                pos = visited(lists, entries, i // SUBS) * BM + i % SUBS * 64
                query = pos + gl.arange(0, 64, COL)
                key = gl.expand_dims(first + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT)), 1)
                low, high = bounds_of(T, lo + bound, hi + bound, query, q_len, kv_len)
                low, high, query = gl.expand_dims(low, 0), gl.expand_dims(high, 0), gl.expand_dims(query, 0)
                entry = 0
                if T.bits or T.members > 0:
                    entry = gl.load(entry_of + entries.p_first + i // SUBS)
                s = by_entry(T, s, entry, low, high, query, key, rules, bits, ends)
            p = gl.exp2(s * scale - less)
            rounded = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
            mbarrier.wait(p_empty.index(slot), phase ^ 1)  # until the P before in this slot has been read
            p_s.index(slot).store(p.to(gl.float16))  # P is at most 1, so 8 times as exact as bf16
            mbarrier.arrive(p_full.index(slot), count=1)
            mbarrier.wait(do_full.index(slot), phase)  # until dO has landed
            do = do_s.index(slot).reshape((64, VDIM))
            dv = warpgroup_mma(rounded, do, dv, is_async=True)
            dv = warpgroup_mma_wait(0, deps=(dv,))
            mbarrier.arrive(do_empty.index(slot), count=1)
            at += 1
    if slot_at >= 0:
        put_sums(sums + slot_at + DIM, dv, DIM + VDIM, 64, VDIM)
    else:
        mbarrier.wait(v_free, 0)  # until the other warpgroup has read V for the last time
        v_s.reshape((64, VDIM)).store(dv.to(DTYPE))
        fence_async_shared()
        tma_store(dv_desc, [b, h, first, 0], v_s)
        tma_store_wait(0)  # until TMA has read it


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def attention_bwd_keys(
    q_desc, k_desc, v_desc, do_desc, rows_desc, dk_desc, dv_desc, sums, order, p_starts, p_counts, p_indices, f_starts,
    f_counts, f_indices, entry_of, lo, hi, rules, bits, scale, factor, q_len, kv_len, rows, plane, tiles, heads, group,
    shared, mask_step, order_item, order_group, rule_step, entries, lead, section, all_heads, slots, window, sunk,
    T: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """Lists are transposed: of `tiles` key blocks each. `heads` are those of keys, `all_heads` those of all items.

    `scale` is `factor`, the softmax scale, times log2(e). `rows_desc` describes lse in base 2 and, `plane` rows later,
    delta, in rows of 64; a head has `rows` numbers. `shared` query heads share lists; `order_group` heads share an
    order. SOURCE only enters Triton's cache key.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    STAGES: gl.constexpr = T.stages
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    head, entry, sub = turn(entries, lead, section, all_heads, T.block[1] // 64)
    b = head // heads
    h = head % heads
    order += ((b * order_item + h // order_group).to(gl.int64) * entries + entry) * ORDER
    tile, first, begin, end, slot = tile_of(order, T.block[1], sub * 64, kv_len)
    k_s = gl.allocate_shared_memory(DTYPE, k_desc.block_type.shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, v_desc.block_type.shape, v_desc.layout)
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    rows_s = gl.allocate_shared_memory(
        gl.float32, [2 * STAGES] + rows_desc.block_type.shape, rows_desc.layout
    )
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    p_s = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], P)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    p_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(v_free, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=1)
    fence_async_shared()
    bars = (kv_full, q_full, do_full, q_empty, do_empty, p_full, p_empty, v_free)
    lists = (p_starts, p_counts, p_indices, f_starts, f_counts, f_indices)
    row = b * mask_step * tiles + tile
    of_tile = (b, h, first, group, row, shared, tiles, begin, end, (rows, heads * group), plane)
    replica = (0 if order_item else b) * order_group + h % order_group
    slot_at = ((replica * slots + slot).to(gl.int64) * T.block[1] + sub * 64) * (DIM + VDIM)
    slot_at = gl.where(slot >= 0, slot_at, -1)
    rule = (
        lo,
        hi,
        rules,
        bits,
        entry_of,
        rule_step,
        q_len,
        kv_len,
        (window, sunk) if T.member_ends else (0, 0),
    )
    memory = (k_s, v_s, q_s, do_s, rows_s)
    gl.warp_specialize(
        [
            (
                differentiate_scores,
                (T, dk_desc, sums, slot_at, of_tile, lists, factor) + memory + (p_s, bars),
            ),
            (weigh, (T, dv_desc, sums, slot_at, of_tile, lists, rule, scale) + memory + (p_s, bars)),
            (
                load_queries,
                (T, q_desc, k_desc, v_desc, do_desc, rows_desc, of_tile, lists) + memory + (bars,),
            ),
        ],
        [4, 1],
        [240, 24],
    )
