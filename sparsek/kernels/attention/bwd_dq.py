"""Device pieces of attention's backward pass: the warps that write dQ, and slots that stage it, dK and dV for TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek.kernels.attention.bwd_records import step_at, tile_at
from sparsek.kernels.attention.bwd_sums import acquire, release, seen, tma_add, tma_written
from sparsek.kernels.lang.gluon import reinterpret, tma_store, tma_store_wait


@gluon.jit
def wait_for_dq(T: gl.constexpr, WG: gl.constexpr, pair, dq_empty):
    """Waits until TMA has read the dQ in the slot that warpgroup WG fills in `pair`."""
    if T.dq_slots == 2 or WG == 0:
        mbarrier.wait(dq_empty.index(WG), (pair & 1) ^ 1)
    else:
        mbarrier.wait(dq_empty.index(WG), pair & 1)  # warpgroup 0 used the slot in the first pair too


@gluon.jit
def staged(T: gl.constexpr, WG: gl.constexpr, DTYPE: gl.constexpr, dk_desc, dv_desc, dq_s, spare_s):
    """Where warpgroup WG stages dK and dV: side by side in its dQ slot, or dV separately if its width differs."""
    halves = reinterpret(dq_s.index(WG), DTYPE, [2] + dk_desc.block_type.shape, dk_desc.layout)
    dk_s = halves.index(0)
    if T.spare:
        dv_s = reinterpret(spare_s.index(WG), DTYPE, [2] + dv_desc.block_type.shape, dv_desc.layout).index(0)
    else:
        dv_s = halves.index(1)
    return dk_s, dv_s


@gluon.jit
def exchanged(T: gl.constexpr, WG: gl.constexpr, dk, dv, pair, turn, dq_s, spare_s, dq_empty, done):
    """dK of both warpgroups in the first one, dV of both in the second; one sum is exchanged after the other."""
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    dk_s = dq_s.index(0).reshape((64, DIM))
    if T.spare:
        dv_s = spare_s.index(0).reshape((64, VDIM))
    else:
        dv_s = dk_s
    if WG == 0:
        wait_for_dq(T, 0, pair, dq_empty)
        dv_s.store(dv)
    # `done` has three phases a tile: dV is written, dV is read, dK is written.
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, turn)
    if WG == 1:
        dv = dv + dv_s.load(dv.type.layout)
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, turn ^ 1)
    if WG == 1:
        dk_s.store(dk)
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, turn)
    if WG == 0:
        dk = dk + dk_s.load(dk.type.layout)
    return dk, dv


@gluon.jit
def write(
    T: gl.constexpr, SIDE: gl.constexpr, dq_desc, tiles, starts, visits, turns, heads, rows, dq_s, bars
):
    """Writer warp of every second step: adds its dQ to memory; in order, the first of a query tile is stored."""
    kv_full, kv_empty, q_full, do_full, ring_empty, ds_full, dq_full, dq_empty, done = bars
    at = 0
    for t in range(gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1)):
        b, g, key, first, masked, pairs = tile_at(tiles, t)
        for pair in range(pairs):
            pos, h, entry, ticket = step_at(T, visits, first, 2 * pair + SIDE)
            slot = SIDE % T.dq_slots
            row = b * heads + h
            if T.ordered:
                turn = turns + row * (rows // 64) + pos // 64
                if ticket > 0:
                    while seen(turn) < ticket:  # until the earlier ones have been added
                        pass
                    acquire()
            mbarrier.wait(dq_full.index(SIDE), at & 1)  # until dQ is staged
            if ticket == 0:
                tma_store(dq_desc, [row, pos, 0], dq_s.index(slot))
            else:
                tma_add(dq_desc, [row, pos, 0], dq_s.index(slot))
            tma_store_wait(0)  # until TMA has read it
            # With one slot the other warpgroup fills it next.
            mbarrier.arrive(dq_empty.index((SIDE + T.dq_slots) % 2), count=1)
            if T.ordered:
                if ticket >= 0:
                    tma_written()
                    release(turn, ticket + 1)
            at += 1
