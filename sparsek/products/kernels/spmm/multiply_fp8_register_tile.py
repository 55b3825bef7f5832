"""Consumer warpgroups of FP8 products that hold a finished tile in registers, not in shared memory.

Sums of the tensor cores (`fast_accum`): rounded, two in a register, the tile waits for its turn, as in
spmm/multiply_register_tile.py. Float32 sums leave no room for that. They stay where they are:

    first stage of a tile, chunk by chunk:  sums of the tile before  -- scales, bias, activation -->  C
                                            the first promotion replaces them

Both happen in parallel with wgmma. A tile passes through two boxes of shared memory for each warpgroup, and the ring
gets a further stage.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek.engine.launch.gluon import tma_store, tma_store_wait
from sparsek.products.kernels.spmm.multiply import activated, bias_of
from sparsek.products.kernels.spmm.multiply_fp8 import (
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
from sparsek.products.kernels.spmm.multiply_register_tile import hold, leave, pieces_of, stage


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


@gluon.jit
def leave_chunk(T: gl.constexpr, WG: gl.constexpr, C: gl.constexpr, c_desc, sums, tile, boxes):
    """Finishes chunk C of the float32 sums of a tile, and stores it. `tile`: its row, column, factors and bias."""
    row, col, columns_s, factor, shift = tile
    CHUNK: gl.constexpr = T.chunk
    COUNT: gl.constexpr = T.chunk // T.held
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.chunk, 32])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.held, 32])
    DTYPE: gl.constexpr = c_desc.dtype
    if T.b_scale == "column":
        across = columns_s.index(WG).slice(C * CHUNK, CHUNK).load(gl.SliceLayout(0, SUMS))
        z = sums[C] * gl.expand_dims(across, 0)
    else:
        z = sums[C] * factor
    if T.bias:
        z = z + gl.expand_dims(shift, 1)
    pieces = pieces_of(activated(T, z, DTYPE).to(DTYPE), COUNT)
    for i in gl.static_range(COUNT):
        y = gl.convert_layout(pieces[i], LAYOUT, assert_trivial=True)
        down = row
        along = col + T.cols * (WG // T.wg_m) + C * CHUNK + i * T.held
        if T.c_col:
            down, along = along, down
        box = boxes.index(2 * WG + (C * COUNT + i) % 2)
        tma_store_wait(1)  # until TMA has read this box, which the piece before the last one left through
        if T.c_col:
            box.permute((1, 0)).store(y)
        else:
            box.store(y)
        fence_async_shared()
        tma_store(c_desc, [down, along], box)


@gluon.jit
def sums_stage(
    T: gl.constexpr, WG: gl.constexpr, FIRST: gl.constexpr, c_desc, sums, two, slot, phase, stretch, down, ring,
    leaves, tile, boxes,
):  # fmt: skip
    """Multiplies and promotes one stage. In the first one of a tile, the sums of the tile before leave if `leaves`.

    Returns the sums, and the next slot and phase.
    """
    a_s, b_s, full, empty = ring
    CHUNKS: gl.constexpr = T.chunks
    PROMOTE: gl.constexpr = T.promote
    UNITS: gl.constexpr = units(T)
    ROW0: gl.constexpr = 64 * (WG % T.wg_m)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.chunk, 32])
    mbarrier.wait(full.index(slot), phase)  # until TMA has written the whole slot
    for u in gl.static_range(UNITS):
        if u % CHUNKS == 0:
            rows_of_a = left_operand(T, LAYOUT, a_s, slot * T.pieces + u // CHUNKS * PROMOTE, ROW0)
        two = started(T, WG, rows_of_a, b_s, slot, u, two)
        if u > 0:
            sums, two = promoted(T, sums, u - 1, PROMOTE, two, stretch, down)
        if FIRST and u < CHUNKS:
            if leaves:  # in parallel with unit u; the registers of the other unit are free
                leave_chunk(T, WG, u, c_desc, sums, tile, boxes)
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
    T: gl.constexpr, WG: gl.constexpr, c_desc, lists, scales, before, ring, boxes, columns_s
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
            T, WG, True, c_desc, sums, two, slot, phase, stretch, down, ring, t > first, old, boxes
        )
        stretch = later
        across = column_scales(T, b_scale, col + COL0, n)
        if T.bias:
            shift = bias_of(T, LAYOUT, bias, row + ROW0, m)
        for q in range(PIECES, pieces, PIECES):
            later = block_scales(T, a_scale, begin, end, q + PIECES)
            sums, two, slot, phase = sums_stage(
                T, WG, False, c_desc, sums, two, slot, phase, stretch, down, ring, False, old, boxes
            )
            stretch = later
        if T.b_scale == "column":
            columns_s.index(WG).store(across * factor)
        old_row = row + ROW0
        old_col = col
        begin, end, row, col, part = coming
        stretch = block_scales(T, a_scale, begin, end, 0)
    if last > first:
        for c in gl.static_range(CHUNKS):
            leave_chunk(T, WG, c, c_desc, sums, (old_row, old_col, columns_s, factor, shift), boxes)
    tma_store_wait(0)  # shared memory must outlive the copies that read it
