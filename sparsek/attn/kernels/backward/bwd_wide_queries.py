"""Attention's backward pass for wide heads, over queries: dQ of 128 queries in a CTA. See hopper_bwd_wide.py."""

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
from sparsek.engine.launch.gluon import opaque, tma_load, tma_store, tma_store_wait


@gluon.jit
def load_keys(T: gl.constexpr, q_desc, k_desc, v_desc, do_desc, tile, lists, q_s, do_s, k_s, v_s, bars):
    """Producer warp: Q and dO of 128 queries, then K and V of every step."""
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    SUBS: gl.constexpr = T.block[1] // 64
    q_full, k_full, v_full, k_empty, v_empty = bars
    b, h, first, group, row, begin, end, of_head = tile
    mbarrier.expect(q_full, 128 * (DIM + VDIM) * 2)
    halves = 2 * gl.num_programs(1)  # 2, unknown to ptxas: it keeps one copy of the loop, and few addresses
    for w in range(halves):
        tma_load(q_desc, [b, h, first + w * 64, 0], q_full, q_s.index(w))
        tma_load(do_desc, [b, h, first + w * 64, 0], q_full, do_s.index(w))
    entries = taken(lists, row, begin, end, 0)
    for i in range((end - begin) * SUBS):
        pos = visited(lists, entries, i // SUBS) * (64 * SUBS) + i % SUBS * 64
        k_slot = i % 2
        v_slot = i % T.v_slots
        mbarrier.wait(k_empty.index(k_slot), i // 2 & 1 ^ 1)  # until nobody reads the K in this slot
        mbarrier.expect(k_full.index(k_slot), 64 * DIM * 2)
        tma_load(k_desc, [b, h // group, pos, 0], k_full.index(k_slot), k_s.index(k_slot))
        mbarrier.wait(v_empty.index(v_slot), i // T.v_slots & 1 ^ 1)
        mbarrier.expect(v_full.index(v_slot), 64 * VDIM * 2)
        tma_load(v_desc, [b, h // group, pos, 0], v_full.index(v_slot), v_s.index(v_slot))


@gluon.jit
def differentiate_queries(
    T: gl.constexpr, WG: gl.constexpr, dq_desc, row_numbers, sums, slot_at, tile, lists, rule, plane, scale, factor,
    q_s, do_s, k_s, v_s, bars,
):  # fmt: skip
    """Warpgroup WG: dQ of its 64 queries."""
    DTYPE: gl.constexpr = dq_desc.dtype
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    SUBS: gl.constexpr = T.block[1] // 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.dim, 16])
    D_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, Q_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q_full, k_full, v_full, k_empty, v_empty = bars
    b, h, first, group, row, begin, end, of_head = tile
    lo, hi, rules, bits, rule_at, q_len, kv_len, ends = rule
    query = first + WG * 64 + gl.arange(0, 64, ROW)
    # An absent tile lies after the last query, and so may the rows of the second warpgroup.
    there = query < q_len
    less = gl.expand_dims(gl.load(row_numbers + of_head + query, mask=there, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(row_numbers + of_head + plane + query, mask=there, other=0.0), 1)
    entries = taken(lists, row, begin, end, 0)
    dq = gl.zeros((64, DIM), gl.float32, Q_LAYOUT)
    mbarrier.wait(q_full, 0)  # until Q and dO have landed
    for i in range((end - begin) * SUBS):
        half = opaque(i * 0 + WG)
        q = q_s.index(half).reshape((64, DIM))
        do = do_s.index(half).reshape((64, VDIM))
        k_slot = i % 2
        v_slot = i % T.v_slots
        zero = gl.zeros((64, 64), gl.float32, S_LAYOUT)
        mbarrier.wait(k_full.index(k_slot), i // 2 & 1)  # until K has landed
        k = k_s.index(k_slot).reshape((64, DIM))
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), i // T.v_slots & 1)  # until V has landed
        v = v_s.index(v_slot).reshape((64, VDIM))
        dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))  # S is done, dP still runs
        if i < entries.p_count * SUBS:
            pos = visited(lists, entries, i // SUBS) * (64 * SUBS) + i % SUBS * 64
            key = gl.expand_dims(pos + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT)), 0)
            low, high = bounds_of(T, lo + rule_at, hi + rule_at, query, q_len, kv_len)
            low, high, place = gl.expand_dims(low, 1), gl.expand_dims(high, 1), gl.expand_dims(query, 1)
            s = by_entry(T, s, entries.p_first + i // SUBS, low, high, place, key, rules, bits, ends)
        p = gl.exp2(s * scale - less)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        ds = gl.convert_layout((p * (dp - delta)).to(DTYPE), D_LAYOUT)
        dq = warpgroup_mma(ds, k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(k_empty.index(k_slot), count=1)
    if slot_at >= 0:
        put_sums(sums + slot_at + WG * 64 * DIM, dq, DIM, 64, DIM)
    else:
        q_s.index(WG).reshape((64, DIM)).store(
            (dq * factor).to(DTYPE)
        )  # nobody else reads this warpgroup's Q
        fence_async_shared()
        tma_store(dq_desc, [b, h, first + WG * 64, 0], q_s.index(WG))
        tma_store_wait(0)  # until TMA has read it


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=[*POINTERS, "row_numbers"])
def attention_bwd_queries(
    q_desc, k_desc, v_desc, do_desc, dq_desc, row_numbers, sums, order, p_starts, p_counts, p_indices, f_starts,
    f_counts, f_indices, lo, hi, rules, bits, scale, factor, q_len, kv_len, rows, plane, tiles, heads, group, shared,
    mask_step, rule_step, entries, lead, section, all_heads, slots, window, sunk, T: gl.constexpr,
    SOURCE: gl.constexpr,
):  # fmt: skip
    """Lists of `tiles` query tiles each. `heads` are those of queries; `shared` of them share lists and an order."""
    DTYPE: gl.constexpr = q_desc.dtype
    DIM: gl.constexpr = T.dim
    V_SLOTS: gl.constexpr = T.v_slots
    head, entry, sub = turn(entries, lead, section, all_heads, 1)
    b = head // heads
    h = head % heads
    of_list = b * mask_step + h // shared
    order += (of_list.to(gl.int64) * entries + entry) * ORDER
    tile, first, begin, end, slot = tile_of(order, 128, 0, q_len)
    q_s = gl.allocate_shared_memory(DTYPE, [2] + q_desc.block_type.shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [2] + do_desc.block_type.shape, do_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [2] + k_desc.block_type.shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [V_SLOTS] + v_desc.block_type.shape, v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    bars = (q_full, k_full, v_full, k_empty, v_empty)
    lists = (p_starts, p_counts, p_indices, f_starts, f_counts, f_indices)
    of_tile = (b, h, first, group, of_list * tiles + tile, begin, end, head.to(gl.int64) * rows)
    replica = (0 if mask_step else b) * shared + h % shared
    slot_at = gl.where(slot >= 0, (replica * slots + slot).to(gl.int64) * 128 * DIM, -1)
    ends = (window, sunk) if T.member_ends else (0, 0)
    rule = (lo, hi, rules, bits, of_list.to(gl.int64) * rule_step, q_len, kv_len, ends)
    memory = (q_s, do_s, k_s, v_s, bars)
    consumer = (dq_desc, row_numbers, sums, slot_at, of_tile, lists, rule, plane, scale, factor) + memory
    gl.warp_specialize(
        [
            (differentiate_queries, (T, 0) + consumer),
            (differentiate_queries, (T, 1) + consumer),
            (load_keys, (T, q_desc, k_desc, v_desc, do_desc, of_tile, lists) + memory),
        ],
        [4, 1],
        [240, 24],
    )
