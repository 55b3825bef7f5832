"""Consumer warpgroups of FP8 products that hold a finished tile in registers, not in shared memory.

Sums of the tensor cores (`fast_accum`): rounded, two in a register, the tile waits for its turn, as in
spmm/multiply_held.py. Float32 sums leave no room for that. They stay where they are:

    last stage of a tile:   the first chunks are done early  -- scales, bias, activation -->  first half of C
    first stage of the next:  sums of the tile before  -- scales, bias, activation -->  other half of C
                              the first promotions replace them

One piece leaves beside every unit of the tensor cores, or two. A tile passes through T.held_boxes boxes of shared
memory for each warpgroup, and the ring gets a further stage.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek.kernels.lang.gluon import tma_store, tma_store_wait
from sparsek.kernels.spmm.multiply import activated, bias_of
from sparsek.kernels.spmm.multiply_fp8 import (
    begun,
    block_scales,
    carried,
    column_scales,
    factors_of_chunks,
    left_operand,
    nothing,
    promoted,
    record,
    row_scales,
    scaled,
    started,
    two_sums,
    units,
)
from sparsek.kernels.spmm.multiply_held import hold, leave, pieces_of, place, stage


@gluon.jit
def multiply_held(T: gl.constexpr, WG: gl.constexpr, c_desc, lists, scales, before, ring, boxes):
    """Consumer warpgroup WG with sums in the tensor cores. The arguments are those of `multiply`, `boxes` two each."""
    tiles, starts = lists
    a_scale, b_scale, alpha = scales
    bias, m, n, part_sums = before
    empty = ring[3]
    PIECES: gl.constexpr = T.pieces
    PER: gl.constexpr = T.per_block
    STAGES: gl.constexpr = T.stages
    COLS: gl.constexpr = T.cols
    COUNT: gl.constexpr = T.cols // T.held
    GAP: gl.constexpr = T.every * T.pieces
    ROW0: gl.constexpr = 64 * (WG % T.wg_m)
    COL0: gl.constexpr = T.cols * (WG // T.wg_m)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.cols, 32])
    first, last, factor = begun(T, starts, scales)
    slot = 0
    phase = 0
    old_row = 0
    old_col = 0
    held = hold(T, gl.zeros((64, COLS), gl.float32, LAYOUT), c_desc.dtype)
    begin, end, row, col, part = record(tiles, first)
    for t in range(first, last):
        coming = record(tiles, t + 1)  # in a whole tile; one spare record ends the schedule
        pieces = carried(gl.maximum(1, (end - begin) * PER))  # a tile without steps gets a stage of zeros
        down = row_scales(T, LAYOUT, a_scale, row + ROW0, m)
        across = column_scales(T, b_scale, col + COL0, n)
        if T.bias:
            shift = bias_of(T, LAYOUT, bias, row + ROW0, m)
        acc = warpgroup_mma_init(gl.zeros((64, COLS), gl.float32, LAYOUT))
        acc, slot, phase = stage(T, WG, acc, True, 0, slot, phase, ring)
        for i in gl.static_range(COUNT):
            for q in range(i * GAP + (PIECES if i == 0 else 0), gl.minimum(pieces, (i + 1) * GAP), PIECES):
                acc, slot, phase = stage(T, WG, acc, False, PIECES, slot, phase, ring)
            if t > first:  # in parallel with the last stage's wgmma
                leave(T, WG, i, c_desc, held[i], old_row, old_col, boxes, None, 0)
        for q in range(COUNT * GAP, pieces, PIECES):
            acc, slot, phase = stage(T, WG, acc, False, PIECES, slot, phase, ring)
        out = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
        out = scaled(T, (out,), 0, down, factors_of_chunks(T, across, factor))
        if T.bias:
            out = out + gl.expand_dims(shift, 1)
        held = hold(T, out, c_desc.dtype)
        old_row = row + ROW0
        old_col = col
        begin, end, row, col, part = coming
    if last > first:
        for i in gl.static_range(COUNT):
            leave(T, WG, i, c_desc, held[i], old_row, old_col, boxes, None, 0)
    tma_store_wait(0)  # shared memory must outlive the copies that read it


@gluon.constexpr_function
def beside(t: Any, piece: int) -> int:
    """The unit beside which a piece of a tile of float32 sums leaves: negative ones are the last of the tile's last
    stage, others the first of the next tile's first stage. The first half leaves early if its sums are done by then.
    """
    early = t.chunks if t.halves and t.chunks > 1 else 0
    each = t.chunk // t.held  # pieces of a chunk
    if piece < early:
        return max(piece, 1) - t.chunks  # its chunk is promoted beside unit `piece // each + 1`
    return piece - early if early else piece // each


@gluon.jit
def leave_piece(T: gl.constexpr, WG: gl.constexpr, P: gl.constexpr, c_desc, sums, tile, boxes):
    """Finishes piece P of the float32 sums of a tile, and stores it. `tile`: its row, column, factors and bias."""
    row, col, columns_s, factor, shift = tile
    EACH: gl.constexpr = T.chunk // T.held
    HELD: gl.constexpr = T.held
    BOXES: gl.constexpr = T.held_boxes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.held, 32])
    DTYPE: gl.constexpr = c_desc.dtype
    z = gl.convert_layout(pieces_of(sums[P // EACH], EACH)[P % EACH], LAYOUT, assert_trivial=True)
    if T.b_scale == "column":
        across = columns_s.index(WG).slice(P * HELD, HELD).load(gl.SliceLayout(0, LAYOUT))
        z = z * gl.expand_dims(across, 0)
    else:
        z = z * factor
    if T.bias:
        z = z + gl.expand_dims(gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT), assert_trivial=True), 1)
    y = activated(T, z, DTYPE).to(DTYPE)
    down, along = place(T, WG, P, row, col)
    box = boxes.index(BOXES * WG + P % BOXES)
    tma_store_wait(BOXES - 1)  # until TMA has read this box, which the piece BOXES before left through
    if T.c_col:
        box.permute((1, 0)).store(y)
    else:
        box.store(y)
    fence_async_shared()
    tma_store(c_desc, [down, along], box)


@gluon.jit
def leave_beside(
    T: gl.constexpr, WG: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr, c_desc, sums, tile, boxes
):
    """Stores the pieces that leave beside units FROM to TO - 1."""
    COUNT: gl.constexpr = T.cols // T.held
    for p in gl.static_range(COUNT):
        if beside(T, p) >= FROM and beside(T, p) < TO:
            leave_piece(T, WG, p, c_desc, sums, tile, boxes)


@gluon.jit
def sums_stage(
    T: gl.constexpr, WG: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, c_desc, sums, two, slot, phase,
    stretch, down, ring, tile, leaves, boxes, turn,
):  # fmt: skip
    """Multiplies and promotes one stage. Beside its units leave pieces of `tile`, if `leaves`: in the FIRST stage of a
    tile those of the tile before, in the LAST one of several its own.

    Returns the sums, and the next slot and phase.
    """
    a_s, b_s, full, empty = ring
    CHUNKS: gl.constexpr = T.chunks
    PROMOTE: gl.constexpr = T.promote
    UNITS: gl.constexpr = units(T)
    STAGGER: gl.constexpr = T.stagger
    ROW0: gl.constexpr = 64 * (WG % T.wg_m)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.chunk, 32])
    if FIRST and STAGGER and WG == 1:
        if not leaves:  # half a stage behind the other warpgroup, whose pauses its products fill
            mbarrier.wait(turn, 0)
    mbarrier.wait(full.index(slot), phase)  # until TMA has written the whole slot
    for u in gl.static_range(UNITS):
        if u % CHUNKS == 0:
            rows_of_a = left_operand(T, LAYOUT, a_s, slot * T.pieces + u // CHUNKS * PROMOTE, ROW0)
        two = started(T, WG, rows_of_a, b_s, slot, u, two)
        if u > 0:
            sums, two = promoted(T, sums, u - 1, PROMOTE, two, stretch, down)
        if leaves:  # in parallel with unit u
            if FIRST:
                leave_beside(T, WG, u, u + 1, c_desc, sums, tile, boxes)
            if LAST:
                leave_beside(T, WG, u - UNITS, u - UNITS + 1, c_desc, sums, tile, boxes)
        elif FIRST and STAGGER and WG == 0:
            if u == UNITS // 2:  # of the first tile
                mbarrier.arrive(turn, count=1)
        if FIRST and u < CHUNKS:  # the first promotion of this chunk comes next
            sums = sums[:u] + (gl.zeros_like(sums[u]),) + sums[u + 1 :]
    sums, two = promoted(T, sums, UNITS - 1, 0, two, stretch, down)
    mbarrier.arrive(empty.index(slot), count=1)
    slot += 1
    if slot == T.stages:
        slot = 0
        phase ^= 1
    return sums, two, slot, phase


@gluon.jit
def multiply_held_sums(
    T: gl.constexpr, WG: gl.constexpr, c_desc, lists, scales, before, ring, boxes, columns_s, turn
):
    """Consumer warpgroup WG with float32 sums. `columns_s`: scales of a tile's columns for each warpgroup."""
    tiles, starts = lists
    a_scale, b_scale, alpha = scales
    bias, m, n, part_sums = before
    PIECES: gl.constexpr = T.pieces
    PER: gl.constexpr = T.per_block
    CHUNKS: gl.constexpr = T.chunks
    ROW0: gl.constexpr = 64 * (WG % T.wg_m)
    COL0: gl.constexpr = T.cols * (WG // T.wg_m)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.chunk, 32])
    first, last, factor = begun(T, starts, scales)
    slot = 0
    phase = 0
    old_row = 0
    old_col = 0
    sums = nothing(T, LAYOUT)
    two = two_sums(T, LAYOUT)
    shift = 0.0
    if T.bias:
        shift = gl.zeros((64,), gl.float32, gl.SliceLayout(1, LAYOUT))
    begin, end, row, col, part = record(tiles, first)
    stretch = block_scales(T, a_scale, begin, end, 0)
    for t in range(first, last):
        coming = record(tiles, t + 1)  # in a whole tile; one spare record ends the schedule
        pieces = carried(gl.maximum(1, (end - begin) * PER))  # a tile without steps gets a stage of zeros
        down = row_scales(T, LAYOUT, a_scale, row + ROW0, m)
        later = block_scales(T, a_scale, begin, end, PIECES)
        old = (old_row, old_col, columns_s, factor, shift)
        sums, two, slot, phase = sums_stage(
            T, WG, True, False, c_desc, sums, two, slot, phase, stretch, down, ring, old, t > first, boxes, turn
        )
        stretch = later
        across = column_scales(T, b_scale, col + COL0, n)
        if T.bias:
            shift = bias_of(T, LAYOUT, bias, row + ROW0, m)
        for q in range(PIECES, pieces - PIECES, PIECES):
            later = block_scales(T, a_scale, begin, end, q + PIECES)
            sums, two, slot, phase = sums_stage(
                T, WG, False, False, c_desc, sums, two, slot, phase, stretch, down, ring, old, False, boxes, turn
            )
            stretch = later
        if T.b_scale == "column":
            columns_s.index(WG).store(across * factor)
        own = (row + ROW0, col, columns_s, factor, shift)
        if pieces > PIECES:
            sums, two, slot, phase = sums_stage(
                T, WG, False, True, c_desc, sums, two, slot, phase, stretch, down, ring, own, True, boxes, turn
            )
        else:  # in a tile of one stage, the tile before leaves beside its units
            leave_beside(T, WG, -CHUNKS, 0, c_desc, sums, own, boxes)
        old_row = row + ROW0
        old_col = col
        begin, end, row, col, part = coming
        stretch = block_scales(T, a_scale, begin, end, 0)
    if last > first:
        old = (old_row, old_col, columns_s, factor, shift)
        leave_beside(T, WG, 0, CHUNKS, c_desc, sums, old, boxes)
    tma_store_wait(0)  # shared memory must outlive the copies that read it
