"""Device pieces of attention's backward pass: its producer warps, one of keys and values and one of queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek.attn.kernels.backward.bwd_records import step_at, tile_at
from sparsek.engine.launch.gluon import tma_load


@gluon.jit
def load_keys(T: gl.constexpr, k_desc, v_desc, tiles, starts, k_s, v_s, tile_bars):
    """Producer warp of K and V: those of the next tile as soon as this one has no use for their memory."""
    HALVES: gl.constexpr = T.halves
    k_full, k_empty, v_full, v_empty = tile_bars
    turn = 0
    for t in range(gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1)):
        b, g, key, first, masked, pairs = tile_at(tiles, t)
        mbarrier.wait(
            k_empty, turn ^ 1
        )  # until both warpgroups have multiplied the last dQ of the previous tile
        mbarrier.expect(k_full, HALVES * 64 * T.dim * 2)
        for w in gl.static_range(HALVES):
            tma_load(k_desc, [b, g, key + w * 64, 0], k_full, k_s.index(w))
        mbarrier.wait(v_empty, turn ^ 1)  # until TMA has read the dV that was staged in V's place
        mbarrier.expect(v_full, HALVES * 64 * T.v_dim * 2)
        for w in gl.static_range(HALVES):
            tma_load(v_desc, [b, g, key + w * 64, 0], v_full, v_s.index(w))
        turn ^= 1


@gluon.jit
def load(
    T: gl.constexpr, q_desc, do_desc, rows_desc, bounds_desc, tiles, starts, visits, heads, rows, plane, bounds, q_s,
    do_s, rows_s, ring_bars,
):  # fmt: skip
    """Producer warp of Q and dO: those of every step, across tiles.

    Steps of 128 queries start dP from -delta, so delta comes with Q.
    """
    QUERIES: gl.constexpr = T.queries
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    NUMBERS: gl.constexpr = T.row_slots
    Q_BYTES: gl.constexpr = QUERIES * (DIM * 2 + (4 if QUERIES == 64 else 8))
    q_full, do_full, ring_empty = ring_bars
    bound_item, bound_head, bound_group, bound_plane = bounds
    at = 0
    for t in range(gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1)):
        b, g, key, first, masked, pairs = tile_at(tiles, t)
        for i in range(128 // QUERIES * pairs):
            pos, h, entry, ticket = step_at(T, visits, first, i)
            slot = at % T.stages
            bar = at % T.barriers
            # Wait until nobody reads the Q and dO in this slot, those of `stages` steps before.
            freed = at + T.barriers - T.stages
            mbarrier.wait(ring_empty.index(freed % T.barriers), (freed // T.barriers & 1) ^ 1)
            q_bar = q_full.index(bar)
            do_bar = do_full.index(bar)
            row = ((b * heads + h) * rows + pos) // QUERIES
            if T.interval:
                if i < 128 // QUERIES * masked:
                    bound = (b * bound_item + h // bound_group * bound_head + pos) // QUERIES
                    mbarrier.expect(q_bar, Q_BYTES + 8 * QUERIES)
                    tma_load(bounds_desc, [bound, 0], q_bar, rows_s.index(NUMBERS * slot + 2))
                    tma_load(bounds_desc, [bound + bound_plane, 0], q_bar, rows_s.index(NUMBERS * slot + 3))
                else:
                    mbarrier.expect(q_bar, Q_BYTES)
            else:
                mbarrier.expect(q_bar, Q_BYTES)
            if T.pack > 1:  # of several heads of each token
                tma_load(q_desc, [b, h, pos // T.pack, 0, 0], q_bar, q_s.index(slot))
            else:
                tma_load(q_desc, [b, h, pos, 0], q_bar, q_s.index(slot))
            tma_load(rows_desc, [row, 0], q_bar, rows_s.index(NUMBERS * slot))
            if QUERIES == 64:
                mbarrier.expect(do_bar, 64 * VDIM * 2 + 256)
                if T.pack > 1:
                    tma_load(do_desc, [b, h, pos // T.pack, 0, 0], do_bar, do_s.index(slot))
                else:
                    tma_load(do_desc, [b, h, pos, 0], do_bar, do_s.index(slot))
                tma_load(rows_desc, [row + plane, 0], do_bar, rows_s.index(NUMBERS * slot + 1))
            else:
                tma_load(rows_desc, [row + plane, 0], q_bar, rows_s.index(NUMBERS * slot + 1))
                mbarrier.expect(do_bar, QUERIES * VDIM * 2)
                if T.pack > 1:
                    tma_load(do_desc, [b, h, pos // T.pack, 0, 0], do_bar, do_s.index(slot))
                else:
                    tma_load(do_desc, [b, h, pos, 0], do_bar, do_s.index(slot))
            at += 1
