"""Device pieces of attention's backward pass: dQ, its slots and the warps that write it; sums of two warpgroups, and of
parts of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from sparsek.attn.kernels.backward.bwd_records import TILE, half_at, tile_at
from sparsek.attn.kernels.backward.bwd_sums import fence_tma, release, seen, tma_add, tma_written
from sparsek.engine.launch.gluon import opaque, reinterpret, tma_store, tma_store_wait


@gluon.jit
def start_dq(T: gl.constexpr, SIDE: gl.constexpr, place, phase, k_s, ds_s, dq_bars, halves):
    """Starts to multiply a dQ from the dS in `place`, that of its columns 64 SIDE to 64 SIDE + 63.

    `halves`: of K, in pairs of blocks; see `read_halves`.
    """
    DIM: gl.constexpr = T.dim
    HALVES: gl.constexpr = T.halves
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.dim, 16])
    ds_full, ds_empty, dq_full, dq_empty = dq_bars
    if HALVES == 2:
        mbarrier.wait(ds_full.index(place), phase)  # until both warpgroups have written dS
    dq = gl.zeros((64, DIM), gl.float32, LAYOUT)
    none = opaque(0)
    for w in gl.static_range(HALVES):
        if T.queries == 128:  # its half of the columns, of a place known only at run time
            left = ds_s.index(place).slice(w * 64, 64).slice(SIDE * 64, 64, 1)
        else:
            left = ds_s.index(place + none).slice(w * 64, 64)
        k = k_s.index((halves[w] if T.paired else w) + none).reshape((64, DIM))
        dq = warpgroup_mma(left.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def stage_dq(T: gl.constexpr, SIDE: gl.constexpr, place, pair, dq, dq_s, dq_bars):
    """Stages that dQ for writer warp SIDE, its number `pair`."""
    DIM: gl.constexpr = T.dim
    ds_full, ds_empty, dq_full, dq_empty = dq_bars
    if T.halves == 2:
        mbarrier.arrive(ds_empty.index(place), count=1)
    wait_for_dq(T, SIDE, pair, dq_empty)
    dq_s.index(SIDE if T.dq_slots == 2 else 0).reshape((2 * DIM, 32)).store(as_held(dq, DIM))
    fence_async_shared()
    mbarrier.arrive(dq_full.index(SIDE), count=1)


@gluon.jit
def wait_for_dq(T: gl.constexpr, WG: gl.constexpr, pair, dq_empty):
    """Waits until TMA has read the dQ in the slot that warpgroup WG fills in `pair`."""
    if T.dq_slots == 2 or WG == 0:
        mbarrier.wait(dq_empty.index(WG), (pair & 1) ^ 1)
    else:
        mbarrier.wait(dq_empty.index(WG), pair & 1)  # warpgroup 0 used the slot in the first pair too


@gluon.jit
def as_held(x, DIM: gl.constexpr):
    """Sums [64, DIM] as lines of 128 bytes, in the order in which threads hold them: each stores 16 bytes at a time,
    8 threads a line, without bank conflicts. delta.cast_quantized reads them.
    """
    # Rows of warps, halves and lanes; columns of products, lanes and pairs.
    x = x.reshape((4, 2, 8, DIM // 8, 4, 2)).permute((0, 3, 2, 4, 1, 5))
    return x.reshape((2 * DIM, 32))


@gluon.jit
def exchanged(T: gl.constexpr, WG: gl.constexpr, dk, dv, pair, turn, dq_s, spare_s, dq_bars, done):
    """dK of both warpgroups in the first one, dV of both in the second; one sum is exchanged after the other."""
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    SUMS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DIM], gl.float32)
    dk_s = reinterpret(dq_s.index(0), gl.float32, [64, DIM], SUMS)
    if T.spare:
        dv_s = spare_s.index(0).reshape((64, VDIM))
    else:
        dv_s = dk_s
    if WG == 0:
        wait_for_dq(T, 0, pair, dq_bars[3])
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
def keep_part(T: gl.constexpr, FIRST: gl.constexpr, first_key, x, sums, tiles, t):
    """Stores 64 rows of dK or dV of tile `t`, a part, as they are: columns from FIRST on of its rows in `sums`."""
    row = first_key + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    column = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    part = sums + gl.load(tiles + TILE * t + 7).to(gl.int64) * (T.keys * (T.dim + T.v_dim))
    gl.store(part + (gl.expand_dims(row * (T.dim + T.v_dim), 1) + gl.expand_dims(column, 0)), x)


@gluon.jit
def write(
    T: gl.constexpr, SIDE: gl.constexpr, dq_desc, tiles, starts, visits, turns, heads, rows, dq_s, dq_bars
):
    """Writer warp of every second 64 queries: adds their dQ to memory; in order, the first of every sum is stored.

    Tickets of a query tile go to its sums in turn, and each sum has an order of its own. Others wait for this warp, so
    the next record is under way while TMA works.
    """
    SUMS: gl.constexpr = T.accumulators
    ds_full, ds_empty, dq_full, dq_empty = dq_bars
    at = 0
    for t in range(gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1)):
        b, g, key, first, masked, pairs = tile_at(tiles, t)
        pos, h, ticket = half_at(T, SIDE, visits, first, 0, pairs > 0)
        for pair in range(pairs):
            slot = SIDE % T.dq_slots
            row = (b * heads + h) * SUMS + (ticket & (SUMS - 1))
            place = ticket >> (SUMS // 2)
            if T.ordered:
                turn = turns + row * (rows // 64) + pos // 64
                if place > 0:
                    while seen(turn) < place:  # until the earlier ones have been added
                        pass
                    fence_tma()
            mbarrier.wait(dq_full.index(SIDE), at & 1)  # until dQ is staged
            if place == 0:
                tma_store(dq_desc, [row, pos * (T.dim // 32), 0], dq_s.index(slot))
            else:
                tma_add(dq_desc, [row, pos * (T.dim // 32), 0], dq_s.index(slot))
            next_pos, next_h, next_ticket = half_at(T, SIDE, visits, first, pair + 1, pair + 1 < pairs)
            tma_store_wait(0)  # until TMA has read it
            # With one slot the other warpgroup fills it next.
            mbarrier.arrive(dq_empty.index((SIDE + T.dq_slots) % 2), count=1)
            if T.ordered:
                if ticket >= 0:
                    tma_written()
                    release(turn, place + 1)
            pos = next_pos
            h = next_h
            ticket = next_ticket
            at += 1
